"""What every lever answers: which values are valid here and why, and how a value changes the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from planner.config import TrainingConfig
from planner.hardware import Card
from planner.models import ModelSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the choice of a lever's values depends on."""

    spec: ModelSpec
    """The model."""
    card: Card
    """The target card."""
    method: str
    """full, lora or qlora: the rung of the ladder that is being searched."""
    effective_batch_size: int
    """Sequences for each optimizer step."""
    gpus: int = 1
    """Cards that train together."""
    max_micro_batch_size: int
    """The largest micro-batch worth looking at."""
    layers: int
    """Repeated layers of the model."""
    supports_sdpa: bool
    """Whether transformers has sdpa attention for the model."""
    supports_checkpointing: bool = True
    """Whether transformers has activation checkpointing for the model."""
    fused_loss_obstacle: str = ""
    """Why the loss can't take over the model's output layer, one clause; empty where it can."""
    sequences_per_sample: int = 1
    """Sequences of a sample that are encoded apart."""
    flash2_obstacle: str = ""
    """Why the model can't run on the flash_attn package, one clause; empty where it can."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of a lever: whether it can be used here, whether it is swept unasked, and why."""

    value: str
    """As it stands in the configuration."""
    reason: str
    """One clause, for a person."""
    valid: bool = True
    """False when the card or the model can't do it: naming it in a request is an error."""
    swept: bool = True
    """Whether it is tried when the request doesn't name it; levers that change results are not."""
    last_resort: bool = False
    """Whether it is tried unasked when nothing that is swept fits: lossless too, and much slower."""


class Lever:
    """A lever of the search space. Sub-classes override what they need."""

    field: ClassVar[str]
    """The field of TrainingConfig that it sets."""
    lowers_memory: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs ``(value, baseline)``: the value claims never to need more memory than the baseline."""
    loss_tolerance: ClassVar[dict[str, float]] = {}
    """Value to the largest relative difference of the first loss from the baseline's; absent means none."""

    def choices(self, context: Context) -> list[Choice]:
        """Every value of this lever with its verdict here."""
        raise NotImplementedError

    def change_model(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """Apply the configuration's value to a built model (on any device, with or without data)."""
        return model

    def explain(self, value: str, context: Context) -> str:
        """Why this value is valid here, or isn't."""
        return next((choice.reason for choice in self.choices(context) if choice.value == value), "")

    def is_last_resort(self, value: str, context: Context) -> bool:
        """Whether a value is only tried unasked when nothing else fits."""
        return any(choice.value == value and choice.last_resort for choice in self.choices(context))


def ruled_out_on_cpu(choices: list[Choice], context: Context, reasons: Mapping[str, str]) -> list[Choice]:
    """The choices; where the processor is the card, those values that have a reason aren't valid for it."""
    if context.card.kind != "cpu":
        return choices
    out = {"valid": False, "swept": False, "last_resort": False}
    return [
        replace(choice, reason=reasons[choice.value], **out) if choice.value in reasons else choice  # type: ignore[arg-type]
        for choice in choices
    ]


def output_layer(model: nn.Module) -> nn.Module | None:
    """The layer that makes the logits, also of a model within peft's wrapper; None where a model names none."""
    getter = getattr(model, "get_output_embeddings", None)
    layer: nn.Module | None = getter() if getter else None
    return layer
