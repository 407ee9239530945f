"""flash_attn under the releases of transformers that the rows were measured with, on tensors without data.

The planner's own stand-in is today's, for padded batches. The benchmarks' batches have no padding: their mask is of
ones, transformers drops it and calls ``flash_attn_func``, which gives a result like the query and the log-sum-exp of
its rows, as torch's own flash kernel does; that runs in its place, workspaces of its backward pass included.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

NAME = "flash_attention_2"


def use(model: nn.Module) -> None:
    """Have a model that was built with eager attention call flash_attn, through its own code."""
    import transformers.modeling_utils

    module: Any = sys.modules[type(model).__module__]
    classes = next((v for k, v in vars(module).items() if k.endswith("_ATTENTION_CLASSES")), None)
    if classes is not None:  # until 4.47, and later where a model wasn't rewritten
        for layer in model.modules():
            if type(layer) is classes["eager"]:
                layer.__class__ = classes[NAME]
                layer._flash_attn_uses_top_left_mask = False
        module._flash_attention_forward = _flash_attention_forward
        module.is_flash_attn_2_available = lambda: True
    else:
        functions: Any = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        if hasattr(functions, "register"):
            functions.register(NAME, _attention_function)
        else:
            functions[NAME] = _attention_function
    model.config._attn_implementation = NAME
    # models that remember their choice beside their configuration
    for part in model.modules():
        for name in ("_use_flash_attention_2", "_use_sdpa"):
            if hasattr(part, name):
                setattr(part, name, name == "_use_flash_attention_2")


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, None]:
    """integrations/flash_attention.py of 4.48, flash_attention_forward: [b, heads, s, d] to [b, s, heads, d]."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if query.dtype == torch.float32:  # norms in fp32: cast to what autocast casts to
        query, key, value = (t.to(torch.bfloat16) for t in (query, key, value))
    return _kernel(query, key, value, dropout), None


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    length: int,
    *,
    position_ids: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> Tensor:
    """modeling_flash_attention_utils.py, _flash_attention_forward; tensors are [b, s, heads, d]."""
    if position_ids is not None and length != 1:
        (torch.diff(position_ids, dim=-1) >= 0).all()  # it looks for packed sequences
    return _kernel(query, key, value, dropout)


def _kernel(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    heads_first = (t.transpose(1, 2) for t in (query, key, value))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, dropout, True, False)[0]
    return out.transpose(1, 2)
