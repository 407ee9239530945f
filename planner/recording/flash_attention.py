"""The flash_attn package under transformers, on tensors without data.

What transformers' ``_flash_attention_forward`` (modeling_flash_attention_utils.py, 5.24) does around the kernels for
a padded batch, and what flash_attn's ``mha_varlen_fwd`` and ``mha_varlen_bwd`` (csrc/flash_attn/flash_api.cpp, 2.x)
allocate. How much padding there is only data tell: none is taken out, the worst case.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils.flop_counter import register_flop_formula

from planner.units import round_up

NAME = "flash_attention_2"
"""transformers' word for it."""


def use(model: nn.Module) -> None:
    """Have a model's layers attend with this; on other devices the name keeps its meaning."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    real = ALL_ATTENTION_FUNCTIONS[NAME]
    if not hasattr(real, "without_data"):

        def either(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (attention if query.device.type == "meta" else real)(module, query, *args, **kwargs)

        either.without_data = True  # type: ignore[attr-defined]
        ALL_ATTENTION_FUNCTIONS.register(NAME, either)
    model.config._attn_implementation = NAME  # type: ignore[union-attr]


def is_used_by(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether a model that was told to attends with this."""
    seen: list[bool] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is attend:
                seen.append(True)
            return func(*args, **(kwargs or {}))

    from planner.recording.kernels import Target
    from planner.recording.recorder import Recorder

    with torch.no_grad(), Watch(), Recorder(Target(compute_capability=(8, 0))):
        try:
            model(**inputs)
        except Exception:  # model code may fail in any way: whoever simulates its step is told how
            return False
    return bool(seen)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers/integrations/flash_attention.py, flash_attention_forward: [b, heads, s, d] to [b, s, heads, d]."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    head_dim, v_head_dim = query.shape[-1], value.shape[-1]
    if v_head_dim != head_dim:
        value = F.pad(value, [0, head_dim - v_head_dim])
    causal = bool(module.is_causal if is_causal is None else is_causal)
    out = attend(query, key, value, attention_mask, dropout, causal)
    return out[..., :v_head_dim], None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool) -> Tensor:
    """_flash_attention_forward. A torch function: modes see it, and autocast's stand-in casts its operands."""
    if has_torch_function((query, key, value)):
        seen: Tensor = handle_torch_function(attend, (query,), query, key, value, mask, dropout, is_causal)
        return seen
    batch, length = query.shape[:2]
    if mask is not None and key.shape[1] > mask.shape[-1]:  # a static cache has room beyond the mask
        key, value = (t[:, : mask.shape[-1]] for t in (key, value))
    rows = [t.reshape(-1, *t.shape[2:]) for t in (query, key, value)]
    if mask is None:
        lengths, indices = torch.empty(batch + 1, dtype=torch.int32, device=query.device), None
    else:
        lengths, indices = _unpadding(mask)
        unpad: Any = Unpad.apply
        if length == key.shape[1]:
            rows = [unpad(row, indices) for row in rows]
        else:  # _upad_input: queries are fewer than keys, which a cache has
            rows[1:] = [unpad(row, indices) for row in rows[1:]]
            if length == 1:
                indices = torch.arange(batch + 1, dtype=torch.int32, device=query.device)[:-1]
            else:
                _, indices = _unpadding(mask[:, -length:])
                rows[0] = unpad(rows[0], indices)
    apply: Any = VarlenAttention.apply
    out: Tensor = apply(*rows, lengths, dropout, is_causal)[..., : query.shape[-1]]
    if indices is None:
        return out.view(batch, length, *out.shape[1:])
    padded: Tensor = torch.zeros(batch * length, *out.shape[1:], dtype=out.dtype, device=out.device)
    padded[indices] = out  # flash_attn/bert_padding.py, pad_input
    return padded.view(batch, length, *out.shape[1:])


def _unpadding(mask: Tensor) -> tuple[Tensor, Tensor]:
    """_get_unpad_data: where the sequences end, and the indices of their tokens, here all of them."""
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = torch.zeros(mask.numel(), dtype=torch.int64, device=mask.device)
    lengths.max()
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), indices


class Unpad(torch.autograd.Function):
    """Indexing of rows, as CUDA goes back from it: in place (FunctionsManual.cpp, index_backward).

    On tensors without data autograd makes a copy there, as it does for sub-classes of tensors.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        """``rows[indices]``"""
        ctx.save_for_backward(indices)
        ctx.shape = rows.shape
        return rows[indices]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """The gradient of rows that are left out is zero."""
        (indices,) = ctx.saved_tensors
        grad = torch.zeros(ctx.shape, dtype=grad_output.dtype, device=grad_output.device)
        return grad.index_put_((indices,), grad_output, accumulate=True), None


class VarlenAttention(torch.autograd.Function):
    """flash_attn_interface.py, FlashAttnVarlenFunc: one row of all sequences, [tokens, heads, head size]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, dropout: float, is_causal: bool) -> Tensor:
        """The head size padded to a multiple of 8; the caller takes the padding off."""
        odd = q.shape[-1] % 8
        if odd:
            q, k, v = (F.pad(t, (0, 8 - odd)) for t in (q, k, v))
        out: Tensor
        out, log_sums, random_state = varlen_forward(q, k, v, len(lengths) - 1, is_causal)
        ctx.save_for_backward(q, k, v, out, log_sums, lengths, random_state)
        ctx.is_causal, ctx.odd = is_causal, odd
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """mha_varlen_bwd: row sums, the fp32 accumulator of dq, and dk and dv of each query head under grouping."""
        q, k, v, out, log_sums, lengths, _ = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (q, k, v)]
        tokens, heads, head_dim = q.shape
        sequences = len(lengths) - 1
        rows = tokens + 128 * sequences
        rounded = round_up(head_dim, 32) if head_dim <= 192 else 256
        work = [
            torch.empty(heads, rows, device=q.device),
            torch.empty(rows, heads, rounded, device=q.device),
        ]
        if k.shape[1] != heads:
            work += [torch.empty(len(k), heads, head_dim, dtype=q.dtype, device=q.device) for _ in range(2)]
        varlen_backward(grad_output.contiguous(), q, k, v, out, log_sums, grads, sequences, ctx.is_causal)
        del work
        if ctx.odd:
            grads = [grad[..., : head_dim - 8 + ctx.odd] for grad in grads]
        return (*grads, None, None, None)


# -- the kernels, as operators with a cost ---------------------------------------------------------------------------


@torch.library.custom_op("vramplan::_flash_attention_varlen", mutates_args=())
def varlen_forward(q: Tensor, k: Tensor, v: Tensor, sequences: int, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Result, log-sum-exp of each row, state of the random generator."""
    return _results(q)


@varlen_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sequences: int, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _results(q)


def _results(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_sums = torch.empty(q.shape[1], len(q), device=q.device)
    return torch.empty_like(q), log_sums, torch.empty(2, dtype=torch.int64, device=q.device)


@torch.library.custom_op("vramplan::_flash_attention_varlen_backward", mutates_args=("grads",))
def varlen_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    grads: list[Tensor],
    sequences: int,
    is_causal: bool,
) -> None:
    """Writes the gradients of q, k and v."""


@varlen_backward.register_fake
def _(*_: Any) -> None:
    return None


def _product_flops(q: Any, k: Any, sequences: int, is_causal: bool) -> int:
    """One product of a sequence's queries with its keys, of all heads, for sequences of equal length."""
    tokens, heads, head_dim = q
    queries, keys = tokens // sequences, k[0] // sequences
    flops = 2 * tokens * keys * heads * head_dim
    return int(flops // 2 if is_causal and queries == keys else flops)  # blocks above the diagonal are skipped


@register_flop_formula(torch.ops.vramplan._flash_attention_varlen)
def _forward_flops(q: Any, k: Any, v: Any, sequences: int, is_causal: bool, **_: Any) -> int:
    return 2 * _product_flops(q, k, sequences, is_causal)


@register_flop_formula(torch.ops.vramplan._flash_attention_varlen_backward)
def _backward_flops(
    g: Any, q: Any, k: Any, v: Any, out: Any, log_sums: Any, grads: Any, sequences: int, is_causal: bool, **_: Any
) -> int:
    return 5 * _product_flops(q, k, sequences, is_causal)  # the scores again, then four gradients
