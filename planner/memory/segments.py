"""Pools of free blocks, and the two ways in which their memory comes from the driver.

The ground under ``planner.memory.allocator``, whose docstring says where torch's source has each rule. There are no
block objects: a block is an address and a size, and neighbours find each other by address. Segments never touch, so
blocks of different segments never look like neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from planner.memory.block_sizes import ROUND_LARGE_BYTES, segment_bytes
from planner.units import round_up

NO_LIMIT_BYTES = 1 << 63
UNLIMITED_SPAN_BYTES = 1 << 60
"""Address space of an expandable segment when there is no capacity to derive it from."""


class Pool:
    """The free blocks of one size class, found by best fit and by either end.

    The lists and dictionaries are read directly by the allocator, on the hot path of every replay.
    """

    __slots__ = ("by_end", "by_size", "by_start", "granule", "sizes", "smallest_remainder", "spans", "unmapped")

    def __init__(self, *, granule: int, smallest_remainder: int) -> None:
        self.granule = granule
        """Bytes that an expandable segment maps at a time."""
        self.smallest_remainder = smallest_remainder
        """A block is split when at least this many bytes remain."""
        self.sizes: list[int] = []
        """The different sizes of free blocks, sorted."""
        self.by_size: dict[int, list[int]] = {}
        """Size: addresses of the free blocks of that size, sorted, never empty."""
        self.by_start: dict[int, int] = {}
        """Address of a free block: its size."""
        self.by_end: dict[int, int] = {}
        """Address behind a free block: its size."""
        self.spans: dict[int, int] = {}
        """Address of a segment: its size (of its whole address space, if expandable)."""
        self.unmapped: dict[int, int] = {}
        """Address of an unmapped range of an expandable segment: its size, sorted by address."""

    def add(self, start: int, size: int) -> None:
        """Free a range, which merges with free neighbours (``free_block``, ``try_merge_blocks``)."""
        neighbour = self.by_start.pop(start + size, 0)
        if neighbour:
            self.forget(start + size, neighbour)
            size += neighbour
        neighbour = self.by_end.pop(start, 0)
        if neighbour:
            start -= neighbour
            self.forget(start, neighbour)
            size += neighbour
        self.by_start[start] = self.by_end[start + size] = size
        starts = self.by_size.get(size)
        if starts is None:
            self.by_size[size] = [start]
            insort(self.sizes, size)
        else:
            insort(starts, start)

    def forget(self, start: int, size: int) -> None:
        """Take a free block out of best fit, not out of ``by_start`` and ``by_end``."""
        starts = self.by_size[size]
        if len(starts) > 1:
            starts.remove(start)
        else:
            del self.by_size[size]
            del self.sizes[bisect_left(self.sizes, size)]

    def remove(self, start: int, size: int) -> None:
        """Take a free block out."""
        self.forget(start, size)
        del self.by_start[start], self.by_end[start + size]

    def best_fits(self, size: int) -> Iterator[tuple[int, int]]:
        """Go through address and size of the free blocks that hold ``size`` bytes, best fit first."""
        for index in range(bisect_left(self.sizes, size), len(self.sizes)):
            found = self.sizes[index]
            for start in self.by_size[found]:
                yield start, found


class AgingPool(Pool):
    """A pool that knows how long each block has been free, counted in searches (``gc_count``)."""

    __slots__ = ("_free_since", "searches")

    def __init__(self, *, granule: int, smallest_remainder: int) -> None:
        super().__init__(granule=granule, smallest_remainder=smallest_remainder)
        self.searches = 0
        """How often a block was looked for (``get_free_blocks_call_count``)."""
        self._free_since: dict[int, int] = {}

    def add(self, start: int, size: int) -> None:
        """Free a range; the merged block is as young as its youngest part (``insert_into_blocks``)."""
        self._free_since[start - self.by_end.get(start, 0)] = self.searches
        super().add(start, size)

    def age(self, start: int) -> int:
        """Searches since the free block at ``start`` was put there."""
        return self.searches - self._free_since[start]


class DriverCall(NamedTuple):
    """Memory that the driver gave or took back."""

    action: str
    """As a memory snapshot names it: segment_alloc, segment_free, segment_map or segment_unmap."""
    address: int
    """First byte."""
    size_bytes: int
    """Length."""


class Device:
    """What the driver has handed out, against a capacity; hands out addresses that are never used twice."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.calls: list[DriverCall] = []
        self._next_address = 0

    def take(self, size: int) -> bool:
        """Reserve ``size`` bytes; False, with nothing changed, where the capacity doesn't hold them."""
        reserved = self.reserved_bytes + size
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        return True

    def give_back(self, size: int) -> None:
        """Return ``size`` bytes to the driver."""
        self.reserved_bytes -= size

    def new_address(self, size: int, alignment: int) -> int:
        """Return the start of a fresh address range that touches no other."""
        address = round_up(self._next_address, alignment)
        self._next_address = address + size + 1
        return address


class FixedSegments:
    """One driver allocation (``cudaMalloc``) for each segment: ``expandable_segments:False``."""

    def __init__(self, device: Device, large_segment_bytes: int, max_split_bytes: int) -> None:
        self._device = device
        self._large_segment_bytes = large_segment_bytes
        self._max_split_bytes = max_split_bytes

    def grow(self, pool: Pool, size: int) -> tuple[int, int] | None:
        """Return address and size of a new segment's free block; None where the driver has no memory.

        ``alloc_block``.
        """
        span = segment_bytes(size, self._large_segment_bytes)
        if not self._device.take(span):
            return None
        start = self._device.new_address(span, ROUND_LARGE_BYTES)
        self._device.calls.append(DriverCall("segment_alloc", start, span))
        pool.spans[start] = span
        pool.add(start, span)
        return start, span

    def release(self, pool: Pool) -> None:
        """Give every segment that is one free block back (``release_blocks``)."""
        for start, size in list(pool.by_start.items()):
            if pool.spans.get(start) == size:
                self._release_segment(pool, start, size)

    def release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back oversize segments that held ``size`` bytes (``release_available_cached_blocks``)."""
        wanted = max(size, self._max_split_bytes)
        for start, found in pool.best_fits(wanted):
            self._release_segment(pool, start, found)
            return True
        released = 0
        while released < wanted and pool.sizes and pool.sizes[-1] >= self._max_split_bytes:
            largest = pool.sizes[-1]
            released += largest
            self._release_segment(pool, pool.by_size[largest][-1], largest)
        return released >= wanted

    def collect(self, pool: Pool, threshold_bytes: int) -> None:
        """Give free segments back, the oldest first, to get below a threshold (``garbage_collect_cached_blocks``)."""
        assert isinstance(pool, AgingPool)
        excess = self._device.reserved_bytes - threshold_bytes
        free = {start: size for start, size in pool.best_fits(0) if pool.spans.get(start) == size}
        while excess > 0 and free:
            average = sum(map(pool.age, free)) / len(free)
            for start in [start for start in free if pool.age(start) >= average]:
                self._release_segment(pool, start, free[start])
                excess -= free.pop(start)

    def _release_segment(self, pool: Pool, start: int, size: int) -> None:
        pool.remove(start, size)
        del pool.spans[start]
        self._device.give_back(size)
        self._device.calls.append(DriverCall("segment_free", start, size))


class ExpandableSegments:
    """Segments that grow by mapping granules of memory as needed: ``expandable_segments:True``."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def grow(self, pool: Pool, size: int) -> tuple[int, int] | None:
        """Map what a block of ``size`` bytes lacks and return address and size of the free block that holds it.

        None where the driver has no memory. ``try_allocate_expandable_block``: granules mapped before a failure
        stay in the pool.
        """
        start = self._find_room(pool, size)
        while (present := pool.by_start.get(start, 0)) < size:
            if not self._map(pool, start + present, size - present):
                return None
        return start, present

    def release(self, pool: Pool) -> None:
        """Unmap the whole granules of every free block (``release_blocks``)."""
        for start, size in list(pool.by_start.items()):
            self._unmap(pool, start, size)

    def collect(self, pool: Pool, threshold_bytes: int) -> None:
        """Do nothing: expandable blocks are passed over (``garbage_collect_cached_blocks``)."""

    def release_oversize(self, pool: Pool, size: int) -> bool:
        """Do nothing: expandable blocks are passed over (``release_available_cached_blocks``)."""
        return False

    def _find_room(self, pool: Pool, size: int) -> int:
        """Return the lowest address from which ``size`` bytes are free or unmapped (``find_expandable_block``)."""
        for start in pool.unmapped:
            candidate = start - pool.by_end.get(start, 0)
            if _has_room(pool, candidate, size):
                return candidate
        return self._reserve_span(pool)

    def _reserve_span(self, pool: Pool) -> int:
        """Reserve addresses for 9/8 of the device's memory, nothing mapped (constructor of ``ExpandableSegment``)."""
        capacity = self._device.capacity_bytes
        wanted = UNLIMITED_SPAN_BYTES if capacity is None else capacity + capacity // 8
        span = round_up(wanted, pool.granule)
        start = self._device.new_address(span, pool.granule)
        pool.spans[start] = span
        pool.unmapped[start] = span
        return start

    def _map(self, pool: Pool, start: int, size: int) -> bool:
        """Back the front of an unmapped range with memory (``map_block``, ``ExpandableSegment::map``)."""
        available = pool.unmapped[start]
        mapped = round_up(min(size, available), pool.granule)
        if not self._device.take(mapped):
            return False
        self._device.calls.append(DriverCall("segment_map", start, mapped))
        del pool.unmapped[start]
        if mapped < available:
            _add_unmapped(pool, start + mapped, available - mapped)
        pool.add(start, mapped)
        return True

    def _unmap(self, pool: Pool, start: int, size: int) -> None:
        """Give back the granules that lie wholly inside a free block (``unmap_block``)."""
        end = start + size
        first = round_up(start, pool.granule)
        last = end // pool.granule * pool.granule
        if first >= last:
            return
        pool.remove(start, size)
        if first > start:
            pool.add(start, first - start)
        if end > last:
            pool.add(last, end - last)
        _add_unmapped(pool, first, last - first)
        self._device.give_back(last - first)
        self._device.calls.append(DriverCall("segment_unmap", first, last - first))


def _has_room(pool: Pool, start: int, size: int) -> bool:
    """Say whether ``size`` bytes that are free or unmapped follow each other from ``start`` on."""
    position = start
    while position - start < size:
        step = pool.unmapped.get(position) or pool.by_start.get(position)
        if not step:
            return False
        position += step
    return True


def _add_unmapped(pool: Pool, start: int, size: int) -> None:
    """Enter an unmapped range, merged with its neighbours; a segment that is left with nothing mapped is dropped."""
    ranges = pool.unmapped
    size += ranges.pop(start + size, 0)
    before = next((address for address, length in ranges.items() if address + length == start), None)
    if before is not None:
        start, size = before, ranges.pop(before) + size
    if pool.spans.get(start) == size:
        del pool.spans[start]
    else:
        ranges[start] = size
        pool.unmapped = dict(sorted(ranges.items()))
