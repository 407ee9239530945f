"""An epoch of batches of different shapes, in data order: what changing shapes leave in the allocator's cache.

A cached block serves a request only when it is large enough, and what is left of it must find a use of its own; so a
run over many shapes reserves more than the largest of them alone. The order matters: from long to short, the cache
that the longest made serves all others (fragments aside); from short to long, every longer batch finds only blocks
that are too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from planner.config import TrainingConfig
from planner.levers.precision import width_multiple
from planner.memory.allocator import CachingAllocator
from planner.memory.host import HostAllocator, allocator_for
from planner.memory.model import Int64s, MemoryModel
from planner.memory.polynomials import Shape
from planner.memory.program import Builder, accumulating_events, gradient_blocks, loaded, micro_batch_events
from planner.parts import batching
from planner.recording.record import Recording

PATIENCE = 24
"""Optimizer steps without a new peak of reserved memory after which a replay ends."""
MAX_EVENTS = 4_000_000
"""Allocations and frees after which a replay ends."""


@dataclass(frozen=True, kw_only=True)
class EpochPeak:
    """What a run over batches of different shapes holds at most."""

    allocated_bytes: int
    """``torch.cuda.max_memory_allocated``"""
    reserved_bytes: int
    """``torch.cuda.max_memory_reserved``"""
    steps: int
    """Optimizer steps replayed."""
    micro_batches: int
    """Micro-batches replayed."""
    last_rise: int
    """The optimizer step, counted from 1, in which reserved memory last reached a new peak."""
    whole: bool
    """Whether every step was replayed."""


def epoch_steps(
    lengths: Sequence[int],
    config: TrainingConfig,
    *,
    seed: int,
    full_targets: bool = False,
    sequences_per_sample: int = 1,
) -> Iterator[list[Shape]]:
    """The shapes of each optimizer step's micro-batches, as the emitted script makes them in its first epoch.

    ``lengths`` in tokens, in the data's order. With ``full_targets`` every sample has a target of the greatest
    length, and so counts as much against the token budget as the longest text. Of several cards, the first one's.
    Sequences of a sample that are encoded apart go into micro-batches one by one, each as long as the longest of them.
    """
    multiple = width_multiple(config.precision)
    widths = [batching.padded(tokens, config.seq_len, multiple) for tokens in lengths]
    counted = [config.seq_len] * len(widths) if full_targets else widths
    for samples in batching.epoch_steps(counted, config.effective_batch_size, seed, 0):
        step = [i for i in samples for _ in range(sequences_per_sample)]
        rows = [counted[i] for i in step]
        dealt = batching.micro_batches(rows, config.max_tokens_per_micro_batch, config.gpus)
        yield [(math.ceil(len(mine) / sequences_per_sample), max(widths[step[i]] for i in mine)) for mine, *_ in dealt]


def replay_epoch(
    model: MemoryModel,
    steps: Iterable[Sequence[Shape]],
    *,
    patience: int = PATIENCE,
    max_events: int = MAX_EVENTS,
) -> EpochPeak:
    """Load, then every optimizer step in turn, each micro-batch with the events and sizes of its own shape.

    Ends early when reserved memory has reached no new peak for ``patience`` steps, and with the step that reaches
    ``max_events`` allocations and frees.
    """
    run = _Run(model)
    done = micro_batches = last_rise = 0
    whole = True
    for shapes in steps:
        if done - last_rise >= patience or run.events >= max_events:
            whole = False
            break
        done, micro_batches = done + 1, micro_batches + len(shapes)
        if run.optimizer_step(shapes):
            last_rise = done
    return EpochPeak(
        allocated_bytes=run.allocator.peak_allocated_bytes,
        reserved_bytes=run.allocator.peak_reserved_bytes,
        steps=done,
        micro_batches=micro_batches,
        last_rise=last_rise,
        whole=whole,
    )


@dataclass
class _Run:
    """A run in progress. Blocks of finished steps are forgotten, but for those that the first one leaves behind."""

    model: MemoryModel
    allocator: CachingAllocator | HostAllocator = field(init=False)
    events: int = 0
    _kept_sizes: Int64s = field(init=False)
    _persistent: int = 0
    _first: bool = True
    _events: dict[tuple[int, str], Int64s] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocator = allocator_for(self.model.settings)
        self._kept_sizes = np.zeros(1, dtype=np.int64)

    def optimizer_step(self, shapes: Sequence[Shape]) -> bool:
        """Replay the micro-batches of one optimizer step and its update; whether the reserved peak rose."""
        before = self.allocator.peak_reserved_bytes
        builder = self._begin(shapes[0])
        sizes, compared, contrast = [self._kept_sizes], None, self.model.contrast
        if contrast is not None:
            compared = builder.place_contrast(contrast, 0)
            sizes.append(np.array(contrast.sizes[1:], dtype=np.int64))
        for index, shape in enumerate(shapes):
            step = self.model.step(shape).template
            events = self._pass_events(step, first=index == 0)
            offset = builder.place("micro_batch", events, len(step.sizes) - 1)
            sizes.append(self.model.row_sizes(shape)[self._persistent + 1 : len(step.sizes)])
            if index == 0:
                gradients = gradient_blocks(step) + offset
        if compared is not None:
            builder.add("compared", -compared, np.zeros(0, dtype=np.int64))
        update = self.model.update
        builder.place_update("first_update" if self._first else "later_update", update, 0)
        sizes.append(np.array(update.sizes, dtype=np.int64)[builder.rows[-1]])
        builder.add("zero_grad", -gradients, np.zeros(0, dtype=np.int64))
        every_size = np.concatenate(sizes)
        self.allocator.run(np.concatenate(builder.events), every_size)
        self.events += builder.length
        if self._first:  # weights, workspaces and the optimizer's state keep their numbers
            self._kept_sizes, self._first = every_size, False
        return self.allocator.peak_reserved_bytes > before

    def _begin(self, shape: Shape) -> Builder:
        if not self._first:
            return Builder(persistent=self._persistent, blocks=len(self._kept_sizes) - 1)
        builder = loaded(self.model.step(shape).template)
        self._persistent = builder.persistent
        self._kept_sizes = self.model.row_sizes(shape)[: self._persistent + 1]
        return builder

    def _pass_events(self, step: Recording, *, first: bool) -> Int64s:
        """The first micro-batch of a step makes the gradients; the run's first opens the libraries' handles."""
        kinds = {
            "opening": partial(micro_batch_events, step, opens_handles=True),
            "first": partial(micro_batch_events, step),
            "further": partial(accumulating_events, step),
        }
        kind = ("opening" if self._first else "first") if first else "further"
        key = (id(step), kind)
        if key not in self._events:
            self._events[key] = kinds[kind]()
        return self._events[key]
