"""What several cards say to each other in a step, how long it takes, and how much of that compute hides.

Rings, as NCCL runs them: an all-gather or a reduce-scatter moves (N - 1) / N of the whole over each card's link, an
all-reduce both. All are assumed to reach what copies over PCIe reach of its rate (``pcie_fraction``), and to run beside
kernels without slowing them. Copies into and out of the buffers are left out: memory is tens of times faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.config import TrainingConfig
from planner.levers.precision import AUTOCAST_DTYPES
from planner.recording.record import Op
from planner.units import MIB, round_up

ALL_GATHER, REDUCE_SCATTER = "vramplan.all_gather", "vramplan.reduce_scatter"
COLLECTIVE_OPERATORS, CASTING_COLLECTIVE_OPERATORS = 6, 15
"""CPU time of one of FSDP2's collectives with its hooks, splits and copies, in operators of a model; without and with a
mixed precision policy. From a step of 12 tiny layers on one CPU with torch 2.13 and a group that sends nothing:
``fully_shard`` took 19 and 45 operators' time for each unit, which has three collectives."""
BUCKET_BYTES = 25 * MIB
"""``DistributedDataParallel(bucket_cap_mb=25)``: what is reduced at once, and the last of which nothing hides."""

Seconds = NDArray[np.float64]


def collective_seconds(ops: Sequence[Op], moved_bytes: NDArray[np.int64], *, gpus: int, bytes_per_s: float) -> Seconds:
    """Time of each operator on the link: of FSDP2's collectives; zero for kernels. [operators]"""
    # what is recorded as moved: of a gather its output, of a reduction its input and the part that is kept
    whole = {ALL_GATHER: 1.0, REDUCE_SCATTER: gpus / (gpus + 1)}
    shares = np.array([whole.get(op.name, 0.0) for op in ops])
    seconds: Seconds = moved_bytes * shares * ((gpus - 1) / gpus / bytes_per_s)
    return seconds


def exposed_seconds(ops: Sequence[Op], busy: Seconds, collectives: Seconds) -> float:
    """What FSDP2's collectives add to a pass: in each direction what is more than the compute beside them.

    ``busy``: each operator's time without them. The first gather has nothing to hide behind, nor has the last
    reduction; every other gather runs while the unit before it computes.
    """
    backward = np.array([op.in_backward for op in ops], dtype=np.bool_)
    spoken = np.flatnonzero(collectives)
    if not len(spoken):
        return 0.0
    alone = float(collectives[spoken[0]] + collectives[spoken[-1]])
    total = 0.0
    for side in (backward, ~backward):
        total += max(0.0, float(collectives[side].sum()) - float(busy[side].sum()))
    return max(total, alone)


def all_reduce_seconds(gradient_bytes: int, *, gpus: int, bytes_per_s: float, backward_s: float) -> float:
    """What DDP's reduction of all gradients adds to the last backward pass, beside which all buckets but one go."""
    each = 2 * (gpus - 1) / gpus / bytes_per_s
    return max(gradient_bytes * each - backward_s, min(gradient_bytes, BUCKET_BYTES) * each)


def together_seconds(
    config: TrainingConfig,
    ops: Sequence[Op],
    moved_bytes: NDArray[np.int64],
    costs: tuple[Seconds, Seconds],
    *,
    gradient_bytes: int,
    bytes_per_s: float,
) -> float:
    """What cards wait for each other in all micro-batches of a step.

    ``costs`` are kernels' and launches' seconds. [operators] FSDP2's collectives are taken out of the former, for they
    run on streams of their own, and what they take of the CPU is added to the latter.
    """
    kernels, launches = costs
    if config.parallelism == "fsdp2":
        collectives = collective_seconds(ops, moved_bytes, gpus=config.gpus, bytes_per_s=bytes_per_s)
        casts = config.precision in AUTOCAST_DTYPES
        kernels[collectives > 0] = 0.0
        launches[collectives > 0] *= CASTING_COLLECTIVE_OPERATORS if casts else COLLECTIVE_OPERATORS
        return config.gradient_accumulation_steps * exposed_seconds(ops, np.maximum(kernels, launches), collectives)
    backward = np.array([op.in_backward for op in ops], dtype=np.bool_)
    backward_s = max(float(kernels[backward].sum()), float(launches[backward].sum()))
    return all_reduce_seconds(gradient_bytes, gpus=config.gpus, bytes_per_s=bytes_per_s, backward_s=backward_s)


def gather_pool_bytes(ops: Sequence[Op], moved_bytes: NDArray[np.int64], *, gpus: int, casts: bool) -> int:
    """What the gathers' stream keeps of memory: the caching allocator has a pool for each stream.

    At most two gathers that follow each other, and with ``casts`` the row of shards that is cast for the second
    (_fsdp_collectives.py: both are allocated on the copy-in stream).
    """
    gathers = [int(n) for op, n in zip(ops, moved_bytes, strict=True) if op.name == ALL_GATHER and not op.in_backward]
    pairs = zip([0, *gathers], gathers, strict=False)
    return round_up(max((a + b + (b // gpus if casts else 0) for a, b in pairs), default=0), 2 * MIB)
