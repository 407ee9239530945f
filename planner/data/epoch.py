"""An epoch of the data with a plan's configuration: padding, micro-batches, steps and time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from planner.config import TrainingConfig
from planner.levers.precision import width_multiple
from planner.parts import batching

if TYPE_CHECKING:
    from planner.simulation import Simulator

Batch = tuple[int, int, int]
"""Rows of a micro-batch, the width that they are padded to, and their own tokens together."""
PLANNED_SAMPLES = 20_000
"""Samples of which micro-batches are made; the rest of an epoch is like them."""
TIMED_SHAPES = 300
"""Shapes whose time is simulated; widths are rounded up so that there are no more."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """One way to make micro-batches."""

    padding: float
    """Share of the tokens in the batches that is padding."""
    micro_batches: float
    """Micro-batches of an optimizer step on average."""
    step_s: float | None
    """Seconds of an optimizer step on average; None where the time of a shape is not known."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch's batches, made in three ways of the same samples."""

    fixed: Batching
    """Micro-batches of the largest size in random order, padded to their longest."""
    grouped: Batching
    """The same size, samples of similar length together."""
    budget: Batching
    """As the script makes them: similar lengths, filled up to the token budget."""


def epoch_of_samples(
    samples: Sequence[tuple[int, ...]], config: TrainingConfig, simulator: Simulator | None, *, seed: int
) -> Epoch:
    """What becomes of samples with these tokens of their sequences. On several cards, the first one's part."""
    multiple = width_multiple(config.precision)
    chosen = list(samples)
    most = max(config.effective_batch_size, PLANNED_SAMPLES)
    if len(chosen) > most:
        chosen = random.Random(seed).sample(chosen, most)

    def width(tokens: int) -> int:
        return batching.padded(tokens, config.seq_len, multiple)

    widths = [max(map(width, sample)) for sample in chosen]
    steps = batching.epoch_steps(widths, config.effective_batch_size, seed, 0)
    shuffled = random.Random(seed).sample(range(len(chosen)), len(chosen))
    at_random = [shuffled[i : i + config.effective_batch_size] for i in range(0, len(chosen), len(steps[0]))]
    at_random[-1] = [*at_random[-1], *shuffled][: config.effective_batch_size]
    time = _Time(simulator, config) if simulator is not None else None

    def judged(made: list[list[Batch]]) -> Batching:
        return _judged(made, time)

    return Epoch(
        fixed=judged([list(_fixed(step, chosen, config, width)) for step in at_random]),
        grouped=judged([list(_fixed(step, chosen, config, width)) for step in steps]),
        budget=judged([list(_by_budget(step, chosen, config, width)) for step in steps]),
    )


def _fixed(
    step: list[int], samples: Sequence[tuple[int, ...]], config: TrainingConfig, width: Callable[[int], int]
) -> Iterator[Batch]:
    size = config.micro_batch_size * config.gpus
    for start in range(0, len(step), size):
        mine = step[start : start + size : config.gpus]
        rows = [tokens for i in mine for tokens in samples[i]]
        yield len(rows), width(max(rows)), sum(rows)


def _by_budget(
    step: list[int], samples: Sequence[tuple[int, ...]], config: TrainingConfig, width: Callable[[int], int]
) -> Iterator[Batch]:
    rows = sorted((tokens for i in step for tokens in samples[i]), reverse=True)
    widths = [width(tokens) for tokens in rows]
    for first, *_ in batching.micro_batches(widths, config.max_tokens_per_micro_batch, config.gpus):
        mine = [rows[i] for i in first]
        yield len(mine), width(max(mine)), sum(mine)


def _judged(steps: list[list[Batch]], time: _Time | None) -> Batching:
    batches = [batch for step in steps for batch in step]
    held = sum(rows * width for rows, width, _ in batches)
    return Batching(
        padding=1 - sum(tokens for *_, tokens in batches) / held,
        micro_batches=len(batches) / len(steps),
        step_s=time.of(steps) if time is not None else None,
    )


class _Time:
    """Simulated time of steps of different micro-batches: each shape's own pass, and the update."""

    def __init__(self, simulator: Simulator, config: TrainingConfig) -> None:
        self._simulator, self._config = simulator, config
        self._seconds: dict[tuple[int, int], float] = {}
        self._update_s = simulator.time(config).update_ms / 1e3

    def of(self, steps: Sequence[Sequence[Batch]]) -> float | None:
        """Seconds of a step on average."""
        shape = (self._config.micro_batch_size, self._config.seq_len)
        if not self._simulator.model(self._config).is_polynomial(shape):
            return None  # every shape would need a recording of its own
        return mean(sum(self._pass(rows, width) for rows, width, _ in step) + self._update_s for step in steps)

    def _pass(self, rows: int, width: int) -> float:
        # as many tokens in a shape nearby: a coarser grid of widths, and rows in proportion
        step = max(8, 8 * math.ceil(self._config.seq_len / TIMED_SHAPES))
        near = min(self._config.seq_len, math.ceil(width / step) * step)
        key = (rows, near)
        if key not in self._seconds:
            size = max(1, round(rows / self._simulator.workload.facts.sequences_per_sample))
            config = self._config.model_copy(update={"micro_batch_size": size, "seq_len": near})
            self._seconds[key] = self._simulator.time(config).micro_batch_ms / 1e3
        return self._seconds[key] * width / near
