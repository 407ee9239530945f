"""Quantization: how the frozen base weights are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever, output_layer
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
        return [
            Choice(value="nf4", reason="4-bit base weights, dequantized layer by layer"),
            Choice(
                value="int8",
                swept=False,
                reason="8-bit base weights, closer to the original than nf4's; every layer's input is kept, also with "
                "checkpointing",
            ),
        ]

    def change_model(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """Put stand-ins for bitsandbytes' layers, whose parameters can't be built without data."""
        if config.quantization == "none":
            return model
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        # modules that transformers keeps in fp32 for their range (T5's wo) are not quantized either
        skipped = {*_SKIPPED, *(getattr(model, "_keep_in_fp32_modules", None) or ())}
        # transformers keeps the output embeddings unquantized (quantizers/base.py, get_keys_to_not_convert)
        head = output_layer(model)
        for name, module in list(model.named_modules()):
            for child_name, child in list(module.named_children()):
                path = f"{name}.{child_name}" if name else child_name
                new = any(part in skipped for part in path.split("."))
                if type(child) in (nn.Linear, Conv1D) and not new and child is not head:
                    setattr(module, child_name, _stand_in(child, config))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return model


def _stand_in(layer: nn.Module, config: TrainingConfig) -> nn.Module:
    from planner.recording.stand_ins import Int8Linear, Nf4Linear

    if config.quantization == "int8":
        return Int8Linear(layer)
    return Nf4Linear(layer, base_dtype(config.precision, config.method))
