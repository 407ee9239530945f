"""Memory and work of text generation as functions of the batch, the prompt and the tokens written.

The first forward passes of small batches are recorded. What each kind of pass allocates is fitted by polynomials of
the batch and of the tokens that the cache holds after it, and a run of any size is laid out from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from planner.inference.pass_fitting import Fitting, Models, PassModel, Record
from planner.inference.pass_kinds import (
    ANY_RESIDUE,
    TOKEN,
    Beginning,
    GenerationFacts,
    Label,
    Start,
    Step,
    label_of,
    prompt_chunks,
    run_steps,
    start_of,
)
from planner.inference.unrolling import (
    BEFORE,
    PASS,
    PREFETCHED,
    RUN_CATEGORY_NAMES,
    Int64s,
    Layout,
    RecordedPass,
    Run,
    recorded_passes,
    tokens,
    unrolled,
)
from planner.memory.allocator import AllocatorSettings
from planner.memory.host import HostSettings, allocator_for, block_bytes
from planner.memory.model import Peak
from planner.memory.polynomials import NotPolynomialError, Shape
from planner.recording.record import WORKSPACE, Recording

__all__ = ["Beginning", "GenerationFacts", "GenerationModel", "PassModel", "prompt_chunks"]

_RECORDED_TOKENS = 8
"""Tokens that are recorded of a run whose sizes follow no polynomial."""


class _Live(NamedTuple):
    """Live bytes of a run, sizes rounded."""

    top: int
    end: int
    sizes: Int64s


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
        models = self._models("start", start._replace(prompt=0))  # it holds for prompts of all lengths
        if models is not None and label.kind == TOKEN and label not in models:
            models = self._models(
                "tokens", start._replace(residue=ANY_RESIDUE, chunks=1, remainder=0, beyond=label.beyond)
            )
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
        """From a recording at the run's own size: of all of it where it is short."""
        passes = self._passes(shape, new_tokens) + 1
        chunks = len(prompt_chunks(self.facts, shape[1]))
        recording = self._record(Beginning(*shape, new_tokens, min(passes, chunks + _RECORDED_TOKENS)))
        return unrolled(recording, passes=passes - 1)

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
        start = start_of(self.facts, shape, new_tokens)
        steps = list(run_steps(self.facts, Beginning(*shape, new_tokens, self._passes(shape, new_tokens) + 1)))
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
            reserved_bytes=self._reserved(run, sizes) or allocator.peak_reserved_bytes,
            breakdown=self._by_category(run, sizes, top),
            phase=self._phase([name for name, start in run.marks if start <= top][-1], shape),
        )

    def _reserved(self, run: Run, sizes: Int64s) -> int:
        """Of a run on two streams, each with a pool of its own (CUDACachingAllocator.cpp); 0 where there is one.

        What is reserved never goes down, so the peaks add up.
        """
        other = run.categories[np.abs(run.events)] == PREFETCHED
        if not other.any() or isinstance(self.settings, HostSettings):
            return 0
        pools = [allocator_for(self.settings) for _ in range(2)]
        for pool, mine in zip(pools, (other, ~other), strict=True):
            pool.run(run.events[mine], sizes)
        return sum(pool.peak_reserved_bytes for pool in pools)

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
        found = dict.fromkeys(RUN_CATEGORY_NAMES, 0)
        for name, amount in zip(RUN_CATEGORY_NAMES, live, strict=True):
            found[name] += int(amount)
        return found

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

    def prompt_passes(self, shape: Shape, new_tokens: int = 2) -> list[tuple[PassModel, Shape]]:
        """The passes of the prompt, each with where its sizes are to be asked for. Raises RecordingError."""
        passes = self._passes(shape, 1)
        start = start_of(self.facts, shape, new_tokens)
        steps = list(run_steps(self.facts, Beginning(*shape, new_tokens, passes)))[1:]
        try:
            return [(self._model(start, label), point) for label, point in steps]
        except NotPolynomialError:
            recorded = recorded_passes(self._record(Beginning(*shape, new_tokens, passes + 1)))
            return [(PassModel.constant(one), shape) for one in recorded[1 : passes + 1]]

    def token_pass(self, shape: Shape, past: int, new_tokens: int = 2) -> tuple[PassModel, Shape]:
        """The pass of a token that finds ``past`` tokens in the cache, two or more, and where to ask for its sizes.

        Raises RecordingError.
        """
        start, point = start_of(self.facts, shape, new_tokens), (shape[0], past + 1)
        try:
            return self._model(start, label_of(self.facts, TOKEN, past + 1)), point
        except NotPolynomialError:
            return PassModel.constant(self._recorded_token(shape, past, start)), point

    def _recorded_token(self, shape: Shape, past: int, start: Start) -> RecordedPass:
        """The second token after a prompt, or a decoder's beginning, of one token less than ``past``."""
        batch, prompt = shape
        if self.facts.encodes:
            return recorded_passes(self._record(Beginning(batch, prompt, past + 8, 4, past - 1)))[3]
        passes = len(prompt_chunks(self.facts, past - 1))
        new_tokens = start.room + 2 - past if start.room else 8
        return recorded_passes(self._record(Beginning(batch, past - 1, new_tokens, passes + 3)))[passes + 2]
