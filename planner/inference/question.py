"""An inference request with its names looked up: the model, the card or the device, lengths, and what answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planner.contradictions import contradictions
from planner.errors import Problem
from planner.hardware import Card
from planner.inference.levers import InferenceContext
from planner.inference.simulation import InferenceSimulator
from planner.inference.space import InferenceSpace, spaces
from planner.inference.workload import DEFAULT_MAX_NEW_TOKENS, InferenceWorkload
from planner.measure.protocol import DeviceFacts
from planner.measurements import device_key
from planner.models import ModelSpec, default_seq_len
from planner.plans import Reason
from planner.question import look_up_names, position_problems
from planner.request import PlanRequest
from planner.tasks import INFERENCE_TASKS, TASK_FACTS, LongTexts

if TYPE_CHECKING:
    from planner.data.deciding import Decided
    from planner.progress import Progress


@dataclass(frozen=True, kw_only=True)
class InferenceQuestion:
    """A request with its names looked up."""

    request: PlanRequest
    """What was asked."""
    card: Card
    """The target card."""
    seq_len: int
    """Longest text or prompt, in tokens."""
    simulator: InferenceSimulator
    """Answers for this model on this card."""
    reasons: list[Reason] = field(default_factory=list)
    """Why the card, the ceiling, the task and the lengths are what they are."""
    device: DeviceFacts | None = None
    """Where the plan is to run; None: the card is not here."""
    data: Decided | None = None
    """The user's data and what becomes of it; None: it was not named."""
    long_texts: LongTexts = "truncate"
    """What becomes of texts longer than ``seq_len``."""

    @property
    def store_key(self) -> dict[str, Any]:
        """What has to be the same for kept measurements to be used; training's are others."""
        assert self.device is not None
        settings = {} if self.device.device == "cpu" else {"allocator": self.request.allocator}
        return device_key(self.device) | settings | {"mode": "infer"}

    @property
    def context(self) -> InferenceContext:
        """What the choice of levers' values depends on."""
        simulator, facts, request = self.simulator, self.simulator.facts, self.request
        window, encodes = simulator.recordings.attention
        batch_size = request.batch_size
        if request.batch_tokens is not None:
            batch_size = max(1, request.batch_tokens // (self.seq_len + simulator.workload.max_new_tokens))
        names_flash = request.attention is not None and "flash2" in request.attention
        return InferenceContext(
            spec=simulator.workload.spec,
            card=self.card,
            method="full",
            effective_batch_size=1,
            max_micro_batch_size=1,
            layers=facts.layers,
            supports_sdpa=facts.supports_sdpa,
            flash2_obstacle=simulator.recordings.flash2_obstacle if names_flash else "",
            generates=simulator.workload.facts.generates,
            seq_len=self.seq_len,
            max_sequences=request.batch_size or request.concurrency,
            micro_batch_size=batch_size,
            sliding_window=window > 0,
            encoder_decoder=encodes,
            stacks=len(facts.stacks),
            plain_linears=facts.plain_linears,
        )

    def spaces(self) -> Iterator[InferenceSpace]:
        """The configurations of each rung of the ladder that the request leaves open."""
        fixed = {
            "max_new_tokens": self.simulator.workload.max_new_tokens,
            "max_tokens": self.request.batch_tokens,
            "prefix_tokens": self.request.prefix_tokens,
        }
        return spaces(self.request, self.context, **fixed)


def look_up(
    request: PlanRequest, device: DeviceFacts | None = None, progress: Progress | None = None
) -> InferenceQuestion:
    """Find model and card, and read the data; on a device the card is what it is.

    Raises InputError with all problems at once.
    """
    names = look_up_names(request, device, progress, _task_problems)
    seq_len, new_tokens, more = _shape(request, names.spec, names.task, names.data)
    workload = InferenceWorkload(
        spec=names.spec, task=names.task, num_labels=request.num_labels, max_new_tokens=new_tokens
    )
    return InferenceQuestion(
        request=request,
        card=names.card,
        seq_len=seq_len,
        simulator=InferenceSimulator(workload, names.card, seq_len=seq_len, **names.on_card(seq_len)),
        reasons=[*names.reasons, *more],
        device=device,
        data=names.data,
        long_texts=names.long_texts,
    )


def _task_problems(request: PlanRequest, spec: ModelSpec) -> Iterator[Problem]:
    """What only the model's own task shows to be wrong."""
    task = request.task or spec.default_task
    if task not in INFERENCE_TASKS:
        message = f"got {task!r}, which {spec.model_id} is used for; accepted with mode infer: "
        yield Problem(argument="task", message=f"{message}{', '.join(INFERENCE_TASKS)}; name one of them")
        return
    if request.task is None:
        yield from contradictions(request.model_copy(update={"task": task}))
    new = (request.max_new_tokens or DEFAULT_MAX_NEW_TOKENS) if task == "causal-lm" else 0
    yield from position_problems(request, spec, new)


def _shape(request: PlanRequest, spec: ModelSpec, task: str, data: Decided | None) -> tuple[int, int, list[Reason]]:
    """Longest text and tokens written, in tokens, and why."""
    said = "as asked for"
    reasons = [Reason(field="task", value=task, reason=said if request.task else "what the model is used for")]
    new = 0
    if TASK_FACTS[task].generates:
        new = request.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        why = said if request.max_new_tokens else "a paragraph or two; --max-new-tokens changes it"
        reasons.append(Reason(field="max_new_tokens", value=new, reason=why))
    seq_len, why = (request.seq_len, said) if request.seq_len else default_seq_len(spec, task)
    if data is not None:
        seq_len, why = data.seq_len, data.seq_len_reason
        columns = ", ".join(data.survey.columns.names)
        reasons.append(Reason(field="columns", value=columns, reason="--text-column changes them"))
    if task == "causal-lm" and spec.max_seq_len is not None and seq_len + new > spec.max_seq_len:
        seq_len, why = max(1, spec.max_seq_len - new), f"{spec.max_seq_len} positions, less what is written"
    reasons.append(Reason(field="seq_len", value=seq_len, reason=why))
    return seq_len, new, reasons
