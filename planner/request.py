"""What the user asked for: the command's options are the API's arguments are the fields of PlanRequest."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from planner import config
from planner.allocator_settings import DEFAULT_ALLOCATOR, AllocatorSyntaxError, parse_allocator
from planner.calibration import DEFAULT_RISK
from planner.errors import InputError, Problem
from planner.units import LARGEST_VRAM_BYTES, compact_bytes, parse_bytes, shown

MODES = ("train",)
METHODS = ("auto", *config.METHODS)
DEVICES = ("auto", "none")
CLASSIFICATION_TASKS = ("sequence-classification", "token-classification")
SEQ2SEQ_TASKS = ("seq2seq-lm",)
LARGEST_COUNT = 10_000_000
"""Bound of every count in a request: far above any use, far below what would make the arithmetic crawl."""


def near_match(word: str, accepted: Iterable[str]) -> str | None:
    """The accepted word that was most likely meant, or None: ``adamw`` -> ``adamw_fused``."""
    words = list(accepted)
    starts = [w for w in words if word and w.startswith(word)]
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return next(iter(starts or close), None)


def _refusal(got: object, accepted: str, remedy: str = "") -> ValueError:
    return ValueError(f"got {shown(got)}; accepted: {accepted}" + (f"; {remedy}" if remedy else ""))


def _text(accepted: str) -> BeforeValidator:
    """A name of any kind: looked up later, where names of that kind are known."""

    def read(value: object) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > 1024:
            raise _refusal(value, accepted)
        return value.strip()

    return BeforeValidator(read)


def _one_of(words: tuple[str, ...]) -> BeforeValidator:
    def read(value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in words:
            near = near_match(word, words)
            raise _refusal(value, ", ".join(words), f"did you mean {near}?" if near else "")
        return word

    return BeforeValidator(read)


def _some_of(
    words: tuple[str, ...], pattern: str = "", example: str = "", impossible: Mapping[str, str] | None = None
) -> BeforeValidator:
    """A restriction of the sweep: words with commas between them, or a list of words.

    ``impossible`` are words that people ask for and that cannot be had, with the reason.
    """
    accepted = f"one or more of {', '.join((*words, example) if example else words)}, separated by commas"

    def known(word: str) -> bool:
        return word in words or bool(pattern and re.fullmatch(pattern, word))

    def read(value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(p, str) for p in parts):
            raise _refusal(value, accepted)
        got = tuple(dict.fromkeys(p.strip().lower() for p in parts))
        wrong = [word for word in got if not known(word)]
        near = {near: None for word in wrong if (near := near_match(word, words))}
        why = [reason for word, reason in (impossible or {}).items() if word in wrong]
        if wrong:
            remedy = f"did you mean {', '.join(near)}?" if near else ""
            raise _refusal(",".join(wrong), accepted, "; ".join(why) or remedy)
        return got

    return BeforeValidator(read)


def _whole(smallest: int, largest: int = LARGEST_COUNT, unit: str = "") -> BeforeValidator:
    accepted = f"a whole number{unit and f' of {unit}'} from {smallest} to {largest}"

    def read(value: object) -> int:
        digits = isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,12}\s*", value)
        if isinstance(value, bool) or not (digits or isinstance(value, int)):
            raise _refusal(value, accepted)
        number = int(value)  # type: ignore[call-overload]
        if not smallest <= number <= largest:
            raise _refusal(value, accepted)
        return int(number)

    return BeforeValidator(read)


def _seconds(value: object) -> float:
    accepted = "a number of seconds greater than 0, at most 1000000"
    try:
        seconds = float(value) if isinstance(value, (str, int, float)) and value is not True else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds <= 1_000_000:
        raise _refusal(value, accepted)
    return seconds


def _risk(value: object) -> float:
    accepted = "a probability from 0.0001 to 0.5, such as 0.01 for 1 run in 100"
    try:
        risk = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        risk = math.nan
    if not 0.0001 <= risk <= 0.5:
        raise _refusal(value, accepted)
    return risk


def _size(minimum_bytes: int | None = None) -> BeforeValidator:
    def read(value: Any) -> Any:
        if minimum_bytes is None:
            parse_bytes(value)
        else:
            parse_bytes(value, minimum_bytes=minimum_bytes)
        return value

    return BeforeValidator(read)


def _allocator(value: object) -> str:
    try:
        return parse_allocator(value).text
    except AllocatorSyntaxError as error:
        raise _ContradictionsError([Problem(argument="allocator", message=m) for m in error.messages]) from None


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _refusal(value, "True or False")
    return value


_MODEL = "a model's hub id such as bert-base-uncased, a folder or a config.json"
_GPU = "a card's name such as RTX 4060 or A100 80GB"
_CHECKPOINTING = _some_of(("none", "full"), r"every-([2-9]|[1-9][0-9]{1,2})", "every-2, every-4, ...")
_DYNAMIC_INT8 = "dynamic int8 quantization runs on the CPU only and can't train"
_NO_TRAINING = dict.fromkeys(("int8-dynamic", "dynamic-int8"), _DYNAMIC_INT8)
Words = tuple[str, ...]


class PlanRequest(BaseModel):
    """What the user asked for, checked and complete; build one with :func:`make_request`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: Annotated[str, _text(_MODEL)]
    """Hub id, folder or config.json of the model."""
    vram: Annotated[str | int, _size()]
    """Memory on the card's label, as it was written: 8GB = 8GiB = 8192MiB, or plain bytes."""
    task: Annotated[config.Task, _one_of(config.TASKS)] | None = None
    """What the model is trained for; None: what its architecture says."""
    mode: Annotated[Literal["train"], _one_of(MODES)] = "train"
    """What the plan is for."""
    method: Annotated[Literal["auto", "full", "lora", "qlora"], _one_of(METHODS)] = "auto"
    """Which parameters are trained; auto: all if they fit, else adapters, else on a quantized base."""
    gpu: Annotated[str, _text(_GPU)] | None = None
    """Loose name of the card; None: a typical card with that much memory."""
    device: Annotated[Literal["auto", "none"], _one_of(DEVICES)] = "auto"
    """Where trial steps run; this version simulates every step, so both values mean no device."""
    seq_len: Annotated[int, _whole(1, unit="tokens")] | None = None
    """Longest sequence, in tokens; None: the planner's choice for the model."""
    target_seq_len: Annotated[int, _whole(1, unit="tokens")] | None = None
    """Longest target sequence of a sequence-to-sequence task, in tokens."""
    num_labels: Annotated[int, _whole(1, unit="labels")] = 2
    """Labels of a classification task."""
    lengths: Annotated[str, _text("a file with one token count a line")] | None = None
    """File with the length of each text of the data, in tokens and in the data's order, one a line; None: assumed."""
    batch_size: Annotated[int, _whole(1, unit="sequences")] | None = None
    """Effective batch: sequences for each optimizer step."""
    batch_tokens: Annotated[int, _whole(1, unit="tokens")] | None = None
    """Effective batch in tokens for each optimizer step; instead of ``batch_size``."""
    precision: Annotated[Words, _some_of(config.PRECISIONS)] | None = None
    """Precisions to choose from; None: all that the card has."""
    checkpointing: Annotated[Words, _CHECKPOINTING] | None = None
    """Activation checkpointing to choose from: none, full, every-N; None: all."""
    offload: Annotated[Words, _some_of(config.OFFLOADS)] | None = None
    """What may move to host memory; None: all."""
    quantization: Annotated[Words, _some_of(config.QUANTIZATIONS, impossible=_NO_TRAINING)] | None = None
    """How frozen base weights may be stored; None: as the method has it."""
    optimizer: Annotated[Words, _some_of(config.OPTIMIZERS)] | None = None
    """Optimizers to choose from; None: all that keep the results of AdamW, others when nothing else fits."""
    attention: Annotated[Words, _some_of(config.ATTENTIONS)] | None = None
    """Attention implementations to choose from; None: all that need no further package."""
    loss: Annotated[Words, _some_of(config.LOSSES)] | None = None
    """Losses to choose from: standard, or fused-linear, which never has all logits in memory; None: standard."""
    headroom: Annotated[str | int, _size(0)] = 0
    """Memory to keep free for other uses of the card, as a size such as 500MB or in bytes."""
    risk: Annotated[float, BeforeValidator(_risk)] = DEFAULT_RISK
    """Probability, at most, that a run needs more than its prediction and margin."""
    host_ram: Annotated[str | int, _size()] | None = None
    """Host memory that offloading may fill; None: what this machine has."""
    allocator: Annotated[str, BeforeValidator(_allocator)] = DEFAULT_ALLOCATOR
    """PyTorch's allocator settings, as in PYTORCH_CUDA_ALLOC_CONF; what it leaves out is PyTorch's default."""
    trials: Annotated[int, _whole(1, 1_000_000)] | None = None
    """Configurations that the search looks at, at most; None: as many as it needs."""
    timeout: Annotated[float, BeforeValidator(_seconds)] | None = None
    """Seconds that the search may take; None: no limit."""
    seed: Annotated[int, _whole(0, 2**32 - 1)] = 0
    """Seed of the search, and the emitted script's default."""
    trust_remote_code: Annotated[bool, BeforeValidator(_flag)] = False
    """Let a model's own code from its folder or the hub run here."""

    @property
    def vram_bytes(self) -> int:
        """Memory on the card's label, in bytes."""
        return parse_bytes(self.vram)

    @property
    def headroom_bytes(self) -> int:
        """Memory to keep free, in bytes."""
        return parse_bytes(self.headroom, minimum_bytes=0)

    @property
    def host_ram_bytes(self) -> int | None:
        """Host memory that offloading may fill, in bytes; None: what this machine has."""
        return None if self.host_ram is None else parse_bytes(self.host_ram)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> PlanRequest:
        problems = [problem for rule in _RULES for problem in rule(self)]
        if problems:
            raise _ContradictionsError(problems)
        return self


class _ContradictionsError(ValueError):
    """Fields that are right one by one and wrong together."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{p.argument}: {p.message}" for p in problems))


def _one_batch(request: PlanRequest) -> Iterator[Problem]:
    sequences, tokens, seq_len = request.batch_size, request.batch_tokens, request.seq_len
    if tokens is None:
        return
    if sequences is not None:
        message = f"got {tokens} beside a batch size of {sequences}; accepted: one of the two; leave one out"
        yield Problem(argument="batch_tokens", message=message)
    if seq_len is not None and tokens < seq_len:
        message = f"got {tokens}; accepted: at least one sequence of {seq_len} tokens"
        yield Problem(argument="batch_tokens", message=message)


def _method_and_quantization(request: PlanRequest) -> Iterator[Problem]:
    allowed, method = request.quantization, request.method
    needed = {"full": ("none",), "lora": ("none",), "qlora": ("nf4", "int8")}.get(method)
    if allowed is not None and needed is not None and not set(needed) & set(allowed):
        remedy = {
            "full": "quantized weights cannot be trained: choose method qlora or auto",
            "lora": "adapters on a quantized base are method qlora",
            "qlora": "adapters on a base that is not quantized are method lora",
        }[method]
        got, accepted = shown(",".join(allowed)), ", ".join(needed)
        message = f"got {got} with method {method}; accepted with it: {accepted}; {remedy}"
        yield Problem(argument="quantization", message=message)


def _flash2_and_precision(request: PlanRequest) -> Iterator[Problem]:
    attention, precision = request.attention, request.precision
    if attention == ("flash2",) and precision is not None and set(precision) <= {"fp32", "tf32"}:
        half = ", ".join(word for word in config.PRECISIONS if word not in ("fp32", "tf32"))
        message = f"got flash2 with precision {','.join(precision)}; accepted with it: {half}; or choose sdpa"
        yield Problem(argument="attention", message=message)


def _offload_and_the_rest(request: PlanRequest) -> Iterator[Problem]:
    """An offload that none of the named values goes with; what is not named is left to the search."""
    from planner.levers.offload import clash

    open_ones = {"optimizer": "adamw_fused", "checkpointing": "full", "precision": "fp32"}
    words = {name: getattr(request, name) or (word,) for name, word in open_ones.items()}
    method = "full" if request.method == "auto" else request.method
    for offload in request.offload or ():
        tried = [dict(zip(words, values, strict=True)) for values in itertools.product(*words.values())]
        reasons = [clash(offload, method=method, **values) for values in tried]
        if all(reasons):
            yield Problem(argument="offload", message=f"got {offload!r}: {reasons[0]}; leave one of them out")


def _task_and_shape(request: PlanRequest) -> Iterator[Problem]:
    task, default = request.task, PlanRequest.model_fields["num_labels"].default
    for argument, value, tasks in (
        ("target_seq_len", request.target_seq_len, SEQ2SEQ_TASKS),
        ("num_labels", request.num_labels if request.num_labels != default else None, CLASSIFICATION_TASKS),
    ):
        if task is not None and value is not None and task not in tasks:
            message = f"got {value} with task {task}; accepted with: {', '.join(tasks)}; leave it out"
            yield Problem(argument=argument, message=message)


def _headroom_leaves_something(request: PlanRequest) -> Iterator[Problem]:
    if request.headroom_bytes >= request.vram_bytes:
        ceiling = compact_bytes(request.vram_bytes)
        message = f"got {shown(request.headroom)}; accepted: less than the card's {ceiling}; keep less free"
        yield Problem(argument="headroom", message=message)


_RULES: tuple[Callable[[PlanRequest], Iterator[Problem]], ...] = (
    _one_batch,
    _method_and_quantization,
    _flash2_and_precision,
    _offload_and_the_rest,
    _task_and_shape,
    _headroom_leaves_something,
)


def make_request(**arguments: Any) -> PlanRequest:
    """Check the arguments of ``plan()`` and build the request; an argument that is None counts as left out.

    Raises InputError with every problem at once: unknown and missing arguments, wrong values, and values
    that contradict each other. Names of models and cards are not looked up here.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return PlanRequest.model_validate(given)
    except ValidationError as error:
        problems = list(_problems(error))
    # Contradictions are looked for only in a request whose fields are right: fill in for the wrong ones.
    wrong = {problem.argument for problem in problems}
    right = {name: value for name, value in given.items() if name not in wrong}
    try:
        PlanRequest.model_validate({"model": "any", "vram": LARGEST_VRAM_BYTES} | right)
    except ValidationError as error:
        problems += [problem for problem in _problems(error) if problem not in problems]
    raise InputError(problems)


def _problems(error: ValidationError) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, _ContradictionsError):
            yield from cause.problems
            continue
        argument = str(detail["loc"][0])
        yield Problem(argument=argument, message=_message(argument, detail["type"], cause or detail["msg"]))


def _message(argument: str, kind: str, cause: object) -> str:
    if kind == "missing":
        accepted = _MODEL if argument == "model" else "a card's memory such as 8GB"
        return f"missing; accepted: {accepted}"
    if kind == "extra_forbidden":
        near = near_match(argument, PlanRequest.model_fields)
        return "unknown argument" + (f"; did you mean {near}?" if near else "")
    return str(cause)
