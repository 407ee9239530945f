"""Activation checkpointing: drop what layers keep for the backward pass and compute it again there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever

if TYPE_CHECKING:
    from torch import nn


def every_n(checkpointing: str) -> int | None:
    """1 for full, N for every-N, None for none."""
    if checkpointing == "none":
        return None
    return 1 if checkpointing == "full" else int(checkpointing.removeprefix("every-"))


class CheckpointingLever(Lever):
    """none, full (every layer), every-N (layers 0, N, 2N, ...)."""

    field = "checkpointing"
    lowers_memory = (("full", "none"), ("every-2", "none"), ("full", "every-2"))
    loss_tolerance = {"full": 1e-5, "every-2": 1e-5}  # noqa: RUF012

    def choices(self, context: Context) -> list[Choice]:
        """Every model of transformers with checkpointing layers can; half of the layers is worth a look from four."""
        supported = context.supports_checkpointing
        missing = "" if supported else f"transformers has no checkpointing for {context.spec.model_type}"
        return [
            Choice(value="none", reason="nothing is computed twice"),
            Choice(
                value="full",
                valid=supported,
                reason=missing or "keeps one hidden state a layer, for one more forward pass",
            ),
            *(
                Choice(
                    value=f"every-{n}",
                    valid=supported,
                    swept=n == 2 and context.layers >= 4,
                    reason=missing or f"one layer in {n} keeps its input alone, and is computed twice",
                )
                for n in (2, 4)
            ),
        ]

    def explain(self, value: str, context: Context) -> str:
        """Also for an N that is only looked at when it is named."""
        n = every_n(value)
        if n is not None and n > 1 and context.supports_checkpointing:
            return f"one layer in {n} keeps its input alone, and is computed twice"
        return super().explain(value, context)

    def change_model(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """As the emitted script does: enable it, then switch the layers off that don't take part."""
        n = every_n(config.checkpointing)
        if n is None:
            return model
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        # transformers 5.23 renamed the method; under both names the arguments of torch's checkpoint() come first
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for index, layer in enumerate(checkpointing_layers(model)):
            layer.gradient_checkpointing = index % n == 0  # type: ignore[assignment]
        return model


def checkpointing_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, in model order, across stacks (an encoder's, then a decoder's)."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def stack_sizes(model: nn.Module) -> list[int]:
    """Layers of each stack (a module list of repeated layers), in model order."""
    layers = {id(layer) for layer in checkpointing_layers(model)}
    counts = [sum(id(child) in layers for child in module.children()) for module in model.modules()]
    return [count for count in counts if count]
