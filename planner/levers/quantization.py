"""Quantization: how the frozen base weights are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever, output_layer, ruled_out_on_cpu
from planner.levers.precision import base_dtype

if TYPE_CHECKING:
    from torch import nn

_SKIPPED = ("classifier", "score", "pooler")
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
        on_meta = next(model.parameters()).is_meta
        for parent, name, layer in list(_quantized_layers(model)):
            setattr(parent, name, (_stand_in if on_meta else _real_layer)(layer, config))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if not on_meta:  # peft looks for it
            setattr(model, "is_loaded_in_8bit" if config.quantization == "int8" else "is_loaded_in_4bit", True)
        return model


def _quantized_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Each layer that the emitted script's ``from_pretrained`` quantizes, with its parent and its name there."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    # modules that transformers keeps in fp32 for their range (T5's wo) are not quantized either
    skipped = {*_SKIPPED, *(getattr(model, "_keep_in_fp32_modules", None) or ())}
    # transformers keeps the output embeddings unquantized (quantizers/base.py, get_keys_to_not_convert)
    head = output_layer(model)
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            new = any(part in skipped for part in path.split("."))
            if type(child) in (nn.Linear, Conv1D) and not new and child is not head:
                yield module, child_name, child


def _stand_in(layer: nn.Module, config: TrainingConfig) -> nn.Module:
    from planner.recording.stand_ins import Int8Linear, Nf4Linear

    if config.quantization == "int8":
        return Int8Linear(layer)
    return Nf4Linear(layer, base_dtype(config.precision, config.method))


def _real_layer(layer: Any, config: TrainingConfig) -> nn.Module:
    """What transformers/integrations/bitsandbytes.py makes of a layer, replace_with_bnb_linear and then loading."""
    import bitsandbytes
    import torch
    from torch import nn

    from planner.recording.stand_ins import OUTLIER_THRESHOLD, features

    weight = layer.weight.data if isinstance(layer, nn.Linear) else layer.weight.data.T
    bnb: Any = bitsandbytes.nn
    bias = layer.bias is not None
    if config.quantization == "int8":
        with torch.device("meta"):
            made = bnb.Linear8bitLt(*features(layer), bias, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD)
        made.weight = bnb.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        kind = {"compress_statistics": True, "quant_type": "nf4"}
        with torch.device("meta"):
            made = bnb.Linear4bit(*features(layer), bias, base_dtype(config.precision, config.method), **kind)
        made.weight = bnb.Params4bit(weight, requires_grad=False, module=made, **kind)
    made.bias = layer.bias
    return cast("nn.Module", made)
