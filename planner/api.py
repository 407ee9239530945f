"""``plan()`` and ``estimate()``: from arguments to an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.allocator_settings import parse_allocator, reason_for
from planner.budget import Memory
from planner.cache import library_versions
from planner.config import LoraSettings, TrainingConfig
from planner.errors import InputError, Problem
from planner.hardware import Card, ceiling_bytes, find_card, typical_card
from planner.lengths import Lengths, given_lengths, read_counts
from planner.levers import Context
from planner.models import ModelSpec, default_seq_len, resolve_model
from planner.plans import Plan, Reason
from planner.report import alternatives_of, lever_rows, memory_rows, reasons_of, trial_rows
from planner.request import PlanRequest, make_request
from planner.search import SearchResult, search
from planner.simulation import Simulator
from planner.space import LARGEST_MICRO_BATCH, Space, effective_batch_size, has_last_resort, make_space, rungs
from planner.timing import Time
from planner.unfitting import nothing_fits
from planner.whole_run import epoch_reason, whole_run
from planner.workload import TRAINABLE_TASKS, Workload

PIECES_TASKS = ("causal-lm", "masked-lm")
"""Tasks whose script makes several samples of a text that is too long."""
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
    assert best.run is not None and best.time is not None
    return Plan(
        request=request,
        hardware=question.card.as_dict(),
        workload=_describe(question, best.config),
        config=best.config,
        peak=best.run,
        time=best.time,
        reasons=[
            *question.reasons,
            *_outside(question, best.config, best.run),
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
    loss: str = "standard",
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
        "loss": loss,
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
    memory = whole_run(question.simulator, config, epoch=False)
    return Estimate(config=config, memory=memory, time=question.simulator.time(config))


# -- looking names up ----------------------------------------------------------------------------------------------


def simulator_of(request: PlanRequest) -> Simulator:
    """What answers for a request's model and card. Raises InputError for names that aren't known."""
    return _look_up(request).simulator


def _look_up(request: PlanRequest) -> Question:
    """Find model and card; all problems at once."""
    problems: list[Problem] = []
    spec = _or_problems(
        problems, lambda: resolve_model(request.model, trust_remote_code=request.trust_remote_code, task=request.task)
    )
    found = _or_problems(problems, lambda: _card(request))
    counts = _or_problems(problems, lambda: read_counts(request.lengths)) if request.lengths else None
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
        allocator=parse_allocator(request.allocator),
        lengths=_lengths(counts, task, seq_len),
        seed=request.seed,
    )
    return Question(request=request, card=card, seq_len=seq_len, simulator=simulator, reasons=[*reasons, *more])


def _lengths(counts: list[int] | None, task: str, seq_len: int) -> Lengths | None:
    return None if counts is None else given_lengths(counts, seq_len=seq_len, pieces=task in PIECES_TASKS)


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
    """Search each rung of the method ladder until something fits; all rungs' trials are kept.

    Before a rung is given up, the levers' last resorts are tried: they change no result, and cost much time.
    """
    request = question.request
    everything = SearchResult()
    options: dict[str, Any] = {"trials": request.trials, "timeout_s": request.timeout, "seed": request.seed}
    for method in rungs(request.method):
        space = _space(question, method)
        for last_resort in (False, True) if has_last_resort(request, space.context) else (False,):
            space = make_space(request, space.context, question.seq_len, last_resort=last_resort)
            found = search(space, question.simulator, **options)
            found.settle(question.simulator)
            everything.trials += found.trials
            if found.best is not None:
                return space, everything
    return space, everything


def _names(words: tuple[str, ...] | None) -> bool:
    """Whether a request names a value that has to be tried on the model: only then is it worth the time."""
    return words is not None and bool({"fused-linear", "flash2"} & set(words))


def _space(question: Question, method: str) -> Space:
    request = question.request
    effective, _ = effective_batch_size(request, question.seq_len)
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
        fused_loss_obstacle=question.simulator.recordings.fused_loss_obstacle if _names(request.loss) else "",
        flash2_obstacle=question.simulator.recordings.flash2_obstacle if _names(request.attention) else "",
    )
    return make_space(question.request, context, question.seq_len)


def _outside(question: Question, config: TrainingConfig, memory: Memory) -> Iterator[Reason]:
    """Why context, margin and the allocator's settings are what they are."""
    yield Reason(field="context_bytes", value=memory.context_bytes, reason=question.simulator.context_reason)
    margin = question.simulator.budget.margin(config)
    yield Reason(field="margin_bytes", value=memory.margin_bytes, reason=margin.reason)
    lengths = question.request.lengths or "assumed"
    yield Reason(field="lengths", value=lengths, reason=epoch_reason(question.simulator, config))
    if host_bytes := question.simulator.host_bytes(config):
        what = f"for offload {config.offload}" if config.offload != "none" else f"for {config.optimizer}'s pages"
        reason = f"host memory {what}, where pinned tensors are rounded up to powers of two; the process comes on top"
        yield Reason(field="host_bytes", value=host_bytes, reason=reason)
    allocator = question.request.allocator
    yield Reason(field="allocator", value=allocator, reason=reason_for(parse_allocator(allocator)))


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
