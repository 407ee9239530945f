"""The levers: one file each, all with the interface of ``base.Lever``."""

from __future__ import annotations

from planner.config import TrainingConfig
from planner.levers import attention, offload, parallelism
from planner.levers.adapters import AdaptersLever
from planner.levers.attention import AttentionLever
from planner.levers.base import Choice, Context, Lever
from planner.levers.batching import BatchingLever
from planner.levers.checkpointing import CheckpointingLever
from planner.levers.loss import LossLever
from planner.levers.offload import OffloadLever
from planner.levers.optimizer import OptimizerLever
from planner.levers.parallelism import ParallelismLever
from planner.levers.precision import PrecisionLever
from planner.levers.quantization import QuantizationLever

LEVERS: tuple[Lever, ...] = (
    PrecisionLever(),
    AttentionLever(),
    QuantizationLever(),
    AdaptersLever(),
    CheckpointingLever(),
    LossLever(),
    OptimizerLever(),
    OffloadLever(),
    ParallelismLever(),
    BatchingLever(),
)
"""In the order in which they change a model: weights, kernels, base, adapters, recomputation, loss, update, batch."""


def conflict(config: TrainingConfig) -> str | None:
    """Why a configuration's values don't go together, or None."""
    return (
        offload.conflict(config)
        or parallelism.conflict(config)
        or attention.conflict(config.attention, config.precision)
    )


__all__ = ["LEVERS", "Choice", "Context", "Lever", "conflict"]
