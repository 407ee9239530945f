"""What the planner expects of transformers, made from releases before it: the whole of the compatibility is here.

``adapt()`` changes the transformers that this process imports; it does nothing to a release that the planner
supports. ``AllTrue`` lets model code of that time run on tensors without data.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def adapt() -> None:
    """Give an older transformers the names that the planner uses. Idempotent."""
    if _RELEASE >= (5,) or getattr(transformers, _MARK, False):
        return
    setattr(transformers, _MARK, True)
    _accept_dtype()
    _accept_meta_in_autocast()
    if "transformers.modeling_layers" not in sys.modules and not _has_checkpointing_layers():
        _add_checkpointing_layers()


_MARK = "_adapted_to_vramplan"
_RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])


class AllTrue(TorchFunctionMode):
    """Whatever is asked of a tensor without data is so; a number on the host fills a tensor on the card, as on CUDA.

    Code from 4.36 to 4.52 asks ``torch.all(mask == 1)`` of the mask that it made itself, and drops one of ones
    (modeling_attn_mask_utils.py); no loop of this benchmark has any other.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0].device.type == "meta":
            return True
        if func is Tensor.masked_fill and isinstance(args[-1], Tensor) and args[-1].device.type == "cpu":
            args = (*args[:-1], args[-1].item())
        return func(*args, **(kwargs or {}))


def _accept_dtype() -> None:
    """``_from_config(config, dtype=...)``: the argument was ``torch_dtype`` before 4.56."""
    from transformers import PreTrainedModel

    make = PreTrainedModel._from_config.__func__

    def from_config(cls: type[Any], config: Any, *, dtype: torch.dtype) -> Any:
        # a configuration's own choice is overwritten by this argument (4.36 on; before, attention was always eager)
        chosen = {"attn_implementation": config._attn_implementation} if _RELEASE >= (4, 36) else {}
        return make(cls, config, torch_dtype=dtype, **chosen)

    PreTrainedModel._from_config = classmethod(from_config)


def _accept_meta_in_autocast() -> None:
    """Rotary embeddings switch autocast off for their tensors' device (4.43 on), and torch knows none for this one."""
    real = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return real("cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast = autocast  # type: ignore[assignment, misc]


# -- activation checkpointing ----------------------------------------------------------------------------------------


def _has_checkpointing_layers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers.modeling_layers") is not None


class GradientCheckpointingLayer(nn.Module):
    """A layer that checkpoints itself, as transformers.modeling_layers has it from 4.52 on.

    Before, the stack called ``checkpoint(layer.__call__, ...)`` for each of its layers: the same recomputation.
    """

    gradient_checkpointing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer, under its checkpointing function when that is switched on."""
        call = super().__call__
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(partial(call, **kwargs), *args)
        return call(*args, **kwargs)


def _add_checkpointing_layers() -> None:
    """transformers.modeling_layers, and models whose layers are of its class."""
    from transformers import PreTrainedModel

    module = ModuleType("transformers.modeling_layers")
    module.GradientCheckpointingLayer = GradientCheckpointingLayer  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    make = PreTrainedModel._from_config.__func__

    def from_config(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        model = make(cls, *args, **kwargs)
        _convert_layers(model)
        return model

    PreTrainedModel._from_config = classmethod(from_config)
    PreTrainedModel.gradient_checkpointing_enable = _enable


def _convert_layers(model: nn.Module) -> None:
    """Layers of the stacks that know of checkpointing become layers that checkpoint themselves."""
    for stack in model.modules():
        if not hasattr(stack, "gradient_checkpointing") or isinstance(stack, GradientCheckpointingLayer):
            continue
        for children in stack.children():
            for layer in children if isinstance(children, nn.ModuleList) else ():
                own = type(layer)
                layer.__class__ = type(own.__name__, (GradientCheckpointingLayer, own), {})


def _enable(model: nn.Module, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
    """``PreTrainedModel.gradient_checkpointing_enable`` for such layers."""
    import torch.utils.checkpoint as checkpointing

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer._gradient_checkpointing_func = partial(
                checkpointing.checkpoint, **(gradient_checkpointing_kwargs or {"use_reentrant": False})
            )
            layer.gradient_checkpointing = True
