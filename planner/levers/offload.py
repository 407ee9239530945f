"""Offload: what lives in host memory instead of on the card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever, ruled_out_on_cpu
from planner.levers.checkpointing import checkpointing_layers

if TYPE_CHECKING:
    from torch import nn

ON_HOST = ("optimizer", "parameters")
"""Values with which the optimizer's state and step are on the host."""
IN_THE_PASS = ("parameters", "activations")
"""Values that change what a micro-batch does, not only the update."""
_HOST_OPTIMIZERS = ("adamw_fused", "adamw_foreach")


def conflict(config: TrainingConfig) -> str | None:
    """Why a configuration's offload doesn't go with its other values, or None."""
    return clash(
        config.offload,
        optimizer=config.optimizer,
        checkpointing=config.checkpointing,
        method=config.method,
        precision=config.precision,
    )


def clash(offload: str, *, optimizer: str, checkpointing: str, method: str, precision: str) -> str | None:
    """Why an offload doesn't go with these values, or None."""
    if offload in ON_HOST and optimizer not in _HOST_OPTIMIZERS:
        return f"{optimizer} has no host version: offload goes with adamw_fused and adamw_foreach"
    if offload != "parameters":
        return None
    if checkpointing != "full":
        return "offload parameters needs checkpointing full: else autograd keeps every layer's weights on the card"
    if method != "full":
        return f"offload parameters is for method full: with {method} most weights are frozen and small in comparison"
    if precision == "fp16-amp":
        return "offload parameters doesn't go with fp16-amp: loss scaling looks for gradients on the card"
    return None


class OffloadLever(Lever):
    """none, the optimizer, the layers' weights (with the optimizer), or what the forward pass saves."""

    field = "offload"
    lowers_memory = (("optimizer", "none"), ("parameters", "optimizer"), ("activations", "none"))

    def choices(self, context: Context) -> list[Choice]:
        """Full fine-tuning's optimizer is swept at once; the others, which cost more time, as a last resort."""
        full = context.method == "full"
        host_step = "8 bytes a trained parameter move to host memory; the step runs on the CPU"
        weights = "weights are on the card while their layer runs; gradients, state and step are on the host"
        if not context.supports_checkpointing:
            weights = f"transformers has no checkpointing for {context.spec.model_type}, which it needs"
        choices = [
            Choice(value="none", reason="nothing crosses PCIe"),
            Choice(
                value="optimizer",
                swept=full,
                last_resort=not full,  # adapters have little state
                reason=host_step,
            ),
            Choice(
                value="parameters",
                valid=context.supports_checkpointing,
                swept=False,
                last_resort=full and context.supports_checkpointing,
                reason=weights,
            ),
            Choice(
                value="activations",
                swept=False,
                last_resort=True,
                reason="what the forward pass saves waits in host memory: it crosses PCIe twice in every pass",
            ),
        ]
        already = "everything is in host memory already"
        return ruled_out_on_cpu(choices, context, dict.fromkeys((*ON_HOST, "activations"), already))

    def change_model(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """As the emitted script does, with operators that a recording sees."""
        if config.offload in IN_THE_PASS:
            from planner.recording.transfers import offload_activations, offload_layers

            if config.offload == "activations":
                offload_activations(model)
            else:
                offload_layers(model, checkpointing_layers(model))
        return model
