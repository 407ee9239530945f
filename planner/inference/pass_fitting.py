"""Forward passes of generation as functions of the batch and of the tokens in the cache, fitted to small recordings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.inference.pass_kinds import (
    ANY_RESIDUE,
    AT_WINDOW,
    CHUNK,
    LAST_CHUNK,
    MANY_CHUNKS,
    MASK_ROWS,
    TOKEN,
    Beginning,
    GenerationFacts,
    Label,
    Start,
    prompt_chunks,
    run_steps,
)
from planner.inference.unrolling import Int64s, PassEvents, RecordedPass, recorded_passes
from planner.memory.polynomials import N_MONOMIALS, N_PLAIN, NotPolynomialError, Polynomials, Shape, fit
from planner.recording.record import Op, Recording
from planner.timing import Operators
from planner.units import round_up

Record = Callable[[Beginning], Recording]
"""Records the beginning of a run."""
_BATCHES = (10, 15, 20, 15, 10, 30, 25, 35)
_UNITS = (5, 15, 25, 10, 20, 5, 15, 25)
"""Batches and lengths that are recorded, lengths in parts of a step; those of the training step's recordings."""
_STEPS = (16, 4, 2)
"""Tokens of a part; the smaller ones for what has few positions."""
_ENOUGH = 3
"""Recordings that tell monomials apart; the others are for sums."""


@dataclass(frozen=True, kw_only=True)
class PassModel:
    """A kind of pass with a polynomial of batch and cached tokens for each size."""

    events: PassEvents
    """What it does."""
    sizes: Polynomials
    """[blocks]"""
    flops: Polynomials
    """[operators]"""
    moved: Polynomials
    """[operands of all operators]"""
    operands: tuple[int, ...]
    """Of each operator."""

    @classmethod
    def of(cls, points: Sequence[Shape], passes: Sequence[RecordedPass], *, shifts: Sequence[int]) -> PassModel:
        """Fit one, whose sizes may also be of ``shifts`` tokens less. Raises NotPolynomialError."""
        first = passes[0]
        if any(one.events.signature != first.events.signature for one in passes[1:]):
            raise NotPolynomialError(np.zeros(0, dtype=np.int64))
        values = np.array([_values(one) for one in passes], dtype=np.int64)
        return cls._split(first, _fit(points, values, shifts))

    @classmethod
    def constant(cls, one: RecordedPass) -> PassModel:
        """A pass of one size, the recorded one."""
        values = np.array(_values(one), dtype=np.int64)
        numerators = np.zeros((len(values), N_MONOMIALS), dtype=np.int64)
        numerators[:, 0] = values
        return cls._split(one, Polynomials(numerators, np.ones(len(values), dtype=np.int64)))

    @classmethod
    def _split(cls, first: RecordedPass, polynomials: Polynomials) -> PassModel:
        ends = np.cumsum([first.events.blocks, len(first.ops)])
        sizes, flops, moved = (
            Polynomials(numerators, denominators)
            for numerators, denominators in zip(
                np.split(polynomials.numerators, ends), np.split(polynomials.denominators, ends), strict=True
            )
        )
        operands = tuple(len(op.moved_bytes) for op in first.ops)
        return cls(events=first.events, sizes=sizes, flops=flops, moved=moved, operands=operands)

    @cached_property
    def ops(self) -> list[Op]:
        """Its operators, without what they compute and move."""
        return [Op(name, 0, (), kind, position, False) for name, kind, position in self.events.ops]

    @cached_property
    def operators(self) -> Operators:
        """The same as arrays."""
        return Operators.of(self.ops)

    def amounts_at(self, point: Shape) -> tuple[Int64s, Int64s]:
        """FLOPs and moved bytes of each operator, of all of its operands together."""
        starts = np.concatenate([[0], np.cumsum(self.operands)[:-1]]).astype(np.int64)
        moved = np.add.reduceat(self.moved.at(point), starts) if self.operands else np.zeros(0, dtype=np.int64)
        return self.flops.at(point), moved

    def ops_at(self, point: Shape) -> list[Op]:
        """Its operators; of each, the bytes of all operands are one number."""
        amounts = zip(*self.amounts_at(point), strict=True)
        return [
            replace(op, flops=int(flops), moved_bytes=(int(nbytes),))
            for op, (flops, nbytes) in zip(self.ops, amounts, strict=True)
        ]


def _fit(points: Sequence[Shape], values: Int64s, shifts: Sequence[int]) -> Polynomials:
    """``fit``, and rows that are polynomials of so many tokens less: what concatenation reads, or a prompt's rest.

    Raises NotPolynomialError.
    """
    numerators = np.zeros((values.shape[1], N_MONOMIALS), dtype=np.int64)
    denominators = np.ones(values.shape[1], dtype=np.int64)
    rows = np.arange(values.shape[1])
    for shift in (0, *(shift for shift in shifts if shift < min(cached for _, cached in points))):
        fitted, found = _fitted_rows([(batch, cached - shift) for batch, cached in points], values[:, rows])
        if shift:
            plain = ~found.numerators[:, N_PLAIN:].any(axis=1)
            fitted, kept = fitted[plain], found.numerators[plain, :N_PLAIN] @ _of_past(shift)
            numerators[rows[fitted], :N_PLAIN], denominators[rows[fitted]] = kept, found.denominators[plain]
        else:
            numerators[rows[fitted]], denominators[rows[fitted]] = found.numerators, found.denominators
        rows = np.delete(rows, fitted)
        if not len(rows):
            return Polynomials(numerators, denominators)
    if len({cached for _, cached in points}) > 1:
        raise NotPolynomialError(rows)
    numerators[rows, :2] = _lines([batch for batch, _ in points], values[:, rows])
    return Polynomials(numerators, denominators)


def _lines(batches: Sequence[int], values: Int64s) -> Int64s:
    """Constant and slope of rows that are of one length. Raises NotPolynomialError. [rows, 2]"""
    at = np.array(batches)
    if batches[0] == batches[1]:
        raise NotPolynomialError(np.arange(values.shape[1]))
    slope = (values[1] - values[0]) // (at[1] - at[0])
    constant = values[0] - slope * at[0]
    wrong = np.flatnonzero(np.any(constant + at[:, None] * slope != values, axis=0))
    if len(wrong):
        raise NotPolynomialError(wrong)
    return np.stack([constant, slope], axis=1)


def _fitted_rows(points: Sequence[Shape], values: Int64s) -> tuple[Int64s, Polynomials]:
    """The rows that follow polynomials, and these."""
    rows = np.arange(values.shape[1])
    try:
        return rows, fit(points, values)
    except NotPolynomialError as error:
        rows = np.delete(rows, error.rows)
    return rows, fit(points, values[:, rows])


def _of_past(new: int) -> Int64s:
    """The plain monomials of ``s - new`` in those of ``s``: 1, b, s, b s, s s, b s s."""
    rows = np.eye(N_PLAIN, dtype=np.int64)
    for one, of_s, of_square in ((0, 2, 4), (1, 3, 5)):
        rows[of_s, one] = -new
        rows[of_square, one], rows[of_square, of_s] = new * new, -2 * new
    return rows


def _values(one: RecordedPass) -> list[int]:
    return [
        *one.sizes.tolist(),
        *(op.flops for op in one.ops),
        *(nbytes for op in one.ops for nbytes in op.moved_bytes),
    ]


Models = Mapping[Label, PassModel]
"""Passes by their kinds."""


# -- fitting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Which small runs are recorded to fit the passes of large ones."""

    record: Record
    """Records the beginning of a run."""
    facts: GenerationFacts
    """What kinds of passes there are."""

    def start(self, start: Start) -> Models:
        """The passes of a prompt, and the one after. Raises NotPolynomialError and RecordingError."""
        shows_tokens = start.residue == ANY_RESIDUE and start.chunks == 1 and not self.facts.encodes
        shows_tokens &= start.beyond != AT_WINDOW  # all of one length, which tells nothing of others
        beginnings = [
            self._beginning(start, index, 4 if shows_tokens else 2, one_pass=start.chunks == 1)
            for index in range(len(_BATCHES))
        ]
        return self._fit(beginnings, lambda label: not label.full and (shows_tokens or label.kind != TOKEN))

    def tokens(self, start: Start) -> Models:
        """The passes of tokens. Raises NotPolynomialError and RecordingError."""
        plain = start._replace(residue=ANY_RESIDUE, chunks=1, remainder=0)
        beginnings = [self._beginning(plain, index, 4) for index in range(len(_BATCHES))]
        if start.beyond == AT_WINDOW:
            ends = [self._told(start, one.batch, self.facts.window - 2, 4) for one in beginnings]
            return self._fit(ends, lambda label: label.kind == TOKEN and label.beyond == AT_WINDOW)
        if self.facts.encodes:  # all prompts are of one length, and the decoder's beginning grows in their place
            lengths = self._lengths(plain)
            beginnings = [
                one._replace(prompt=start.prompt, decoder_tokens=length, new_tokens=length + 8)
                for one, length in zip(beginnings, lengths, strict=True)
            ]
        models = self._fit(beginnings, lambda label: label.kind == TOKEN and not label.full)
        if not start.room:
            return models
        ends = [self._told(start, one.batch, start.room - 2, 4) for one in beginnings]
        return {**models, **self._fit(ends, lambda label: label.kind == TOKEN and label.full)}

    def _beginning(self, start: Start, index: int, tokens: int, *, one_pass: bool = False) -> Beginning:
        """The run of small size that is recorded as ``index``-th, with so many passes of tokens."""
        if start.chunks > 1:
            chunks = start.chunks + (index % 5 if start.chunks == MANY_CHUNKS else 0)
            prompt = self.facts.prefix + (chunks - 1) * self.facts.chunk + start.remainder
        else:
            prompt = self._lengths(start, one_pass=one_pass)[index]
        return self._told(start, 1 if start.single else _BATCHES[index], prompt, tokens)

    def _told(self, start: Start, batch: int, prompt: int, tokens: int) -> Beginning:
        new_tokens = start.room + 1 - prompt if start.room else tokens + 2
        return Beginning(batch, prompt, new_tokens, len(prompt_chunks(self.facts, prompt)) + tokens)

    def _lengths(self, start: Start, *, one_pass: bool = False) -> list[int]:
        """Prompts' lengths: three that tell monomials apart, then more for sums."""
        if start.beyond == AT_WINDOW:
            return [self.facts.window] * len(_UNITS)
        limits = [start.room, self.facts.max_positions, 0 if start.beyond else self.facts.window]
        limit = min([limit - MASK_ROWS // 2 for limit in limits if limit], default=2**31)
        if self.facts.chunk and one_pass:
            limit = min(limit, self.facts.prefix + self.facts.chunk)
        least = round_up(self.facts.window + 1 if start.beyond else self.facts.prefix, MASK_ROWS)
        shift = start.residue - MASK_ROWS if start.residue else 0
        for step in _STEPS:
            lengths = [least + round_up(units * step, MASK_ROWS) + shift for units in _UNITS]
            if max(lengths) <= limit:
                return lengths
        raise NotPolynomialError(np.zeros(0, dtype=np.int64))

    def _fit(self, beginnings: Sequence[Beginning], wanted: Callable[[Label], bool]) -> Models:
        samples: dict[Label, list[tuple[Shape, RecordedPass]]] = {}
        for beginning in beginnings[:_ENOUGH]:
            self._sample(beginning, samples, wanted)
        if not all(_is_fitted(pairs, self._shifts(label, pairs)) for label, pairs in samples.items()):
            for beginning in beginnings[_ENOUGH:]:
                self._sample(beginning, samples, wanted)
        return {
            label: PassModel.of(*zip(*pairs, strict=True), shifts=self._shifts(label, pairs))
            for label, pairs in samples.items()
        }

    def _shifts(self, label: Label, pairs: Sequence[tuple[Shape, RecordedPass]]) -> list[int]:
        """Tokens that a pass adds to the cache, and those of a shared beginning."""
        new = self.facts.chunk if label.kind.startswith(CHUNK) else 1
        if label.kind == LAST_CHUNK:
            new = (pairs[0][0][1] - self.facts.prefix - 1) % self.facts.chunk + 1
        return [new, self.facts.prefix] if self.facts.prefix else [new]

    def _sample(
        self,
        beginning: Beginning,
        samples: dict[Label, list[tuple[Shape, RecordedPass]]],
        wanted: Callable[[Label], bool],
    ) -> None:
        recorded = recorded_passes(self.record(beginning))
        for (label, point), one in zip(run_steps(self.facts, beginning), recorded[:-1], strict=False):
            if wanted(label):
                samples.setdefault(label, []).append((point, one))


def _is_fitted(pairs: Sequence[tuple[Shape, RecordedPass]], shifts: Sequence[int]) -> bool:
    values = [_values(one) for _, one in pairs]
    if len({len(row) for row in values}) > 1:
        raise NotPolynomialError(np.zeros(0, dtype=np.int64))
    try:
        _fit([point for point, _ in pairs], np.array(values, dtype=np.int64), shifts)
    except NotPolynomialError:
        return False
    return True
