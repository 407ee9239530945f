"""The optimizer and its implementation: what state it keeps and what its step needs while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from planner.levers.base import Choice, Context, Lever

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STATE_BYTES_PER_PARAMETER = {"adamw_fused": 8, "adamw_foreach": 8, "adamw_8bit": 2, "adafactor": 0, "sgd": 0}


class OptimizerLever(Lever):
    """AdamW (fused or foreach), 8-bit AdamW, Adafactor, SGD."""

    field = "optimizer"
    lowers_memory = (
        ("adamw_fused", "adamw_foreach"),
        ("adamw_8bit", "adamw_fused"),
        ("adafactor", "adamw_fused"),
        ("sgd", "adamw_fused"),
    )

    def choices(self, context: Context) -> list[Choice]:
        """Fused AdamW unasked: foreach needs more memory and time for the same step, the others train otherwise."""
        return [
            Choice(value="adamw_fused", reason="one kernel, no temporaries; the transformers default"),
            Choice(
                value="adamw_foreach",
                swept=False,
                reason="the same step as fused, with 4 bytes a parameter of temporaries",
            ),
            Choice(
                value="adamw_8bit",
                swept=False,
                reason="2 bytes a parameter of state instead of 8, rounded in blocks: only when named",
            ),
            Choice(
                value="adafactor",
                swept=False,
                reason="row and column statistics instead of two states: another algorithm, only when named",
            ),
            Choice(value="sgd", swept=False, reason="no state: another algorithm, only when named"),
        ]


def make_optimizer(name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that the emitted script makes, for parameters that hold no data."""
    import torch

    from planner.recording.stand_ins import EightBitAdamW, FusedAdamW

    kinds: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "adamw_fused": FusedAdamW,
        "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "adamw_8bit": EightBitAdamW,
        "adafactor": lambda p: torch.optim.Adafactor(p, foreach=False),
        "sgd": lambda p: torch.optim.SGD(p, foreach=True),
    }
    return kinds[name](list(parameters))
