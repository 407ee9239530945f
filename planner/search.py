"""The search: Optuna looks for the fastest configuration whose memory stays under the ceiling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any, Generic, Protocol

from typing_extensions import TypeVar

from planner.budget import Budget, Memory
from planner.config import C, TrainingConfig, passes_of
from planner.inference.timing import measured_time
from planner.interrupts import interrupts_as_they_are
from planner.levers import conflict
from planner.measurements import log_noise
from planner.simulation import Simulator
from planner.space import Space
from planner.timing import InferenceTime, Time
from planner.units import format_bytes

if TYPE_CHECKING:
    import optuna

    from planner.measure.protocol import Measurement

EXHAUSTIVE_UP_TO = 600
"""Spaces of at most this many configurations are looked at whole: a simulated trial costs milliseconds."""
DEFAULT_TRIALS = 400
"""Trials of a larger space when the request gives no number."""


Made_co = TypeVar("Made_co", covariant=True)
Asked_contra = TypeVar("Asked_contra", contravariant=True)


@dataclass(frozen=True, kw_only=True)
class Trial(Generic[C]):
    """One configuration that was looked at."""

    config: C
    """The configuration."""
    memory: Memory | None
    """Predicted memory; None where it was not worth computing."""
    time: Time | None
    """Predicted time; None where the configuration doesn't fit."""
    status: str
    """fits, exceeds, or pruned; of a measured one fits, oom, or error."""
    reason: str
    """Why it doesn't fit, or was not looked at closely, or not measured."""
    run: Memory | None = None
    """Memory of the whole run, with its phases; None where only two steps were looked at."""
    measured: Measurement | None = None
    """What a trial on the device measured; None where none was run."""

    @property
    def known(self) -> Memory | None:
        """The memory of as much of the run as was looked at."""
        return self.run or self.memory

    @property
    def best_time(self) -> Time | None:
        """As measured where it was, else as predicted."""
        found = self.measured
        if found is None or found.step_ms is None or found.tokens_per_s is None:
            return self.time
        if isinstance(self.time, InferenceTime):
            return measured_time(self.time, found)
        return Time(
            step_ms=found.step_ms,
            micro_batch_ms=median(found.micro_batch_ms),
            update_ms=median(found.update_ms),
            tokens_per_s=found.tokens_per_s,
            source="measured",
        )


@dataclass
class SearchResult(Generic[C]):
    """All trials of one search; ``best`` is the fastest that fits."""

    trials: list[Trial[C]] = field(default_factory=list)
    run: int = 0
    """Trials that were run on the device for this result, failed ones included."""
    interrupted: bool = False
    """Whether the user stopped it."""
    stopped: str = ""
    """Why no more trials were run, one clause; empty for a simulated search."""
    problems: list[str] = field(default_factory=list)
    """What went wrong without stopping it, a line each."""

    @property
    def measured(self) -> list[Trial[C]]:
        """Trials with a measurement."""
        return [trial for trial in self.trials if trial.measured]

    @property
    def fitting(self) -> list[Trial[C]]:
        """Trials that fit, fastest first; among equally fast ones the one that needs least memory.

        Where anything was measured, only what was.
        """
        if self.measured:
            return _by_measured_speed([trial for trial in self.measured if trial.status == "fits"])
        return sorted((t for t in self.trials if t.status == "fits"), key=_preference)

    @property
    def best(self) -> Trial[C] | None:
        """The fastest trial that fits."""
        return next(iter(self.fitting), None)

    def add(self, found: SearchResult[C]) -> None:
        """Another part of the search: its trials besides those before, and how it ended."""
        self.trials += found.trials
        self.run += found.run
        self.problems += found.problems
        self.interrupted, self.stopped = found.interrupted, found.stopped

    def as_dict(self) -> dict[str, Any]:
        """How it went on a device: the field ``search`` of plan.json."""
        return {
            "trials_run": self.run,
            "trials_kept": max(0, len(self.measured) - self.run),
            "interrupted": self.interrupted,
            "ended": self.stopped,
            "problems": self.problems,
        }

    def closest(self, simulator: Answers[C]) -> Trial[C] | None:
        """The trial that needs least memory, with its exact need; None when no trial's need is known.

        Many trials know a lower bound only: the exact need is found in the bounds' order, until a bound is above it.
        """
        best: Trial[C] | None = None
        for trial in sorted((t for t in self.trials if t.memory), key=_known_bytes):
            if best is not None and _known_bytes(trial) >= _known_bytes(best):
                break
            exact = replace(trial, memory=simulator.memory_of_budget(trial.config))
            if best is None or _known_bytes(exact) < _known_bytes(best):
                best = exact
        return best and replace(best, run=simulator.whole_run(best.config))

    def settle(self, simulator: Answers[C]) -> None:
        """Hold the fastest trials against their whole runs, until one fits; those before it exceed the ceiling."""
        for trial in self.fitting:
            run = simulator.whole_run(trial.config)
            settled = replace(trial, run=run)
            if not run.fits:
                settled = replace(settled, time=None, status="exceeds", reason=_over_later(run))
            self.trials[self.trials.index(trial)] = settled
            if run.fits:
                return


def _over_later(run: Memory) -> str:
    """Why a trial whose first steps fit does not."""
    phase = max(run.phases, key=lambda name: run.phases[name]["peak_reserved_bytes"])
    over = format_bytes(run.total_bytes - run.ceiling_bytes)
    when = "over an epoch of different lengths" if phase == "epoch" else f"in phase {phase.replace('_', ' ')}"
    return f"two steps fit; {over} over the ceiling {when}"


def _known_bytes(trial: Trial[C]) -> int:
    assert trial.known is not None
    return trial.known.total_bytes


def _preference(trial: Trial[C]) -> tuple[float, int]:
    assert trial.time is not None and trial.memory is not None
    # speeds that first differ in the fifth digit are the same to a time model: take the smaller footprint
    return (-float(f"{trial.time.tokens_per_s:.4g}"), trial.memory.total_bytes)


def _by_measured_speed(trials: list[Trial[C]]) -> list[Trial[C]]:
    """Fastest first, but in front the smallest of those that the measurements' noise can't tell from the fastest."""
    ordered: list[Trial[C]] = sorted(trials, key=_measured_preference)
    if not ordered:
        return []
    tied = [trial for trial in ordered if _is_a_tie(trial, ordered[0])]
    first: Trial[C] = min(tied, key=_measured_bytes)
    ordered.insert(0, ordered.pop(next(i for i, trial in enumerate(ordered) if trial is first)))
    return ordered


def _is_a_tie(trial: Trial[C], fastest: Trial[C]) -> bool:
    """Whether the speeds differ by less than the standard error of the difference, and than what is worth a trial."""
    from planner.expected_gain import WORTH_A_TRIAL

    errors = [log_noise(t.measured, passes_of(t.config)) for t in (trial, fastest) if t.measured]
    slower = _measured_speed(fastest) / _measured_speed(trial) - 1 if _measured_speed(trial) else math.inf
    return trial is fastest or slower < min(math.hypot(*errors), WORTH_A_TRIAL)


def _measured_preference(trial: Trial[C]) -> tuple[float, int]:
    return (-_measured_speed(trial), _measured_bytes(trial))


def _measured_speed(trial: Trial[C]) -> float:
    return (trial.measured and trial.measured.tokens_per_s) or 0.0


def _measured_bytes(trial: Trial[C]) -> int:
    return (trial.measured and trial.measured.peak_reserved_bytes) or 0


class SearchSpace(Protocol[Made_co]):
    """What is searched: fields with their values, and the configuration that a choice of them is."""

    @property
    def values(self) -> Mapping[str, Sequence[str]]:
        """Field to its values."""

    @property
    def size(self) -> int:
        """Number of configurations."""

    def configuration(self, chosen: Mapping[str, str]) -> Made_co:
        """The configuration with these values."""

    def least(self) -> Iterator[dict[str, str]]:
        """The values of configurations than which no other claims to need less memory."""


class Answers(Protocol[Asked_contra]):
    """What answers for configurations."""

    @property
    def budget(self) -> Budget:
        """The ceiling and what is kept off it."""

    def memory_of_budget(self, config: Asked_contra) -> Memory:
        """The peak over every shape that the token budget lets through."""

    def whole_run(self, config: Asked_contra) -> Memory:
        """The peak over all phases of a run."""


def search(
    space: Space, simulator: Simulator, *, trials: int | None = None, timeout_s: float | None = None, seed: int = 0
) -> SearchResult:
    """Look for the fastest training configuration of the space that fits."""
    look = partial(evaluate, simulator=simulator)
    return explore(space, look, simulator.budget, trials=trials, timeout_s=timeout_s, seed=seed)


def explore(
    space: SearchSpace[C],
    look: Callable[[C], Trial[C]],
    budget: Budget,
    *,
    trials: int | None = None,
    timeout_s: float | None = None,
    seed: int = 0,
) -> SearchResult[C]:
    """Look for the fastest configuration of the space that fits, where ``look`` says of each what it needs.

    A small space is enumerated, by Optuna's grid sampler; a larger one, or one with fewer trials than configurations,
    is sampled with TPE, which learns from the constraint. The ceiling enters as ``trial.set_constraint``: at most zero
    is feasible.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a failing trial is told by the exception that ends the search
    result: SearchResult[C] = SearchResult()
    if trials is None and (hopeless := _none_can_fit(space, look, budget)):
        result.trials += hopeless
        return result
    count = min(space.size, trials or (space.size if space.size <= EXHAUSTIVE_UP_TO else DEFAULT_TRIALS))
    study = optuna.create_study(direction="maximize", sampler=_sampler(space.values, space.size, count, seed))
    if count < space.size:  # a few trials must not miss that something fits at all
        for chosen in islice(space.least(), 2):
            study.enqueue_trial(chosen)
    seen: set[C] = set()
    with interrupts_as_they_are():
        study.optimize(lambda trial: _objective(trial, space, look, result, seen), n_trials=count, timeout=timeout_s)
    return result


def _none_can_fit(space: SearchSpace[C], look: Callable[[C], Trial[C]], budget: Budget) -> list[Trial[C]]:
    """The trials that show that nothing in the space fits, without looking at the rest; none where something may.

    Levers' claims to lower memory hold for allocated bytes: a configuration that only its fragments keep out decides
    nothing.
    """
    looked: list[Trial[C]] = []
    for chosen in space.least():
        trial = look(space.configuration(chosen))
        memory = trial.memory
        if memory is None or memory.peak_allocated_bytes <= budget.allocator_bytes(trial.config):
            return []
        looked.append(trial)
    return looked


def _sampler(values: Mapping[str, Sequence[str]], size: int, count: int, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    if count == size:
        return optuna.samplers.GridSampler({name: list(options) for name, options in values.items()}, seed=seed)
    return optuna.samplers.TPESampler(seed=seed, multivariate=True)


def _objective(
    trial: optuna.Trial,
    space: SearchSpace[C],
    look: Callable[[C], Trial[C]],
    result: SearchResult[C],
    seen: set[C],
) -> float:
    chosen = {name: trial.suggest_categorical(name, list(options)) for name, options in space.values.items()}
    config = space.configuration(chosen)
    looked = look(config)
    if config not in seen:
        seen.add(config)
        result.trials.append(looked)
    over_bytes = looked.memory.total_bytes - looked.memory.ceiling_bytes if looked.memory else 1
    trial.set_constraint("memory", float(over_bytes))
    return looked.time.tokens_per_s if looked.time else 0.0


def evaluate(config: TrainingConfig, simulator: Simulator) -> Trial:
    """Memory and time of one configuration."""
    clash = conflict(config)
    if clash:
        return Trial(config=config, memory=None, time=None, status="pruned", reason=clash)
    in_the_way = None if config.offload == "activations" else _short_of_host_memory(config, simulator)
    if in_the_way:
        return in_the_way
    alone = config.micro_batch_size == 1 and config.effective_batch_size // config.gpus % 2 == 0
    if alone and _fits(with_micro_batch(config, 2), simulator):
        reason = "two sequences at once fit, and are never slower"
        return Trial(config=config, memory=None, time=None, status="pruned", reason=reason)
    least = simulator.at_least(config)
    memory = least or simulator.memory_of_budget(config)
    if memory.fits:
        fits = Trial(config=config, memory=memory, time=simulator.time(config), status="fits", reason="")
        return _short_of_host_memory(config, simulator) or fits
    over = format_bytes(memory.total_bytes - memory.ceiling_bytes)
    reason = f"{'at least ' if least else ''}{over} over the ceiling"
    return Trial(config=config, memory=memory, time=None, status="exceeds", reason=reason)


def _short_of_host_memory(config: TrainingConfig, simulator: Simulator) -> Trial | None:
    host = simulator.host_shortage_bytes(config)
    if host <= 0:
        return None
    reason = f"needs at least {format_bytes(host)} of host memory more than there is"
    return Trial(config=config, memory=None, time=None, status="exceeds", reason=reason)


def _fits(config: TrainingConfig, simulator: Simulator) -> bool:
    return simulator.at_least(config) is None and simulator.memory_of_budget(config).fits


def with_micro_batch(config: TrainingConfig, micro_batch_size: int) -> TrainingConfig:
    """The same configuration with another micro-batch, at the same effective batch."""
    tokens_of_a_sample = config.max_tokens_per_micro_batch // config.micro_batch_size
    return config.model_copy(
        update={
            "micro_batch_size": micro_batch_size,
            "max_tokens_per_micro_batch": micro_batch_size * tokens_of_a_sample,
            "gradient_accumulation_steps": config.effective_batch_size // (micro_batch_size * config.gpus),
        }
    )
