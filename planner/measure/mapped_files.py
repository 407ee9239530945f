"""Pages of libraries' files: what a process has mapped of them counts in its resident set, and a fork starts with none.

The kernel copies no page table of a mapping that page faults can fill (mm/memory.c, vma_needs_copy). So a fork would
seem to need less memory than a process of its own, by some 70 MB of torch's code.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path

import numpy as np

Range = tuple[int, int]
"""First address and length in bytes."""

_PRESENT = np.uint64(1 << 63)  # Documentation/admin-guide/mm/pagemap.rst
_ENTRY_BYTES = 8
_MADV_POPULATE_READ = 22  # asm-generic/mman-common.h; Linux 5.14


def mapped_ranges() -> list[Range]:
    """What this process has mapped of files and holds in memory; empty where the kernel doesn't tell."""
    ranges: list[Range] = []
    with suppress(OSError), Path("/proc/self/pagemap").open("rb") as pages:
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
            if inode != "0":
                first, end = (int(address, 16) for address in addresses.split("-"))
                pages.seek(first // mmap.PAGESIZE * _ENTRY_BYTES)
                entries = np.frombuffer(pages.read((end - first) // mmap.PAGESIZE * _ENTRY_BYTES), np.uint64)
                ranges += _runs(first, (entries & _PRESENT) != 0)
    return ranges


def _runs(first: int, present: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[Range]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], present, [False]]).astype(np.int8)))
    starts, ends = edges[::2].tolist(), edges[1::2].tolist()
    return [(first + a * mmap.PAGESIZE, (b - a) * mmap.PAGESIZE) for a, b in zip(starts, ends, strict=True)]


def map_again(ranges: list[Range]) -> None:
    """Have them mapped in this process, a fork of the one that they were read in."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, length in ranges:
        madvise(first, length, _MADV_POPULATE_READ)  # where it fails, a page fault does it later
