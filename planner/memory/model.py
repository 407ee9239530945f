"""Memory as a function of micro-batch and sequence length: exact, invertible, and cheap to ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.memory.allocator import AllocatorSettings
from planner.memory.host import HostSettings, allocator_for, block_bytes
from planner.memory.polynomials import N_MONOMIALS, NotPolynomialError, Polynomials, Shape, fit, shapes_needed
from planner.memory.program import Program, build, categories
from planner.recording.record import CATEGORY_NAMES, WORKSPACE, Op, Recording

Int64s = NDArray[np.int64]
Record = Callable[[Shape], Recording]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What a replayed run holds at most."""

    allocated_bytes: int
    """``torch.cuda.max_memory_allocated``; on a CPU the live tensors, not rounded."""
    reserved_bytes: int
    """``torch.cuda.max_memory_reserved``; on a CPU what the resident set grows by."""
    breakdown: dict[str, int]
    """Allocated bytes by category when the allocated peak is reached."""
    phase: str
    """The phase of the loop in which that is."""


class Variant(NamedTuple):
    """What changes a step's structure, not only its sizes; each variant is recorded apart."""

    single: bool
    """One sequence: tensors with a dimension of one are contiguous more often."""
    aligned: bool
    """A length of a multiple of 16: attention masks need no padding (attention.cpp, pad_bias)."""

    @classmethod
    def of(cls, shape: Shape) -> Variant:
        """The variant that a shape belongs to."""
        return cls(shape[0] == 1, shape[1] % 16 == 0)

    def shapes(self, limit: int | None = None) -> tuple[Shape, ...]:
        """Small shapes to record: three that tell every monomial from every other, then more for sums.

        Lengths of multiples of 40 and batches of multiples of 5, so that fractions of the token count in kernels'
        workspaces are whole numbers (also for a target sequence, whose length doesn't change). A model with a
        ``limit`` of fewer positions has shorter ones, of multiples of 8 with batches of multiples of 20, which tell
        apart what differs at lengths up to there; none where it has very few.
        """
        longest = next((longest for longest in _LENGTHS if limit is None or longest <= limit), None)
        if longest is None:
            return ()
        lengths = _LENGTHS[longest][not self.aligned]
        batches = (1,) * 8 if self.single else (10, 15, 20, 15, 10, 30, 25, 35)
        scale = 1 if longest >= 240 or self.single else 4
        return tuple((scale * batch, length) for batch, length in zip(batches, lengths, strict=True))


_LENGTHS = {
    400: ((80, 240, 400, 160, 320, 80, 240, 400), (40, 120, 200, 360, 280, 120, 40, 200)),
    240: ((80, 240, 160, 80, 240, 160, 80, 240), (40, 120, 200, 168, 88, 120, 40, 200)),
    112: ((16, 48, 80, 112, 64, 16, 48, 80), (8, 40, 104, 72, 24, 40, 8, 104)),
    48: ((16, 32, 48, 16, 32, 48, 16, 32), (8, 24, 40, 8, 24, 40, 8, 24)),
}
"""Positions that a model must have, to lengths that are recorded: multiples of 16, and others."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """A step's events with a polynomial for each size, and the same for its operators."""

    template: Recording
    """One recording; its sizes are replaced."""
    sizes: Polynomials
    """[blocks + 1]"""
    gate_counts: Polynomials
    """[gates]"""
    flops: Polynomials
    """[operators]"""
    moved: Polynomials
    """[operands of all operators]"""

    def sizes_at(self, shape: Shape) -> Int64s:
        """Bytes of every recorded block at a shape."""
        sizes = self.sizes.at(shape)
        if self.template.gates:
            counts = self.gate_counts.at(shape)
            for (block, _, threshold), count in zip(self.template.gates, counts, strict=True):
                if count <= threshold:
                    sizes[block] = 0
        return sizes

    def ops_at(self, shape: Shape) -> tuple[Int64s, Int64s]:
        """FLOPs and moved bytes of every operator at a shape."""
        return self.flops.at(shape), np.add.reduceat(self.moved.at(shape), self._operand_starts)

    def recording_at(self, shape: Shape) -> Recording:
        """What a recording at a shape would be; of each operator, the bytes of all operands are one number."""
        flops, moved = self.ops_at(shape)
        ops = [
            replace(op, flops=int(f), moved_bytes=(int(m),))
            for op, f, m in zip(self.template.ops, flops, moved, strict=True)
        ]
        return replace(self.template, sizes=self.sizes_at(shape).tolist(), gates=[], ops=ops)

    @cached_property
    def _operand_starts(self) -> Int64s:
        counts = [len(op.moved_bytes) for op in self.template.ops]
        return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)


def fit_step(record: Record, shapes: Sequence[Shape]) -> StepModel:
    """Record at three of ``shapes`` (more when a size needs it) and solve for every size.

    Raises NotPolynomialError when structure or sizes follow no polynomial.
    """
    recordings = [record(shape) for shape in shapes[:3]]
    if shapes_needed(shapes[:3], _all_values(recordings)):
        recordings += [record(shape) for shape in shapes[3:]]
    structure = recordings[0].structure
    if any(recording.structure != structure for recording in recordings[1:]):
        raise NotPolynomialError(np.zeros(0, dtype=np.int64))
    polynomials = fit(shapes[: len(recordings)], _all_values(recordings))
    return _split(recordings[0], polynomials)


def constant_step(recording: Recording) -> StepModel:
    """The model of one recorded shape: every size is what it is there."""
    values = _all_values([recording])[0]
    numerators = np.zeros((len(values), N_MONOMIALS), dtype=np.int64)
    numerators[:, 0] = values
    return _split(recording, Polynomials(numerators, np.ones(len(values), dtype=np.int64)))


def agrees(model: StepModel, recording: Recording, shape: Shape) -> bool:
    """Whether the model gives what was recorded at a shape, event for event."""
    if recording.structure != model.template.structure:
        return False
    return bool(np.array_equal(model.sizes.at(shape), np.array(recording.sizes)))


def _required(record: Record | None) -> Record:
    if record is None:
        raise NotPolynomialError(np.zeros(0, dtype=np.int64))
    return record


def _all_values(recordings: Sequence[Recording]) -> Int64s:
    counts = {(len(r.sizes), len(r.gates), len(r.ops), sum(len(op.moved_bytes) for op in r.ops)) for r in recordings}
    if len(counts) > 1:
        raise NotPolynomialError(np.zeros(0, dtype=np.int64))
    return np.array(
        [
            [
                *recording.sizes,
                *(count for _, count, _ in recording.gates),
                *(op.flops for op in recording.ops),
                *(nbytes for op in recording.ops for nbytes in op.moved_bytes),
            ]
            for recording in recordings
        ],
        dtype=np.int64,
    )


def _split(template: Recording, polynomials: Polynomials) -> StepModel:
    ends = np.cumsum([len(template.sizes), len(template.gates), len(template.ops)])
    parts = [
        Polynomials(numerators, denominators)
        for numerators, denominators in zip(
            np.split(polynomials.numerators, ends), np.split(polynomials.denominators, ends), strict=True
        )
    ]
    return StepModel(template=template, sizes=parts[0], gate_counts=parts[1], flops=parts[2], moved=parts[3])


class MemoryModel:
    """What a configuration structure needs at any micro-batch and length, on a card with given workspaces.

    ``step`` gives the step's model for a Variant, when one is first asked for; None when its sizes follow no
    polynomial: then ``exact`` records each shape that is asked for. ``evaluation`` records a pass without gradients.
    ``contrast`` is what comes before each step's micro-batches, and lasts until their end.
    """

    def __init__(
        self,
        step: Callable[[Variant], StepModel | None],
        update: Recording,
        *,
        cublas_workspace_bytes: int,
        exact: Record | None = None,
        evaluation: Record | None = None,
        contrast: Recording | None = None,
        settings: AllocatorSettings | HostSettings | None = None,
    ) -> None:
        self._step = lru_cache(maxsize=4)(step)
        self._evaluation = evaluation
        self.contrast = contrast
        self._exact = lru_cache(maxsize=64)(lambda shape: constant_step(_required(exact)(shape)))
        self.update = update
        self._workspace_bytes = cublas_workspace_bytes
        self.settings = settings or AllocatorSettings()
        self.block_bytes = block_bytes(self.settings)
        self._program = lru_cache(maxsize=4)(self._build_program)
        self.peak = lru_cache(maxsize=4096)(self._peak)

    def step(self, shape: Shape) -> StepModel:
        """The step's model for this shape."""
        return self._step(Variant.of(shape)) or self._exact(shape)

    def is_polynomial(self, shape: Shape) -> bool:
        """Whether shapes like this one are replayed from a few recordings, or each recorded."""
        return self._step(Variant.of(shape)) is not None

    def _build_program(self, key: Variant | Shape, accumulate: bool) -> Program:
        step = self._step(key) if isinstance(key, Variant) else self._exact(key)
        assert step is not None
        return build(step.template, self.update, accumulate=accumulate, contrast=self.contrast)

    def program(self, shape: Shape, *, accumulate: bool) -> Program:
        """The run's stream of events."""
        return self._program(Variant.of(shape) if self.is_polynomial(shape) else shape, accumulate)

    def block_sizes(self, shape: Shape, *, accumulate: bool) -> Int64s:
        """Bytes of every block of the program at a shape."""
        sizes: Int64s = self.row_sizes(shape)[self.program(shape, accumulate=accumulate).rows]
        return sizes

    def row_sizes(self, shape: Shape, *others: Recording) -> Int64s:
        """Bytes of every row that a program at a shape names: the step's, the update's, the contrast's, ``others``'."""
        model = self.step(shape)
        recordings = [*self.constant_recordings, *others]
        rows = np.concatenate([model.sizes_at(shape), *(np.array(r.sizes, dtype=np.int64) for r in recordings)])
        rows[categories(model.template, *recordings) == WORKSPACE] = self._workspace_bytes
        return rows

    @property
    def constant_recordings(self) -> list[Recording]:
        """Those whose sizes don't depend on the shape, in the order of a program's rows."""
        return [self.update, *([self.contrast] if self.contrast else [])]

    def evaluation(self, shape: Shape) -> Recording | None:
        """A pass of an evaluation at this shape, when the model was told how to record one."""
        return self._evaluation(shape) if self._evaluation else None

    def allocated_bytes(self, shape: Shape, *, accumulate: bool) -> int:
        """Peak of the rounded live sizes: a lower bound of what is reserved, a hundred times cheaper."""
        return int(self._live_bytes(shape, accumulate=accumulate).max(initial=0))

    def _live_bytes(self, shape: Shape, *, accumulate: bool) -> Int64s:
        events = self.program(shape, accumulate=accumulate).events
        sizes = _rounded(self.block_sizes(shape, accumulate=accumulate), self.block_bytes)
        live: Int64s = np.cumsum(np.sign(events) * sizes[np.abs(events)])
        return live

    def _peak(self, shape: Shape, *, accumulate: bool) -> Peak:
        program = self.program(shape, accumulate=accumulate)
        sizes = self.block_sizes(shape, accumulate=accumulate)
        allocator = allocator_for(self.settings)
        allocator.run(program.events, sizes)
        top = int(np.argmax(self._live_bytes(shape, accumulate=accumulate)))
        return Peak(
            allocated_bytes=allocator.peak_allocated_bytes,
            reserved_bytes=allocator.peak_reserved_bytes,
            breakdown=self.live_by_category(
                program, sizes, categories(self.step(shape).template, *self.constant_recordings), top
            ),
            phase=[name for name, start in program.marks if start <= top][-1],
        )

    def live_by_category(self, program: Program, sizes: Int64s, kinds: Int64s, top: int) -> dict[str, int]:
        """Live bytes of each category after event ``top``; ``sizes`` of blocks, ``kinds`` of rows."""
        events = program.events[: top + 1]
        blocks = np.abs(events)
        amounts = np.sign(events) * _rounded(sizes, self.block_bytes)[blocks]
        live = np.bincount(kinds[program.rows][blocks], weights=amounts, minlength=len(CATEGORY_NAMES))
        return {name: int(amount) for name, amount in zip(CATEGORY_NAMES, live, strict=True)}

    # -- the model the other way round ---------------------------------------------------------------------------

    def largest_micro_batch(self, seq_len: int, budget_bytes: int, *, accumulate: bool, limit: int = 4096) -> int:
        """The largest micro-batch whose reserved peak is within the budget; 0 when none is."""
        return largest(lambda b: self._within((b, seq_len), budget_bytes, accumulate=accumulate), limit)

    def longest_seq_len(
        self, micro_batch_size: int, budget_bytes: int, *, accumulate: bool, limit: int, multiple: int = 8
    ) -> int:
        """The longest length (a multiple of ``multiple``, at most ``limit``) within the budget; 0 when none is."""
        units = largest(
            lambda n: self._within((micro_batch_size, n * multiple), budget_bytes, accumulate=accumulate),
            limit // multiple,
        )
        return units * multiple

    def largest_token_budget(self, seq_len: int, budget_bytes: int, *, accumulate: bool) -> int:
        """Padded tokens a micro-batch may hold when its longest sequence has ``seq_len`` tokens."""
        return seq_len * self.largest_micro_batch(seq_len, budget_bytes, accumulate=accumulate)

    def _within(self, shape: Shape, budget_bytes: int, *, accumulate: bool) -> bool:
        if self.allocated_bytes(shape, accumulate=accumulate) > budget_bytes:
            return False
        return self.peak(shape, accumulate=accumulate).reserved_bytes <= budget_bytes


def _rounded(sizes: Int64s, nbytes: int) -> Int64s:
    return -(-sizes // nbytes) * nbytes


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to ``limit`` that fits, by doubling and bisection; 0 when 1 doesn't."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


__all__ = [
    "MemoryModel",
    "Op",
    "Peak",
    "StepModel",
    "Variant",
    "agrees",
    "constant_step",
    "fit_step",
]
