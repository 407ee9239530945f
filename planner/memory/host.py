"""A model of glibc's malloc: what a sequence of tensors makes a process's resident set grow by.

Left to itself malloc raises the size from which it maps memory of its own for a request, up to 32 MiB, with every
such request that is freed (malloc.c, __libc_free). Tensors then lie in one heap among small objects that outlive
them, and torch's requests for 64-byte alignment can't be served from holes of their own size (_int_memalign asks for
96 bytes more): resident sets of up to 1.8 times the live tensors were measured. Where ``MALLOC_MMAP_THRESHOLD_`` is
set (``planner/measure/environment.py`` does) the size stays, larger tensors lie in mappings that go when they are
freed, and these rules hold:

- From the threshold on a request gets pages of its own, given back on free (sysmalloc_mmap, munmap_chunk).
- Smaller ones are served from the smallest free part of the heap that is large enough, which is split; else from the
  heap's end, which grows by what is missing and 128 KiB (_int_malloc, sysmalloc, M_TOP_PAD).
- What is freed merges with free neighbours; the heap's end is given back when it is larger than 128 KiB
  (_int_free, systrim, M_TRIM_THRESHOLD).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.memory.allocator import AllocatorSettings, CachingAllocator
from planner.memory.block_sizes import MIN_BLOCK_BYTES
from planner.units import round_up

KIB = 1024
PAGE_BYTES = 4 * KIB
HEADER_BYTES = 16
"""SIZE_SZ twice; requests are rounded up to as much."""
ALIGNMENT_BYTES = 64 + 32
"""c10/core/alignment.h, gAlignment, and malloc's smallest part: what _int_memalign asks for beyond the request."""
TOP_PAD_BYTES = 128 * KIB
TRIM_THRESHOLD_BYTES = 128 * KIB
MMAP_THRESHOLD_BYTES = 64 * KIB


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """How a process gets its memory."""

    mmap_threshold_bytes: int = MMAP_THRESHOLD_BYTES
    """``MALLOC_MMAP_THRESHOLD_``: from this size on a request is mapped on its own."""


class HostAllocator:
    """The resident set's part that tensors make. Blocks are named by keys that the caller chooses."""

    def __init__(self, settings: HostSettings) -> None:
        self._threshold = settings.mmap_threshold_bytes
        self._live: dict[int, tuple[int, int, int]] = {}
        self._free: list[tuple[int, int]] = []
        self._free_from: dict[int, int] = {}
        self._free_to: dict[int, int] = {}
        self._heap = self._top = self._mapped = 0
        self._allocated = 0
        self.peak_allocated_bytes = 0
        """Most bytes in live tensors since the start or ``reset_peaks``; not rounded."""
        self.peak_reserved_bytes = 0
        """Most resident bytes that tensors make since the start or ``reset_peaks``."""

    @property
    def reserved_bytes(self) -> int:
        """Resident now. The heap's end was never written to beyond what was given out, up to its padding."""
        return self._mapped + self._heap - min(self._top, TOP_PAD_BYTES)

    def reset_peaks(self) -> None:
        """Let the peaks start from what is held now."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self._allocated, self.reserved_bytes

    def run(self, events: Sequence[int] | npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> int:
        """Apply signed keys: ``+k`` allocates ``sizes[k]`` bytes under key k, ``-k`` frees it.

        Returns the index of the event at which the allocated bytes last reached a new peak, -1 when they didn't.
        """
        nbytes, top = sizes.tolist(), -1
        for index, event in enumerate(np.asarray(events).tolist()):
            if event < 0:
                if nbytes[-event]:
                    self._release(-event)
            elif nbytes[event]:
                self._take(event, nbytes[event])
                if self._allocated > self.peak_allocated_bytes:
                    self.peak_allocated_bytes, top = self._allocated, index
                self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return top

    def _take(self, key: int, nbytes: int) -> None:
        self._allocated += nbytes
        size = round_up(nbytes + HEADER_BYTES, HEADER_BYTES)
        needed = size + ALIGNMENT_BYTES
        place = bisect_left(self._free, (needed, -1))
        if place < len(self._free):
            found, start = self._free[place]
            self._forget(start)
            if found > size:
                self._add(start + size, found - size)
        elif needed > self._top and needed >= self._threshold:
            pages = round_up(needed, PAGE_BYTES)
            self._mapped += pages
            self._live[key] = (-1, pages, nbytes)
            return
        else:
            if needed > self._top:
                grown = round_up(needed + TOP_PAD_BYTES - self._top, PAGE_BYTES)
                self._heap, self._top = self._heap + grown, self._top + grown
            start = self._heap - self._top
            self._top -= size
        self._live[key] = (start, size, nbytes)

    def _release(self, key: int) -> None:
        start, size, nbytes = self._live.pop(key)
        self._allocated -= nbytes
        if start < 0:
            self._mapped -= size
            return
        if start in self._free_to:
            before = self._free_to[start]
            size += self._forget(before)
            start = before
        if start + size in self._free_from:
            size += self._forget(start + size)
        if start + size < self._heap - self._top:
            self._add(start, size)
            return
        self._top += size
        if self._top > TRIM_THRESHOLD_BYTES:
            given_back = max(0, (self._top - TOP_PAD_BYTES) // PAGE_BYTES * PAGE_BYTES)
            self._heap, self._top = self._heap - given_back, self._top - given_back

    def _add(self, start: int, size: int) -> None:
        insort(self._free, (size, start))
        self._free_from[start], self._free_to[start + size] = size, start

    def _forget(self, start: int) -> int:
        size = self._free_from.pop(start)
        del self._free_to[start + size], self._free[bisect_left(self._free, (size, start))]
        return size


def allocator_for(settings: AllocatorSettings | HostSettings) -> CachingAllocator | HostAllocator:
    """What gives out memory under these settings."""
    return HostAllocator(settings) if isinstance(settings, HostSettings) else CachingAllocator(settings)


def block_bytes(settings: AllocatorSettings | HostSettings) -> int:
    """What a tensor's size is rounded up to where allocated bytes are counted."""
    return 1 if isinstance(settings, HostSettings) else MIN_BLOCK_BYTES
