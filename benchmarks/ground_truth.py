"""Rows of a measurements file, and the runs that reproduce them on the simulated card.

``load_rows(path)`` reads a file in the format of ground_truth/measurements.csv; ``run_for(row)`` records the loop that
the row's authors ran, through the planner's own recording and polynomials, or says why it can't.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import older_releases
from loading import after_checkpoint, checkpoint_sizes
from loops import ITERATION, record
from rows import Row, load_rows, whole
from setups import Setup, setup_of

from planner import cache as store
from planner.errors import InputError, RecordingError
from planner.hardware import Card
from planner.memory.allocator import AllocatorSettings, CachingAllocator, OutOfMemory, Replay, replay_events
from planner.memory.model import StepModel, Variant, fit_step
from planner.memory.polynomials import NotPolynomialError, Shape
from planner.recording.record import WORKSPACE, Op, Recording
from planner.simulation import cublas_workspace_bytes

__all__ = ["Row", "Run", "Skipped", "load_rows", "run_for"]

older_releases.adapt()


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A row that isn't reproduced."""

    row: Row
    reason: str
    """Why, in one line."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row's run on its card: the events of some iterations with the sizes at the row's shape."""

    row: Row
    setup: Setup
    recording: Recording
    """Load, then iterations in phases named ``iteration_0``, ...; sizes and operators are those of the row's shape."""
    fitted: bool
    """Sizes come from polynomials fitted to small recordings; False when they were recorded at the row's shape."""

    @property
    def card(self) -> Card:
        """The row's card."""
        return self.setup.card

    @property
    def tokens(self) -> int:
        """Tokens of one iteration (of the input sequences)."""
        return self.sequences * self.setup.shape[1]

    @property
    def sequences(self) -> int:
        """Sequences of one iteration."""
        return self.setup.shape[0] * (whole(self.row["grad_accum"]) or 1)

    @property
    def recorded_micro_batches(self) -> int:
        """Micro-batches of an iteration that the recording has (the row may repeat the later ones)."""
        return self.setup.micro_batches

    @cached_property
    def iteration_ops(self) -> list[Op]:
        """The operators of the last recorded iteration, the optimizer's included."""
        names = [name for name in self.recording.phases if name.startswith(ITERATION.format(""))]
        begin, end = self.recording.phases[names[-1]], self.recording.phases["end"]
        return [op for op in self.recording.ops if begin <= op.position <= end]

    @cached_property
    def replay(self) -> Replay:
        """The run through the caching allocator."""
        return self._replay(None)

    def fits_in(self, capacity_bytes: int) -> bool:
        """Whether the run goes through when the driver has this much beside the context."""
        try:
            self._replay(capacity_bytes)
        except OutOfMemory:
            return False
        return True

    def _replay(self, capacity_bytes: int | None) -> Replay:
        sizes = np.array(self.recording.sizes, dtype=np.int64)
        kinds = np.array(self.recording.categories)
        sizes[kinds == WORKSPACE] = cublas_workspace_bytes(self.card.compute_capability)
        events = np.array(self.recording.events)
        if self.setup.measured_from is None:
            return replay_events(events, sizes, AllocatorSettings(), capacity_bytes)
        begin = self.recording.phases[ITERATION.format(self.setup.measured_from)]
        allocator = CachingAllocator(AllocatorSettings(), capacity_bytes)
        allocator.run(events[:begin], sizes)
        allocator.reset_peaks()
        allocator.empty_cache()
        peak_index = begin + allocator.run(events[begin:], sizes)
        return Replay(
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            peak_event_index=peak_index,
            retries=allocator.num_alloc_retries,
        )

    @property
    def predicted_bytes(self) -> int:
        """What the row's own measure would have read."""
        if self.row.measure == "max_memory_allocated":
            return self.replay.peak_allocated_bytes
        if self.row.measure == "max_memory_reserved":
            return self.replay.peak_reserved_bytes
        return self.replay.peak_reserved_bytes + self.setup.context_bytes


def run_for(row: Row) -> Run | Skipped:
    """Reproduce a row, or say why not."""
    try:
        setup = setup_of(row)
        if isinstance(setup, str):
            return Skipped(row=row, reason=setup)
        recording, fitted = _recorded(setup)
        if setup.beside_checkpoint is not None:
            recording = after_checkpoint(recording, _checkpoint(setup))
    except (InputError, RecordingError) as error:
        return Skipped(row=row, reason=str(error).splitlines()[0])
    return Run(row=row, setup=setup, recording=recording, fitted=fitted)


# -- recording -------------------------------------------------------------------------------------------------------


def _recorded(setup: Setup) -> tuple[Recording, bool]:
    """Fitted to small shapes and evaluated at the row's; recorded there where nothing fits."""
    model = None if setup.few_shapes else _step_model(setup, Variant.of(setup.shape))
    if model is not None:
        return _at(model, setup.shape), True
    key = {**_key(setup), "shape": setup.shape}
    recording = _without_closed_gates(store.remembered("ground-truth", key, lambda: _record(setup, setup.shape)))
    return (recording if setup.unrolled is None else setup.unrolled(recording)), False


def _checkpoint(setup: Setup) -> list[int]:
    """Sizes of the checkpoint's tensors in fp32."""
    beside = setup.beside_checkpoint or {}
    key = {**_key(setup), "checkpoint": sorted(beside.items())}
    return store.remembered(
        "ground-truth", key, lambda: checkpoint_sizes(_source(_source_key(setup), setup).model, beside)
    )


def _step_model(setup: Setup, variant: Variant) -> StepModel | None:
    def make() -> StepModel | None:
        try:
            return fit_step(lambda shape: _record(setup, shape), variant.shapes())
        except NotPolynomialError:
            return None

    key = {**_key(setup), "variant": variant._asdict()}
    known: StepModel | None = _models.setdefault(repr(key), store.remembered("ground-truth", key, make))
    return known


_models: dict[str, StepModel | None] = {}


def _at(model: StepModel, shape: Shape) -> Recording:
    template = model.template
    flops, moved = model.ops_at(shape)
    ops = [
        Op(op.name, int(f), (int(m),), op.kind, op.position, op.in_backward)
        for op, f, m in zip(template.ops, flops, moved, strict=True)
    ]
    return Recording(
        sizes=model.sizes_at(shape).tolist(),
        categories=template.categories,
        events=template.events,
        layers=template.layers,
        phases=template.phases,
        gradients=template.gradients,
        ops=ops,
    )


def _without_closed_gates(recording: Recording) -> Recording:
    for block, count, threshold in recording.gates:
        if count <= threshold:
            recording.sizes[block] = 0
    return recording


def _record(setup: Setup, shape: Shape) -> Recording:
    return record(_source(_source_key(setup), setup), setup.loop, shape, micro_batches=setup.micro_batches)


_sources: dict[str, Any] = {}


def _source(key: str, setup: Setup) -> Any:
    """The model of a setup, built once."""
    if key not in _sources:
        import torch

        from planner.levers import LEVERS
        from planner.recording.kernels import Target
        from planner.recording.source import StepSource

        _sources.clear()
        model = setup.workload.build_model(
            attention=setup.config.attention, dtype=getattr(torch, setup.weights), use_cache=setup.use_cache
        )
        for lever in LEVERS:
            model = lever.change_model(model, setup.config)
            if setup.kbit_preparation and lever.field == "quantization":
                import peft

                model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model.train()
        target = Target(compute_capability=setup.card.compute_capability, torch_release=setup.torch_release)
        _sources[key] = StepSource(workload=setup.workload, config=setup.config, model=model, stacks=(), target=target)
    return _sources[key]


def _source_key(setup: Setup) -> str:
    fields = (setup.workload, setup.config, setup.weights, setup.use_cache, setup.kbit_preparation)
    return repr((*fields, setup.card.compute_capability, setup.torch_release))


def _key(setup: Setup) -> dict[str, Any]:
    here = Path(__file__).parent
    return {
        "source": _source_key(setup),
        "loop": setup.loop_name,
        "micro_batches": setup.micro_batches,
        "loops": [(here / name).read_text(encoding="utf-8") for name in _CODE],
    }


_CODE = (
    *("loops.py", "older_releases.py", "generation.py", "packed_linears.py", "flash_attn_stand_in.py"),
    *("fms.py", "fused_kernels.py", "boundaries.py", "configs.py", "hfbench.py", "octo.py"),
)
"""Files that a recording depends on."""
