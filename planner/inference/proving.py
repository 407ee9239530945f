"""An inference request proved on a device: what its trials run, under which cap, and the search that runs them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median, median_low

import numpy as np

from planner.budget import Memory
from planner.config import InferenceConfig
from planner.expected_gain import WORTH_A_TRIAL, Candidate, Target
from planner.inference.question import InferenceQuestion
from planner.inference.search import InferenceResult, InferenceTrial
from planner.inference.simulation import InferenceSimulator
from planner.inference.space import InferenceSpace
from planner.inference.timing import seconds_over, typical_shape
from planner.measure.protocol import Measurement, TrialSpec
from planner.measure.runner import TrialRunner
from planner.measured_search import candidates_of, measured_search
from planner.measurements import MeasurementStore, digest, workload_key
from planner.memory.polynomials import Shape
from planner.progress import Progress
from planner.proving import trial_runner
from planner.residuals import structure_of
from planner.study import SharedStudy
from planner.units import format_bytes, round_up
from planner.whole_run import run_by_measured

InferenceCandidate = Candidate[InferenceConfig]
LENGTHS_MULTIPLE = 16
"""Most batches' width, once padded."""


@dataclass(frozen=True)
class _MadeSpace:
    """A space whose configurations are those that were looked at, with what is found out about each: where offloaded
    layers are, what a batch costs beside its tokens."""

    space: InferenceSpace
    made: Mapping[InferenceConfig, InferenceConfig]

    @classmethod
    def of(cls, space: InferenceSpace, simulated: InferenceResult) -> _MadeSpace:
        configs = [trial.config for trial in simulated.trials]
        unmade = {"layers_on_card": None, "embedding_on_card": True, "overhead_tokens": 0, "prefix_cache_bytes": 0}
        return cls(space, {config.model_copy(update=unmade): config for config in configs})

    @property
    def values(self) -> Mapping[str, Sequence[str]]:
        return self.space.values

    @property
    def size(self) -> int:
        return self.space.size

    def configuration(self, chosen: Mapping[str, str]) -> InferenceConfig:
        config = self.space.configuration(chosen)
        return self.made.get(config, config)

    def least(self) -> Iterator[dict[str, str]]:
        return self.space.least()


def trial_spec(question: InferenceQuestion, config: InferenceConfig) -> TrialSpec:
    """What a trial of this configuration runs, capped so that a whole run stays under the ceiling."""
    simulator, device = question.simulator, question.device
    assert device is not None
    return TrialSpec(
        workload=simulator.workload,
        config=config,
        device=device.device,
        ceiling_bytes=cap_bytes(question, config),
        context_bytes=device.context_bytes,
        expected_used_bytes=device.total_bytes - device.free_bytes,
        # a generated batch takes long, and most of it is its tokens, whatever the prompts' lengths
        typical_seq_len=None if config.max_new_tokens else typical_seq_len(simulator, config),
        seed=question.request.seed,
    )


def typical_seq_len(simulator: InferenceSimulator, config: InferenceConfig) -> int:
    """A length of the texts' middle."""
    return min(config.seq_len, round_up(median_low(simulator.texts.tokens), LENGTHS_MULTIPLE))


def cap_bytes(question: InferenceQuestion, config: InferenceConfig) -> int:
    """What a trial may hold, context included: the ceiling less the margin and what is kept free, and less what the
    simulator says that a run over many lengths needs beyond the trial's own batches.
    """
    simulator = question.simulator
    run, batch = simulator.whole_run(config), simulator.memory(config)
    later = max(0, run.peak_reserved_bytes - batch.peak_reserved_bytes)
    return simulator.budget.process_bytes(config) - later


class Prover:
    """Runs the best configurations of each rung; what --trials and --timeout allow is for all rungs together."""

    def __init__(self, question: InferenceQuestion, progress: Progress) -> None:
        self._question, self._progress = question, progress
        self._began = time.monotonic()

    def __call__(self, space: InferenceSpace, simulated: InferenceResult, run_before: int) -> InferenceResult:
        """Raises TrialError when trials fail and none runs."""
        request = self._question.request
        spent_s = time.monotonic() - self._began
        return prove(
            self._question,
            space,
            simulated,
            progress=self._progress,
            trials=None if request.trials is None else max(0, request.trials - run_before),
            timeout_s=None if request.timeout is None else max(0.0, request.timeout - spent_s),
        )


def prove(
    question: InferenceQuestion,
    space: InferenceSpace,
    simulated: InferenceResult,
    *,
    progress: Progress,
    trials: int | None = None,
    timeout_s: float | None = None,
) -> InferenceResult:
    """The simulated search's configurations, as trials on the device find them.

    ``trials`` and ``timeout_s`` bound what is run here. Raises TrialError when trials fail and none runs.
    """
    device, request, simulator = question.device, question.request, question.simulator
    assert device is not None
    key = question.store_key
    target = Target(workload=workload_key(simulator.workload), kind=str(key["kind"]))
    found = candidates_of(simulated, simulator, kind=target.kind, ceiling_of=simulator.budget.process_bytes)
    candidates, left_out = worth_measuring(found)
    store: MeasurementStore[InferenceConfig] = MeasurementStore(key)
    with trial_runner(request, device.device) as runner:
        result = measured_search(
            _MadeSpace.of(space, simulated),
            simulated,
            candidates,
            target,
            measure=partial(_measured, runner, question),
            store=store,
            study=_study(question, space, target, limit_s=runner.limits.timeout_s),
            exact_ceiling=lambda config: cap_bytes(question, config),
            trials=trials,
            timeout_s=timeout_s,
            progress=progress,
        )
    if result.interrupted and not result.measured:
        return replace(simulated, interrupted=True, stopped=result.stopped, run=result.run, problems=result.problems)
    looked_at = [_left_out(trial, left_out) for trial in result.trials]
    result.trials = [_with_run(trial, simulator) for trial in looked_at]
    return result


def _measured(runner: TrialRunner, question: InferenceQuestion, config: InferenceConfig) -> Measurement:
    return at_planned_lengths(runner.run(trial_spec(question, config)), question.simulator, config)


def worth_measuring(
    candidates: Sequence[InferenceCandidate],
) -> tuple[list[InferenceCandidate], dict[InferenceConfig, InferenceCandidate]]:
    """Those whose batch is predicted to gain anything, and of the others each with the smaller one that is as fast.

    Once the device is busy a larger batch is no faster, and its trial takes as much longer as it is larger.
    """
    kept: dict[str, InferenceCandidate] = {}
    chosen, left_out = [], {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.config.micro_batch_size):
        structure = structure_of(candidate.config)
        smaller = kept.get(structure)
        if smaller and candidate.tokens_per_s < (1 + WORTH_A_TRIAL) * smaller.tokens_per_s:
            left_out[candidate.config] = smaller
            continue
        kept[structure] = candidate
        chosen.append(candidate)
    return chosen, left_out


def _left_out(trial: InferenceTrial, left_out: Mapping[InferenceConfig, InferenceCandidate]) -> InferenceTrial:
    smaller = left_out.get(trial.config)
    if smaller is None or trial.measured is not None or trial.status != "pruned":
        return trial
    than = f"a batch of {smaller.config.micro_batch_size}"
    return replace(trial, reason=f"not run: predicted to be less than {WORTH_A_TRIAL:.0%} faster than {than}")


def _study(question: InferenceQuestion, space: InferenceSpace, target: Target, *, limit_s: float) -> SharedStudy:
    """The study of everything that decides the outcome; what is free on a host, and what a process holds, don't."""
    request, context = question.request, space.context
    decides = {
        "mode": "infer",
        "workload": target.workload,
        "device": question.store_key,
        "values": {field: list(options) for field, options in space.values.items()},
        "shape": [question.seq_len, space.max_new_tokens, space.max_tokens, space.prefix_tokens, context.max_sequences],
        "texts": digest(question.simulator.texts.tokens),
        "limits": [request.vram_bytes, request.headroom_bytes, request.seed, request.allocator, request.risk],
    }
    name = f"vramplan-{digest(decides)}"
    return SharedStudy(None, name=name, space=space.values, limit_s=limit_s, seed=request.seed)


# -- what a measurement says of a run --------------------------------------------------------------------------------


def at_planned_lengths(measurement: Measurement, simulator: InferenceSimulator, config: InferenceConfig) -> Measurement:
    """The measurement with its speed over texts of the planned lengths.

    A trial runs batches of two lengths. What they took over what was predicted corrects the predictions of the others:
    the ratio's logarithm is taken to be linear in the length between the two, and constant beyond them.
    """
    if not measurement.ok or measurement.step_ms is None:
        return measurement
    predicted, seconds_of = simulator.time(config), lru_cache(partial(simulator.batch_seconds, config))
    at_longest = measurement.step_ms / predicted.step_ms
    shape = typical_shape(config, typical_seq_len(simulator, config))
    if not measurement.typical_micro_batch_ms or shape[1] >= config.seq_len:
        return replace(measurement, tokens_per_s=predicted.tokens_per_s / at_longest)
    at_typical = median(measurement.typical_micro_batch_ms) / (1e3 * seconds_of(shape))
    points, logarithms = (shape[1], config.seq_len), (math.log(at_typical), math.log(at_longest))

    def corrected(shape: Shape) -> float:
        return math.exp(np.interp(shape[1], points, logarithms)) * seconds_of(shape)

    lengths = simulator.window
    slower = seconds_over(lengths, config, corrected) / seconds_over(lengths, config, seconds_of)
    return replace(measurement, tokens_per_s=predicted.tokens_per_s / slower)


def measured_run(simulator: InferenceSimulator, config: InferenceConfig, measured: Measurement) -> Memory:
    """The whole run by what a trial measured: what the simulator says that other lengths add goes on top of it.

    What the process held beyond the allocator is the context.
    """
    run, batch = simulator.whole_run(config), simulator.memory(config)
    return run_by_measured(simulator.budget, config, run=run, trial=batch, measured=measured)


def _with_run(trial: InferenceTrial, simulator: InferenceSimulator) -> InferenceTrial:
    """A measured trial that fits, with the memory of the whole run by what it measured."""
    if trial.measured is None or trial.status != "fits":
        return trial
    run = measured_run(simulator, trial.config, trial.measured)
    trial = replace(trial, run=run, time=trial.time or simulator.time(trial.config))
    if run.fits:
        return trial
    over = format_bytes(run.total_bytes - run.ceiling_bytes)
    return replace(trial, status="exceeds", reason=f"the trial fits; {over} over the ceiling later in a run")
