"""The optimizer and its implementation: what state it keeps and what its step needs while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from planner.levers.base import Choice, Context, Lever, ruled_out_on_cpu
from planner.levers.offload import ON_HOST

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

LEARNING_RATE = 1e-5
"""Of a trial's steps: too small to change how a model behaves."""


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
        choices = [
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
        reason = "8-bit optimizers are planned for CUDA devices alone"
        return ruled_out_on_cpu(choices, context, dict.fromkeys(("adamw_8bit", "paged_adamw_8bit"), reason))


def make_optimizer(
    name: str, parameters: Iterable[Tensor], *, masters: bool = False, offload: str = "none"
) -> torch.optim.Optimizer:
    """The optimizer that the emitted script makes; for parameters that hold no data one that allocates as much.

    With ``masters`` it steps on fp32 copies of them; with ``offload`` optimizer or parameters in host memory, for
    parameters with data alone.
    """
    from planner.recording.stand_ins import without_data

    parameters = list(parameters)
    if offload in ON_HOST:
        from planner.levers.host_optimizer import HostAdamW, HostAdamWOfLayers

        return (HostAdamW if offload == "optimizer" else HostAdamWOfLayers)(parameters, lr=LEARNING_RATE)
    if masters:
        from planner.levers.master_weights import MasterWeights

        return MasterWeights(parameters, lr=LEARNING_RATE, make=lambda copies: make_optimizer(name, copies))
    return (_stand_ins if without_data(parameters) else _real)(parameters)[name]()


def _stand_ins(parameters: list[Tensor]) -> Mapping[str, Callable[[], torch.optim.Optimizer]]:
    import torch

    from planner.recording.stand_ins import EightBitAdamW, FusedAdamW

    return {
        **_real(parameters),
        "adamw_fused": lambda: FusedAdamW(parameters),
        "adamw_8bit": lambda: EightBitAdamW(parameters),
        "paged_adamw_8bit": lambda: EightBitAdamW(parameters, paged=True),
        # as torch chooses on a card, for which meta stands (torch/optim/optimizer.py, _default_to_fused_or_foreach)
        "sgd": lambda: torch.optim.SGD(parameters, foreach=True if parameters[0].is_meta else None),
    }


def _real(parameters: list[Tensor]) -> Mapping[str, Callable[[], torch.optim.Optimizer]]:
    import torch

    def eight_bit(kind: str) -> torch.optim.Optimizer:
        import bitsandbytes

        optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, kind)(parameters, lr=LEARNING_RATE)
        return optimizer

    return {
        "adamw_fused": lambda: torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True),
        "adamw_foreach": lambda: torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=True),
        "adamw_8bit": lambda: eight_bit("AdamW8bit"),
        "paged_adamw_8bit": lambda: eight_bit("PagedAdamW8bit"),
        "adafactor": lambda: torch.optim.Adafactor(parameters, lr=LEARNING_RATE, foreach=False),
        "sgd": lambda: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    }
