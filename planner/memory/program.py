"""A training run as one stream of allocations and frees: the recorded step, repeated as the loop repeats it.

    load | first micro-batch, further micro-batches, first update, gradients dropped | ... later update ... | evaluation

Where a step's micro-batches are compared with each other, that comes before the first one (its ``contrast``).
The first micro-batch of an optimizer step creates the gradients; further ones add into them and drop their own. The
first update creates the optimizer's state. So two optimizer steps with at most two micro-batches each go through
every state that a longer run of one shape goes through. A resumed run has its state before its first gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.recording.record import OPTIMIZER, WORKSPACE, Recording

Int64s = NDArray[np.int64]

LOAD, FIRST_STEP, STEADY_STEP, EVALUATE, RESUME = "load", "first_step", "steady_step", "evaluate", "resume"
"""Phases of a run."""


@dataclass(frozen=True)
class Program:
    """The stream of a whole run: block ``k`` has the size of row ``rows[k]`` of the recorded blocks."""

    events: Int64s
    """Signed block numbers: ``+k`` allocates, ``-k`` frees."""
    rows: Int64s
    """For each block, its row: of the step recording, after its last row of the update recording, after that one's
    last row of the contrast's recording if there is one, and then of the evaluation's."""
    marks: tuple[tuple[str, int], ...]
    """Parts of the loop and the index of their first event."""
    phases: tuple[tuple[str, int], ...]
    """Phases of the run and the index of their first event; a phase may come more than once."""


@dataclass
class Builder:
    """Lays passes of recordings after one another, each pass with blocks of its own.

    Blocks of the first ``persistent`` numbers, which loading made, are the same in every pass.
    """

    persistent: int = 0
    """Blocks that loading makes."""
    blocks: int = 0
    """Blocks so far."""
    length: int = 0
    """Events so far."""
    events: list[Int64s] = field(default_factory=list)
    """Of each pass, renumbered."""
    rows: list[Int64s] = field(default_factory=lambda: [np.zeros(1, dtype=np.int64)])
    """Of each pass: rows of the blocks that it made."""
    marks: list[tuple[str, int]] = field(default_factory=list)
    """Name and first event of each pass."""
    phases: list[tuple[str, int]] = field(default_factory=list)
    """Name and first event of each phase."""

    def phase(self, name: str) -> None:
        """Begin a phase."""
        self.phases.append((name, self.length))

    def add(self, name: str, events: Int64s, rows: Int64s) -> None:
        """Append events whose new blocks are numbered from ``blocks + 1`` on and have these rows."""
        self.marks.append((name, self.length))
        self.events.append(events)
        self.rows.append(rows)
        self.length += len(events)
        self.blocks += len(rows)

    def place(self, name: str, events: Int64s, recorded_blocks: int, first_row: int = 0) -> int:
        """Append a pass in a recording's own numbers; returns what was added to the numbers of its own blocks."""
        offset = self.blocks - self.persistent
        moved = np.where(np.abs(events) > self.persistent, events + np.sign(events) * offset, events)
        rows = first_row + np.arange(self.persistent + 1, recorded_blocks + 1)
        self.add(name, moved.astype(np.int64), rows)
        return offset

    def place_update(self, phase: str, update: Recording, first_row: int) -> None:
        """Append an update; its temporaries and its state are new blocks."""
        events = update_events(update, phase)
        blocks = events[events > 0]
        lowest = int(blocks.min()) if len(blocks) else 1
        shifted = events + np.sign(events) * (self.blocks + 1 - lowest)
        self.add(phase, shifted, first_row + np.arange(lowest, lowest + len(blocks)))

    def place_contrast(self, contrast: Recording, first_row: int) -> Int64s:
        """Append what comes before a step's micro-batches; returns its blocks that are still there."""
        kept = [event for event in contrast.events if contrast.categories[abs(event)] != WORKSPACE]
        events = np.array(kept, dtype=np.int64)
        shifted = events + np.sign(events) * self.blocks
        self.add("contrast", shifted, first_row + np.arange(1, len(contrast.sizes)))
        return np.setdiff1d(shifted[shifted > 0], -shifted[shifted < 0])

    def program(self) -> Program:
        """Everything so far."""
        rows = np.concatenate(self.rows)
        return Program(np.concatenate(self.events), rows, tuple(self.marks), tuple(self.phases))


def build(
    step: Recording,
    update: Recording,
    *,
    accumulate: bool,
    evaluation: Recording | None = None,
    contrast: Recording | None = None,
) -> Program:
    """Two optimizer steps; with ``accumulate``, of two micro-batches each. Then an evaluation and a step after it."""
    builder = loaded(step)
    for phase, name in ((FIRST_STEP, "first_update"), (STEADY_STEP, "later_update")):
        builder.phase(phase)
        _optimizer_step(builder, step, update, name, accumulate=accumulate, contrast=contrast)
    if evaluation is not None:
        builder.phase(EVALUATE)
        first_row = sum(len(recording.sizes) for recording in (step, update, contrast) if recording)
        builder.place("evaluate", micro_batch_events(evaluation), len(evaluation.sizes) - 1, first_row)
        builder.phase(STEADY_STEP)
        _optimizer_step(builder, step, update, "later_update", accumulate=accumulate, contrast=contrast)
    return builder.program()


def resumed(step: Recording, update: Recording, *, accumulate: bool, contrast: Recording | None = None) -> Program:
    """A run that goes on from a checkpoint: the optimizer's state comes from the host before the first gradients.

    torch/optim/optimizer.py, load_state_dict: state by state in the parameters' order, as the first update makes it.
    """
    builder = loaded(step)
    builder.phases.clear()
    builder.phases.append((RESUME, 0))
    state = [block for block in update_events(update, "first_update") if update.categories[abs(block)] == OPTIMIZER]
    made = np.arange(1, len(state) + 1, dtype=np.int64)
    builder.add("state", builder.blocks + made, len(step.sizes) + np.array(state, dtype=np.int64))
    for first in (True, False):
        _optimizer_step(
            builder, step, update, "later_update", accumulate=accumulate, contrast=contrast, opens_handles=first
        )
    return builder.program()


def loaded(step: Recording) -> Builder:
    """A run of which only loading is there."""
    events = np.array(step.events[: _begin(step)], dtype=np.int64)
    persistent = int(np.abs(events).max(initial=0))
    builder = Builder(persistent=persistent)
    builder.phase(LOAD)
    builder.add("load", events, np.arange(1, persistent + 1))
    return builder


def _optimizer_step(
    builder: Builder,
    step: Recording,
    update: Recording,
    name: str,
    *,
    accumulate: bool,
    contrast: Recording | None = None,
    opens_handles: bool | None = None,
) -> None:
    if opens_handles is None:
        opens_handles = name == "first_update"
    blocks = len(step.sizes) - 1
    compared = builder.place_contrast(contrast, len(step.sizes) + len(update.sizes)) if contrast else None
    shift = builder.place("micro_batch", micro_batch_events(step, opens_handles=opens_handles), blocks)
    if accumulate:
        builder.place("accumulate", accumulating_events(step), blocks)
    if compared is not None:
        builder.add("compared", -compared, np.zeros(0, dtype=np.int64))
    builder.place_update(name, update, len(step.sizes))
    builder.add("zero_grad", -(gradient_blocks(step) + shift), np.zeros(0, dtype=np.int64))


def _begin(recording: Recording) -> int:
    return recording.phases.get("inputs", 0)


def micro_batch_events(step: Recording, *, opens_handles: bool = False) -> Int64s:
    """A pass after loading; only a run's first pass allocates the libraries' workspaces, which stay."""
    begin = _begin(step)
    if opens_handles:
        return np.array(step.events[begin:], dtype=np.int64)
    return np.array([e for e in step.events[begin:] if step.categories[abs(e)] != WORKSPACE], dtype=np.int64)


def gradient_blocks(step: Recording) -> Int64s:
    """The blocks of a pass that are its gradients, each once."""
    return np.array(sorted({block for _, block in step.gradients}), dtype=np.int64)


def update_events(update: Recording, phase: str) -> Int64s:
    """The first or a later update, in the recording's own numbers."""
    begin = update.phases[phase]
    ends = [index for index in update.phases.values() if index > begin]
    return np.array(update.events[begin : min(ends, default=len(update.events))], dtype=np.int64)


def accumulating_events(step: Recording) -> Int64s:
    """A further micro-batch: AccumulateGrad adds each new gradient into the one that is there and drops it.

    torch/csrc/autograd/functions/accumulate_grad.h: ``variable_grad += new_grad`` when gradients exist already.
    """
    begin = _begin(step)
    drops: dict[int, list[int]] = {}
    for index, block in step.gradients:
        drops.setdefault(index, []).append(block)
    events: list[int] = []
    for index in range(begin, len(step.events) + 1):
        events += [-block for block in drops.get(index, ())]
        if index < len(step.events) and step.categories[abs(step.events[index])] != WORKSPACE:
            events.append(step.events[index])
    return np.array(events, dtype=np.int64)


def categories(*recordings: Recording) -> Int64s:
    """The category of every row that a program names: of the step, the update and the evaluation."""
    return np.array([kind for recording in recordings for kind in recording.categories], dtype=np.int64)
