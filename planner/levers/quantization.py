"""Quantization: how the frozen base weights are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever, output_layer, ruled_out_on_cpu
from planner.levers.precision import base_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

    Place = tuple[nn.Module, str, nn.Module]

SKIPPED = ("classifier", "score", "pooler")
"""New modules, which the emitted script keeps from being quantized."""


class QuantizationLever(Lever):
    """none, nf4 with double quantization, or int8; both under LoRA."""

    field = "quantization"
    lowers_memory = (("nf4", "none"), ("nf4", "int8"))

    def choices(self, context: Context) -> list[Choice]:
        """A consequence of the method: full fine-tuning and LoRA keep the weights as they are."""
        if context.method != "qlora":
            return [Choice(value="none", reason="the weights stay as they are")]
        choices = [
            Choice(value="nf4", reason="4-bit base weights, dequantized layer by layer"),
            Choice(
                value="int8",
                swept=False,
                reason="8-bit base weights, closer to the original than nf4's; every layer's input is kept, also with "
                "checkpointing",
            ),
        ]
        reason = "quantized training is planned for CUDA devices alone"
        return ruled_out_on_cpu(choices, context, dict.fromkeys(("nf4", "int8"), reason))

    def change_model(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """Put bitsandbytes' layers, which quantize when they are moved to their device; on meta stand-ins for them."""
        if config.quantization == "none":
            return model
        dtype = base_dtype(config.precision, config.method)
        on_meta = next(model.parameters()).is_meta
        make = _stand_in if on_meta else bitsandbytes_layer
        exchange(_quantized_layers(model), partial(make, quantization=config.quantization, compute_dtype=dtype))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if not on_meta:
            mark(model, config.quantization)
        return model


def _quantized_layers(model: nn.Module) -> Iterator[Place]:
    """Each layer that the emitted script's ``from_pretrained`` quantizes, with its parent and its name there."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    # modules that transformers keeps in fp32 for their range (T5's wo) are not quantized either
    skipped = {*SKIPPED, *(getattr(model, "_keep_in_fp32_modules", None) or ())}
    # transformers keeps the output embeddings unquantized (quantizers/base.py, get_keys_to_not_convert)
    head = output_layer(model)
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            new = any(part in skipped for part in path.split("."))
            if type(child) in (nn.Linear, Conv1D) and not new and child is not head:
                yield module, child_name, child


def exchange(places: Iterable[Place], make: Callable[[nn.Module], nn.Module]) -> None:
    """Put what ``make`` makes of each layer in its place: ``(parent, name there, layer)``."""
    for parent, name, layer in list(places):
        setattr(parent, name, make(layer))


def mark(model: nn.Module, quantization: str) -> None:
    """What from_pretrained leaves on a model of bitsandbytes' layers; peft looks for it."""
    setattr(model, "is_loaded_in_8bit" if quantization == "int8" else "is_loaded_in_4bit", True)


def _stand_in(layer: nn.Module, quantization: str, compute_dtype: torch.dtype) -> nn.Module:
    from planner.recording.stand_ins import Int8Linear, Nf4Linear

    return Int8Linear(layer) if quantization == "int8" else Nf4Linear(layer, compute_dtype)


def bitsandbytes_layer(layer: Any, quantization: str, compute_dtype: torch.dtype) -> nn.Module:
    """What transformers/integrations/bitsandbytes.py makes of a layer, replace_with_bnb_linear and then loading.

    ``quantization``: int8 or nf4, which happens when the layer, in host memory until then, is moved to a device.
    """
    import bitsandbytes
    import torch
    from torch import nn

    from planner.recording.stand_ins import OUTLIER_THRESHOLD, features

    weight = layer.weight.data if isinstance(layer, nn.Linear) else layer.weight.data.T
    bnb: Any = bitsandbytes.nn
    bias = layer.bias is not None
    if quantization == "int8":
        with torch.device("meta"):
            made = bnb.Linear8bitLt(*features(layer), bias, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD)
        made.weight = bnb.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        kind = {"compress_statistics": True, "quant_type": "nf4"}
        with torch.device("meta"):
            made = bnb.Linear4bit(*features(layer), bias, compute_dtype, **kind)
        made.weight = bnb.Params4bit(weight, requires_grad=False, module=made, **kind)
    made.bias = layer.bias
    return cast("nn.Module", made)
