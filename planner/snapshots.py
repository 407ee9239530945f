"""The simulated run of a plan as a file that PyTorch's memory viewer opens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.allocator_settings import parse_allocator
from planner.config import TrainingConfig
from planner.errors import InputError, Problem
from planner.memory.model import MemoryModel
from planner.memory.program import build
from planner.memory.snapshot import snapshot, sources, write
from planner.recording.record import Recording
from planner.recording.repetition import Stack
from planner.recordings import Recordings, Structure
from planner.simulation import Simulator, cublas_workspace_bytes

if TYPE_CHECKING:
    from planner.plans import Plan
    from planner.recording.source import StepSource


class NamedRecordings(Recordings):
    """Recordings of whole models, with the module and operator that made each block."""

    def _from_layers(self, config: TrainingConfig, record: Callable[[StepSource], Recording]) -> Recording:
        return record(self._source(config, self.structure(config)))

    def _source(self, config: TrainingConfig, structure: Structure, stacks: tuple[Stack, ...] = ()) -> StepSource:
        from planner.recording.names import NamingRecorder

        source = super()._source(config, structure)
        return replace(source, new_recorder=partial(NamingRecorder, model=source.model))

    def _key(self, structure: Structure) -> dict[str, Any]:
        return {**super()._key(structure), "named": True}


def save_snapshot(plan: Plan, path: str | Path) -> Path:
    """Write the simulated run of a plan as a PyTorch memory snapshot, to open at pytorch.org/memory_viz.

    The run goes from loading through two optimizer steps, an evaluation and a further step, with the largest
    micro-batch of the longest length. Stacks name modules. Raises InputError where the file can't be written, and
    what ``plan()`` raises where the model is no longer there.
    """
    from planner.api import simulator_of

    return _write(snapshot_of(simulator_of(plan.request), plan.config, plan.request.allocator), path)


def snapshot_of(simulator: Simulator, config: TrainingConfig, allocator: str) -> dict[str, Any]:
    """The run of one configuration as ``torch.cuda.memory._snapshot`` would return it."""
    recordings = NamedRecordings(simulator.workload, simulator.card)
    shape, accumulate = (config.micro_batch_size, config.seq_len), config.gradient_accumulation_steps > 1
    step, update = recordings.record(config, shape), recordings.update(config)
    evaluation, contrast = recordings.evaluation(config, shape), recordings.contrast(config)
    model = MemoryModel(
        lambda _: None,
        update,
        exact=lambda _: step,
        contrast=contrast,
        cublas_workspace_bytes=cublas_workspace_bytes(simulator.card.compute_capability),
    )
    program = build(step, update, accumulate=accumulate, evaluation=evaluation, contrast=contrast)
    return snapshot(
        program,
        model.row_sizes(shape, evaluation)[program.rows],
        sources([step, *model.constant_recordings, evaluation]),
        parse_allocator(allocator),
        capacity_bytes=simulator.budget.ceiling_bytes - simulator.budget.context_bytes,
    )


def _write(content: dict[str, Any], path: str | Path) -> Path:
    try:
        write(content, path)
    except OSError as error:
        why = error.strerror or str(error)
        message = f"got {str(path)!r}; accepted: a file that can be written; {why}"
        raise InputError([Problem(argument="snapshot", message=message)]) from error
    return Path(path)
