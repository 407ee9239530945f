"""Memory and work of text generation as functions of the batch, the prompt and the tokens written.

The first forward passes of small batches are recorded. What each kind of pass allocates is fitted by polynomials of
the batch and of the tokens that the cache holds after it, and a run of any size is laid out from them. Passes of one
kind differ in what they do only where the number of tokens is a multiple of 16 (attention.cpp, pad_bias: masks of the
memory-efficient kernel need no padding then) or reaches the window of sliding attention: these are kinds of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from planner.inference.unrolling import (
    PASS,
    RUN_CATEGORY_NAMES,
    Int64s,
    Layout,
    PassEvents,
    RecordedPass,
    Run,
    recorded_passes,
    tokens,
    unrolled,
)
from planner.memory.allocator import AllocatorSettings
from planner.memory.host import HostSettings, allocator_for, block_bytes
from planner.memory.model import Peak
from planner.memory.polynomials import N_PLAIN, NotPolynomialError, Polynomials, Shape, fit
from planner.recording.record import WORKSPACE, Op, Recording
from planner.units import round_up

T = TypeVar("T")

BEFORE, WHOLE, CHUNK, LAST_CHUNK, FIRST_TOKEN, TOKEN = "before", "whole", "chunk", "last_chunk", "first_token", "token"
"""Kinds of passes: loading and the batch's arrival; a prompt in one pass; a prompt's chunk, and its last one; the pass
that follows the prompt's, and the others."""
MASK_ROWS = 16
"""Masks of the memory-efficient kernel are padded to a multiple of these elements."""
_RESIDUE = MASK_ROWS - 3
"""Of the lengths of most recorded prompts: the third pass is the one that needs no padding."""
_BATCHES = (10, 15, 20, 15, 10, 30, 25, 35)
_UNITS = (5, 15, 25, 10, 20, 5, 15, 25)
"""Recorded lengths in parts of a step; those of the training step's recordings."""
_STEPS = (16, 4, 2)
MANY_CHUNKS = 4
"""From so many chunks on, a prompt's middle ones are alike."""
_RECORDED_TOKENS = 6
_ENOUGH = 3
"""Recordings that tell monomials apart; the rest is for sums."""


class Beginning(NamedTuple):
    """The part of a run that is recorded."""

    batch: int
    """Prompts."""
    prompt: int
    """Tokens of each, padding included."""
    new_tokens: int
    """What generate is told: max_new_tokens; a static cache has room for as many."""
    passes: int
    """Forward passes that are recorded: chunks of the prompt, then one for each token but the first."""
    decoder_tokens: int = 1
    """Tokens that the decoder of an encoder-decoder model begins with."""


Record = Callable[[Beginning], Recording]


@dataclass(frozen=True, kw_only=True)
class GenerationFacts:
    """What decides which kinds of passes a run has."""

    chunk: int = 0
    """Tokens of a prompt in one pass; 0: all."""
    prefix: int = 0
    """Tokens at the prompts' beginning that are in the cache already."""
    has_room: bool = False
    """The cache has its last size from the start (static)."""
    window: int = 0
    """Tokens that layers with sliding attention see; 0 where there are none."""
    encodes: bool = False
    """Encoder-decoder: the prompt is the encoder's, and tokens are the decoder's."""
    max_positions: int | None = None
    """Positions that the model has, where they are limited."""


class Label(NamedTuple):
    """A kind of pass."""

    kind: str
    """One of BEFORE, WHOLE, ..."""
    aligned: bool
    """The tokens in the cache after it are a multiple of MASK_ROWS."""
    beyond: bool
    """They fill the window of sliding attention."""


class Start(NamedTuple):
    """What a run's beginning depends on besides the batch and the prompt's length: each is fitted apart."""

    single: bool
    """One prompt: no padding, so no mask."""
    residue: int
    """The prompt's length beyond a multiple of MASK_ROWS: 0, 15 (the first token completes one), or any other."""
    beyond: bool
    """The prompt fills the window of sliding attention."""
    chunks: int
    """Passes that the prompt takes; MANY_CHUNKS: so many or more."""
    remainder: int
    """Tokens of the prompt's last chunk; 0 where it is one pass."""
    room: int
    """Tokens that a static cache has room for; 0 for other caches."""
    prompt: int
    """The encoder's tokens of an encoder-decoder model; 0 for others."""


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
    def of(cls, points: Sequence[Shape], passes: Sequence[RecordedPass]) -> PassModel:
        """Fit one. Raises NotPolynomialError."""
        first = passes[0]
        if any(one.events.signature != first.events.signature for one in passes[1:]):
            raise NotPolynomialError(np.zeros(0, dtype=np.int64))
        values = np.array([_values(one) for one in passes], dtype=np.int64)
        polynomials = _fit(points, values)
        ends = np.cumsum([first.events.blocks, len(first.ops)])
        sizes, flops, moved = (
            Polynomials(numerators, denominators)
            for numerators, denominators in zip(
                np.split(polynomials.numerators, ends), np.split(polynomials.denominators, ends), strict=True
            )
        )
        operands = tuple(len(op.moved_bytes) for op in first.ops)
        return cls(events=first.events, sizes=sizes, flops=flops, moved=moved, operands=operands)

    def ops_at(self, point: Shape) -> list[Op]:
        """Its operators; of each, the bytes of all operands are one number."""
        starts = np.concatenate([[0], np.cumsum(self.operands)[:-1]]).astype(np.int64)
        moved = np.add.reduceat(self.moved.at(point), starts) if self.operands else np.zeros(0, dtype=np.int64)
        return [
            Op(name, int(flops), (int(nbytes),), kind, position, False)
            for (name, kind, position), flops, nbytes in zip(self.events.ops, self.flops.at(point), moved, strict=True)
        ]


def _fit(points: Sequence[Shape], values: Int64s) -> Polynomials:
    """``fit``, and rows that are one monomial of the tokens before the pass: what concatenation reads."""
    try:
        return fit(points, values)
    except NotPolynomialError as error:
        if not len(error.rows):
            raise
        of_past = error.rows
    rest = np.setdiff1d(np.arange(values.shape[1]), of_past)
    here = fit(points, values[:, rest])
    before = fit([(batch, cached - 1) for batch, cached in points], values[:, of_past])
    if before.numerators[:, N_PLAIN:].any():
        raise NotPolynomialError(of_past)
    numerators = np.zeros((values.shape[1], before.numerators.shape[1]), dtype=np.int64)
    denominators = np.ones(values.shape[1], dtype=np.int64)
    numerators[rest], denominators[rest] = here.numerators, here.denominators
    numerators[of_past, :N_PLAIN] = before.numerators[:, :N_PLAIN] @ _ONE_TOKEN_LESS
    denominators[of_past] = before.denominators
    return Polynomials(numerators, denominators)


_ONE_TOKEN_LESS = np.array(
    # of 1, b, s, b s, s s, b s s in these monomials of one token less
    [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [-1, 0, 1, 0, 0, 0],
        [0, -1, 0, 1, 0, 0],
        [1, 0, -2, 0, 1, 0],
        [0, 1, 0, -2, 0, 1],
    ],
    dtype=np.int64,
)


def _values(one: RecordedPass) -> list[int]:
    return [
        *one.sizes.tolist(),
        *(op.flops for op in one.ops),
        *(nbytes for op in one.ops for nbytes in op.moved_bytes),
    ]


Models = Mapping[Label, PassModel]
Step = tuple[Label, Shape]
"""A pass of a run: its kind, the batch, and the tokens in the cache after it."""


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
        shows_tokens = start.residue == _RESIDUE and start.chunks == 1 and not self.facts.encodes
        beginnings = [self._beginning(start, index, 4 if shows_tokens else 2) for index in range(len(_BATCHES))]
        return self._fit(beginnings, not_wanted=() if shows_tokens else (TOKEN,))

    def tokens(self, start: Start) -> Models:
        """The passes of tokens. Raises NotPolynomialError and RecordingError."""
        plain = start._replace(residue=_RESIDUE, chunks=1, remainder=0)
        beginnings = [self._beginning(plain, index, 4) for index in range(len(_BATCHES))]
        if self.facts.encodes:  # all prompts are of one length, and the decoder's beginning grows in their place
            lengths = self._lengths(plain)
            beginnings = [
                one._replace(prompt=start.prompt, decoder_tokens=length, new_tokens=length + 8)
                for one, length in zip(beginnings, lengths, strict=True)
            ]
        return self._fit(beginnings, not_wanted=(BEFORE, WHOLE, FIRST_TOKEN))

    def _beginning(self, start: Start, index: int, tokens: int) -> Beginning:
        """The run of small size that is recorded as ``index``-th, with so many passes of tokens."""
        batch = 1 if start.single else _BATCHES[index]
        if start.chunks > 1:
            chunks = start.chunks + (index % 5 if start.chunks == MANY_CHUNKS else 0)
            prompt = self.facts.prefix + (chunks - 1) * self.facts.chunk + start.remainder
        else:
            chunks, prompt = 1, self._lengths(start)[index]
        new_tokens = start.room + 1 - prompt if start.room else tokens + 2
        return Beginning(batch, prompt, new_tokens, chunks + tokens)

    def _lengths(self, start: Start) -> list[int]:
        """Prompts' lengths: three that tell monomials apart, then more for sums."""
        limits = [start.room, self.facts.max_positions, self.facts.window if not start.beyond else 0]
        limit = min([limit - MASK_ROWS // 2 for limit in limits if limit], default=2**31)
        if self.facts.chunk and start.chunks == 1:
            limit = min(limit, self.facts.prefix + self.facts.chunk)
        least = round_up(self.facts.window + 1 if start.beyond else self.facts.prefix, MASK_ROWS)
        shift = start.residue - MASK_ROWS if start.residue else 0
        for step in _STEPS:
            lengths = [least + round_up(units * step, MASK_ROWS) + shift for units in _UNITS]
            if max(lengths) <= limit:
                return lengths
        raise NotPolynomialError(np.zeros(0, dtype=np.int64))

    def _fit(self, beginnings: Sequence[Beginning], *, not_wanted: Sequence[str]) -> Models:
        samples: dict[Label, list[tuple[Shape, RecordedPass]]] = {}
        for beginning in beginnings[:_ENOUGH]:
            self._sample(beginning, samples, not_wanted)
        if not all(_is_fitted(pairs) for pairs in samples.values()):
            for beginning in beginnings[_ENOUGH:]:
                self._sample(beginning, samples, not_wanted)
        return {label: PassModel.of(*zip(*pairs, strict=True)) for label, pairs in samples.items()}

    def _sample(
        self, beginning: Beginning, samples: dict[Label, list[tuple[Shape, RecordedPass]]], not_wanted: Sequence[str]
    ) -> None:
        batch, prompt, _, passes, decoder_tokens = beginning
        steps = run_steps(self.facts, (batch, prompt), passes, decoder_tokens)
        recorded = recorded_passes(self.record(beginning))
        for (label, point), one in zip(steps, recorded[:-1], strict=False):
            if label.kind not in not_wanted:
                samples.setdefault(label, []).append((point, one))


def _is_fitted(pairs: Sequence[tuple[Shape, RecordedPass]]) -> bool:
    values = [_values(one) for _, one in pairs]
    if len({len(row) for row in values}) > 1:
        raise NotPolynomialError(np.zeros(0, dtype=np.int64))
    try:
        _fit([point for point, _ in pairs], np.array(values, dtype=np.int64))
    except NotPolynomialError:
        return False
    return True


def run_steps(facts: GenerationFacts, shape: Shape, passes: int, decoder_tokens: int = 1) -> Iterator[Step]:
    """What comes before a run's passes, and ``passes`` of them."""
    batch, prompt = shape
    yield Label(BEFORE, False, False), shape
    chunks = prompt_chunks(facts, prompt)
    for index, cached in enumerate(chunks):
        kind = WHOLE if len(chunks) == 1 else LAST_CHUNK if index == len(chunks) - 1 else CHUNK
        if kind == CHUNK and index < 2:
            kind += f"_{index}"  # the first finds no cache, and the second finds it as the first has left it
        yield _label(facts, kind, cached), (batch, cached)
    first = decoder_tokens if facts.encodes else prompt
    for index in range(passes - len(chunks)):
        cached = first + 1 + index
        # an encoder-decoder's first token has one before it, so only the prompt's length is left to vary
        point = shape if facts.encodes and not index else (batch, cached)
        yield _label(facts, TOKEN if index else FIRST_TOKEN, cached), point


def _label(facts: GenerationFacts, kind: str, cached: int) -> Label:
    return Label(kind, cached % MASK_ROWS == 0, bool(facts.window) and cached >= facts.window)


def prompt_chunks(facts: GenerationFacts, prompt: int) -> list[int]:
    """Tokens in the cache after each pass of a prompt."""
    if not facts.chunk or facts.encodes:
        return [prompt]
    return [*range(facts.prefix + facts.chunk, prompt, facts.chunk), prompt]


class _Live(NamedTuple):
    """Live bytes of a run, sizes rounded."""

    top: int
    end: int
    sizes: Int64s


# -- runs ------------------------------------------------------------------------------------------------------------

Remember = Callable[[dict[str, Any], Callable[[], Any]], Any]
"""Gives what is known by a key, or makes and keeps it."""


class GenerationModel:
    """What generation needs at any batch, prompt and number of tokens.

    ``remember`` keeps what was fitted beyond this process. Where sizes follow no polynomial, the beginning of each
    run that is asked for is recorded at its own size; that raises RecordingError where tokens don't grow by equal
    steps.
    """

    def __init__(
        self,
        record: Record,
        facts: GenerationFacts,
        *,
        cublas_workspace_bytes: int = 0,
        settings: AllocatorSettings | HostSettings | None = None,
        remember: Remember = lambda _, make: make(),
    ) -> None:
        self.facts = facts
        self.settings = settings or AllocatorSettings()
        self._record = record
        self._remember = remember
        self._workspace_bytes = cublas_workspace_bytes
        self._block_bytes = block_bytes(self.settings)
        self._models = lru_cache(maxsize=64)(self._fitted)
        self._exact = lru_cache(maxsize=16)(self._recorded)
        self.peak = lru_cache(maxsize=1024)(self._peak)
        self.allocated_bytes = lru_cache(maxsize=4096)(self._allocated)

    # -- models of passes --------------------------------------------------------------------------------------------

    def start_of(self, shape: Shape, new_tokens: int) -> Start:
        """What a run's beginning depends on."""
        batch, prompt = shape
        chunks = len(prompt_chunks(self.facts, prompt))
        residue = prompt % MASK_ROWS
        return Start(
            single=batch == 1,
            residue=residue if residue in (0, MASK_ROWS - 1) else _RESIDUE,
            beyond=bool(self.facts.window) and prompt >= self.facts.window,
            chunks=min(chunks, MANY_CHUNKS),
            remainder=(prompt - self.facts.prefix - 1) % self.facts.chunk + 1 if chunks > 1 else 0,
            room=prompt + new_tokens - 1 if self.facts.has_room else 0,
            prompt=prompt if self.facts.encodes else 0,
        )

    def _fitted(self, part: str, start: Start) -> Models | None:
        fitting = Fitting(record=self._record, facts=self.facts)

        def make() -> Models | None:
            try:
                return fitting.start(start) if part == "start" else fitting.tokens(start)
            except NotPolynomialError:
                return None

        found: Models | None = self._remember({"part": part, **start._asdict()}, make)
        return found

    def _model(self, start: Start, label: Label) -> PassModel:
        """Raises NotPolynomialError where there is none."""
        of_start = start._replace(prompt=0)  # fitted over prompts, where tokens are for one length of them
        models = self._models("start", of_start)
        if models is not None and label.kind == TOKEN and label not in models:
            beyond = label.beyond
            plain = start._replace(residue=_RESIDUE, chunks=1, remainder=0, beyond=beyond)
            models = self._models("tokens", plain)
        if models is None or label not in models:
            raise NotPolynomialError(np.zeros(0, dtype=np.int64))
        return models[label]

    # -- whole runs --------------------------------------------------------------------------------------------------

    def run(self, shape: Shape, new_tokens: int) -> Run:
        """The whole run; from the second token on without most blocks that live within a pass (see ``lasting``).

        Raises RecordingError.
        """
        try:
            return self._laid_out(shape, new_tokens)
        except NotPolynomialError:
            return self._exact(shape, new_tokens)

    def recording(self, shape: Shape, new_tokens: int) -> Recording:
        """The same as a recording. Raises RecordingError."""
        return self.run(shape, new_tokens).recording()

    def _recorded(self, shape: Shape, new_tokens: int) -> Run:
        """From a recording at the run's own size."""
        chunks = len(prompt_chunks(self.facts, shape[1]))
        recording = self._record(Beginning(*shape, new_tokens, chunks + min(new_tokens, _RECORDED_TOKENS)))
        return unrolled(recording, new_tokens=new_tokens)

    def _laid_out(self, shape: Shape, new_tokens: int) -> Run:
        steps, models, first = self._plan(shape, new_tokens)
        layout = Layout()
        for index, (label, point) in enumerate(steps[:first]):
            layout.mark(PASS.format(index - 1) if index else BEFORE)
            layout.add(models[label].events, models[label].sizes.at(point))
        tokens(
            layout,
            range(first, len(steps) - 1),
            lambda index: models[steps[index][0]].events,
            lambda index: models[steps[index][0]].sizes.at(steps[index][1]),
        )
        return layout.run()

    def _plan(self, shape: Shape, new_tokens: int) -> tuple[list[Step], Models, int]:
        """A run's passes and the one that would follow, their models, and which is the first of those of tokens."""
        start = self.start_of(shape, new_tokens)
        steps = list(run_steps(self.facts, shape, self._passes(shape, new_tokens) + 1))
        models = {label: self._model(start, label) for label in dict(steps)}
        kinds = [label.kind for label, _ in steps]
        first = kinds.index(TOKEN) if TOKEN in kinds else len(kinds)
        return steps, models, min(first, len(kinds) - 1)

    def _passes(self, shape: Shape, new_tokens: int) -> int:
        return len(prompt_chunks(self.facts, shape[1])) + new_tokens - 1

    # -- memory ------------------------------------------------------------------------------------------------------

    def _peak(self, shape: Shape, new_tokens: int) -> Peak:
        """What a run holds at most; ``breakdown`` by RUN_CATEGORY_NAMES. Raises RecordingError."""
        run = self.run(shape, new_tokens)
        sizes = np.where(run.categories == WORKSPACE, self._workspace_bytes, run.sizes)
        allocator = allocator_for(self.settings)
        top = allocator.run(run.events, sizes)
        return Peak(
            allocated_bytes=allocator.peak_allocated_bytes,
            reserved_bytes=allocator.peak_reserved_bytes,
            breakdown=self._by_category(run, sizes, top),
            phase=self._phase([name for name, start in run.marks if start <= top][-1], shape),
        )

    def _phase(self, mark: str, shape: Shape) -> str:
        """``load``, ``prefill`` or ``decode``."""
        if mark == BEFORE:
            return "load"
        chunks = len(prompt_chunks(self.facts, shape[1]))
        return "prefill" if mark in [PASS.format(index) for index in range(chunks)] else "decode"

    def _by_category(self, run: Run, sizes: Int64s, top: int) -> dict[str, int]:
        events = run.events[: top + 1]
        blocks = np.abs(events)
        amounts = np.sign(events) * self._rounded(sizes[blocks])
        live = np.bincount(run.categories[blocks], weights=amounts, minlength=len(RUN_CATEGORY_NAMES))
        return {name: int(amount) for name, amount in zip(RUN_CATEGORY_NAMES, live, strict=True)}

    def _rounded(self, sizes: Int64s) -> Int64s:
        return -(-sizes // self._block_bytes) * self._block_bytes

    def _allocated(self, shape: Shape, new_tokens: int) -> int:
        """Peak of the rounded live sizes, without laying out every token: a lower bound of what is reserved.

        Sizes grow with the tokens in the cache, so of each kind of pass the last one holds most. Raises
        RecordingError.
        """
        try:
            steps, models, first = self._plan(shape, new_tokens)
        except NotPolynomialError:
            return self._live(self._exact(shape, new_tokens)).top
        layout = Layout()
        for label, point in steps[:first]:
            layout.add(models[label].events, models[label].sizes.at(point))
        begun = self._live(layout.run())
        left = begun.sizes[layout.left]
        last = {label: index for index, (label, _) in enumerate(steps) if first < index < len(steps) - 1}
        tops = [self._top_of(steps, models, index, begun.end - int(left.sum()), left) for index in last.values()]
        return max([begun.top, *tops])

    def _top_of(self, steps: Sequence[Step], models: Models, index: int, held_bytes: int, left: Int64s) -> int:
        """Most bytes that are live during a pass of a token that isn't the first of its kind."""
        (before, at_before), (label, point) = steps[index - 1], steps[index]
        own = self._rounded(models[before].sizes.at(at_before))
        handed = np.concatenate([[0], own, left])[models[before].events.left]
        sizes = np.concatenate([[0], self._rounded(models[label].sizes.at(point)), handed])
        events = models[label].events.events
        return held_bytes + int(handed.sum() + np.cumsum(np.sign(events) * sizes[np.abs(events)]).max(initial=0))

    def _live(self, run: Run) -> _Live:
        sizes = self._rounded(np.where(run.categories == WORKSPACE, self._workspace_bytes, run.sizes))
        live = np.cumsum(np.sign(run.events) * sizes[np.abs(run.events)])
        return _Live(top=int(live.max(initial=0)), end=int(live[-1]) if len(live) else 0, sizes=sizes)

    # -- work --------------------------------------------------------------------------------------------------------

    def prefill_ops(self, shape: Shape, new_tokens: int = 2) -> list[Op]:
        """The operators of the prompt's passes."""
        start = self.start_of(shape, new_tokens)
        steps = list(run_steps(self.facts, shape, self._passes(shape, 1)))
        return [op for label, point in steps[1:] for op in self._model(start, label).ops_at(point)]

    def token_ops(self, shape: Shape, past: int, new_tokens: int = 2) -> list[Op]:
        """The operators of a token that finds ``past`` tokens in the cache."""
        start = self.start_of(shape, new_tokens)
        return self._model(start, _label(self.facts, TOKEN, past + 1)).ops_at((shape[0], past + 1))
