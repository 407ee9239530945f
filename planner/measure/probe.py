"""What a device is and reaches, found by a process of its own: memory, context, rates, and what is unusual about it."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import Tensor

from planner.config import TrainingConfig
from planner.levers.optimizer import make_optimizer
from planner.measure import nvml
from planner.measure.backends import generic_step
from planner.measure.protocol import DeviceFacts
from planner.models import resolve_model
from planner.recording.record import ACTIVATIONS
from planner.step import build_model, run_micro_batch
from planner.units import MIB, format_bytes
from planner.workload import Workload

TIMED_S = 0.12
"""Seconds that one rate is measured for, about."""
OTHERS_FROM_BYTES = 64 * MIB
"""What others hold of a card that is worth a word: less is the driver's own."""
_CPU_ROWS, _CUDA_ROWS = 256, 4096
_CPU_ELEMENTS, _CUDA_ELEMENTS = 8 * MIB, 64 * MIB
_OPERATORS = 100


def probe(device: str) -> DeviceFacts:
    """The facts of ``cpu``, ``cuda`` or ``cuda:1``. Raises RuntimeError where there is no such device.

    The process should end afterwards, and have done nothing on the device before. Takes a second or two.
    """
    return _probe_cpu() if device == "cpu" else _probe_cuda(torch.device(device))


# -- rates -----------------------------------------------------------------------------------------------------------


def _seconds(run: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """The shortest time of one call, of those that fit into TIMED_S, and of two at least; a first one isn't counted.

    The shortest, because whatever else runs on the machine only makes it slower.
    """
    run()
    synchronize()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 2 or time.perf_counter() - began < TIMED_S:
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def matmul_rates(device: torch.device, names: Mapping[str, torch.dtype], rows: int) -> dict[str, float]:
    """FLOP/s of square products of ``rows`` by each type's name; a type without kernels here is absent."""
    rates: dict[str, float] = {}
    for name, dtype in names.items():
        with suppress(RuntimeError), _tf32(name == "tf32"):
            left, right = (torch.ones(rows, rows, dtype=dtype, device=device) for _ in range(2))
            out = torch.empty_like(left)
            seconds = _seconds(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), _waiting(device))  # type: ignore[misc]
            rates[name] = 2 * rows**3 / seconds
    return rates


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def bandwidth(device: torch.device, elements: int) -> float:
    """Bytes a second of a sum of two tensors: two reads and a write of each element.

    The result is a new tensor, as most operators' are: on a CPU its pages come from the system at their first use.
    """
    a, b = (torch.ones(elements, device=device) for _ in range(2))
    return 3 * 4 * elements / _seconds(lambda: a + b, _waiting(device))


def operator_us(device: torch.device) -> float:
    """A module's small operator, with its autograd node, forward and backward: half of both, as two operators."""
    layer = torch.nn.LayerNorm(8, device=device)
    x = torch.ones(1, 8, device=device)

    def chain() -> None:
        y: Tensor = x
        for _ in range(_OPERATORS):
            y = layer(y)
        y.sum().backward()

    return _seconds(chain, _waiting(device)) / (2 * _OPERATORS) * 1e6


def _waiting(device: torch.device) -> Callable[[], object]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


# -- the CPU ---------------------------------------------------------------------------------------------------------


def _probe_cpu() -> DeviceFacts:
    device = torch.device("cpu")
    memory = psutil.virtual_memory()
    limit = container_limit_bytes()
    total = memory.total if limit is None else min(limit, memory.total)
    generic_step(device)
    _train_a_little()
    gc.collect()
    held = int(psutil.Process().memory_info().rss)
    rates = matmul_rates(device, {"fp32": torch.float32, "bf16": torch.bfloat16}, _CPU_ROWS)
    notes = [] if total == memory.total else [f"its container may have {format_bytes(total)} of memory"]
    if rates.get("bf16", 0.0) < rates["fp32"]:
        notes.append("bf16 is slower than fp32: the processor has no instructions for its products")
    return DeviceFacts(
        device="cpu",
        name=processor_name(),
        total_bytes=total,
        free_bytes=min(total, memory.available),
        context_bytes=held,
        flops_per_s=rates,
        bandwidth_bytes_per_s=bandwidth(device, _CPU_ELEMENTS),
        operator_us=operator_us(device),
        threads=torch.get_num_threads(),
        notes=tuple(notes),
    )


def _train_a_little() -> None:
    """A step of a small BERT: libraries are loaded, and the code of a training step's kernels is in memory.

    A step's kernels are some 10 MB of libtorch that nothing has touched before, and MKL keeps its packing buffers.
    """
    import accelerate  # noqa: F401

    spec = resolve_model("bert-base-uncased")
    small = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "num_hidden_layers": 1}
    workload = Workload(spec=replace(spec, config={**spec.config, **small, "vocab_size": 512}), task=_TASK)
    config = TrainingConfig(
        micro_batch_size=4,
        seq_len=64,
        max_tokens_per_micro_batch=256,
        gradient_accumulation_steps=1,
        effective_batch_size=4,
        precision="fp32",
    )
    model = build_model(workload, config, device="cpu")
    parameters = list(model.parameters())
    optimizer = make_optimizer(config.optimizer, parameters)
    run_micro_batch(model, partial(workload.make_batch, 4, 64, device="cpu"), _Unwatched(), None)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


class _Unwatched:
    """Nobody wants to know where the step is."""

    def phase(self, name: str, *, category: int = ACTIVATIONS, backward: bool = False) -> None:
        """Nothing."""


_TASK = "sequence-classification"


def processor_name() -> str:
    """As the system calls it; ``platform.processor()`` is empty or the bare architecture on Linux."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def container_limit_bytes(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int | None:
    """The least memory limit of this process's control groups and those above them; None where there is none.

    psutil reads /proc/meminfo, which knows the machine alone (cgroups(7); memory.max of version 2,
    memory.limit_in_bytes of version 1, whose "no limit" is a number near 2**63).
    """
    limits: list[int] = []
    with suppress(OSError):
        for line in groups.read_text(encoding="ascii", errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            own = base / path.lstrip("/")
            for folder in (own, *own.parents):
                with suppress(OSError, ValueError):
                    limits.append(int((folder / name).read_text(encoding="ascii")))
    return min((limit for limit in limits if limit < 1 << 60), default=None)


# -- CUDA ------------------------------------------------------------------------------------------------------------


def _probe_cuda(device: torch.device) -> DeviceFacts:
    """Not run on a machine without a card; only documented functions of torch and of NVML are called."""
    device = torch.device("cuda", device.index or 0)
    properties = torch.cuda.get_device_properties(device)
    total = int(properties.total_memory)
    before = nvml.free_bytes(device)
    generic_step(device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device)
    others = 0 if before is None else max(0, total - before)
    context = max(0, total - free - kept - others)
    types = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if (properties.major, properties.minor) < (8, 0):  # emulated, or the same as fp32
        del types["tf32"], types["bf16"]
    return DeviceFacts(
        device=str(device),
        name=properties.name,
        total_bytes=total,
        free_bytes=total - others,
        context_bytes=context,
        compute_capability=(properties.major, properties.minor),
        flops_per_s=matmul_rates(device, types, _CUDA_ROWS),
        bandwidth_bytes_per_s=bandwidth(device, _CUDA_ELEMENTS),
        operator_us=operator_us(device),
        driver=driver_version(device),
        notes=tuple(cuda_notes(properties.name, others, known=before is not None)),
    )


def cuda_notes(name: str, others_bytes: int, *, known: bool) -> Iterator[str]:
    """What is unusual about a card of this name, of which others hold so much (``known``: as NVML says)."""
    if "MIG" in name.split():  # torch names a slice "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
        yield "a MIG slice: part of a card, with memory and multiprocessors of its own"
    if "microsoft" in platform.release().lower():
        yield "WSL: what exceeds the card's memory goes to the host's without an error, and steps slow down many times"
    elif platform.system() == "Windows":
        yield (
            "Windows: what exceeds the card's memory goes to the host's without an error unless the driver's "
            "sysmem fallback policy says otherwise"
        )
    if not known:
        yield "NVML isn't there (nvidia-ml-py): what other processes hold counts as this one's context"
    elif others_bytes > OTHERS_FROM_BYTES:
        yield f"other processes hold {format_bytes(others_bytes)} of it"


def driver_version(device: torch.device) -> str:
    """NVML's, as nvidia-smi shows it; empty where NVML isn't there."""
    with nvml.card(device) as (module, _):
        return "" if module is None else str(module.nvmlSystemGetDriverVersion())
