"""The peak of every phase of a run: loading, first step, steady step, evaluation, resuming from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.memory.host import allocator_for
from planner.memory.model import Int64s, MemoryModel
from planner.memory.polynomials import Shape
from planner.memory.program import Program, build, categories, resumed
from planner.recording.record import Recording


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """What a run holds at most until a phase ends."""

    allocated_bytes: int
    """Most bytes in live blocks during the phase."""
    reserved_bytes: int
    """Most bytes held from the driver during the phase, what earlier phases left in the cache included."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """The whole run, phase by phase."""

    phases: Mapping[str, PhasePeak]
    """By name (see memory/program.py), in the order in which they begin."""
    breakdown: dict[str, int]
    """Allocated bytes by category when most is allocated."""

    @property
    def allocated_bytes(self) -> int:
        """``torch.cuda.max_memory_allocated`` over all phases."""
        return max(peak.allocated_bytes for peak in self.phases.values())

    @property
    def reserved_bytes(self) -> int:
        """``torch.cuda.max_memory_reserved`` over all phases."""
        return max(peak.reserved_bytes for peak in self.phases.values())


def replay_life(model: MemoryModel, shape: Shape, *, accumulate: bool) -> Life:
    """A run from loading to an evaluation and a step after it, and another that resumes from a checkpoint.

    Writing a checkpoint allocates nothing on the card: safetensors and ``torch.save`` copy tensor by tensor to the
    host (safetensors/torch.py, _tobytes; torch/serialization.py, _save). The best checkpoint is kept as files, and
    never loaded beside the model that trains.
    """
    step, update, evaluation = model.step(shape).template, model.update, model.evaluation(shape)
    recordings: list[Recording] = [evaluation] if evaluation else []
    rows = model.row_sizes(shape, *recordings)
    kinds = categories(step, *model.constant_recordings, *recordings)
    phases: dict[str, PhasePeak] = {}
    best, breakdown = -1, {}
    for program in (
        build(step, update, accumulate=accumulate, evaluation=evaluation, contrast=model.contrast),
        resumed(step, update, accumulate=accumulate, contrast=model.contrast),
    ):
        sizes: Int64s = rows[program.rows]
        for name, start, peak, top in _replay(model, program, sizes):
            known = phases.get(name, peak)
            phases[name] = PhasePeak(
                allocated_bytes=max(peak.allocated_bytes, known.allocated_bytes),
                reserved_bytes=max(peak.reserved_bytes, known.reserved_bytes),
            )
            if peak.allocated_bytes > best and top >= 0:
                best, breakdown = peak.allocated_bytes, model.live_by_category(program, sizes, kinds, start + top)
    return Life(phases=phases, breakdown=breakdown)


def _replay(model: MemoryModel, program: Program, sizes: Int64s) -> Iterator[tuple[str, int, PhasePeak, int]]:
    """Each phase with its first event, its peak, and the event (counted from there) where most was allocated."""
    allocator = allocator_for(model.settings)
    ends = [start for _, start in program.phases[1:]] + [len(program.events)]
    for (name, start), end in zip(program.phases, ends, strict=True):
        allocator.reset_peaks()
        top = allocator.run(program.events[start:end], sizes)
        peak = PhasePeak(allocated_bytes=allocator.peak_allocated_bytes, reserved_bytes=allocator.peak_reserved_bytes)
        yield name, start, peak, top
