"""A whole run of text generation from its first forward passes: one pass's events again for each further token.

A recording is cut where forward passes end. A pass's events are written in numbers of its own: its blocks, and those
that earlier passes left to it. From the second token on these are the same for every token, and only sizes grow: the
cache is concatenated anew, and how its blocks fit in what earlier ones left decides what is reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.errors import RecordingError
from planner.memory.block_sizes import SMALL_SIZE_BYTES
from planner.recording.record import CATEGORY_NAMES, OUTSIDE_LAYERS, Op, Recording

Int64s = NDArray[np.int64]

BEFORE, PASS, CHOSEN, END = "before", "pass_{}", "chosen_{}", "end"
"""Phases: loading and the batch's arrival; the k-th forward pass, from the end of the one before to its own; the token
that it led to is there; what isn't recorded."""
KV_CACHE = len(CATEGORY_NAMES)
"""Category of blocks that hold keys and values."""
PREFETCHED = KV_CACHE + 1
"""Category of blocks that another stream fetched keys and values to."""
RUN_CATEGORY_NAMES = (*CATEGORY_NAMES, "kv_cache", "kv_cache")
"""Names of the categories of a run's blocks."""
WHOLE_PASSES = 8
"""Passes at a run's end that keep all of their events."""


@dataclass(frozen=True, kw_only=True)
class PassEvents:
    """What one forward pass does, in numbers of its own.

    Its ``blocks`` blocks are 1, 2, ...; what earlier passes left has the numbers after these, in ``left``'s order of
    the pass before.
    """

    events: Int64s
    """``+k`` allocates, ``-k`` frees."""
    blocks: int
    """How many it makes."""
    left: Int64s
    """Numbers of the blocks that are still there after it and that a later pass frees."""
    categories: Int64s
    """[blocks]"""
    chosen: int
    """Events before the token that the pass before led to has been chosen; 0 where none is."""
    ops: tuple[tuple[str, str, int], ...]
    """Of each operator: name, kind, events before it."""

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for passes that do the same with other sizes."""
        return (
            self.events.tobytes(),
            self.blocks,
            self.left.tobytes(),
            self.categories.tobytes(),
            self.chosen,
            self.ops,
        )


@dataclass(frozen=True, kw_only=True)
class RecordedPass:
    """A pass and its sizes."""

    events: PassEvents
    sizes: Int64s
    """Bytes of its blocks."""
    ops: tuple[Op, ...]
    """Its operators; positions are the recording's."""


def recorded_passes(recording: Recording) -> list[RecordedPass]:
    """What comes before the first pass, and the passes. Of the last one it isn't known what it leaves.

    Raises RecordingError.
    """
    if recording.gates:
        raise RecordingError("a kernel's buffer depends on a count: generation isn't laid out from a few tokens")
    cuts = _cuts(recording)
    events = np.array(recording.events, dtype=np.int64)
    numbers = np.abs(events)
    made = np.array([numbers[:cut].max(initial=0) for cut in cuts])  # blocks are numbered as they are made
    freed_in = np.full(len(recording.sizes), len(cuts), dtype=np.int64)
    at = np.flatnonzero(events < 0)
    freed_in[numbers[at]] = np.searchsorted(cuts, at, side="right") - 1
    passes, before = [], np.zeros(0, dtype=np.int64)
    starts = _op_starts(recording, cuts)
    for index, (start, end) in enumerate(pairwise(cuts)):
        own = np.arange(made[index] + 1, made[index + 1] + 1)
        known = np.concatenate([own, before])
        later = known[(freed_in[known] > index) & (freed_in[known] < len(cuts) - 1)]
        ops = recording.ops[starts[index] : starts[index + 1]]
        passes.append(
            RecordedPass(
                events=PassEvents(
                    events=np.sign(events[start:end]) * _places(known, numbers[start:end]),
                    blocks=len(own),
                    left=_places(known, np.sort(later)),
                    categories=np.array(recording.categories, dtype=np.int64)[own],
                    chosen=_chosen(recording, start, end),
                    ops=tuple((op.name, op.kind, op.position - start) for op in ops),
                ),
                sizes=np.array(recording.sizes, dtype=np.int64)[own],
                ops=tuple(ops),
            )
        )
        before = np.sort(later)
    return passes


def _cuts(recording: Recording) -> list[int]:
    names = [name for name in recording.phases if name.startswith(PASS.format(""))]
    if not names:
        raise RecordingError("no forward pass of generation was recorded")
    return [0, *(recording.phases[name] for name in names), recording.phases[END]]


def _op_starts(recording: Recording, cuts: Sequence[int]) -> list[int]:
    positions = [op.position for op in recording.ops]
    return np.searchsorted(positions, cuts).tolist() if positions else [0] * len(cuts)


def _chosen(recording: Recording, start: int, end: int) -> int:
    marks = [at for name, at in recording.phases.items() if name.startswith(CHOSEN.format(""))]
    return next((at - start for at in marks if start <= at < end), 0)


def _places(known: Int64s, numbers: Int64s) -> Int64s:
    """The places of block numbers in a list, from 1 on. Raises RecordingError where one isn't there."""
    order = np.argsort(known)
    found = np.searchsorted(known, numbers, sorter=order)
    places: Int64s = order[np.minimum(found, len(known) - 1)] if len(known) else np.zeros(0, dtype=np.int64)
    if len(numbers) and (not len(known) or not np.array_equal(known[places], numbers)):
        raise RecordingError("a forward pass of generation frees a block that none has left to it")
    return places + 1


@dataclass
class Layout:
    """A run, laid out pass by pass."""

    events: list[Int64s] = field(default_factory=list)
    sizes: list[Int64s] = field(default_factory=lambda: [np.zeros(1, dtype=np.int64)])
    categories: list[Int64s] = field(default_factory=lambda: [np.zeros(1, dtype=np.int64)])
    marks: list[tuple[str, int]] = field(default_factory=list)
    """Phases and their first events."""
    blocks: int = 0
    length: int = 0
    left: Int64s = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Blocks that later passes free."""

    def add(self, one: PassEvents, sizes: Int64s, events: Int64s | None = None) -> None:
        """The next pass; ``events`` is a part of its events where not all are wanted. Raises RecordingError."""
        numbers = np.concatenate([[0], np.arange(self.blocks + 1, self.blocks + one.blocks + 1), self.left])
        chosen = one.events if events is None else events
        if max(np.abs(chosen).max(initial=0), one.left.max(initial=0)) >= len(numbers):
            raise RecordingError("the passes of generation don't leave to each other what they free")
        self.events.append(np.sign(chosen) * numbers[np.abs(chosen)])
        self.sizes.append(sizes)
        self.categories.append(one.categories)
        self.left = numbers[one.left]
        self.blocks += one.blocks
        self.length += len(chosen)

    def mark(self, phase: str) -> None:
        """A phase begins."""
        self.marks.append((phase, self.length))

    def run(self) -> Run:
        """Everything so far."""
        events = np.concatenate(self.events)
        blocks = int(np.abs(events).max(initial=0)) + 1  # of the last pass not all of them need be
        return Run(
            events=events,
            sizes=np.concatenate(self.sizes)[:blocks],
            categories=np.concatenate(self.categories)[:blocks],
            marks=tuple(self.marks),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of generation as a stream of allocations and frees."""

    events: Int64s
    """Signed block numbers in order."""
    sizes: Int64s
    """Bytes by block number; the first is unused."""
    categories: Int64s
    """By block number: indices of RUN_CATEGORY_NAMES."""
    marks: tuple[tuple[str, int], ...]
    """Phases and their first events."""

    def recording(self) -> Recording:
        """As a recording, without operators."""
        return Recording(
            sizes=self.sizes.tolist(),
            categories=self.categories.tolist(),
            events=self.events.tolist(),
            layers=[OUTSIDE_LAYERS] * len(self.events),
            phases=dict(self.marks),
        )


def lasting(one: PassEvents, largest: Int64s) -> Int64s:
    """The events of blocks that outlive a pass, or that come to be too large for the allocator's small pool.

    Blocks of a pass alone that the small pool serves (up to 1 MiB) are nine events in ten, and what they need is
    reserved by the first passes: they never take more than their own size. ``largest``: bytes of each of its blocks
    in the last pass.
    """
    numbers = np.abs(one.events)
    own = numbers <= one.blocks
    freed = np.isin(numbers, numbers[(one.events < 0) & own])
    large = np.zeros(len(numbers), dtype=np.bool_)
    large[own] = largest[numbers[own] - 1] > SMALL_SIZE_BYTES
    kept: Int64s = one.events[~(own & freed) | large]
    return kept


# -- from one recording ----------------------------------------------------------------------------------------------


def unrolled(recording: Recording, *, passes: int) -> Run:
    """The whole run of ``passes`` forward passes, of one recording at its own shape.

    Sizes grow by equal steps from token to token. Raises RecordingError where the last passes differ, or sizes don't
    grow so.
    """
    recorded = recorded_passes(recording)
    layout = Layout()
    whole = passes + 1 < len(recorded)
    first = passes + 1 if whole else len(recorded) - 2
    for index, one in enumerate(recorded[:first]):
        layout.mark(PASS.format(index - 1) if index else BEFORE)
        layout.add(one.events, one.sizes)
    last = recorded[first]
    growth = np.zeros(last.events.blocks, dtype=np.int64) if whole else _growth(recorded)
    tokens(layout, range(first, passes + 1), lambda _: last.events, lambda index: last.sizes + growth * (index - first))
    return layout.run()


def _growth(recorded: Sequence[RecordedPass]) -> Int64s:
    """By how much each block of a token is larger than that of the token before. Raises RecordingError."""
    if len(recorded) < 5:
        raise RecordingError("too few generated tokens were recorded to tell how they grow")
    older, last, unfinished = recorded[-3:]
    alike = older.events.signature == last.events.signature
    if not alike or not np.array_equal(last.events.events, unfinished.events.events):
        raise RecordingError("the events of one generated token are not those of the next")
    growth: Int64s = last.sizes - older.sizes
    if not np.array_equal(unfinished.sizes - last.sizes, growth):
        raise RecordingError("the sizes of one generated token are not those of the next")
    return growth


def tokens(
    layout: Layout, passes: range, events_of: Callable[[int], PassEvents], sizes_of: Callable[[int], Int64s]
) -> None:
    """Lay out passes of tokens, and the choice of the last one's token; most without what lasts no longer than they.

    ``passes``: numbers of the forward passes; ``events_of`` and ``sizes_of`` give each one's.
    """
    reduced: dict[int, Int64s] = {}
    largest: dict[int, Int64s] = {}
    for index in reversed(passes):
        one = events_of(index)
        if id(one) not in largest:
            largest[id(one)] = sizes_of(index)
            reduced[id(one)] = lasting(one, largest[id(one)])
    for index in passes:
        one, sizes = events_of(index), sizes_of(index)
        layout.mark(PASS.format(index - 1))
        layout.add(one, sizes, None if index >= passes.stop - WHOLE_PASSES else reduced[id(one)])
    one = events_of(passes.stop)
    layout.mark(CHOSEN.format(passes.stop - 2))
    layout.add(one, sizes_of(passes.stop), one.events[: one.chosen])


__all__ = [
    "BEFORE",
    "CHOSEN",
    "END",
    "KV_CACHE",
    "PASS",
    "PREFETCHED",
    "RUN_CATEGORY_NAMES",
    "Layout",
    "PassEvents",
    "RecordedPass",
    "Run",
    "lasting",
    "recorded_passes",
    "tokens",
    "unrolled",
]
