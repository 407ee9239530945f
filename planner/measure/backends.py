"""What differs between the devices that a trial can run on: memory figures, cap, waiting, errors."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor, nn

from planner.measure import nvml
from planner.measure.protocol import DEVICE_ERROR, ERROR, HOST_OOM, OOM, TrialSpec
from planner.recording.kernels import Target
from planner.recording.record import ACTIVATIONS, OPTIMIZER, PARAMETERS, TEMPORARIES, Recording
from planner.recording.recorder import Recorder
from planner.units import format_bytes

MIB = 2**20
OCCUPIED_FROM_BYTES = 64 * MIB
"""Growth of what others hold on a card from which it is not as empty as at the start."""


class Backend(ABC):
    """One device, as a trial's process sees it. Memory in bytes."""

    peaks: dict[str, dict[str, int]]
    """Phase to its ``peak_allocated_bytes`` and ``peak_reserved_bytes``."""
    context_bytes: int = 0
    """What the process held on the device before the model."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.peaks = {}

    @abstractmethod
    def start(self, spec: TrialSpec) -> str:
        """Have the device's libraries loaded, note what is held, set the cap; why it can't be measured now, or ''."""

    @abstractmethod
    def phase(self, name: str) -> Any:
        """A context whose peaks are those of the phase."""

    @abstractmethod
    def finish(self) -> None:
        """Nothing is measured any more: the process is as it was before."""

    @abstractmethod
    def process_bytes(self) -> int:
        """Most that the process held on the device so far, as the system sees it."""

    @abstractmethod
    def status_of(self, error: BaseException) -> str:
        """The status of a trial that ended with an exception."""

    @property
    def recorder(self) -> Recorder | None:
        """What watches the warm-up steps, where there is such a thing."""
        return None

    def adopt(self, tensors: Iterable[tuple[Tensor, int]]) -> None:  # noqa: B027
        """The model is there: its tensors, each with the layer that holds it."""

    def forget_building(self) -> None:  # noqa: B027
        """What building the model with random weights held for a moment is not counted."""

    def recording(self, *, update: bool = False) -> Any:
        """A context in which the recorder, if any, sees what happens."""
        del update
        return nullcontext()

    def synchronize(self) -> None:  # noqa: B027
        """Wait until the device has done everything."""

    def _note(self, phase: str, **peaks: int) -> None:
        known = self.peaks.setdefault(phase, {})
        known.update({name: max(nbytes, known.get(name, 0)) for name, nbytes in peaks.items()})

    @property
    def allocation_retries(self) -> int:
        """Times the allocator freed its cache to ask again."""
        return 0

    @property
    def jumps(self) -> bool:
        """Whether a pass that takes several times the median says that memory runs out."""
        return False

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Over all phases."""
        return _largest(self.peaks, "peak_reserved_bytes")

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Over all phases."""
        return _largest(self.peaks, "peak_allocated_bytes")


def backend_of(device: str) -> Backend:
    """The backend for ``cpu``, ``cuda`` or ``cuda:1``. Raises ValueError for another device."""
    kinds = {"cpu": CpuBackend, "cuda": CudaBackend}
    kind = device.partition(":")[0]
    if kind not in kinds:
        raise ValueError(f"device: got {device!r}; accepted: cpu, cuda, cuda:N")
    return kinds[kind](device)


def generic_step(device: torch.device) -> None:
    """A small training step: what it needs of libraries, kernels and threads is loaded afterwards."""
    layers = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256)).to(device)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            loss = layers(torch.ones(512, 256, device=device)).float().square().mean()
        loss.backward()
    optimizer.step()
    if device.type == "cpu":
        _generic_texts()


@torch.no_grad()
def _generic_texts() -> None:
    """A few tokens' way through a model of texts.

    Pages of torch's libraries become resident when code in them first runs: 3 MiB for these operators.
    """
    table, ids = nn.Embedding(64, 64), torch.zeros(2, 16, dtype=torch.int64)
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    for dtype in (torch.float32, torch.bfloat16):
        states = table(ids).to(dtype).view(2, 16, 4, 16).transpose(1, 2)
        for given in (mask, mask[:, :, :1].expand(2, 1, 16, 16), None):
            states = nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=given)
        logits = torch.cat([states, states], dim=-1).float().tanh().softmax(-1)
        logits.argmax(-1).eq(0).all().item()


def _largest(peaks: Mapping[str, Mapping[str, int]], name: str) -> int | None:
    return max((phase[name] for phase in peaks.values() if name in phase), default=None)


# -- the CPU ---------------------------------------------------------------------------------------------------------


class CpuBackend(Backend):
    """The processor: live tensors by a recorder, and the process's resident set."""

    _MESSAGES = ("can't allocate memory", "could not create a primitive", "std::bad_alloc")

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._live = Recorder(Target(kind="cpu"))
        self._phases = count()
        self._limit: tuple[int, int] | None = None
        self._largest = 0

    def start(self, spec: TrialSpec) -> str:
        """The ceiling is one of the process: what it holds already counts."""
        generic_step(self.device)
        _forget_peak()
        self.context_bytes = held = _resident_bytes()
        if spec.ceiling_bytes is None:
            return ""
        available = psutil.virtual_memory().available
        if available < spec.ceiling_bytes - held:
            there, own, ceiling = map(format_bytes, (available, held, spec.ceiling_bytes))
            return f"{there} of host memory are available beside this process's {own}; the ceiling is {ceiling}"
        self._cap(spec.ceiling_bytes - held)
        return ""

    def _cap(self, growth: int) -> None:
        """setrlimit(2), RLIMIT_DATA: private writable memory, which is what malloc gets; torch is told when it is out.

        Windows has no such limit and macOS doesn't keep to it: there the ceiling is only compared at the end.
        """
        if (mapped := _status_bytes("VmData")) is None:
            return
        import resource

        self._limit = resource.getrlimit(resource.RLIMIT_DATA)
        hard = self._limit[1]
        wanted = mapped + max(0, growth)
        resource.setrlimit(
            resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )

    @property
    def recorder(self) -> Recorder:
        """Of live tensors."""
        return self._live

    def adopt(self, tensors: Iterable[tuple[Tensor, int]]) -> None:
        """The model's tensors are the first that live."""
        self._live.phase("load/model", category=PARAMETERS)
        self._live.adopt(tensors)

    def forget_building(self) -> None:
        """The resident set's peak starts anew."""
        _forget_peak()

    @contextmanager
    def recording(self, *, update: bool = False) -> Iterator[None]:
        """What is allocated within is seen."""
        with self._live, self._live.categorised(OPTIMIZER if update else ACTIVATIONS):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The resident set's peak starts anew."""
        self._largest = max(self._largest, _peak_resident_bytes())
        _forget_peak()
        self._live.phase(f"{name}/{next(self._phases)}", category=TEMPORARIES)
        try:
            yield
        finally:
            self._note(name, peak_reserved_bytes=max(0, _peak_resident_bytes() - self.context_bytes))

    def finish(self) -> None:
        """Peaks of live tensors are counted, and the limit is the one before."""
        if self._limit is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, self._limit)
        self._largest = max(self._largest, _peak_resident_bytes())
        for name, live in live_peaks(self._live.recording()).items():
            self._note(name, peak_allocated_bytes=live)

    def process_bytes(self) -> int:
        """The largest resident set."""
        return max(self._largest, _peak_resident_bytes())

    def status_of(self, error: BaseException) -> str:
        """Out of memory where malloc had none, as torch, oneDNN and C++ say it."""
        out_of_memory = isinstance(error, MemoryError) or any(text in str(error) for text in self._MESSAGES)
        return OOM if out_of_memory else ERROR


def live_peaks(recording: Recording) -> dict[str, int]:
    """Most bytes in live tensors in each phase of a recording; ``first_step/forward`` is a part of ``first_step``."""
    signed = ((1 if event > 0 else -1) * recording.sizes[abs(event)] for event in recording.events)
    live = list(accumulate(signed, initial=0))  # before each event, and after the last
    starts = sorted((start, name.partition("/")[0]) for name, start in recording.phases.items())
    peaks: dict[str, int] = {}
    for (first, phase), (last, _) in pairwise([*starts, (len(recording.events), "")]):
        peaks[phase] = max(peaks.get(phase, 0), *live[first : last + 1])
    return peaks


def _status_bytes(field: str) -> int | None:
    """A line of /proc/self/status (proc(5)), which Linux alone has."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak_resident_bytes() -> int:
    """VmHWM; where there is no /proc the largest since the process's start, or what psutil has."""
    if (peak := _status_bytes("VmHWM")) is not None:
        return peak
    memory = psutil.Process().memory_info()
    if (peak := getattr(memory, "peak_wset", None)) is not None:  # Windows
        return int(peak)
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> None:
    """proc(5), clear_refs: 5 sets VmHWM to the present resident set. Where it can't, peaks are those so far."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


# -- CUDA ------------------------------------------------------------------------------------------------------------


class CudaBackend(Backend):
    """A card: torch's allocator for tensors, the driver for everything."""

    _NO_DEVICE = ("No CUDA GPUs", "not compiled with CUDA", "no NVIDIA driver", "CUDA driver", "CUDA unknown error")
    _OUT_OF_MEMORY: ClassVar[tuple[str, ...]] = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")

    def __init__(self, device: str) -> None:
        super().__init__(device)
        if self.device.index is None:
            self.device = torch.device("cuda", 0)
        self._others = 0
        self._most_used = 0

    def start(self, spec: TrialSpec) -> str:
        """What the card holds before this process has its context is others'."""
        before = nvml.free_bytes(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_device(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)  # makes the context
        self._others = max(0, total - (free + spec.context_bytes if before is None else before))
        expected = spec.expected_used_bytes
        if expected is not None and self._others > expected + OCCUPIED_FROM_BYTES:
            return (
                f"others hold {format_bytes(self._others)} of the card's memory, {format_bytes(expected)} at the start"
            )
        generic_step(self.device)
        torch.cuda.empty_cache()
        self.context_bytes = max(0, self._used() - torch.cuda.memory_reserved(self.device) - self._others)
        if spec.ceiling_bytes is not None:
            room = max(0, spec.ceiling_bytes - (spec.context_bytes or self.context_bytes))
            torch.cuda.set_per_process_memory_fraction(min(1.0, room / total), self.device)
        return ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """torch's peaks start anew."""
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:
            self._note(
                name,
                peak_allocated_bytes=torch.cuda.max_memory_allocated(self.device),
                peak_reserved_bytes=torch.cuda.max_memory_reserved(self.device),
            )
            with suppress(RuntimeError):  # after an error of the device it answers no more
                self._most_used = max(self._most_used, self._used())

    def finish(self) -> None:
        """The cache was the process's most: nothing to undo."""

    def synchronize(self) -> None:
        """Also where errors of kernels appear."""
        torch.cuda.synchronize(self.device)

    def process_bytes(self) -> int:
        """NVML's figure for this process where it knows its number (in a container it often doesn't)."""
        return nvml.process_bytes(self.device) or max(0, self._most_used - self._others)

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    @property
    def allocation_retries(self) -> int:
        """As torch counts them."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    @property
    def jumps(self) -> bool:
        """WSL and Windows move a card's memory to the host's when it runs out."""
        return True

    def status_of(self, error: BaseException) -> str:
        """The card's memory, the host's, another error of the card, or of the code."""
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or any(code in text for code in self._OUT_OF_MEMORY):
            return OOM
        if isinstance(error, MemoryError) or "can't allocate memory" in text:
            return HOST_OOM
        if any(words in text for words in self._NO_DEVICE):
            return DEVICE_ERROR
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in text:
            # the caching allocator raises OutOfMemoryError: this one is of pinned memory (cudaHostAlloc)
            return HOST_OOM if "out of memory" in text else DEVICE_ERROR
        return ERROR
