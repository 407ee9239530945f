"""``plan()`` and ``estimate()``: from arguments to an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.allocator_settings import parse_allocator, reason_for
from planner.budget import Memory
from planner.cache import library_versions
from planner.config import Config, LoraSettings, TrainingConfig
from planner.devices import find_device
from planner.errors import InputError, Problem
from planner.inference.planning import estimate_inference, plan_inference
from planner.inference.question import InferenceQuestion
from planner.inference.question import look_up as look_up_inference
from planner.measure.environment import trial_environment
from planner.measure.protocol import DeviceFacts
from planner.measure.runner import TrialRunner
from planner.measurements import device_key
from planner.plans import Plan, Reason
from planner.progress import NoProgress, Progress
from planner.proving import prove
from planner.question import Question, look_up
from planner.report import alternatives_of, lever_rows, memory_rows, reasons_of, trial_rows
from planner.request import PlanRequest, make_request
from planner.search import SearchResult, Trial, search
from planner.simulation import Simulator
from planner.space import Space, has_last_resort, make_space, rungs
from planner.study import known_studies
from planner.timing import Time
from planner.unfitting import nothing_fits
from planner.whole_run import epoch_reason, whole_run


@dataclass(frozen=True)
class Estimate:
    """Memory and time of one given configuration."""

    config: Config
    """The configuration."""
    memory: Memory
    """What it needs."""
    time: Time
    """How long a step takes."""

    def __getattr__(self, name: str) -> Any:
        """The fields of ``memory`` and ``time`` are attributes too: ``estimate(...).total_bytes``."""
        if name.startswith("__") or name in ("memory", "time"):
            raise AttributeError(name)
        return getattr(self.memory if hasattr(self.memory, name) else self.time, name)


def plan(*, progress: Progress | None = None, **arguments: Any) -> Plan[Any]:
    """Find the fastest way to train a model, or with ``mode="infer"`` to run it, in the memory of a card.

    Arguments are the fields of PlanRequest (``model`` and ``vram`` are needed), the command's options by other
    names: ``plan(model="bert-base-uncased", vram="8GB")``. Where there is a device, the best configurations are run on
    it; ``progress`` is told. An interrupt (KeyboardInterrupt) among these trials ends them: the plan is the best so
    far and says so (``interrupted``). Raises InputError with every problem of the arguments, NothingFitsError when no
    configuration fits, RecordingError when the model's step can't be simulated, TrialError when every trial fails.
    """
    progress = progress or NoProgress()
    request = make_request(**arguments)
    progress.phase("looking for a device")
    if request.mode == "infer":
        return plan_inference(_inference_question(request, progress), progress)
    question = _question(request, progress)
    space, result = _search_ladder(question, progress)
    best = result.best
    if best is None:
        raise nothing_fits(question.request, question.simulator, space, result)
    progress.phase("writing the plan up")
    return _plan_of(best, question, space, result)


def _question(request: PlanRequest, progress: Progress | None = None) -> Question:
    """The request with its names looked up, on the device that its trials run on."""
    device, reason = find_device(request, _probe)
    question = look_up(request, device, progress)
    return replace(question, reasons=[reason, *question.reasons])


def _inference_question(request: PlanRequest, progress: Progress | None = None) -> InferenceQuestion:
    device, reason = find_device(request, _probe)
    question = look_up_inference(request, device, progress)
    return replace(question, reasons=[reason, *question.reasons])


def _probe(device: str) -> DeviceFacts:
    with TrialRunner(trial_environment(device, "")) as runner:
        return runner.probe(device)


def _plan_of(best: Trial, question: Question, space: Space, result: SearchResult) -> Plan:
    assert best.run is not None and best.best_time is not None
    request, corrected = question.request, question.corrected()
    workload = _describe(question, best.config) | _about_texts(question, best.config, best.best_time, corrected)
    return Plan(
        request=request,
        hardware=question.card.as_dict(),
        workload=workload,
        config=best.config,
        peak=best.run,
        time=best.best_time,
        reasons=[
            *question.reasons,
            *_outside(question, best.config, best.run),
            *_about_long_texts(question, workload),
            *reasons_of(best.config, request, space, result),
        ],
        alternatives=alternatives_of(best, result),
        levers=lever_rows(best, space, corrected),
        versions=library_versions(),
        trial_rows=trial_rows(result),
        memory_rows=memory_rows(best.config, corrected),
        search={} if question.device is None else result.as_dict(),
    )


def estimate(
    *,
    model: str,
    vram: str | int,
    micro_batch_size: int,
    seq_len: int,
    gradient_accumulation_steps: int = 1,
    precision: str = "fp32",
    checkpointing: str = "none",
    offload: str = "none",
    optimizer: str = "adamw_fused",
    attention: str = "sdpa",
    loss: str = "standard",
    method: str = "full",
    lora: LoraSettings | None = None,
    **others: Any,
) -> Estimate:
    """Memory and time of one given configuration. ``others`` are further fields of PlanRequest (task, gpu, ...).

    With ``mode="infer"`` a batch of ``micro_batch_size`` texts or requests; what is training's is left out then.
    Raises InputError with every problem of the arguments.
    """
    if others.get("mode") == "infer":
        asked = {"model": model, "vram": vram, "seq_len": seq_len, "batch_size": micro_batch_size}
        given = {"precision": precision, "offload": offload, "attention": attention}
        return Estimate(*estimate_inference(_inference_question(make_request(**asked, **given, **others))))
    chosen = {
        "precision": precision,
        "checkpointing": checkpointing,
        "offload": offload,
        "optimizer": optimizer,
        "attention": attention,
        "loss": loss,
    }
    count = micro_batch_size * gradient_accumulation_steps * int(others.get("gpus", 1))
    request = make_request(model=model, vram=vram, seq_len=seq_len, batch_size=count, method=method, **chosen, **others)
    return _training_estimate(_question(request), method, micro_batch_size, lora)


def _training_estimate(question: Question, method: str, micro_batch_size: int, lora: LoraSettings | None) -> Estimate:
    """Of the one configuration that a request leaves."""
    space, simulator = question.space(method), question.corrected()
    first = {name: options[0] for name, options in space.values.items()}
    config = space.configuration({**first, "micro_batch_size": str(micro_batch_size)})
    if lora is not None:
        config = config.model_copy(update={"lora": lora})
    memory = whole_run(simulator, config, epoch=False)
    return Estimate(config=config, memory=memory, time=simulator.time(config))


def simulator_of(request: PlanRequest) -> Simulator:
    """What answers for a request's model and card. Raises InputError for names that aren't known."""
    return _question(request).simulator


# -- the search ----------------------------------------------------------------------------------------------------


def _search_ladder(question: Question, progress: Progress) -> tuple[Space, SearchResult]:
    """Search each rung of the method ladder until something fits; all rungs' trials are kept.

    Before a rung is given up, the levers' last resorts are tried: they change no result, and cost much time. On a
    device a rung's best configurations are run, and what --trials and --timeout allow is for all rungs together.
    """
    request, everything = question.request, SearchResult()
    measured = question.device is not None
    began = time.monotonic()
    limits: dict[str, Any] = {} if measured else {"trials": request.trials, "timeout_s": request.timeout}
    for method in rungs(request.method, device=question.card.kind):
        progress.phase(f"simulating method {method}")
        space = question.space(method)
        for last_resort in (False, True) if has_last_resort(request, space.context) else (False,):
            space = make_space(request, space.context, question.seq_len, last_resort=last_resort)
            found = search(space, question.simulator, seed=request.seed, **limits)
            if measured:
                about = _about(question, method, last_resort=last_resort)
                left = _left(request, everything, time.monotonic() - began)
                found = prove(question, space, found, progress=progress, about=about, limits=left)
            if not found.measured:
                found.settle(question.simulator)
            everything.add(found)
            if found.best is not None or found.interrupted:
                return space, everything
    return space, everything


def _about(question: Question, method: str, *, last_resort: bool) -> dict[str, Any]:
    """What a worker that joins has to know to see the same search."""
    assert question.device is not None
    # a model's own code runs where its user said so, not on every host that joins
    left_out = {"storage", "device", "trials", "timeout", "trust_remote_code"}
    request = question.request.model_dump(mode="json", exclude=left_out, exclude_unset=True)
    return {
        "request": request,
        "device": device_key(question.device),
        "method": method,
        "last_resort": last_resort,
    }


def _left(request: PlanRequest, done: SearchResult, spent_s: float) -> dict[str, Any]:
    """What a request allows that earlier rungs have not used up."""
    trials = None if request.trials is None else max(0, request.trials - done.run)
    return {"trials": trials, "timeout_s": None if request.timeout is None else max(0.0, request.timeout - spent_s)}


def _outside(question: Question, config: TrainingConfig, memory: Memory) -> Iterator[Reason]:
    """Why context, margin and the allocator's settings are what they are."""
    yield Reason(field="context_bytes", value=memory.context_bytes, reason=question.simulator.context_reason)
    margin = question.simulator.budget.margin(config)
    yield Reason(field="margin_bytes", value=memory.margin_bytes, reason=margin.reason)
    lengths = question.request.lengths or question.request.data or "assumed"
    yield Reason(field="lengths", value=lengths, reason=epoch_reason(question.simulator, config))
    if host_bytes := question.simulator.host_bytes(config):
        what = f"for offload {config.offload}" if config.offload != "none" else f"for {config.optimizer}'s pages"
        reason = f"host memory {what}, where pinned tensors are rounded up to powers of two; the process comes on top"
        yield Reason(field="host_bytes", value=host_bytes, reason=reason)
    allocator = question.request.allocator
    yield Reason(
        field="allocator", value=allocator, reason=reason_for(parse_allocator(allocator), device=question.card.kind)
    )


def _about_texts(question: Question, config: TrainingConfig, time: Time, simulator: Simulator) -> dict[str, Any]:
    """What becomes of long texts, and the user's data where it was named."""
    about: dict[str, Any] = {"long_texts": question.long_texts, "overlap": question.request.overlap, "data": None}
    if question.data is not None:
        from planner.data.planning import describe_data

        about["data"] = describe_data(question.data, config, simulator, step_ms=time.step_ms)
    return about


def _about_long_texts(question: Question, workload: Mapping[str, Any]) -> Iterator[Reason]:
    reason = "as asked for" if question.request.long_texts else f"usual for {workload['task']}"
    if question.data is not None:
        from planner.data.planning import long_texts_reason

        reason = long_texts_reason(question.data, workload["data"])
    yield Reason(field="long_texts", value=question.long_texts, reason=reason)


def _describe(question: Question, config: TrainingConfig) -> dict[str, Any]:
    workload, facts = question.simulator.workload, question.simulator.facts
    return {
        "model": workload.spec.model_id,
        "task": workload.task,
        "architecture": facts.architecture,
        "model_type": workload.spec.model_type,
        "parameters": facts.parameters,
        "trainable_parameters": question.simulator.trainable_parameters(config),
        "seq_len": question.seq_len,
        "target_seq_len": workload.target_seq_len,
        "num_labels": workload.num_labels,
        "vocab_size": facts.vocab_size,
    }


# -- workers ---------------------------------------------------------------------------------------------------------


def worker(
    *, storage: str, device: str = "auto", timeout: float | None = None, progress: Progress | None = None
) -> int:
    """Run trials of the searches that keep theirs in a storage, on this machine's device; how many were run.

    Ends when nothing is left to run here. Searches on another kind of device are not this worker's. Raises InputError
    for a storage or device that can't be used, TrialError where trials fail and none runs.
    """
    progress = progress or NoProgress()
    began, run = time.monotonic(), 0
    for _, about in known_studies(storage):
        request = make_request(**{**about["request"], "storage": storage, "device": device})
        question = _question(request)
        if question.device is None:
            message = f"got {device!r}: {question.reasons[0].reason}; accepted: a device that is here, or cpu"
            raise InputError([Problem(argument="device", message=message)])
        if device_key(question.device) != about["device"]:
            continue
        space = question.space(about["method"])
        space = make_space(request, space.context, question.seq_len, last_resort=about["last_resort"])
        simulated = search(space, question.simulator, seed=request.seed)
        left = {"timeout_s": None if timeout is None else max(0.0, timeout - (time.monotonic() - began))}
        found = prove(question, space, simulated, progress=progress, limits=left, worker=True)
        run += found.run
        if found.interrupted:
            break
    return run
