"""peft's adapters on bitsandbytes' layers, for the stand-ins of those layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from planner.recording.stand_ins import Int8Linear, Nf4Linear


def adapt(model: nn.Module, *, autocast: bool) -> None:
    """Give adapters on stand-ins the forward pass of those on the real layers; ``autocast``: the step runs in it."""
    for module in model.modules():
        if isinstance(module, LoraLinear) and isinstance(module.base_layer, (Int8Linear, Nf4Linear)):
            module.forward = partial(_forward, module, autocast=autocast)  # type: ignore[method-assign]


def _forward(module: Any, x: Tensor, *, autocast: bool) -> Tensor:
    """peft/tuners/lora/bnb.py, Linear8bitLt.forward and Linear4bit.forward: under autocast nothing is cast.

    The adapters of an ordinary layer get their input in their own type, fp32, and autocast casts it back.
    """
    result: Tensor = module.base_layer(x)
    if isinstance(module.base_layer, Nf4Linear):
        result = result.clone()
    for name in module.active_adapters:
        dtype = result.dtype
        if not autocast:
            x = module._cast_input_dtype(x, module.lora_A[name].weight.dtype)
        output = module.lora_B[name](module.lora_A[name](module.lora_dropout[name](x))) * module.scaling[name]
        if not autocast:
            output = output.to(dtype)
        result = result + output
    return result
