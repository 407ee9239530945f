"""The loss: over the logits of all tokens, or fused with the output layer over a part of them at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever
from planner.levers.precision import autocast_dtype, base_dtype

if TYPE_CHECKING:
    from torch import nn


class LossLever(Lever):
    """standard: the model makes its logits; fused-linear: the loss does, an eighth of them at a time."""

    field = "loss"
    lowers_memory = (("fused-linear", "standard"),)
    loss_tolerance = {"fused-linear": 1e-5}  # noqa: RUF012

    def choices(self, context: Context) -> list[Choice]:
        """For models that return their output layer's result as it is, over a vocabulary."""
        refusal = context.fused_loss_obstacle
        return [
            Choice(value="standard", reason="the model's own logits, all at once"),
            Choice(
                value="fused-linear",
                valid=not refusal,
                swept=False,
                reason=f"not for {context.spec.model_type}: {refusal}"
                if refusal
                else "an eighth of the logits at a time, in place of all with their gradient; the same loss",
            ),
        ]

    def change_model(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """The model leaves its output layer to the loss."""
        if config.loss == "fused-linear":
            from planner.levers.fused_loss import skip_output_layer

            skip_output_layer(model, autocast_dtype(config.precision) or base_dtype(config.precision, config.method))
        return model
