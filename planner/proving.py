"""A request proved on a device: what its trials run, under which cap, and the search that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median_low
from typing import Any

from planner.config import TrainingConfig
from planner.expected_gain import Target
from planner.measure.environment import trial_environment
from planner.measure.protocol import TrialSpec
from planner.measure.runner import Limits, TrialRunner
from planner.measured_search import candidates_of, measured_search, study_name
from planner.measurements import MeasurementStore, workload_key
from planner.progress import Progress
from planner.question import Question
from planner.request import PlanRequest
from planner.search import SearchResult, Trial
from planner.space import Space
from planner.study import SharedStudy
from planner.units import format_bytes, round_up
from planner.whole_run import later_bytes, lengths_of, measured_run


def trial_spec(question: Question, config: TrainingConfig) -> TrialSpec:
    """What a trial of this configuration runs, capped so that a whole run stays under the ceiling."""
    simulator, device = question.simulator, question.device
    assert device is not None
    lengths, _ = lengths_of(simulator, config)
    return TrialSpec(
        workload=simulator.workload,
        config=config,
        device=device.device,
        ceiling_bytes=cap_bytes(question, config),
        context_bytes=device.context_bytes,
        expected_used_bytes=device.total_bytes - device.free_bytes,
        # lengths of multiples of 16, as most batches are once padded
        typical_seq_len=min(config.seq_len, round_up(median_low(lengths.tokens), 16)),
        seed=question.request.seed,
    )


def cap_bytes(question: Question, config: TrainingConfig) -> int:
    """What a trial may hold, context included: the ceiling less the margin and what is kept free, and less what the
    simulator says that later phases need beyond the trial's own steps. What stays within it makes a plan that fits.
    """
    simulator = question.simulator
    return simulator.budget.process_bytes(config) - later_bytes(simulator, config)


@contextmanager
def trial_runner(request: PlanRequest, device: str) -> Iterator[TrialRunner]:
    """What runs a request's trials."""
    limits = Limits() if request.trial_timeout is None else replace(Limits(), timeout_s=request.trial_timeout)
    with TrialRunner(trial_environment(device, request.allocator), limits) as runner:
        yield runner


def prove(
    question: Question,
    space: Space,
    simulated: SearchResult,
    *,
    progress: Progress,
    about: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    worker: bool = False,
) -> SearchResult:
    """The simulated search's configurations, as trials on the device find them.

    ``limits`` are ``trials`` and ``timeout_s`` of this process; ``about`` is what a worker that joins has to know.
    Raises TrialError when trials fail and none runs, InputError for a storage that can't be used.
    """
    device, request, simulator = question.device, question.request, question.simulator
    assert device is not None
    key = question.store_key
    kind = str(key["kind"])
    candidates = candidates_of(simulated, simulator, kind=kind, ceiling_of=simulator.budget.process_bytes)
    target = Target(workload=workload_key(simulator.workload), kind=kind)
    with trial_runner(request, device.device) as runner:
        result = measured_search(
            space,
            simulated,
            candidates,
            target,
            measure=lambda config: runner.run(trial_spec(question, config)),
            store=MeasurementStore(key),
            study=_study(question, space, target, about, limit_s=runner.limits.timeout_s),
            exact_ceiling=lambda config: cap_bytes(question, config),
            worker=worker,
            progress=progress,
            **(limits or {}),
        )
    if result.interrupted and not result.measured:
        return replace(simulated, interrupted=True, stopped=result.stopped, run=result.run, problems=result.problems)
    result.trials = [_with_run(trial, question) for trial in result.trials]
    return result


def _study(
    question: Question, space: Space, target: Target, about: dict[str, Any] | None, *, limit_s: float
) -> SharedStudy:
    """The study of everything that decides the outcome; what is free on a host, and what a process holds, don't."""
    request = question.request
    decides = {"vram_bytes": request.vram_bytes, "headroom_bytes": request.headroom_bytes, "seed": request.seed}
    name = study_name(
        space, target, question.store_key, {**decides, "allocator": request.allocator, "risk": request.risk}
    )
    return SharedStudy(request.storage, name=name, space=space.values, about=about, limit_s=limit_s, seed=request.seed)


def _with_run(trial: Trial, question: Question) -> Trial:
    """A measured trial that fits, with the memory of the whole run by what it measured."""
    if trial.measured is None or trial.status != "fits":
        return trial
    run = measured_run(question.simulator, trial.config, trial.measured)
    if run.fits:
        return replace(trial, run=run)
    over = format_bytes(run.total_bytes - run.ceiling_bytes)
    return replace(trial, run=run, status="exceeds", reason=f"the trial fits; {over} over the ceiling later in a run")
