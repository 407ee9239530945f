"""How long a pass takes whose weights come to the card while it runs, between two bounds.

accelerate copies each weight from pageable memory with a blocking copy, one after the other. The CUDA driver waits for
the stream, copies the weight to pinned memory of its own in one thread, and the card fetches it from there; the call
returns when all is there (CUDA Runtime API, "API synchronization behavior"). So no kernel is launched ahead of a copy
and nothing runs beside it. For large copies the driver fetches one piece while it copies the next.

After each weight accelerate empties torch's cache (``set_module_tensor_to_device``, ``clear_cache``): the driver takes
back every segment that is free and is asked for it again.

Vectors of a table that waits in host memory are gathered there by one thread's copies, and come in the same way.

- lower: the link at its full rate, kernels at the card's peaks, nothing else;
- expected: the slower of the two copies; kernels and launches as in ``planner/timing.py``, from idle to idle between
  two weights; for weights on disk, their file's page faults;
- upper: both copies one after the other, no kernel beside its launch, the driver slow, the disk slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.achievable import Achievable, reached_on
from planner.hardware import Card
from planner.host_memory import TO_CARD
from planner.inference.timing import without_gradients
from planner.memory.allocator import AllocatorSettings, CachingAllocator
from planner.recording.record import OUTSIDE_LAYERS, Op, Recording
from planner.timing import Operators

Seconds = NDArray[np.float64]
HOOK_US = 89.0
"""CPU time of AlignDevicesHook for each weight, forward and back, without the copy: measured with accelerate 1.15 and
torch 2.13 on 500 LayerNorms of 8 features whose weights wait on the CPU where they also run; the same norms without
hooks took 17 us each."""
HEADER_US = 1.7
"""CPU time for each tensor of a checkpoint's file, whenever one of them is read: OffloadedWeightsLoader opens the file
and reads its whole header each time. Measured in the same way, with files of 200 and 800 tensors."""
DRIVER_CALL_US = 100.0
"""Of cudaMalloc or cudaFree: about 50 us up to 512 KB, and more above (University of Virginia, CUDA support, memory
management overhead)."""
SLOW_DRIVER_CALL_US = 1000.0
"""The same on a slow host: assumed, ten times as much."""


@dataclass(frozen=True, kw_only=True)
class HostRates:
    """How fast a machine's weights get on their way to its card: assumptions, to be replaced by who knows better."""

    copy_bytes_per_s: float = 10e9
    """Of one thread that copies in host memory: "a single-threaded host memcpy runs at roughly 10 GB/s" (docs.rs,
    oxicuda-memory 0.5.5, staging)."""
    mapped_file_bytes_per_s: float = 1e9
    """Of copies to the card from a mapped file that isn't in the page cache, which wait for one page fault after
    another: "~1 GB/s (from an SSD that has ~7 GB/s read speed)" (pytorch/pytorch#117805, safetensors)."""
    touched_file_bytes_per_s: float = 5e9
    """The same where the CPU's threads read it: "when the tensors loaded from the file are used by the CPU, we get
    fairly good load performance (~5 GB/s)", on that disk."""
    slow_disk_bytes_per_s: float = 0.55e9
    """Of a disk on SATA, whose link has 600 MB/s: what a file is read at from a slower disk than that one."""


@dataclass(frozen=True, kw_only=True)
class StreamingTime:
    """Seconds of a pass, with what it can be at best and at worst."""

    lower_s: float
    """Whatever the host is like, it takes at least this."""
    expected_s: float
    """By the mechanism above."""
    upper_s: float
    """More than this means that an assumption about the host doesn't hold."""
    copied_bytes: int
    """To the card."""
    copies: int
    """Weights that came."""

    def __add__(self, other: StreamingTime) -> StreamingTime:
        """One after the other."""
        return StreamingTime(
            lower_s=self.lower_s + other.lower_s,
            expected_s=self.expected_s + other.expected_s,
            upper_s=self.upper_s + other.upper_s,
            copied_bytes=self.copied_bytes + other.copied_bytes,
            copies=self.copies + other.copies,
        )


def streaming_time(
    ops: Sequence[Op],
    flops: NDArray[np.int64],
    moved_bytes: NDArray[np.int64],
    card: Card,
    *,
    tf32: bool,
    offload: str,
    reached: Achievable | None = None,
    host: HostRates | None = None,
    driver_calls: int = 0,
    tensors_in_file: int = 0,
) -> StreamingTime:
    """A pass's operators, with FLOPs and moved bytes of each [operators].

    ``offload``: parameters or disk, where the weights come from; ``driver_calls`` as of ``emptied``;
    ``tensors_in_file``: of the checkpoint, if that is one file.
    """
    reached, host = without_gradients(reached or reached_on(card)), host or HostRates()
    operators = Operators.of(ops)
    comes = np.array([op.name == TO_CARD for op in ops], dtype=np.bool_)
    nbytes = np.where(comes, moved_bytes, 0).astype(np.float64)
    best, usual = (
        np.where(comes, 0.0, operators.kernel_seconds(flops, moved_bytes, card, tf32=tf32, reached=rates))
        for rates in (_at_peak(reached), reached)
    )
    weights = np.array([is_weight(op) for op in ops], dtype=np.bool_)
    disk = weights & (offload == "disk")
    hook_s = (HOOK_US + disk * HEADER_US * tensors_in_file) * 1e-6
    launches = np.where(comes, hook_s, operators.launch_seconds(reached))
    at_best, usually, at_worst = _copy_seconds(nbytes, card, reached, host, disk=disk)
    gathering = (comes & ~weights) * nbytes / host.copy_bytes_per_s
    return StreamingTime(
        lower_s=float((best + at_best).sum()),
        expected_s=float(_between_copies(usual, launches, comes) + (usually + gathering).sum())
        + driver_calls * DRIVER_CALL_US * 1e-6,
        upper_s=float((usual + launches + at_worst + gathering).sum()) + driver_calls * SLOW_DRIVER_CALL_US * 1e-6,
        copied_bytes=int(nbytes.sum()),
        copies=int(weights.sum()),
    )


def is_weight(op: Op) -> bool:
    """Whether an operator brings a layer's weight; what comes outside of layers are vectors of tokens."""
    return op.name == TO_CARD and op.layer != OUTSIDE_LAYERS


def _copy_seconds(
    nbytes: Seconds, card: Card, reached: Achievable, host: HostRates, *, disk: NDArray[np.bool_]
) -> tuple[Seconds, Seconds, Seconds]:
    """Of each copy, at best, usually and at worst; ``disk``: those that come from there. [operators]

    On a CPU nothing is copied: kernels read the file's pages, which may be in memory already.
    """
    slow_disk = nbytes / host.slow_disk_bytes_per_s * disk
    if card.kind == "cpu":
        return 0 * nbytes, nbytes / host.touched_file_bytes_per_s, slow_disk
    link = nbytes / (card.pcie_bytes_per_s * reached.pcie_fraction)
    staging = nbytes / host.copy_bytes_per_s
    usually = np.maximum(np.maximum(link, staging), nbytes / host.mapped_file_bytes_per_s * disk)
    return nbytes / card.pcie_bytes_per_s, usually, link + staging + slow_disk


def _at_peak(reached: Achievable) -> Achievable:
    return replace(
        reached,
        matmul_fp32_fraction=1.0,
        matmul_tensor_core_fraction=1.0,
        attention_fp32_fraction=1.0,
        attention_half_fraction=1.0,
        bandwidth_fraction=1.0,
        kernel_us=0.0,
    )


def _between_copies(kernels: Seconds, launches: Seconds, comes: NDArray[np.bool_]) -> float:
    """Sum of what kernels and launches take from one copy to the next, each time from an idle card to an idle card.

    As ``planner.timing.Pass.of``: the last kernel ends at max over i of (when i is launched + kernels from i on).
    """
    if not len(kernels):
        return 0.0
    starts = np.flatnonzero(comes)
    if not len(starts) or starts[0] > 0:
        starts = np.concatenate([[0], starts])
    ahead = np.cumsum(launches) - (np.cumsum(kernels) - kernels)
    before = np.concatenate([[0.0], np.cumsum(launches) - np.cumsum(kernels)])[starts]
    waiting = np.maximum.reduceat(ahead, starts) - before
    return float(kernels.sum() + np.maximum(waiting, 0.0).sum())


@dataclass(frozen=True, kw_only=True)
class Emptied:
    """What emptying torch's cache after every weight does to a pass."""

    driver_calls: int
    """Segments that the driver gave or took back after loading."""
    peak_reserved_bytes: int
    """At most held by the allocator, loading included."""


def emptied(recording: Recording, settings: AllocatorSettings | None = None) -> Emptied:
    """Replay a recording, emptying the cache where accelerate does."""
    allocator = CachingAllocator(settings or AllocatorSettings())
    sizes = np.array(recording.sizes, dtype=np.int64)
    borders = [op.position for op in recording.ops if is_weight(op)]
    starts = sorted(recording.phases.values())
    loaded = starts[1] if len(starts) > 1 else 0
    allocator.run(recording.events[:loaded], sizes)
    before, at = len(allocator.driver_calls), loaded
    for border in borders:
        allocator.run(recording.events[at:border], sizes)
        allocator.empty_cache()
        at = border
    allocator.run(recording.events[at:], sizes)
    return Emptied(driver_calls=len(allocator.driver_calls) - before, peak_reserved_bytes=allocator.peak_reserved_bytes)
