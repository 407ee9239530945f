"""What the allocator holds, block by block, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BlockInfo:
    """One block of a segment."""

    address: int
    """First byte."""
    size_bytes: int
    """Length, what ``allocated_bytes`` counts."""
    allocated: bool
    """In use, or free."""


@dataclass(frozen=True, kw_only=True)
class SegmentInfo:
    """One driver allocation, or one contiguous mapped range of an expandable segment, with its blocks in order."""

    blocks: tuple[BlockInfo, ...]
    """By address, without gaps."""
    small: bool
    """Of the pool for requests of up to 1 MiB."""

    @property
    def size_bytes(self) -> int:
        """Sum of the blocks."""
        return sum(block.size_bytes for block in self.blocks)
