"""A replayed run as a PyTorch memory snapshot: what pytorch.org/memory_viz and ``torch.cuda._memory_viz`` read.

The dictionary that ``torch.cuda.memory._snapshot`` returns (``torch/csrc/cuda/memory_snapshot.cpp``): the segments at
the end, and a trace of every allocation, free and call of the driver. Stacks of frames are what made a block: the
operator, the module it ran in and the modules around that one, and the part of the run. One difference: sizes in the
trace are those of blocks, so that they add up to what ``torch.cuda.max_memory_allocated`` reads; torch writes what
was requested, up to 511 bytes less each.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.allocator_settings import AllocatorOptions
from planner.memory.allocator import CachingAllocator, OutOfMemory, SegmentInfo
from planner.memory.program import Program
from planner.recording.record import NamedRecording, Origin, Recording
from planner.units import MIB

Int64s = NDArray[np.int64]
Frame = dict[str, str | int]
Frames = list[Frame]

BASE_ADDRESS = 0x7F00_0000_0000
"""Where the card's memory begins, as in a process that runs."""
_PICKLE_PROTOCOL = 4
"""The newest that MemoryViz.js reads."""
_PASSES = {"micro_batch": "micro-batch 1", "accumulate": "micro-batch 2"}
_UPDATES = {"first_update": "update", "later_update": "update", "zero_grad": "zero_grad"}


@dataclass(frozen=True)
class Source:
    """What a block of the program was recorded as."""

    origin: Origin
    """The module and the operator."""
    phase: str
    """The phase of the recording: load, inputs, forward, backward, first_update, ..."""


def sources(recordings: Sequence[Recording]) -> list[Source]:
    """Of every row that a program of these recordings names, in their order."""
    return [source for recording in recordings for source in _sources(recording)]


def _sources(recording: Recording) -> Iterator[Source]:
    assert isinstance(recording, NamedRecording)
    starts = sorted((index, name) for name, index in recording.phases.items())
    phases, phase, coming = [""] * len(recording.sizes), "load", 0
    for index, event in enumerate(recording.events):
        while coming < len(starts) and starts[coming][0] <= index:
            phase, coming = starts[coming][1], coming + 1
        if event > 0:
            phases[event] = phase
    for origin, name in zip(recording.origins, phases, strict=True):
        yield Source(origin, name)


@dataclass
class _Trace:
    """The entries of one device's trace; frames are shared, so that a file of many entries stays small."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    driver_calls: int = 0

    def add(self, action: str, address: int, size_bytes: int, frames: Frames, **more: int) -> None:
        """One entry; the clock counts entries."""
        entry: dict[str, Any] = {"action": action, "addr": address, "size": size_bytes, "stream": 0}
        self.entries.append({**entry, "time_us": len(self.entries), "frames": frames, **more})

    def follow_driver(self, allocator: CachingAllocator, frames: Frames) -> None:
        """What the driver was asked since the last time."""
        for call in allocator.driver_calls[self.driver_calls :]:
            self.add(call.action, BASE_ADDRESS + call.address, call.size_bytes, frames)
        self.driver_calls = len(allocator.driver_calls)


def snapshot(
    program: Program,
    sizes: Int64s,
    rows: Sequence[Source],
    options: AllocatorOptions,
    *,
    capacity_bytes: int,
) -> dict[str, Any]:
    """Replay a program and write everything down. ``sizes`` in bytes of blocks, ``rows`` what each row was.

    A run that needs more than ``capacity_bytes`` ends where it runs out, as it would on the card.
    """
    allocator = CachingAllocator(options.settings(capacity_bytes), capacity_bytes)
    trace = _Trace()
    frames_of: dict[int, Frames] = {}
    parts = _parts_of_run(program)
    for index, event in enumerate(program.events.tolist()):
        block = abs(event)
        nbytes = int(sizes[block])
        if not nbytes:
            continue
        if event < 0:
            _trace_free(trace, allocator, block, frames_of.pop(block))
            continue
        frames = _frames(rows[program.rows[block]], parts[index])
        try:
            allocator.malloc(block, nbytes)
        except OutOfMemory as error:
            trace.follow_driver(allocator, frames)
            free = capacity_bytes - allocator.reserved_bytes
            trace.add("oom", 0, error.requested_bytes, frames, device_free=free)
            break
        trace.follow_driver(allocator, frames)
        frames_of[block] = frames
        place = allocator.block(block)
        assert place is not None
        trace.add("alloc", BASE_ADDRESS + place.address, place.size_bytes, frames)
    trace.add("snapshot", 0, allocator.allocated_bytes, [])
    return {
        "segments": _segments(allocator, frames_of, sizes, expandable=options.expandable_segments),
        "device_traces": [trace.entries],
        "allocator_settings": _settings(options),
        "external_annotations": [],
    }


def _trace_free(trace: _Trace, allocator: CachingAllocator, block: int, frames: Frames) -> None:
    """Both entries of a free; nothing lies between them on one stream."""
    place = allocator.block(block)
    assert place is not None
    allocator.free(block)
    for action in ("free_requested", "free_completed"):
        trace.add(action, BASE_ADDRESS + place.address, place.size_bytes, frames)


def _parts_of_run(program: Program) -> list[str]:
    """For each event, which optimizer step's which micro-batch or update it belongs to."""
    names: list[str] = []
    step = 0
    ends = [start for _, start in program.marks[1:]] + [len(program.events)]
    for (mark, start), end in zip(program.marks, ends, strict=True):
        step += mark == "micro_batch"
        what = _PASSES.get(mark) or _UPDATES.get(mark)
        names += [f"optimizer step {step}, {what}" if what else mark] * (end - start)
    return names


@cache
def _frames(source: Source, part: str) -> Frames:
    """Innermost first: the operator, its module and those around it, the phase in its part of the run."""
    origin = source.origin
    frames = [_frame("operator" if "::" in origin.operator else "tensor", origin.operator)] if origin.operator else []
    if origin.module:
        frames.append(_frame(origin.kind, origin.module))
        names = origin.module.split(".")
        frames += [_frame("module", ".".join(names[:depth])) for depth in range(len(names) - 1, 0, -1)]
    return [*frames, _frame(part, source.phase)]


@cache
def _frame(where: str, name: str) -> Frame:
    return {"filename": where, "line": 0, "name": name}


def _segments(
    allocator: CachingAllocator, frames_of: dict[int, Frames], sizes: Int64s, *, expandable: bool
) -> list[dict[str, Any]]:
    """What the driver has given, block by block."""
    live: dict[int, tuple[int, Frames]] = {}
    for block, frames in frames_of.items():
        place = allocator.block(block)
        assert place is not None
        live[place.address] = int(sizes[block]), frames
    return [_segment(segment, live, expandable=expandable) for segment in allocator.snapshot()]


def _segment(segment: SegmentInfo, live: dict[int, tuple[int, Frames]], *, expandable: bool) -> dict[str, Any]:
    nothing: tuple[int, Frames] = (0, [])
    blocks = []
    for info in segment.blocks:
        requested_bytes, frames = live[info.address] if info.allocated else nothing
        block = {"address": BASE_ADDRESS + info.address, "size": info.size_bytes, "requested_size": requested_bytes}
        blocks.append({**block, "state": "active_allocated" if info.allocated else "inactive", "frames": frames})
    used = sum(info.size_bytes for info in segment.blocks if info.allocated)
    return {
        "device": 0,
        "address": BASE_ADDRESS + segment.blocks[0].address,
        "total_size": segment.size_bytes,
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(block["requested_size"] for block in blocks),
        "stream": 0,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "frames": [],
        "blocks": blocks,
    }


def _settings(options: AllocatorOptions) -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": options.text,
        "expandable_segments": options.expandable_segments,
        "max_split_size": -1 if options.max_split_size_mb is None else options.max_split_size_mb * MIB,
        "garbage_collection_threshold": options.garbage_collection_threshold or 0.0,
    }


def write(snapshot: dict[str, Any], path: str | Path) -> None:
    """Write the file whole or not at all, with the folders above it. Raises OSError."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    staging = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            pickle.dump(snapshot, file, protocol=_PICKLE_PROTOCOL)
        staging.chmod(0o644)
        staging.replace(target)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
