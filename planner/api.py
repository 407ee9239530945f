"""``plan()`` and ``estimate()``: from arguments to an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.budget import Memory
from planner.cache import library_versions
from planner.config import LoraSettings, TrainingConfig
from planner.errors import InputError, Problem
from planner.hardware import Card, ceiling_bytes, find_card, typical_card
from planner.levers import Context
from planner.models import ModelSpec, default_seq_len, resolve_model
from planner.plans import Plan, Reason
from planner.report import alternatives_of, lever_rows, memory_rows, reasons_of, trial_rows
from planner.request import PlanRequest, make_request
from planner.search import SearchResult, search
from planner.simulation import Simulator
from planner.space import LARGEST_MICRO_BATCH, Space, effective_batch_size, make_space, rungs
from planner.timing import Time
from planner.unfitting import nothing_fits
from planner.workload import TRAINABLE_TASKS, Workload

DEFAULT_TARGET_SEQ_LEN = 128
"""Target tokens of a sequence-to-sequence task when the request doesn't say: a summary's usual length."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request with its names looked up."""

    request: PlanRequest
    """What was asked."""
    card: Card
    """The target card."""
    seq_len: int
    """Longest sequence, in tokens."""
    simulator: Simulator
    """Answers for this model on this card."""
    reasons: list[Reason]
    """Why the card, the ceiling, the task and the lengths are what they are."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory and time of one given configuration."""

    config: TrainingConfig
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


def plan(**arguments: Any) -> Plan:
    """Find the fastest way to train a model in the memory of a card.

    Arguments are the fields of PlanRequest (``model`` and ``vram`` are needed), the command's options by other
    names: ``plan(model="bert-base-uncased", vram="8GB")``. Raises InputError with every problem of the arguments,
    NothingFitsError when no configuration fits, RecordingError when the model's step can't be simulated.
    """
    request = make_request(**arguments)
    question = _look_up(request)
    space, result = _search_ladder(question)
    best = result.best
    if best is None:
        raise nothing_fits(question.request, question.simulator, space, result)
    assert best.memory is not None and best.time is not None
    return Plan(
        request=request,
        hardware=question.card.as_dict(),
        workload=_describe(question, best.config),
        config=best.config,
        peak=best.memory,
        time=best.time,
        reasons=[
            *question.reasons,
            *_outside(question, best.config, best.memory),
            *reasons_of(best.config, request, space, result),
        ],
        alternatives=alternatives_of(best, result),
        levers=lever_rows(best, space, question.simulator),
        versions=library_versions(),
        trial_rows=trial_rows(result),
        memory_rows=memory_rows(best.config, question.simulator),
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
    method: str = "full",
    lora: LoraSettings | None = None,
    **others: Any,
) -> Estimate:
    """Memory and time of one given configuration. ``others`` are further fields of PlanRequest (task, gpu, ...).

    Raises InputError with every problem of the arguments.
    """
    chosen = {
        "precision": precision,
        "checkpointing": checkpointing,
        "offload": offload,
        "optimizer": optimizer,
        "attention": attention,
    }
    count = micro_batch_size * gradient_accumulation_steps
    request = make_request(model=model, vram=vram, seq_len=seq_len, batch_size=count, method=method, **chosen, **others)
    question = _look_up(request)
    space = _space(question, method)
    config = space.configuration(
        {**{name: options[0] for name, options in space.values.items()}, "micro_batch_size": str(micro_batch_size)}
    )
    if lora is not None:
        config = config.model_copy(update={"lora": lora})
    return Estimate(config=config, memory=question.simulator.memory(config), time=question.simulator.time(config))


# -- looking names up ----------------------------------------------------------------------------------------------


def _look_up(request: PlanRequest) -> Question:
    """Find model and card; all problems at once."""
    problems: list[Problem] = []
    spec = _or_problems(
        problems, lambda: resolve_model(request.model, trust_remote_code=request.trust_remote_code, task=request.task)
    )
    found = _or_problems(problems, lambda: _card(request))
    if spec is not None:
        problems += _shape_problems(request, spec)
    if problems or spec is None or found is None:
        raise InputError(problems)
    card, reasons = found
    task = request.task or spec.default_task
    workload, seq_len, more = _workload(request, spec, task)
    simulator = Simulator(
        workload,
        card,
        ceiling_bytes=_ceiling(request, card)[0],
        seq_len=seq_len,
        headroom_bytes=request.headroom_bytes,
        host_ram_bytes=request.host_ram_bytes,
        risk=request.risk,
    )
    return Question(request=request, card=card, seq_len=seq_len, simulator=simulator, reasons=[*reasons, *more])


def _or_problems(problems: list[Problem], look_up: Any) -> Any:
    try:
        return look_up()
    except InputError as error:
        problems.extend(error.problems)
        return None


def _card(request: PlanRequest) -> tuple[Card, list[Reason]]:
    if request.gpu is None:
        card, reason = typical_card(request.vram_bytes)
    else:
        card, reason = find_card(request.gpu, vram_bytes=request.vram_bytes), "as asked for"
    ceiling, why = _ceiling(request, card)
    return card, [
        Reason(field="gpu", value=card.name, reason=reason),
        Reason(field="ceiling_bytes", value=ceiling, reason=why),
    ]


def _ceiling(request: PlanRequest, card: Card) -> tuple[int, str]:
    return ceiling_bytes(request.vram_bytes, card, named=request.gpu is not None)


def _shape_problems(request: PlanRequest, spec: ModelSpec) -> Iterator[Problem]:
    task = request.task or spec.default_task
    if task not in TRAINABLE_TASKS:
        message = f"got {task!r}; accepted in this version: {', '.join(TRAINABLE_TASKS)}; choose one of these"
        yield Problem(argument="task", message=message)
    limit = spec.max_seq_len
    if limit is not None and request.seq_len is not None and request.seq_len > limit:
        message = f"got {request.seq_len}; {spec.model_id} has positions for {limit} tokens; ask for {limit} or less"
        yield Problem(argument="seq_len", message=message)


def _workload(request: PlanRequest, spec: ModelSpec, task: str) -> tuple[Workload, int, list[Reason]]:
    reasons = [
        Reason(field="task", value=task, reason="as asked for" if request.task else "what the model is used for")
    ]
    seq_len, why = (request.seq_len, "as asked for") if request.seq_len else default_seq_len(spec, task)
    reasons.append(Reason(field="seq_len", value=seq_len, reason=why))
    target = None
    if task == "seq2seq-lm":
        target = request.target_seq_len or min(seq_len, DEFAULT_TARGET_SEQ_LEN)
        said = "as asked for" if request.target_seq_len else "a summary's usual length; --target-seq-len changes it"
        reasons.append(Reason(field="target_seq_len", value=target, reason=said))
    workload = Workload(spec=spec, task=task, num_labels=request.num_labels, target_seq_len=target)
    return workload, seq_len, reasons


# -- the search ----------------------------------------------------------------------------------------------------


def _search_ladder(question: Question) -> tuple[Space, SearchResult]:
    """Search each rung of the method ladder until something fits; all rungs' trials are kept."""
    request = question.request
    everything = SearchResult()
    for method in rungs(request.method):
        space = _space(question, method)
        found = search(space, question.simulator, trials=request.trials, timeout_s=request.timeout, seed=request.seed)
        everything.trials += found.trials
        if found.best is not None:
            break
    return space, everything


def _space(question: Question, method: str) -> Space:
    effective, _ = effective_batch_size(question.request, question.seq_len)
    facts = question.simulator.facts
    context = Context(
        spec=question.simulator.workload.spec,
        card=question.card,
        method=method,
        effective_batch_size=effective,
        max_micro_batch_size=LARGEST_MICRO_BATCH,
        layers=facts.layers,
        supports_sdpa=facts.supports_sdpa,
        supports_checkpointing=facts.supports_checkpointing,
    )
    return make_space(question.request, context, question.seq_len)


def _outside(question: Question, config: TrainingConfig, memory: Memory) -> Iterator[Reason]:
    """Why context and margin are what they are."""
    yield Reason(field="context_bytes", value=memory.context_bytes, reason=question.simulator.context_reason)
    margin = question.simulator.budget.margin(config)
    yield Reason(field="margin_bytes", value=memory.margin_bytes, reason=margin.reason)


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
