"""From an inference request to a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from planner.allocator_settings import LEFT_ALONE, gives_back, parse_allocator, reason_for
from planner.budget import Memory
from planner.cache import library_versions
from planner.config import InferenceConfig
from planner.errors import InputError, Problem
from planner.inference import report
from planner.inference.proving import Prover
from planner.inference.question import InferenceQuestion
from planner.inference.search import InferenceResult, InferenceTrial, search_ladder
from planner.inference.space import InferenceSpace, conflict
from planner.inference.unfitting import nothing_fits
from planner.plans import Plan, Reason
from planner.progress import Progress
from planner.report import alternatives_of, trial_rows
from planner.timing import InferenceTime


def plan_inference(question: InferenceQuestion, progress: Progress) -> Plan[InferenceConfig]:
    """The fastest way to run the model in the memory of the card. Raises NothingFitsError and RecordingError."""
    request = question.request
    prove = None if question.device is None else Prover(question, progress)
    limits = {} if prove else {"trials": request.trials, "timeout_s": request.timeout}
    space, result = search_ladder(question, progress.phase, prove, seed=request.seed, **limits)
    best = result.best
    if best is None:
        raise nothing_fits(question, result)
    progress.phase("writing the plan up")
    return _plan_of(best, question, space, result)


def estimate_inference(question: InferenceQuestion) -> tuple[InferenceConfig, Memory, InferenceTime]:
    """The one configuration that a request leaves, with memory of the whole run and time. Raises InputError."""
    simulator, space = question.simulator, next(iter(question.spaces()))
    config = space.configuration({name: options[0] for name, options in space.values.items()})
    config = simulator.placed(simulator.with_prefixes(config))
    if clash := conflict(config):
        raise InputError([Problem(argument="quantization", message=f"got {config.quantization!r}: {clash}")])
    config = simulator.settled(config)
    return config, simulator.whole_run(config), simulator.time(config)


def _plan_of(
    best: InferenceTrial, question: InferenceQuestion, space: InferenceSpace, result: InferenceResult
) -> Plan[InferenceConfig]:
    assert best.run is not None and best.best_time is not None
    simulator = question.simulator
    return Plan(
        request=question.request,
        hardware=question.card.as_dict(),
        workload=_describe(question, best),
        config=best.config,
        peak=best.run,
        time=best.best_time,
        reasons=[
            *question.reasons,
            *_outside(question, best.config, best.run),
            *report.reasons_of(best.config, question, space),
            *report.bounds_of(best.config, simulator),
        ],
        alternatives=alternatives_of(best, result, report.STRUCTURE),
        levers=report.lever_rows(best, space, simulator),
        versions=library_versions(),
        trial_rows=trial_rows(result),
        memory_rows=report.memory_rows(best.config, simulator),
        search={} if question.device is None else result.as_dict(),
    )


def _outside(question: InferenceQuestion, config: InferenceConfig, memory: Memory) -> Iterator[Reason]:
    """Why context, margin, lengths, host memory and the allocator's settings are what they are."""
    simulator, request = question.simulator, question.request
    yield Reason(field="context_bytes", value=memory.context_bytes, reason=simulator.context_reason)
    margin = simulator.budget.margin(config)
    yield Reason(field="margin_bytes", value=memory.margin_bytes, reason=margin.reason)
    lengths = request.lengths or request.data or "assumed"
    yield Reason(field="lengths", value=lengths, reason=simulator.texts.reason)
    yield from report.host_reason(config, simulator)
    why = reason_for(parse_allocator(request.allocator), device=question.card.kind)
    if question.card.kind == "cpu" and not gives_back(asdict(memory)):
        why = LEFT_ALONE
    yield Reason(field="allocator", value=request.allocator, reason=why)
    said = "as asked for" if request.long_texts else f"usual for {simulator.workload.task}"
    yield Reason(field="long_texts", value=question.long_texts, reason=said)


def _describe(question: InferenceQuestion, best: InferenceTrial) -> dict[str, Any]:
    workload, facts = question.simulator.workload, question.simulator.facts
    data = None
    if question.data is not None:
        from planner.inference.data import describe_data

        assert isinstance(best.best_time, InferenceTime)
        data = describe_data(question.data, best.config, best.best_time)
    return {
        "model": workload.spec.model_id,
        "task": workload.task,
        "architecture": facts.architecture,
        "model_type": workload.spec.model_type,
        "parameters": facts.parameters,
        "seq_len": question.seq_len,
        "num_labels": workload.num_labels,
        "vocab_size": facts.vocab_size,
        "max_new_tokens": workload.max_new_tokens,
        "long_texts": question.long_texts,
        "overlap": question.request.overlap,
        "layers": facts.layers,
        "layers_name": facts.layers_name,
        "data": data,
    }
