"""A model of PyTorch's CUDA caching allocator: what a sequence of allocations reserves on the card.

Pure Python, one stream, no CUDA graphs or private pools. Written from torch's source, 2.11 to 2.14; sizes are equal
to the byte because they depend on the requests alone. The rules, each with the function that holds it in
``c10/cuda/CUDACachingAllocator.cpp`` unless another file is named:

- A request is rounded up to 512 B, or with ``roundup_power2_divisions`` to the next of so many equal steps between
  two powers of two (``round_size``, ``roundup_power2_next_division``). Zero bytes allocate nothing (``allocate``).
- Up to 1 MiB it is served from the small pool, otherwise from the large one (``get_pool``).
- The smallest free block of the pool that fits is taken, the lowest address among equals (``get_free_block``,
  ``BlockComparatorSize``). Blocks of ``max_split_size`` or more serve only requests of that size or more, and only
  when they exceed the request by less than ``max_non_split_rounding_size``, which is ``large_segment_size`` unless
  it is set (``c10/core/AllocatorConfig.cpp``).
- Else a segment is asked of the driver: 2 MiB for the small pool, ``large_segment_size`` (20 MiB) below 10 MiB,
  otherwise the request rounded up to 2 MiB (``get_allocation_size``, ``alloc_block``).
- A block is split when 512 B or more would remain in the small pool or with expandable segments, more than 1 MiB in
  the large pool unless the request is ``max_split_size`` or more (``should_split``, ``alloc_found_block``).
  An unsplit remainder belongs to the block: ``allocated_bytes`` counts ``block->size``, not what was requested.
- A freed block merges with free neighbours of its segment and returns to its pool, not to the driver (``free_block``,
  ``try_merge_blocks``).
- With ``garbage_collection_threshold``, and only in a process that may not have all of the card's memory
  (``set_per_process_memory_fraction`` of less than 1), wholly free large segments are given back before the driver
  is asked, when more than that share is reserved: those of average age or more, again until enough is given back.
  Age counts the large pool's searches since the segment became free (``garbage_collect_cached_blocks``,
  ``gc_count``). Expandable segments are passed over.
- When the driver has no memory: oversize free segments are given back until the request fits
  (``release_available_cached_blocks``, only with ``max_split_size``) and the driver is asked again; then every
  segment that is wholly free is given back (``release_cached_blocks``, ``release_blocks``), ``num_alloc_retries``
  counts one, and the driver is asked a last time (``malloc``).
- With ``expandable_segments`` each pool has one segment that grows at its end by granules of 2 MiB or
  ``large_segment_size`` (``find_expandable_block``, ``try_allocate_expandable_block``, ``map_block``; several only
  when the address space of the first, 9/8 of the device's memory, has no room). A free block next to unmapped
  addresses counts with them for best fit (``get_free_block``), so the segment's end is used last. Giving back unmaps
  whole granules of free blocks (``unmap_block``).

Two things are the driver's and are assumed: a new segment lies above all earlier ones (the order of addresses decides
only between free blocks of one size), and ``capacity_bytes`` is exhausted to the last byte.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.memory.block_sizes import (
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    SMALL_SIZE_BYTES,
    AllocatorSettings,
    round_size,
    round_sizes,
    segment_bytes,
)
from planner.memory.layout import BlockInfo, SegmentInfo
from planner.memory.segments import (
    NO_LIMIT_BYTES,
    AgingPool,
    Device,
    DriverCall,
    ExpandableSegments,
    FixedSegments,
    Pool,
)

__all__ = [
    "AllocatorSettings",
    "BlockInfo",
    "CachingAllocator",
    "DriverCall",
    "OutOfMemory",
    "Replay",
    "SegmentInfo",
    "replay_events",
]


class OutOfMemory(Exception):  # noqa: N818 - torch.cuda.OutOfMemoryError's short name, by contract
    """The driver's capacity doesn't hold a request, even after every wholly free segment was given back."""

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        """What the driver was asked for: the segment of the request (what torch's message says)."""
        self.allocated_bytes = allocated_bytes
        """In live blocks."""
        self.reserved_bytes = reserved_bytes
        """Held from the driver."""
        self.capacity_bytes = capacity_bytes
        """What the driver has in all."""
        super().__init__(
            f"out of memory: tried to allocate {requested_bytes} B; of {capacity_bytes} B capacity"
            f" {reserved_bytes} B are reserved, {allocated_bytes} B of them allocated"
        )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a sequence of allocation events came to."""

    peak_allocated_bytes: int
    """``torch.cuda.max_memory_allocated()`` at the end."""
    peak_reserved_bytes: int
    """``torch.cuda.max_memory_reserved()`` at the end."""
    peak_event_index: int
    """Index of the event at which the allocated bytes first reached their peak; -1 if nothing was allocated."""
    retries: int
    """``num_alloc_retries``: how often everything free had to be given back to the driver."""


class CachingAllocator:
    """The allocator of one device. Blocks are named by keys that the caller chooses.

    ``capacity_bytes`` is what the driver can give this process beside its context; None for no limit.
    """

    def __init__(self, settings: AllocatorSettings, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes: got {capacity_bytes}; accepted: more than 0, or None for no limit")
        self._divisions = settings.roundup_power2_divisions
        # Given back are segments that came as one: expandable segments never do (garbage_collect_cached_blocks).
        collects = settings.garbage_collection_bytes is not None and not settings.expandable_segments
        self._collect_above = settings.garbage_collection_bytes if collects else None
        # The smallest block that is large enough is then not always the one to take, or taking it is counted.
        self._special = collects or settings.max_split_size_bytes is not None
        self._max_split = settings.max_split_size_bytes or NO_LIMIT_BYTES
        self._max_rounding = settings.max_non_split_rounding_bytes or settings.large_segment_size_bytes
        self._large_segment = settings.large_segment_size_bytes
        self._device = Device(capacity_bytes)
        self._segments: FixedSegments | ExpandableSegments
        if settings.expandable_segments:
            self._segments = ExpandableSegments(self._device)
            self._unsplit_from = NO_LIMIT_BYTES
            large_remainder = MIN_BLOCK_BYTES
        else:
            self._segments = FixedSegments(self._device, self._large_segment, self._max_split)
            self._unsplit_from = self._max_split
            # Sizes are multiples of 512 B, so "more than 1 MiB remains" is "1 MiB + 512 B or more".
            large_remainder = SMALL_SIZE_BYTES + MIN_BLOCK_BYTES
        self._small = Pool(granule=SMALL_SEGMENT_BYTES, smallest_remainder=MIN_BLOCK_BYTES)
        kind = AgingPool if collects else Pool
        self._large = kind(granule=self._large_segment, smallest_remainder=large_remainder)
        self._live: dict[int, tuple[int, int]] = {}
        self._empty: set[int] = set()
        self._allocated = 0
        self._peak_allocated = 0
        self._retries = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes in live blocks, after rounding and with unsplit remainders."""
        return self._allocated

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver."""
        return self._device.reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes allocated since the start or ``reset_peaks``."""
        return self._peak_allocated

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes reserved since the start or ``reset_peaks``."""
        return self._device.peak_reserved_bytes

    @property
    def num_alloc_retries(self) -> int:
        """How often everything free was given back because the driver had no memory."""
        return self._retries

    def reset_peaks(self) -> None:
        """Let the peaks start from what is allocated and reserved now."""
        self._peak_allocated = self._allocated
        self._device.peak_reserved_bytes = self._device.reserved_bytes

    def malloc(self, key: int, nbytes: int) -> None:
        """Allocate ``nbytes`` under a key, 1 or more, that isn't in use; zero bytes allocate nothing.

        Raises OutOfMemory, after which the allocator is still usable, and ValueError.
        """
        if key < 1 or key in self._empty:
            raise ValueError(f"key: got {key}; accepted: 1 or more and not in use")
        if nbytes:
            self._run([key], {key: round_size(nbytes, self._divisions)})
        else:
            self._empty.add(key)

    def free(self, key: int) -> None:
        """Free the block of a key. Raises ValueError where the key holds none."""
        if key in self._empty:
            self._empty.remove(key)
        else:
            self._run([-key], {key: MIN_BLOCK_BYTES})

    def run(self, events: Sequence[int] | npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> int:
        """Apply signed keys: ``+k`` allocates ``sizes[k]`` bytes under key k, ``-k`` frees it.

        Returns the index of the event at which the allocated bytes last reached a new peak, -1 when they didn't.
        Zero-byte blocks are passed over. Raises OutOfMemory, and ValueError for events that make no sense.
        """
        rounded = round_sizes(sizes, self._divisions)
        return self._run(_checked_events(events, len(rounded)), rounded)

    def empty_cache(self) -> None:
        """Give everything that is wholly free back to the driver (``torch.cuda.empty_cache``)."""
        self._segments.release(self._large)
        self._segments.release(self._small)

    @property
    def driver_calls(self) -> Sequence[DriverCall]:
        """What the driver was asked for and given back so far, in order."""
        return self._device.calls

    def block(self, key: int) -> BlockInfo | None:
        """Where the block of a key lies; None where the key holds none or no bytes."""
        block = self._live.get(key)
        return None if block is None else BlockInfo(address=block[0], size_bytes=block[1], allocated=True)

    def snapshot(self) -> list[SegmentInfo]:
        """Return every segment with its blocks, by address (``torch.cuda.memory._snapshot``)."""
        blocks = [(start, size, True, size <= SMALL_SIZE_BYTES) for start, size in self._live.values()]
        for pool in (self._small, self._large):
            blocks += [(start, size, False, pool is self._small) for start, size in pool.by_start.items()]
        segments: list[tuple[bool, list[BlockInfo]]] = []
        end = -1
        for start, size, allocated, small in sorted(blocks):
            if start != end:
                segments.append((small, []))
            segments[-1][1].append(BlockInfo(address=start, size_bytes=size, allocated=allocated))
            end = start + size
        return [SegmentInfo(blocks=tuple(blocks), small=small) for small, blocks in segments]

    def _run(self, events: Iterable[int], sizes: Sequence[int] | Mapping[int, int]) -> int:  # noqa: PLR0912, PLR0915
        """Apply signed keys, ``sizes[key]`` rounded already; return the index of the event at a new peak (-1: none).

        The rules of ``malloc`` and ``free`` are here or called from here. One long loop over local names, since a
        search spends its time in it: with a method for each event it takes a quarter longer.
        """
        live = self._live
        small, large = self._small, self._large
        special, counted, unsplit_from = self._special, self._collect_above is not None, self._unsplit_from
        allocated, peak, peak_index = self._allocated, self._peak_allocated, -1
        try:
            for index, event in enumerate(events):
                if event > 0:
                    size = sizes[event]
                    if not size:
                        continue
                    if event in live:
                        raise ValueError(f"key: got {event}, which is allocated already; accepted: a key not in use")
                    pool = small if size <= SMALL_SIZE_BYTES else large
                    by_size = pool.by_size
                    starts = by_size.get(size)
                    # A block that can grow is the last to be taken: _find looks for others.
                    if starts is not None and not counted and starts[0] + size not in pool.unmapped:
                        start = starts.pop(0)
                        if not starts:
                            free_sizes = pool.sizes
                            del by_size[size], free_sizes[bisect_left(free_sizes, size)]
                        del pool.by_start[start], pool.by_end[start + size]
                    else:
                        free_sizes = pool.sizes
                        place = bisect_left(free_sizes, size)
                        if (
                            special
                            or place == len(free_sizes)
                            or by_size[found := free_sizes[place]][0] + found in pool.unmapped
                        ):
                            self._allocated = allocated
                            start, found = self._find(pool, size, place)
                            pool.forget(start, found)
                        else:
                            starts = by_size[found]
                            start = starts.pop(0)
                            if not starts:
                                del by_size[found], free_sizes[place]
                        del pool.by_start[start]
                        rest = found - size
                        if rest >= pool.smallest_remainder and size < unsplit_from:
                            pool.by_start[start + size] = pool.by_end[start + found] = rest
                            starts = by_size.get(rest)
                            if starts is None:
                                by_size[rest] = [start + size]
                                insort(free_sizes, rest)
                            else:
                                insort(starts, start + size)
                        else:
                            del pool.by_end[start + found]
                            size = found
                    live[event] = (start, size)
                    allocated += size
                    if allocated > peak:
                        peak, peak_index = allocated, index
                elif sizes[-event]:
                    block = live.pop(-event, None)
                    if block is None:
                        raise ValueError(f"key: got {-event}, which isn't allocated; accepted: a key in use")
                    start, size = block
                    allocated -= size
                    # The small pool splits to the byte, so a live block's size tells its pool.
                    pool = small if size <= SMALL_SIZE_BYTES else large
                    pool.add(start, size)
        finally:
            self._allocated, self._peak_allocated = allocated, peak
        return peak_index

    def _find(self, pool: Pool, size: int, place: int) -> tuple[int, int]:
        """Return address and size of the best fit (``get_free_block``), or of new memory."""
        if isinstance(pool, AgingPool):
            pool.searches += 1
        if place < len(pool.sizes):
            found = pool.sizes[place]
            start = pool.by_size[found][0]
            if start + found in pool.unmapped:
                start, found = _least_growable(pool, size)
            if found < self._max_split or (size >= self._max_split and found < size + self._max_rounding):
                return start, found
        return self._grow(pool, size)

    def _grow(self, pool: Pool, size: int) -> tuple[int, int]:
        """Get memory from the driver, giving back what is free where it has none."""
        segments = self._segments
        if self._collect_above is not None:
            segments.collect(self._large, self._collect_above)
        block = segments.grow(pool, size)
        if block is None and segments.release_oversize(pool, size):
            block = segments.grow(pool, size)
        if block is None:
            self.empty_cache()
            self._retries += 1
            block = segments.grow(pool, size)
        if block is None:
            raise OutOfMemory(
                requested_bytes=segment_bytes(size, self._large_segment),
                allocated_bytes=self._allocated,
                reserved_bytes=self._device.reserved_bytes,
                capacity_bytes=self._device.capacity_bytes or 0,
            )
        return block


def replay_events(
    events: Sequence[int] | npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
) -> Replay:
    """Run allocation events through a fresh allocator.

    ``+k`` (k >= 1) allocates block k with ``sizes[k]`` bytes, ``-k`` frees it; zero-byte blocks are passed over.
    Raises OutOfMemory, and ValueError for events that make no sense.
    """
    allocator = CachingAllocator(settings, capacity_bytes)
    peak_index = allocator.run(events, sizes)
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_event_index=peak_index,
        retries=allocator.num_alloc_retries,
    )


def _checked_events(events: Sequence[int] | npt.NDArray[np.int64], blocks: int) -> list[int]:
    """Return the events as a list, which is several times faster to go through than an array."""
    blocks_named = np.abs(np.asarray(events, dtype=np.int64))
    if blocks_named.size and not 0 < blocks_named.min() <= blocks_named.max() < blocks:
        raise ValueError(f"events: accepted: numbers of blocks from 1 to {blocks - 1}, negative to free")
    return events.tolist() if isinstance(events, np.ndarray) else list(events)


def _least_growable(pool: Pool, size: int) -> tuple[int, int]:
    """Move on from a best fit that can grow to larger blocks as long as they can grow less (``get_free_block``)."""
    fits = pool.best_fits(size)
    best = next(fits)
    for block in fits:
        if _expandable_size(pool, *block) >= _expandable_size(pool, *best):
            break
        best = block
    return best


def _expandable_size(pool: Pool, start: int, size: int) -> int:
    """Return the size of a free block together with the unmapped range behind it."""
    return size + pool.unmapped.get(start + size, 0)
