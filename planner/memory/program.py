"""A training run as one stream of allocations and frees: the recorded step, repeated as the loop repeats it.

    load | first micro-batch, further micro-batches | first update, gradients dropped | ... | later update ...

The first micro-batch of an optimizer step creates the gradients; further ones add into them and drop their own. The
first update creates the optimizer's state. So two optimizer steps with at most two micro-batches each go through
every state that a longer run goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.recording.record import WORKSPACE, Recording

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Program:
    """The stream of a whole run: block ``k`` has the size of row ``rows[k]`` of the recorded blocks."""

    events: Int64s
    """Signed block numbers: ``+k`` allocates, ``-k`` frees."""
    rows: Int64s
    """For each block, its row: of the step recording, or after its last row, of the update recording."""
    marks: tuple[tuple[str, int], ...]
    """Phase names and the index of their first event."""


@dataclass
class _Builder:
    events: list[Int64s] = field(default_factory=list)
    rows: list[Int64s] = field(default_factory=lambda: [np.zeros(1, dtype=np.int64)])
    marks: list[tuple[str, int]] = field(default_factory=list)
    blocks: int = 0
    length: int = 0

    def add(self, name: str, events: Int64s, rows: Int64s) -> None:
        """Append events whose new blocks are numbered from ``blocks + 1`` on and have these rows."""
        self.marks.append((name, self.length))
        self.events.append(events)
        self.rows.append(rows)
        self.length += len(events)
        self.blocks += len(rows)


def build(step: Recording, update: Recording, *, accumulate: bool) -> Program:
    """Two optimizer steps; with ``accumulate``, of two micro-batches each."""
    builder = _Builder()
    events = np.array(step.events, dtype=np.int64)
    loaded = step.phases.get("inputs", 0)
    persistent = int(np.abs(events[:loaded]).max(initial=0))
    builder.add("load", events[:loaded], np.arange(1, persistent + 1))
    later = _without_workspaces(step)
    gradient_blocks = np.array(sorted({block for _, block in step.gradients}), dtype=np.int64)
    for step_index, phase in enumerate(("first_update", "later_update")):
        micro = events[loaded:] if step_index == 0 else later
        shift = _place(builder, "micro_batch", micro, step, persistent)
        if accumulate:
            _place(builder, "accumulate", _dropping_gradients(step), step, persistent)
        _place_update(builder, phase, update, len(step.sizes))
        builder.add("zero_grad", -shift(gradient_blocks), np.zeros(0, dtype=np.int64))
    rows = np.concatenate(builder.rows)
    return Program(np.concatenate(builder.events), rows, tuple(builder.marks))


def _place(
    builder: _Builder, name: str, events: Int64s, step: Recording, persistent: int
) -> Callable[[Int64s], Int64s]:
    """Append one pass of the step; returns how it renumbered the step's own blocks."""
    offset = builder.blocks - persistent

    def shift(blocks: Int64s) -> Int64s:
        moved = np.where(np.abs(blocks) > persistent, blocks + np.sign(blocks) * offset, blocks)
        return moved.astype(np.int64)

    builder.add(name, shift(events), np.arange(persistent + 1, len(step.sizes)))
    return shift


def _place_update(builder: _Builder, phase: str, update: Recording, first_row: int) -> None:
    begin = update.phases[phase]
    ends = [index for index in update.phases.values() if index > begin]
    events = np.array(update.events[begin : min(ends, default=len(update.events))], dtype=np.int64)
    blocks = events[events > 0]
    lowest = int(blocks.min()) if len(blocks) else 1
    shifted = events + np.sign(events) * (builder.blocks + 1 - lowest)
    builder.add(phase, shifted, first_row + np.arange(lowest, lowest + len(blocks)))


def _without_workspaces(step: Recording) -> Int64s:
    """A library's workspace is allocated once and kept."""
    events = step.events[step.phases.get("inputs", 0) :]
    return np.array([e for e in events if step.categories[abs(e)] != WORKSPACE], dtype=np.int64)


def _dropping_gradients(step: Recording) -> Int64s:
    """A further micro-batch: AccumulateGrad adds each new gradient into the one that is there and drops it.

    torch/csrc/autograd/functions/accumulate_grad.h: ``variable_grad += new_grad`` when gradients exist already.
    """
    begin = step.phases.get("inputs", 0)
    drops: dict[int, list[int]] = {}
    for index, block in step.gradients:
        drops.setdefault(index, []).append(block)
    events: list[int] = []
    for index in range(begin, len(step.events) + 1):
        events += [-block for block in drops.get(index, ())]
        if index < len(step.events) and step.categories[abs(step.events[index])] != WORKSPACE:
            events.append(step.events[index])
    return np.array(events, dtype=np.int64)


def categories(step: Recording, update: Recording) -> Int64s:
    """The category of every row that a program names."""
    return np.array([*step.categories, *update.categories], dtype=np.int64)
