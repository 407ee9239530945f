"""What goes to a trial's process and what comes back: plain data, JSON either way. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from planner.config import Config, InferenceConfig, read_config
from planner.inference.workload import InferenceWorkload
from planner.models import ModelSpec
from planner.workload import Workload

OK = "ok"
OOM = "oom"
HOST_OOM = "host-oom"
THRASHING = "thrashing"
TIMEOUT = "timeout"
HANG = "hang"
KILLED = "killed"
SEGFAULT = "segfault"
CRASH = "crash"
DEVICE_ERROR = "device-error"
BAD_REPLY = "bad-reply"
NAN_LOSS = "nan-loss"
NO_GRADIENT = "no-gradient"
NOT_CHECKPOINTED = "not-checkpointed"
OCCUPIED = "occupied"
BAD_REQUEST = "bad-request"
ERROR = "error"

SERVING = "serving"
"""The phase that a server reports once it can take requests."""

STATUSES: Mapping[str, str] = {
    OK: "measured",
    OOM: "the device ran out of memory",
    HOST_OOM: "host memory ran out",
    THRASHING: "it fits only by freeing and asking again: steps slow down",
    TIMEOUT: "it took longer than a trial may",
    HANG: "it made no progress",
    KILLED: "something killed its process",
    SEGFAULT: "its process ended with a segmentation fault",
    CRASH: "its process ended on its own, without an answer",
    DEVICE_ERROR: "the device reported an error other than too little memory",
    BAD_REPLY: "its answer could not be read",
    NAN_LOSS: "the loss was not finite",
    NO_GRADIENT: "trained parameters got no gradient",
    NOT_CHECKPOINTED: "layers that are to be computed twice were not",
    OCCUPIED: "others hold more of the device's memory than at the start",
    BAD_REQUEST: "the process could not read what it was to run",
    ERROR: "its code raised an exception",
}
"""Every status that a trial can end with, and what it means."""
OUT_OF_MEMORY = frozenset({OOM, HOST_OOM, THRASHING})
"""Statuses that say that a configuration does not fit."""
ABOUT_THE_CONFIGURATION = frozenset({OK, OOM, THRASHING, NAN_LOSS, NO_GRADIENT, NOT_CHECKPOINTED})
"""Statuses that would be the same the next time: worth keeping. The others say something about the moment."""


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """What a trial runs, and under which limits."""

    workload: Workload
    """Model and task, at inference an InferenceWorkload; the weights are random."""
    config: Config
    """The configuration; its micro-batch and length are the worst case that is run."""
    device: str
    """``cpu``, ``cuda`` or ``cuda:1``."""
    ceiling_bytes: int | None = None
    """Memory that the process may take on the device, context included; None: all there is."""
    context_bytes: int = 0
    """Of that, what the process takes outside of torch's allocator; taken off the cap."""
    expected_used_bytes: int | None = None
    """What others held on the card at the start: much more than that, and it is not measured; None: anything goes."""
    typical_seq_len: int | None = None
    """A length of the data's middle, run as well: time at it, memory after a change of shape; None: not run."""
    seed: int = 0
    """Of weights and batches."""
    timed_s: float = 2.0
    """Seconds that timed passes may take, about; at least MIN_PASSES are timed."""

    def to_json(self) -> str:
        """One line of JSON."""
        document = asdict(self)
        document["config"] = self.config.model_dump(mode="json")
        return json.dumps(document, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> TrialSpec:
        """From ``to_json``'s line. Raises ValueError, in one line, for anything else."""
        try:
            values: dict[str, Any] = json.loads(text)
            workload = dict(values.pop("workload"))
            spec = ModelSpec(**workload.pop("spec"))
            config = read_config(values.pop("config"))
            kind = InferenceWorkload if isinstance(config, InferenceConfig) else Workload
            return cls(workload=kind(spec=spec, **workload), config=config, **values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not a trial's request: {' '.join(str(error).split())[:300]}") from error


MIN_PASSES = 3
"""Micro-batches that are timed at least."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a trial's process answered, or what its end says. Memory in bytes; None or empty where it got not so far."""

    status: str
    """One of STATUSES."""
    reason: str = ""
    """What happened, in one line; empty for ``ok``."""
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """``peak_allocated_bytes`` and ``peak_reserved_bytes`` of load, first_step, steady_step and typical; at inference
    of load, first_batch, batch and typical."""
    peak_allocated_bytes: int | None = None
    """Most in live tensors. CUDA: max_memory_allocated. CPU: of a recording of real tensors."""
    peak_reserved_bytes: int | None = None
    """Most held for tensors. CUDA: max_memory_reserved. CPU: growth of the resident set over ``context_bytes``."""
    context_bytes: int | None = None
    """What the process held before the model. CUDA: the context. CPU: the resident set with libraries loaded."""
    process_bytes: int | None = None
    """Most that the process held on the device: as the driver sees it; on the CPU the largest resident set."""
    micro_batch_ms: tuple[float, ...] = ()
    """Each timed micro-batch at the longest length, forward and backward; at inference each timed batch."""
    update_ms: tuple[float, ...] = ()
    """Each timed update: clip, step, gradients dropped."""
    typical_micro_batch_ms: tuple[float, ...] = ()
    """Each timed micro-batch at the typical length."""
    prefill_ms: float | None = None
    """Of a generating task's median batch: from its arrival to its first token."""
    token_ms: tuple[float, ...] = ()
    """Each further token of that batch, in order: later ones find more in the cache."""
    step_ms: float | None = None
    """An optimizer step of all its micro-batches, or a batch to answer: medians of the above (of batches the lower)."""
    tokens_per_s: float | None = None
    """Tokens of the step's sequences a second; of a generating task those that are written."""
    steps_executed: int = 0
    """Optimizer updates that were run: at least two for ``ok``. At inference batches of the longest texts."""
    allocation_retries: int = 0
    """Times the allocator had to free its cache and ask again."""
    loss: float | None = None
    """Of the last micro-batch."""
    without_gradient: tuple[str, ...] = ()
    """Trained parameters that never got a gradient other than zero."""
    recomputed_layers: int = 0
    """Layers that ran forward again in one backward pass."""
    setup_s: float = 0.0
    """From the process's start to the first micro-batch."""
    wall_s: float = 0.0
    """All of the trial, as its parent saw it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of torch and transformers in the trial's process."""

    @property
    def ok(self) -> bool:
        """Whether the configuration ran, within the ceiling."""
        return self.status == OK

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """From ``to_json``'s line. Raises ValueError for anything else."""
        values = json.loads(text)
        known = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or values.get("status") not in STATUSES or not set(values) <= known:
            raise ValueError("not a measurement")
        return _measurements().validate_json(text, strict=True)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What a device is and holds, as a process of its own found it. Memory in bytes."""

    device: str
    """As torch names it: ``cpu``, ``cuda:0``."""
    name: str
    """``NVIDIA H200``, or the processor's name."""
    total_bytes: int
    """All of its memory, as torch reports it; the host's memory for the CPU."""
    free_bytes: int
    """Free before this process used any of it."""
    context_bytes: int
    """What a process holds once its libraries and kernels are loaded and a small step has run."""
    compute_capability: tuple[int, int] = (0, 0)
    """Of a CUDA device."""
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Achieved by large matrix products: fp32, bf16, ..."""
    bandwidth_bytes_per_s: float = 0.0
    """Achieved by adding large tensors, reads and writes counted."""
    operator_us: float = 0.0
    """A small operator with its autograd node, forward and backward."""
    threads: int = 0
    """torch's intra-op threads (CPU)."""
    driver: str = ""
    """Version of the CUDA driver; empty on the CPU."""
    notes: tuple[str, ...] = ()
    """What is unusual about it, a clause each: a MIG slice, WSL with its system-memory fallback, other processes."""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DeviceFacts:
        """From ``to_json``'s line. Raises ValueError for anything else."""
        try:
            values = json.loads(text)
            major, minor = values.pop("compute_capability")
            return cls(compute_capability=(major, minor), notes=tuple(values.pop("notes")), **values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not a device's facts: {error}") from error


@cache
def _measurements() -> TypeAdapter[Measurement]:
    """Reads measurements and checks their types; making it takes 10 ms."""
    return TypeAdapter(Measurement)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
