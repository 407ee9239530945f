"""The optimizer and its implementation: what state it keeps and what its step needs while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from planner.levers.base import Choice, Context, Lever

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STATE_BYTES_PER_PARAMETER = {
    "adamw_fused": 8,
    "adamw_foreach": 8,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 0,
    "adafactor": 0,
    "sgd": 0,
}
"""On the card, of fp32 parameters."""
PAGED_BYTES_PER_PARAMETER = {"paged_adamw_8bit": 2}
"""In CUDA's managed memory: in host memory whenever the card's is needed for something else."""


class OptimizerLever(Lever):
    """AdamW (fused or foreach), 8-bit AdamW (paged or not), Adafactor, SGD."""

    field = "optimizer"
    lowers_memory = (
        ("adamw_fused", "adamw_foreach"),
        ("adamw_8bit", "adamw_fused"),
        ("paged_adamw_8bit", "adamw_8bit"),
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
                value="paged_adamw_8bit",
                swept=False,
                reason="8-bit state in managed memory: it leaves the card when anything else needs it, and comes back "
                "over PCIe for each step: only when named",
            ),
            Choice(
                value="adafactor",
                swept=False,
                reason="row and column statistics instead of two states: another algorithm, only when named",
            ),
            Choice(value="sgd", swept=False, reason="no state: another algorithm, only when named"),
        ]


def make_optimizer(name: str, parameters: Iterable[Tensor], *, masters: bool = False) -> torch.optim.Optimizer:
    """The optimizer that the emitted script makes, for parameters that hold no data.

    With ``masters`` it steps on fp32 copies of them.
    """
    import torch

    from planner.recording.stand_ins import EightBitAdamW, FusedAdamW

    if masters:
        from planner.levers.master_weights import MasterWeights

        return MasterWeights(list(parameters), lr=1e-5, make=lambda copies: make_optimizer(name, copies))

    kinds: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "adamw_fused": FusedAdamW,
        "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "adamw_8bit": EightBitAdamW,
        "paged_adamw_8bit": lambda p: EightBitAdamW(p, paged=True),
        "adafactor": lambda p: torch.optim.Adafactor(p, foreach=False),
        "sgd": lambda p: torch.optim.SGD(p, foreach=True),
    }
    return kinds[name](list(parameters))
