"""The allocator's settings, and the sizes that follow from them alone.

Constants and functions carry the names of ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The options of ``PYTORCH_ALLOC_CONF`` that change how much is reserved, with torch's defaults."""

    expandable_segments: bool = False
    """Grow one segment per pool instead of asking the driver for separate ones."""
    large_segment_size_bytes: int = 20 * MIB
    """Segment for requests between 1 and 10 MiB; a whole number of MiB above 10."""
    roundup_power2_divisions: int = 0
    """Steps between two powers of two that requests are rounded up to, itself a power of two; 0 and 1 are off."""
    max_split_size_bytes: int | None = None
    """Blocks of this size or more are never split; at least ``large_segment_size_bytes``. None: no limit."""

    def __post_init__(self) -> None:
        """Reject what torch's parser rejects (``c10/core/AllocatorConfig.cpp``), with a ValueError."""
        large = self.large_segment_size_bytes
        if large <= MIN_LARGE_ALLOC_BYTES or large % MIB:
            raise ValueError(f"large_segment_size_bytes: got {large}; accepted: whole MiB above 10 MiB")
        divisions = self.roundup_power2_divisions
        if divisions < 0 or divisions & (divisions - 1):
            raise ValueError(f"roundup_power2_divisions: got {divisions}; accepted: 0 or a power of two")
        limit = self.max_split_size_bytes
        if limit is not None and limit < large:
            raise ValueError(f"max_split_size_bytes: got {limit}; accepted: {large} (a large segment) or more")


def round_size(nbytes: int, divisions: int = 0) -> int:
    """Return the block that serves a request of ``nbytes`` (``round_size``); zero bytes need none."""
    if nbytes < 0:
        raise ValueError(f"nbytes: got {nbytes}; accepted: 0 or more")
    if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
        power_of_two = 1 << (nbytes.bit_length() - 1)
        return round_up(nbytes, power_of_two // divisions)
    return (nbytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


def round_sizes(sizes: npt.NDArray[np.int64], divisions: int = 0) -> list[int]:
    """Return ``round_size`` of each element; at once where it is the plain rounding."""
    if divisions > 1 or (sizes.size and sizes.min() < 0):
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
