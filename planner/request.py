"""What the user asked for: the command's options are the API's arguments are the fields of PlanRequest."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, field_serializer, model_validator

from planner import config
from planner.allocator_settings import DEFAULT_ALLOCATOR, AllocatorSyntaxError, parse_allocator
from planner.calibration import DEFAULT_RISK
from planner.contradictions import contradictions
from planner.errors import InputError, Problem, near_match
from planner.units import LARGEST_VRAM_BYTES, parse_bytes, shown

MODES = ("train", "infer")
METHODS = ("auto", *config.METHODS)
LONG_TEXTS = ("truncate", "segment", "pack")
DEVICES = ("auto", "none", "cpu", "cuda")
"""Words for the device; ``cuda:1`` names one of several."""
LARGEST_COUNT = 10_000_000
"""Bound of every count in a request: far above any use, far below what would make the arithmetic crawl."""


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
    words: tuple[str, ...], pattern: str = "", example: str = "", aliases: Mapping[str, str] | None = None
) -> BeforeValidator:
    """A restriction of the sweep: words with commas between them, or a list of words.

    ``aliases``: what some are called elsewhere.
    """
    accepted = f"one or more of {', '.join((*words, example) if example else words)}, separated by commas"

    def known(word: str) -> bool:
        return word in words or bool(pattern and re.fullmatch(pattern, word))

    def read(value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(p, str) for p in parts):
            raise _refusal(value, accepted)
        typed = (p.strip().lower() for p in parts)
        got = tuple(dict.fromkeys((aliases or {}).get(word, word) for word in typed))
        wrong = [word for word in got if not known(word)]
        near = {near: None for word in wrong if (near := near_match(word, words))}
        if wrong:
            remedy = f"did you mean {', '.join(near)}?" if near else ""
            raise _refusal(",".join(wrong), accepted, remedy)
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


def _overlap(value: object) -> float:
    accepted = "a share from 0 to 0.5, such as 0.1 for a tenth of a segment"
    try:
        share = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        share = math.nan
    if not 0 <= share <= 0.5:
        raise _refusal(value, accepted)
    return share


def _device(value: object) -> str:
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in DEVICES and not re.fullmatch(r"cuda:(0|[1-9][0-9]{0,2})", word):
        near = "cuda" if word.startswith("gpu") else near_match(word, DEVICES)
        accepted = f"{', '.join(DEVICES)}, or one of several GPUs such as cuda:1"
        raise _refusal(value, accepted, f"did you mean {near}?" if near else "")
    return word


def _trial_device(value: object) -> str:
    word = _device(value)
    if word == "none":
        raise _refusal(value, "auto, cpu, cuda or cuda:1", "a worker runs trials on a device")
    return word


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
_STORAGE = "a journal's file such as trials.log, or a database's URL such as postgresql+psycopg://user@host/db"
_DATA = "a jsonl, csv, parquet or txt file, a folder that datasets saved, or a hub dataset's id"
_CHECKPOINTING = _some_of(("none", "full"), r"every-([2-9]|[1-9][0-9]{1,2})", "every-2, every-4, ...")
_PRECISIONS = tuple(dict.fromkeys((*config.PRECISIONS, *config.INFERENCE_PRECISIONS)))
_OFFLOADS = tuple(dict.fromkeys((*config.OFFLOADS, *config.INFERENCE_OFFLOADS)))
_QUANTIZATIONS = tuple(dict.fromkeys((*config.QUANTIZATIONS, *config.INFERENCE_QUANTIZATIONS)))
_ALSO_CALLED = {"dynamic-int8": "int8-dynamic"}
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
    mode: Annotated[Literal["train", "infer"], _one_of(MODES)] = "train"
    """What the plan is for: training the model, or running it."""
    method: Annotated[Literal["auto", "full", "lora", "qlora"], _one_of(METHODS)] = "auto"
    """Which parameters are trained; auto: all if they fit, else adapters, else on a quantized base."""
    gpu: Annotated[str, _text(_GPU)] | None = None
    """Loose name of the card; None: a typical card with that much memory."""
    device: Annotated[str, BeforeValidator(_device)] = "auto"
    """Where trials run: cuda, cuda:1 or cpu; none: all is simulated; auto: cuda where there is one, else none."""
    seq_len: Annotated[int, _whole(1, unit="tokens")] | None = None
    """Longest sequence, in tokens; None: the planner's choice for the model."""
    target_seq_len: Annotated[int, _whole(1, unit="tokens")] | None = None
    """Longest target sequence of a sequence-to-sequence task, in tokens."""
    num_labels: Annotated[int, _whole(1, unit="labels")] = 2
    """Labels of a classification task."""
    lengths: Annotated[str, _text("a file with one token count a line")] | None = None
    """File with the length of each text of the data, in tokens and in the data's order, one a line; None: assumed."""
    data: Annotated[str, _text(_DATA)] | None = None
    """The training data: its token lengths are planned for; None: lengths are assumed."""
    text_column: Annotated[str, _text("a column's name, or two or three with commas between them")] | None = None
    """Column of the data's texts; for pairs of texts two of them; None: the usual names."""
    label_column: Annotated[str, _text("a column's name")] | None = None
    """Column of the data's labels; None: the usual names."""
    long_texts: Annotated[Literal["truncate", "segment", "pack"], _one_of(LONG_TEXTS)] | None = None
    """What becomes of texts longer than ``seq_len``: truncate; segment: several samples, cut between sentences; pack:
    texts are joined and cut into full windows; None: what the task usually has."""
    overlap: Annotated[float, BeforeValidator(_overlap)] = 0.0
    """Share of a segment that the next one repeats."""
    batch_size: Annotated[int, _whole(1, unit="sequences")] | None = None
    """Effective batch: sequences for each optimizer step; at inference the sequences of one batch."""
    batch_tokens: Annotated[int, _whole(1, unit="tokens")] | None = None
    """Effective batch in tokens for each optimizer step; at inference the tokens of one batch; instead of
    ``batch_size``."""
    precision: Annotated[Words, _some_of(_PRECISIONS)] | None = None
    """Precisions to choose from; None: all that the card has."""
    checkpointing: Annotated[Words, _CHECKPOINTING] | None = None
    """Activation checkpointing to choose from: none, full, every-N; None: all."""
    offload: Annotated[Words, _some_of(_OFFLOADS)] | None = None
    """What may move to host memory; None: all."""
    quantization: Annotated[Words, _some_of(_QUANTIZATIONS, aliases=_ALSO_CALLED)] | None = None
    """How weights may be stored; None: in training as the method has it, at inference as they are if that fits."""
    optimizer: Annotated[Words, _some_of(config.OPTIMIZERS)] | None = None
    """Optimizers to choose from; None: all that keep the results of AdamW, others when nothing else fits."""
    attention: Annotated[Words, _some_of(config.ATTENTIONS)] | None = None
    """Attention implementations to choose from; None: all that need no further package."""
    loss: Annotated[Words, _some_of(config.LOSSES)] | None = None
    """Losses to choose from: standard, or fused-linear, which never has all logits in memory; None: standard."""
    gpus: Annotated[int, _whole(1, 4096, unit="GPUs")] = 1
    """Cards of this kind that train together."""
    parallelism: Annotated[Words, _some_of(tuple(w for w in config.PARALLELISMS if w != "none"))] | None = None
    """How several cards may share the work: ddp, fsdp2; None: both."""
    max_new_tokens: Annotated[int, _whole(1, unit="tokens")] | None = None
    """Tokens that a generating task writes for each request, at most; None: a usual number."""
    concurrency: Annotated[int, _whole(1, unit="sequences")] | None = None
    """Inference: sequences that there are at once, such as a query's documents or requests served together; None:
    as many as there is room for."""
    kv_cache: Annotated[Words, _some_of(config.KV_CACHES)] | None = None
    """Kinds of cache of keys and values to choose from; None: those that change no result."""
    prefill_chunk: Annotated[int, _whole(1, unit="tokens")] | None = None
    """Tokens of a prompt in one pass; None: whole prompts, if these fit."""
    prefix_tokens: Annotated[int, _whole(0, unit="tokens")] = 0
    """Tokens at the beginning of prompts that requests share."""
    headroom: Annotated[str | int, _size(0)] = 0
    """Memory to keep free for other uses of the card, as a size such as 500MB or in bytes."""
    risk: Annotated[float, BeforeValidator(_risk)] = DEFAULT_RISK
    """Probability, at most, that a run needs more than its prediction and margin."""
    host_ram: Annotated[str | int, _size()] | None = None
    """Host memory that offloading may fill; None: what this machine has."""
    allocator: Annotated[str, BeforeValidator(_allocator)] = DEFAULT_ALLOCATOR
    """PyTorch's allocator settings, as in PYTORCH_CUDA_ALLOC_CONF; what it leaves out is PyTorch's default."""
    trials: Annotated[int, _whole(1, 1_000_000)] | None = None
    """Measured trials, at most; without a device configurations to look at; None: as many as the search needs."""
    timeout: Annotated[float, BeforeValidator(_seconds)] | None = None
    """Seconds that measured trials may take together; without a device the search; None: no limit."""
    trial_timeout: Annotated[float, BeforeValidator(_seconds)] | None = None
    """Seconds that one measured trial may take; None: what the planner allows."""
    storage: Annotated[str, _text(_STORAGE)] | None = None
    """Where trials are kept while the search runs, and shared with other workers; None: a file in the user's cache."""
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

    @field_serializer("storage")
    def _without_password(self, storage: str | None) -> str | None:
        return None if storage is None else without_password(storage)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> PlanRequest:
        problems = contradictions(self)
        if problems:
            raise _ContradictionsError(problems)
        return self


class WorkerRequest(BaseModel):
    """What a worker is to join, checked; build one with :func:`make_worker_request`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    storage: Annotated[str, _text(_STORAGE)]
    """Where the trials are that it takes part in."""
    device: Annotated[str, BeforeValidator(_trial_device)] = "auto"
    """Where it runs them: cuda, cuda:1 or cpu; auto: cuda where there is one."""
    timeout: Annotated[float, BeforeValidator(_seconds)] | None = None
    """Seconds after which it starts no further trial; None: when there is nothing left to run."""


def without_password(storage: str) -> str:
    """A storage's URL as it may be shown and saved: ``postgresql://user:***@host/trials``."""
    hidden = re.sub(r"(://[^:/@]*:).*@", r"\1***@", storage)
    return re.sub(r"(?i)([?&]password=)[^&]*", r"\1***", hidden)


class _ContradictionsError(ValueError):
    """Fields that are right one by one and wrong together."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{p.argument}: {p.message}" for p in problems))


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


def make_worker_request(**arguments: Any) -> WorkerRequest:
    """Check the arguments of ``worker()``; None counts as left out. Raises InputError with every problem."""
    try:
        return WorkerRequest.model_validate({name: value for name, value in arguments.items() if value is not None})
    except ValidationError as error:
        raise InputError(list(_problems(error))) from None


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
        accepted = {"model": _MODEL, "storage": _STORAGE}.get(argument, "a card's memory such as 8GB")
        return f"missing; accepted: {accepted}"
    if kind == "extra_forbidden":
        near = near_match(argument, PlanRequest.model_fields)
        return "unknown argument" + (f"; did you mean {near}?" if near else "")
    return str(cause)
