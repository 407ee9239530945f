"""Quantization: how the frozen base weights are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever
from planner.levers.precision import base_dtype

if TYPE_CHECKING:
    from torch import nn

_SKIPPED = ("classifier", "score", "pooler")
"""New modules, which the emitted script keeps from being quantized."""


class QuantizationLever(Lever):
    """none, or nf4 with double quantization under LoRA."""

    field = "quantization"
    lowers_memory = (("nf4", "none"),)

    def choices(self, context: Context) -> list[Choice]:
        """A consequence of the method: full fine-tuning and LoRA keep the weights as they are."""
        if context.method == "qlora":
            return [Choice(value="nf4", reason="4-bit base weights, dequantized layer by layer")]
        return [Choice(value="none", reason="the weights stay as they are")]

    def change_model(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """Put stand-ins for bitsandbytes' 4-bit layers, whose parameters can't be built without data."""
        if config.quantization != "nf4":
            return model
        from torch import nn

        from planner.recording.stand_ins import Nf4Linear

        # modules that transformers keeps in fp32 for their range (T5's wo) are not quantized either
        skipped = {*_SKIPPED, *(getattr(model, "_keep_in_fp32_modules", None) or ())}
        kept = {id(module) for module in (_output_layer(model),) if module is not None}
        for name, module in list(model.named_modules()):
            for child_name, child in list(module.named_children()):
                path = f"{name}.{child_name}" if name else child_name
                new = any(part in skipped for part in path.split("."))
                if type(child) is nn.Linear and not new and id(child) not in kept:
                    setattr(module, child_name, Nf4Linear(child, base_dtype(config.precision, config.method)))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return model


def _output_layer(model: nn.Module) -> nn.Module | None:
    """transformers keeps the output embeddings unquantized (quantizers/base.py, get_keys_to_not_convert)."""
    getter = getattr(model, "get_output_embeddings", None)
    layer: nn.Module | None = getter() if getter else None
    return layer
