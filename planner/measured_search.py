"""The search on a device: few trials, each chosen by what the simulator and all earlier measurements expect of it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Generic, Protocol

from planner.budget import Budget, Memory
from planner.config import C, Config, InferenceConfig, TrainingConfig
from planner.errors import TrialError
from planner.evidence import Knowledge, over_bytes, typical_speed
from planner.expected_gain import (
    WORTH_A_TRIAL,
    Candidate,
    Evidence,
    Prospects,
    Target,
    expected_improvement,
    prospects,
)
from planner.measure.protocol import (
    OUT_OF_MEMORY,
    STATUSES,
    Measurement,
)
from planner.measurements import (
    MeasurementStore,
    digest,
)
from planner.progress import NoProgress, Progress
from planner.residuals import chance_below, memory_spread
from planner.search import Asked_contra, SearchResult, SearchSpace, Trial
from planner.space import Space
from planner.study import Claim, SharedStudy
from planner.timing import Time

GIVEN_UP_AFTER = 3
"""Configurations that failed, none of them for want of memory, before anything ran: the device or the set-up is
broken, and further trials would only say so again."""
WAIT_S = 0.2
"""Between two looks at what other workers measure, when nothing is left to run here."""
Measure = Callable[[C], Measurement]


def study_name(space: Space, target: Target, device: Mapping[str, Any], limits: Mapping[str, Any]) -> str:
    """A name for the study of everything that decides its outcome; another request gets another study.

    ``device`` is the store's key, versions included; ``limits`` whatever else trials depend on: the ceiling, seeds.
    """
    values = {field: list(options) for field, options in space.values.items()}
    batch, method = space.context.effective_batch_size, space.context.method
    key = [target.workload, target.kind, dict(device), dict(limits), values, space.seq_len, batch, method]
    return f"vramplan-{digest(key)}"


class Predicts(Protocol[Asked_contra]):
    """What predicts a trial's memory and time."""

    @property
    def budget(self) -> Budget:
        """The ceiling and what is kept off it."""

    def memory(self, config: Asked_contra) -> Memory:
        """Of what a trial runs."""

    def time(self, config: Asked_contra) -> Time:
        """Of a step."""


def candidates_of(
    simulated: SearchResult[C], simulator: Predicts[C], *, kind: str, ceiling_of: Callable[[C], int]
) -> list[Candidate[C]]:
    """What a simulated search leaves to be measured: everything but what is certain not to fit.

    ``ceiling_of`` says what a configuration's trial may take, context included.
    """
    spread, context = memory_spread(kind), simulator.budget.context_bytes
    unsure = math.hypot(spread.device, spread.workload, spread.precision, spread.levers, spread.structure)
    found = []
    for trial in simulated.trials:
        if trial.memory is None:
            continue
        ceiling = ceiling_of(trial.config)
        room, least = ceiling - context, trial.memory.peak_reserved_bytes
        if room <= 0 or chance_below(math.log(room / least), 0.0, unsure) < NEVER:
            continue
        predicted = trial.time or simulator.time(trial.config)
        found.append(
            Candidate(
                config=trial.config,
                reserved_bytes=simulator.memory(trial.config).peak_reserved_bytes,
                ceiling_bytes=ceiling,
                context_bytes=context,
                step_ms=predicted.step_ms,
                tokens_per_s=predicted.tokens_per_s,
            )
        )
    return found


NEVER = 1e-4
"""Chance of fitting below which a configuration is not even a candidate, by predictions alone. Measurements may show
that predictions are off by a little, so this is more patient than the search itself."""


def measured_search(
    space: SearchSpace[C],
    simulated: SearchResult[C],
    candidates: Sequence[Candidate[C]],
    target: Target,
    *,
    measure: Measure[C],
    store: MeasurementStore[C],
    study: SharedStudy,
    exact_ceiling: Callable[[C], int] | None = None,
    trials: int | None = None,
    timeout_s: float | None = None,
    worker: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult[C]:
    """Run the trials that are worth it; every simulated trial comes back, with its measurement where there is one.

    ``exact_ceiling`` is what a configuration's trial may take, where that takes too long to be asked of every
    candidate: theirs is then the most that it can be. ``trials`` and ``timeout_s`` bound what is run here; ``worker``:
    what is run for another process's search, whose ties are its own to settle. Measurements of all workers and those
    kept from before count as if run here. An interrupt ends it with what there is (``interrupted``). Raises TrialError
    when trials fail and nothing runs.
    """
    limits = _Limits(trials=trials, timeout_s=timeout_s, clock=clock, start=clock())
    knowledge = Knowledge(space, candidates, target, store, study, exact_ceiling)
    search = _Search(knowledge, measure, store, progress or NoProgress(), limits)
    try:
        search.go_on()
        if not worker:
            search.confirm()
    except KeyboardInterrupt:
        search.interrupted, search.stopped = True, "interrupted"
    return search.result(simulated)


@dataclass(kw_only=True)
class _Limits:
    """What may still be run here."""

    trials: int | None
    timeout_s: float | None
    clock: Callable[[], float]
    start: float
    run: int = 0

    def reached(self, typical_s: float = 0.0) -> str:
        """Which limit forbids another trial, which takes so long; empty where none does."""
        if self.trials is not None and self.run >= self.trials:
            return f"all {self.trials} trials that were allowed are run"
        if self.timeout_s is not None and (left := self.left_s()) is not None and left < max(typical_s, 1e-9):
            return f"the {self.timeout_s:g} s that were allowed are over, or too short for another trial"
        return ""

    def left_s(self) -> float | None:
        return None if self.timeout_s is None else max(self.start + self.timeout_s - self.clock(), 0.0)

    def left_trials(self, most: int) -> int:
        return most if self.trials is None else min(most, self.trials - self.run)


class _Search(Generic[C]):
    """One search while it runs."""

    def __init__(
        self,
        knowledge: Knowledge[C],
        measure: Measure[C],
        store: MeasurementStore[C],
        progress: Progress,
        limits: _Limits,
    ) -> None:
        self.known: Knowledge[C] = knowledge
        self.measure: Measure[C] = measure
        self.store: MeasurementStore[C] = store
        self.study, self.progress, self.limits = knowledge.study, progress, limits
        self.stopped, self.interrupted = "", False
        self.best_told = 0.0
        self.durations: list[float] = []
        self.problems: dict[str, None] = {}
        if knowledge.unreadable:
            self.problems[f"{knowledge.unreadable} measurements in {store.path} can't be read: left out"] = None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Run trials until none is worth it, or a limit is reached."""
        while True:
            self.study.bury()
            evidence = self.known.evidence()
            view = prospects(list(self.known.candidates.values()), evidence, self.known.target)
            if evidence.best > self.best_told:  # others' or kept: what is run here is told as it ends
                self.progress.best(evidence.best)
                self.best_told = evidence.best
            open_ones = sum(not outlook.closed for outlook in view.outlooks)
            self.progress.expect(trials=self.limits.left_trials(open_ones), seconds=self.limits.left_s())
            self.stopped = self._reason_to_stop(evidence)
            if self.stopped:
                return
            if view.next is None:
                if not evidence.pending:
                    self.stopped = _nothing_left(view)
                    return
                time.sleep(WAIT_S)
            elif self.known.settle(view.next.candidate.config):
                continue  # it may be another's turn now
            elif claim := self.study.claim(self.known.choices[view.next.candidate.config]):
                self._run(claim)

    def confirm(self) -> None:
        """Measure the best two again where noise may hide that the second is faster, by so much that it matters."""
        for _ in range(2):
            trials = self._measured_now()
            ordered = sorted((t for t in trials if t.status == "fits"), key=_speed, reverse=True)[:2]
            if len(ordered) < 2 or self.limits.reached(self._typical_s()):
                return
            errors = [self.known.noise(trial.config) for trial in ordered]
            behind = math.log(_speed(ordered[1]) / _speed(ordered[0]))
            if expected_improvement(behind, math.hypot(*errors)) < WORTH_A_TRIAL:
                return
            noisier = ordered[errors.index(max(errors))]
            if claim := self.study.claim(self.known.choices[noisier.config], repeat=True):
                self._run(claim)

    def _reason_to_stop(self, evidence: Evidence[C]) -> str:
        failures = self.known.failures()
        if len(failures) >= GIVEN_UP_AFTER and not evidence.speeds and not evidence.failed:
            return f"{len(failures)} configurations failed, and none ran"
        return self.limits.reached(self._typical_s())

    def _typical_s(self) -> float:
        return median(self.durations) if self.durations else 0.0

    def _run(self, claim: Claim) -> None:
        config = self.known.config(claim.choice)
        candidate = self.known.candidates[config]
        text = describe(config)
        self.progress.trial_started(text)
        start = self.limits.clock()
        try:
            measurement = self.measure(config)
        except BaseException:
            self.study.give_up(claim)
            raise
        self.limits.run += 1
        self.durations.append(self.limits.clock() - start)
        try:
            self._keep(claim, candidate, measurement)
        except KeyboardInterrupt:  # what was measured is not lost for that
            self._keep(claim, candidate, measurement)
            raise
        speed = measurement.tokens_per_s if measurement.ok else None
        self.best_told = max(self.best_told, speed or 0.0)
        self.progress.trial_ended(text, tokens_per_s=speed, problem="" if measurement.ok else _problem(measurement))

    def _keep(self, claim: Claim, candidate: Candidate[C], measurement: Measurement) -> None:
        problem = self.store.append(self.known.row(candidate, measurement))
        if problem:
            self.problems[problem] = None
        self.study.tell(claim, measurement, over_bytes=over_bytes(measurement, candidate))

    # -- the result --------------------------------------------------------------------------------------------------

    def _measured_now(self) -> list[Trial[C]]:
        return [
            _measured_trial(Trial(config=config, memory=None, time=None, status="", reason=""), measurements)
            for config, measurements in self.known.results().items()
        ]

    def result(self, simulated: SearchResult[C]) -> SearchResult[C]:
        """Every simulated trial, with what was measured or why it wasn't. Raises TrialError when nothing ran."""
        results, failures = self.known.results(), self.known.failures()
        if failures and not results and not self.interrupted:
            raise TrialError(_all_failed(failures))
        view = prospects(list(self.known.candidates.values()), self.known.evidence(), self.known.target)
        not_run = {outlook.candidate.config: outlook for outlook in view.outlooks}
        found = []
        for trial in simulated.trials:
            if measurements := results.get(trial.config) or failures.get(trial.config):
                found.append(_measured_trial(trial, measurements))
            elif trial.status == "fits":
                outlook = not_run.get(trial.config)
                why = outlook.closed if outlook else ""
                if outlook and not why:
                    worth = f"expected to gain {outlook.gain:.1%}; " if math.isfinite(outlook.gain) else ""
                    why = f"not run: {worth}{self.stopped}"
                found.append(replace(trial, status="pruned", reason=why or f"not run: {self.stopped}"))
            else:
                found.append(trial)
        problems = [*self.problems, *([self.study.problem] if self.study.problem else [])]
        return SearchResult(
            trials=found, run=self.limits.run, interrupted=self.interrupted, stopped=self.stopped, problems=problems
        )


def _speed(trial: Trial[Any]) -> float:
    return (trial.measured and trial.measured.tokens_per_s) or 0.0


def _measured_trial(trial: Trial[C], measurements: Sequence[Measurement]) -> Trial[C]:
    """With the last measurement; of one that ran several times, the one nearest to their mean, at the mean's speed."""
    last = measurements[-1]
    if not last.ok:
        status = "oom" if last.status in OUT_OF_MEMORY else "error"
        return replace(trial, status=status, reason=_problem(last), measured=last)
    ran, speed = [m for m in measurements if m.ok], typical_speed(measurements)
    nearest = min(ran, key=lambda m: abs((m.tokens_per_s or 0.0) - speed))
    if len(ran) > 1 and nearest.step_ms and nearest.tokens_per_s:
        step_ms = nearest.step_ms * nearest.tokens_per_s / speed
        nearest = replace(nearest, tokens_per_s=speed, step_ms=step_ms)
    return replace(trial, status="fits", reason="", measured=nearest)


def _problem(measurement: Measurement) -> str:
    """What happened, in a clause."""
    return measurement.reason or STATUSES[measurement.status]


def _nothing_left(view: Prospects[Any]) -> str:
    if any(not outlook.closed for outlook in view.outlooks):
        return f"all that is left is expected to gain {view.gain:.1%}, under {WORTH_A_TRIAL:.0%}"
    return "nothing is left that could be faster and fit"


def _all_failed(failures: Mapping[Any, Sequence[Measurement]]) -> str:
    """Every kind of failure once, with how often it came."""
    ended = [measurement for measurements in failures.values() for measurement in measurements]
    counts = Counter(measurement.status for measurement in ended)
    lines = [f"{len(ended)} trials of {len(failures)} configurations were run, and all failed:"]
    for status, count in counts.most_common():
        example = next(m.reason for m in ended if m.status == status)
        lines.append(f"  {count} x {status}: {STATUSES[status]}{f' ({example})' if example else ''}")
    return "\n".join(lines)


def describe(config: Config) -> str:
    """A configuration in a few words, what is as usual left out."""
    own = _inference_words(config) if isinstance(config, InferenceConfig) else _training_words(config)
    attention = [config.attention] if config.attention != "sdpa" else []
    offload = [f"offload {config.offload}"] if config.offload != "none" else []
    batch = "batch" if isinstance(config, InferenceConfig) else "micro-batch"
    return ", ".join([config.precision, *own, *attention, *offload, f"{batch} {config.micro_batch_size}"])


def _training_words(config: TrainingConfig) -> list[str]:
    words: list[str] = [config.optimizer]
    words += [f"checkpointing {config.checkpointing}"] if config.checkpointing != "none" else []
    return words + ([f"{config.loss} loss"] if config.loss != "standard" else [])


def _inference_words(config: InferenceConfig) -> list[str]:
    words = [f"quantization {config.quantization}"] if config.quantization != "none" else []
    words += [f"{config.kv_cache} cache"] if config.kv_cache not in ("none", "dynamic") else []
    return words + ([f"{config.prefill_chunk_tokens} tokens a pass"] if config.prefill_chunk_tokens else [])
