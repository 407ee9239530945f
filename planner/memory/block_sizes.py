"""The allocator's settings, and the sizes that follow from them alone.

Constants and functions carry the names of ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.units import round_up

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_SIZE_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MIN_LARGE_ALLOC_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB
ROUNDUP_INTERVALS = 16
"""Sizes from 1 MiB to 64 GiB, by powers of two, that can be rounded up in different steps."""

Divisions = int | tuple[int, ...]
"""Steps between two powers of two: the same for all sizes, or one number for each of the ROUNDUP_INTERVALS."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The options of ``PYTORCH_ALLOC_CONF`` that change how much is reserved, with torch's defaults."""

    expandable_segments: bool = False
    """Grow one segment per pool instead of asking the driver for separate ones."""
    large_segment_size_bytes: int = 20 * MIB
    """Segment for requests between 1 and 10 MiB; a whole number of MiB above 10."""
    roundup_power2_divisions: Divisions = 0
    """Steps between two powers of two that requests are rounded up to, themselves powers of two; 0 and 1 are off.
    A tuple has one for each interval: sizes below 2 MiB, from there below 4 MiB, ..., from 32 GiB on."""
    max_split_size_bytes: int | None = None
    """Blocks of this size or more are never split; at least ``large_segment_size_bytes``. None: no limit."""
    max_non_split_rounding_bytes: int | None = None
    """A block that is never split serves a request that it exceeds by less than this; at least
    ``large_segment_size_bytes``. None: that."""
    garbage_collection_bytes: int | None = None
    """When this much is exceeded, segments that were free for long are given back before the driver is asked:
    ``garbage_collection_threshold`` of what the process may have. None: never."""

    def __post_init__(self) -> None:
        """Reject what torch's parser rejects (``c10/core/AllocatorConfig.cpp``), with a ValueError."""
        large = self.large_segment_size_bytes
        if large <= MIN_LARGE_ALLOC_BYTES or large % MIB:
            raise ValueError(f"large_segment_size_bytes: got {large}; accepted: whole MiB above 10 MiB")
        divisions = self.roundup_power2_divisions
        if isinstance(divisions, tuple) and len(divisions) != ROUNDUP_INTERVALS:
            message = f"got {len(divisions)} numbers; accepted: one number or {ROUNDUP_INTERVALS}"
            raise ValueError(f"roundup_power2_divisions: {message}")
        if not _are_powers_of_two(divisions if isinstance(divisions, tuple) else (divisions,)):
            raise ValueError(f"roundup_power2_divisions: got {divisions}; accepted: 0 or a power of two")
        for name in ("max_split_size_bytes", "max_non_split_rounding_bytes"):
            limit = getattr(self, name)
            if limit is not None and limit < large:
                raise ValueError(f"{name}: got {limit}; accepted: {large} (a large segment) or more")
        collected = self.garbage_collection_bytes
        if collected is not None and collected < 0:
            raise ValueError(f"garbage_collection_bytes: got {collected}; accepted: 0 or more")


def _are_powers_of_two(numbers: Iterable[int]) -> bool:
    return all(number >= 0 and not number & (number - 1) for number in numbers)


def round_size(nbytes: int, divisions: Divisions = 0) -> int:
    """Return the block that serves a request of ``nbytes`` (``round_size``); zero bytes need none."""
    if nbytes < 0:
        raise ValueError(f"nbytes: got {nbytes}; accepted: 0 or more")
    if isinstance(divisions, tuple):  # AllocatorConfig.cpp, roundup_power2_divisions
        divisions = divisions[min(max(nbytes.bit_length() - MIB.bit_length(), 0), ROUNDUP_INTERVALS - 1)]
    if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
        power_of_two = 1 << (nbytes.bit_length() - 1)
        return round_up(nbytes, power_of_two // divisions)
    return (nbytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


def round_sizes(sizes: npt.NDArray[np.int64], divisions: Divisions = 0) -> list[int]:
    """Return ``round_size`` of each element; at once where it is the plain rounding."""
    if divisions not in (0, 1) or (sizes.size and sizes.min() < 0):
        return [round_size(nbytes, divisions) for nbytes in sizes.tolist()]
    rounded: list[int] = ((sizes + (MIN_BLOCK_BYTES - 1)) & -MIN_BLOCK_BYTES).tolist()
    return rounded


def segment_bytes(size: int, large_segment_bytes: int) -> int:
    """Return the segment that is asked of the driver for a block of ``size`` bytes (``get_allocation_size``)."""
    if size <= SMALL_SIZE_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_ALLOC_BYTES:
        return large_segment_bytes
    return round_up(size, ROUND_LARGE_BYTES)
