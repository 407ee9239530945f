"""A request with its names looked up: the model, the card or the device, the lengths, and what answers for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.allocator_settings import parse_allocator
from planner.contradictions import long_text_problems
from planner.errors import InputError, Problem
from planner.hardware import Card, ceiling_bytes, find_card, typical_card
from planner.lengths import Lengths, given_lengths, read_counts
from planner.levers import Context
from planner.measure.protocol import DeviceFacts
from planner.measurements import Corrections, MeasurementStore, device_key, workload_key
from planner.models import ModelSpec, default_seq_len, resolve_model
from planner.plans import Reason
from planner.request import PlanRequest
from planner.simulation import Simulator
from planner.space import LARGEST_MICRO_BATCH, Space, effective_batch_size, make_space
from planner.tasks import TASK_FACTS, LongTexts, facts_for
from planner.units import format_bytes
from planner.workload import TRAINABLE_TASKS, Workload

if TYPE_CHECKING:
    from planner.data.deciding import Decided
    from planner.progress import Progress

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
    device: DeviceFacts | None = None
    """Where trials run; None: every step is simulated."""
    data: Decided | None = None
    """The user's data and what becomes of it; None: it was not named."""
    long_texts: LongTexts = "truncate"
    """What becomes of texts longer than ``seq_len``."""

    @property
    def store_key(self) -> dict[str, Any]:
        """What has to be the same for kept measurements to be used: the device, versions, the allocator's settings."""
        assert self.device is not None
        settings = {} if self.device.device == "cpu" else {"allocator": self.request.allocator}
        return device_key(self.device) | settings

    def corrected(self) -> Simulator:
        """The simulator as measurements that are kept of this device make it; as it is where there is no device."""
        if self.device is None:
            return self.simulator
        key, workload = self.store_key, workload_key(self.simulator.workload)
        rows, context_bytes = MeasurementStore(key).rows(), self.device.context_bytes
        corrections = Corrections.of(rows, workload=workload, kind=key["kind"], context_bytes=context_bytes)
        return self.simulator.corrected(corrections)

    def space(self, method: str) -> Space:
        """The configurations of one rung of the method ladder that the request leaves open."""
        request, facts = self.request, self.simulator.facts
        effective, _ = effective_batch_size(request, self.seq_len)
        recordings = self.simulator.recordings
        context = Context(
            spec=self.simulator.workload.spec,
            card=self.card,
            method=method,
            effective_batch_size=effective,
            gpus=request.gpus,
            max_micro_batch_size=LARGEST_MICRO_BATCH,
            layers=facts.layers,
            supports_sdpa=facts.supports_sdpa,
            supports_checkpointing=facts.supports_checkpointing,
            fused_loss_obstacle=recordings.fused_loss_obstacle if _names(request.loss) else "",
            sequences_per_sample=self.simulator.workload.facts.sequences_per_sample,
            flash2_obstacle=recordings.flash2_obstacle if _names(request.attention) else "",
        )
        return make_space(request, context, self.seq_len)


def look_up(request: PlanRequest, device: DeviceFacts | None = None, progress: Progress | None = None) -> Question:
    """Find model and card, and read the data; on a device the card is what it is.

    Raises InputError with all problems at once.
    """
    names = look_up_names(request, device, progress, _shape_problems)
    workload, seq_len, more = _workload(request, names.spec, names.task, names.data)
    return Question(
        request=request,
        card=names.card,
        seq_len=seq_len,
        simulator=Simulator(workload, names.card, seq_len=seq_len, **names.on_card(seq_len)),
        reasons=[*names.reasons, *more],
        device=device,
        data=names.data,
        long_texts=names.long_texts,
    )


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a request's names stand for, in either mode."""

    request: PlanRequest
    """What was asked."""
    spec: ModelSpec
    """The model."""
    card: Card
    """The target card."""
    ceiling_bytes: int
    """What it can give."""
    reasons: list[Reason]
    """Why both."""
    device: DeviceFacts | None
    """Where trials run; None: every step is simulated."""
    counts: list[int] | None
    """Lengths that a file gives, in tokens; None: it was not named."""
    data: Decided | None
    """The user's data; None: it was not named."""

    @property
    def task(self) -> str:
        """As asked for, or what the model is used for."""
        return self.request.task or self.spec.default_task

    @property
    def long_texts(self) -> LongTexts:
        """What becomes of texts that are too long."""
        if self.data is not None:
            return self.data.long_texts
        return self.request.long_texts or facts_for(self.task, self.request.mode).long_texts[0]

    def on_card(self, seq_len: int) -> dict[str, Any]:
        """What a simulator is told of the card beside itself: the arguments of planner.simulation.OnCard."""
        request, device = self.request, self.device
        how = "" if device is None else f"measured on this machine's {device.name}"
        return {
            "ceiling_bytes": self.ceiling_bytes,
            "headroom_bytes": request.headroom_bytes,
            "host_ram_bytes": request.host_ram_bytes,
            "risk": request.risk,
            "allocator": parse_allocator(request.allocator),
            "lengths": _lengths(self.counts, self.data, self.long_texts, seq_len),
            "seed": request.seed,
            "gpus": request.gpus,
            "context": None if device is None else (device.context_bytes, how),
        }


def look_up_names(
    request: PlanRequest,
    device: DeviceFacts | None,
    progress: Progress | None,
    problems_with: Callable[[PlanRequest, ModelSpec], Iterable[Problem]],
) -> Names:
    """Look all names up, and read the data. Raises InputError with all problems at once.

    ``problems_with``: what only the model shows to be wrong with a request.
    """
    problems: list[Problem] = []
    spec = _or_problems(
        problems, lambda: resolve_model(request.model, trust_remote_code=request.trust_remote_code, task=request.task)
    )
    found = _or_problems(problems, lambda: _card(request, device))
    counts = _or_problems(problems, lambda: read_counts(request.lengths)) if request.lengths else None
    if spec is not None:
        problems += problems_with(request, spec)
    data = None
    if spec is not None and request.data is not None and not problems:
        data = _or_problems(problems, lambda: _data(request, spec, progress))
    if problems or spec is None or found is None:
        raise InputError(problems)
    card, ceiling, reasons = found
    return Names(
        request=request,
        spec=spec,
        card=card,
        ceiling_bytes=ceiling,
        reasons=reasons,
        device=device,
        counts=counts,
        data=data,
    )


def _data(request: PlanRequest, spec: ModelSpec, progress: Progress | None) -> Decided:
    """The data that a request names, and what becomes of it. Raises InputError."""
    from planner.data.planning import data_of
    from planner.progress import NoProgress

    return data_of(request, spec, request.task or spec.default_task, progress or NoProgress())


def _lengths(counts: list[int] | None, data: Decided | None, long_texts: LongTexts, seq_len: int) -> Lengths | None:
    """Lengths that were counted or given; None where they are to be assumed."""
    if data is not None:
        from planner.data.planning import lengths_of_data

        return lengths_of_data(data)
    return None if counts is None else given_lengths(counts, seq_len=seq_len, long_texts=long_texts)


def _or_problems(problems: list[Problem], look_up: Any) -> Any:
    """What ``look_up`` returns; None where it raises InputError, whose problems are added."""
    try:
        return look_up()
    except InputError as error:
        problems.extend(error.problems)
        return None


def _card(request: PlanRequest, device: DeviceFacts | None) -> tuple[Card, int, list[Reason]]:
    """The card, the ceiling on it in bytes, and why both."""
    if device is not None:
        from planner.hardware import card_of_device

        card, reason = card_of_device(device, request.vram_bytes), "this machine's"
        ceiling, why = _ceiling_of_device(request, card, device)
    else:
        if request.gpu is None:
            card, reason = typical_card(request.vram_bytes)
        else:
            card, reason = find_card(request.gpu, vram_bytes=request.vram_bytes), "as asked for"
        ceiling, why = ceiling_bytes(request.vram_bytes, card, named=request.gpu is not None)
    return (
        card,
        ceiling,
        [
            Reason(field="gpu", value=card.name, reason=reason),
            Reason(field="ceiling_bytes", value=ceiling, reason=why),
        ],
    )


def _ceiling_of_device(request: PlanRequest, card: Card, device: DeviceFacts) -> tuple[int, str]:
    """What was asked for, but no more than is free: others' memory is not the plan's (BERT on a shared GTX 1080)."""
    ceiling, why = ceiling_bytes(request.vram_bytes, card)
    if ceiling <= device.free_bytes:
        return ceiling, why
    held, free = format_bytes(device.total_bytes - device.free_bytes), format_bytes(device.free_bytes)
    return device.free_bytes, f"others hold {held} of {card.name}: {free} are free"


def _shape_problems(request: PlanRequest, spec: ModelSpec) -> Iterator[Problem]:
    task = request.task or spec.default_task
    if task not in TRAINABLE_TASKS:
        message = f"got {task!r}; accepted in this version: {', '.join(TRAINABLE_TASKS)}; choose one of these"
        yield Problem(argument="task", message=message)
    elif TASK_FACTS[task].loss == "contrastive" and request.batch_size == 1:
        message = f"got 1 with task {task}; accepted with it: 2 or more; samples are compared with each other"
        yield Problem(argument="batch_size", message=message)
    else:
        yield from long_text_problems(request, task)
    yield from position_problems(request, spec)


def position_problems(request: PlanRequest, spec: ModelSpec, more: int = 0) -> Iterator[Problem]:
    """A length, with ``more`` tokens after it, for which the model has no positions."""
    limit = spec.max_seq_len
    if limit is not None and request.seq_len is not None and request.seq_len + more > limit:
        room = f" and {more} that are written" if more else ""
        message = (
            f"got {request.seq_len}; {spec.model_id} has positions for {limit} tokens{room and ', these' + room}; "
        )
        yield Problem(argument="seq_len", message=f"{message}ask for {limit - more} or less")


def _workload(
    request: PlanRequest, spec: ModelSpec, task: str, data: Decided | None
) -> tuple[Workload, int, list[Reason]]:
    reasons = [
        Reason(field="task", value=task, reason="as asked for" if request.task else "what the model is used for")
    ]
    if data is not None:
        return _workload_of_data(request, spec, task, data, reasons)
    seq_len, why = (request.seq_len, "as asked for") if request.seq_len else default_seq_len(spec, task)
    reasons.append(Reason(field="seq_len", value=seq_len, reason=why))
    target = None
    if task == "seq2seq-lm":
        target = request.target_seq_len or min(seq_len, DEFAULT_TARGET_SEQ_LEN)
        said = "as asked for" if request.target_seq_len else "a summary's usual length; --target-seq-len changes it"
        reasons.append(Reason(field="target_seq_len", value=target, reason=said))
    workload = Workload(spec=spec, task=task, num_labels=request.num_labels, target_seq_len=target)
    return workload, seq_len, reasons


def _workload_of_data(
    request: PlanRequest, spec: ModelSpec, task: str, data: Decided, reasons: list[Reason]
) -> tuple[Workload, int, list[Reason]]:
    from planner.data.planning import num_labels_of, reasons_for_data

    reasons = [*reasons, Reason(field="seq_len", value=data.seq_len, reason=data.seq_len_reason)]
    reasons += [Reason(field=name, value=value, reason=why) for name, value, why in reasons_for_data(request, data)]
    num_labels = num_labels_of(request, data)[0] if data.facts.has_classes else request.num_labels
    workload = Workload(spec=spec, task=task, num_labels=num_labels, target_seq_len=data.target_seq_len)
    return workload, data.seq_len, reasons


def _names(words: tuple[str, ...] | None) -> bool:
    """Whether a request names a value that has to be tried on the model: only then is it worth the time."""
    return words is not None and bool({"fused-linear", "flash2"} & set(words))
