"""Quantization: how the frozen base weights are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever
from planner.levers.precision import base_dtype

if TYPE_CHECKING:
    from torch import nn

_SKIPPED = ("lm_head", "score", "classifier", "qa_outputs", "embed_out", "pre_classifier")
"""transformers keeps output heads unquantized (quantizers/base.py, get_keys_to_not_convert)."""


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

        for name, module in list(model.named_modules()):
            for child_name, child in list(module.named_children()):
                path = f"{name}.{child_name}" if name else child_name
                if type(child) is nn.Linear and not any(part in _SKIPPED for part in path.split(".")):
                    setattr(module, child_name, Nf4Linear(child, base_dtype(config.precision, config.method)))
        _cast_rest_to_fp32(model)
        return model


def _cast_rest_to_fp32(model: nn.Module) -> None:
    """peft.prepare_model_for_kbit_training: freezes the base, and casts what isn't 4-bit to fp32."""
    import torch

    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(torch.float32)
