"""Configurations to memory models: which recordings a configuration needs, each made once and remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from planner import cache
from planner.config import TrainingConfig
from planner.hardware import Card, context_bytes
from planner.inspection import ModelFacts, inspect_model
from planner.memory.model import MemoryModel, StepModel, Variant, fit_step
from planner.recording.record import Recording
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.step import StepSource

MIB = 2**20
_SAME_MEMORY = {"tf32": "fp32"}
"""Precisions that record like another."""


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Size of a cuBLAS handle's workspace (aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize)."""
    return 32 * MIB if compute_capability[0] in (9, 10, 12) else 8_519_680


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a configuration needs on the card, part by part. All in bytes; the fields of plan.json."""

    peak_allocated_bytes: int
    """``torch.cuda.max_memory_allocated()`` of a run."""
    peak_reserved_bytes: int
    """``torch.cuda.max_memory_reserved()``: what the caching allocator holds."""
    context_bytes: int
    """The CUDA context with its loaded kernels, outside the allocator."""
    margin_bytes: int
    """Kept free for what the simulation doesn't know (and for what the user asked to keep free)."""
    total_bytes: int
    """Reserved, context and margin: what must be under the ceiling."""
    ceiling_bytes: int
    """What the card can give."""
    breakdown: Mapping[str, int]
    """Allocated bytes at the peak by parameters, gradients, optimizer, activations, temporaries, workspace."""

    @property
    def fits(self) -> bool:
        """Whether the total is under the ceiling."""
        return self.total_bytes <= self.ceiling_bytes


class Simulator:
    """Answers what a configuration of one workload needs on one card."""

    def __init__(self, workload: Workload, card: Card, *, ceiling_bytes: int, headroom_bytes: int = 0) -> None:
        self.workload = workload
        self.card = card
        self.ceiling_bytes = ceiling_bytes
        self._headroom_bytes = headroom_bytes
        self._context_bytes, self.context_reason = context_bytes(card)
        self._sources: dict[str, StepSource] = {}
        self._models: dict[str, MemoryModel] = {}

    @cached_property
    def facts(self) -> ModelFacts:
        """What the model is."""
        return cache.remembered("facts", self._workload_key, lambda: inspect_model(self.workload))

    @property
    def budget_bytes(self) -> int:
        """What the allocator may reserve: the ceiling without context and margin."""
        return self.ceiling_bytes - self._context_bytes - self._margin_bytes

    @property
    def _margin_bytes(self) -> int:
        return self._headroom_bytes

    def memory(self, config: TrainingConfig) -> Memory:
        """The peak of training with this configuration."""
        peak = self.model(config).peak(
            (config.micro_batch_size, config.seq_len), accumulate=config.gradient_accumulation_steps > 1
        )
        outside = self._context_bytes + self._margin_bytes
        activations = peak.breakdown["activations"] + peak.breakdown["inputs"]
        return Memory(
            peak_allocated_bytes=peak.allocated_bytes,
            peak_reserved_bytes=peak.reserved_bytes,
            context_bytes=self._context_bytes,
            margin_bytes=self._margin_bytes,
            total_bytes=peak.reserved_bytes + outside,
            ceiling_bytes=self.ceiling_bytes,
            breakdown={
                "parameters": peak.breakdown["parameters"],
                "gradients": peak.breakdown["gradients"],
                "optimizer": peak.breakdown["optimizer"],
                "activations": activations,
                "temporaries": peak.breakdown["temporaries"],
                "workspace": peak.breakdown["workspace"],
            },
        )

    def model(self, config: TrainingConfig) -> MemoryModel:
        """The memory model of a configuration's structure."""
        structure = self.structure(config)
        update = {**structure, "optimizer": config.optimizer, "offload": config.offload}
        key = repr(update)
        if key not in self._models:
            self._models[key] = MemoryModel(
                lambda variant: self._step_model(config, structure, variant),
                self._update_recording(config, update),
                cublas_workspace_bytes=cublas_workspace_bytes(self.card.compute_capability),
            )
        return self._models[key]

    def structure(self, config: TrainingConfig) -> dict[str, Any]:
        """The fields that decide which events a step has; configurations that share them share recordings."""
        precision = _SAME_MEMORY.get(config.precision, config.precision)
        if precision == "fp16-amp" and self.card.supports_bf16:
            precision = "bf16-amp"  # two bytes either way, and the same kernels
        return {
            "precision": precision,
            "checkpointing": config.checkpointing,
            "attention": config.attention,
            "quantization": config.quantization,
            "method": config.method,
            "lora": config.lora.model_dump() if config.lora else None,
        }

    def _step_model(self, config: TrainingConfig, structure: dict[str, Any], variant: Variant) -> StepModel:
        key = {**self._key(structure), "variant": variant._asdict()}
        return cache.remembered(
            "steps", key, lambda: fit_step(self._source(config, structure).record, variant.shapes())
        )

    def _update_recording(self, config: TrainingConfig, update: dict[str, Any]) -> Recording:
        # which parameters are trained, and in what type, doesn't depend on recomputation or attention
        key = {k: v for k, v in update.items() if k not in ("checkpointing", "attention")}

        def record() -> Recording:
            from planner.step import record_update

            structure = {k: v for k, v in update.items() if k not in ("optimizer", "offload")}
            return record_update(self._source(config, structure), config.optimizer, config.offload)

        return cache.remembered("updates", self._key(key), record)

    def _source(self, config: TrainingConfig, structure: dict[str, Any]) -> StepSource:
        from planner.recording.kernels import Target
        from planner.step import make_source

        key = repr(structure)
        if key not in self._sources:
            changed = config.model_copy(update={"precision": structure["precision"]})
            target = Target(compute_capability=self.card.compute_capability)
            self._sources[key] = make_source(self.workload, changed, target)
        return self._sources[key]

    @property
    def _workload_key(self) -> dict[str, Any]:
        return asdict(self.workload)

    def _key(self, structure: dict[str, Any]) -> dict[str, Any]:
        return {
            "workload": self._workload_key,
            "compute_capability": self.card.compute_capability,
            "structure": structure,
        }
