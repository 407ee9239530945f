"""Configurations to memory models: which recordings a configuration needs, each made once and remembered."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from planner import cache
from planner.config import TrainingConfig
from planner.errors import RecordingError
from planner.hardware import Card, context_bytes
from planner.inspection import ModelFacts, inspect_model
from planner.levers.offload import HOST_BYTES_PER_PARAMETER
from planner.memory.model import MemoryModel, StepModel, Variant, fit_step
from planner.memory.polynomials import NotPolynomialError
from planner.recording.record import Recording
from planner.recording.repetition import NotRegularError, Stack
from planner.timing import Time, step_time
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


def _this_machines_ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Simulator:
    """Answers what a configuration of one workload needs on one card."""

    def __init__(
        self,
        workload: Workload,
        card: Card,
        *,
        ceiling_bytes: int,
        headroom_bytes: int = 0,
        host_ram_bytes: int | None = None,
    ) -> None:
        self.workload = workload
        self.card = card
        self.ceiling_bytes = ceiling_bytes
        self._headroom_bytes = headroom_bytes
        self._host_ram_bytes = host_ram_bytes or _this_machines_ram_bytes()
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

    def time(self, config: TrainingConfig) -> Time:
        """How long an optimizer step takes with this configuration."""
        return step_time(
            self.model(config),
            config,
            self.card,
            trainable_parameters=self.trainable_parameters(config),
            tokens_per_sequence=self.workload.tokens_per_sequence(config.seq_len),
        )

    def trainable_parameters(self, config: TrainingConfig) -> int:
        """Number of parameters that get gradients."""
        if config.method == "full":
            return self.facts.parameters
        structure = self.structure(config)
        return cache.remembered(
            "trainable",
            self._key(structure),
            lambda: sum(p.numel() for p in self._source(config, structure).trainable),
        )

    def host_shortage_bytes(self, config: TrainingConfig) -> int:
        """Host memory that offloading needs beyond what there is; at most zero when there is enough."""
        if config.offload == "none":
            return 0
        return self.trainable_parameters(config) * HOST_BYTES_PER_PARAMETER - self._host_ram_bytes

    def model(self, config: TrainingConfig) -> MemoryModel:
        """The memory model of a configuration's structure."""
        structure = self.structure(config)
        key = repr((structure, config.optimizer, config.offload))
        if key not in self._models:
            self._models[key] = MemoryModel(
                lambda variant: self._step_model(config, structure, variant),
                self._update_recording(config, structure),
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
        return cache.remembered("steps", key, lambda: self._fit(config, structure, variant))

    def _fit(self, config: TrainingConfig, structure: dict[str, Any], variant: Variant) -> StepModel:
        """From a shallow model where its layers repeat, else from the whole one."""
        from planner.step import plan_stacks

        stacks = plan_stacks(self.workload, config, self.facts.stacks)
        if stacks:
            try:
                return fit_step(self._source(config, structure, stacks).record, variant.shapes())
            except (NotRegularError, NotPolynomialError):
                pass
        try:
            return fit_step(self._source(config, structure).record, variant.shapes())
        except NotPolynomialError as error:
            raise RecordingError(
                f"{self.workload.spec.model_id}: memory follows no polynomial of micro-batch and length ({error})"
            ) from error

    def _update_recording(self, config: TrainingConfig, structure: dict[str, Any]) -> Recording:
        # which parameters are trained, and in what type, doesn't depend on recomputation, attention or autocast
        trained = {name: structure[name] for name in ("method", "lora", "quantization")}
        weights = "bf16" if config.precision == "bf16" else "fp32"  # adapters are fp32 on any base
        key = {**trained, "weights": weights, "optimizer": config.optimizer, "offload": config.offload}

        def record() -> Recording:
            from planner.step import record_update

            return record_update(self._source(config, structure), config.optimizer, config.offload)

        return cache.remembered("updates", self._key(key), record)

    def _source(self, config: TrainingConfig, structure: dict[str, Any], stacks: tuple[Stack, ...] = ()) -> StepSource:
        from planner.recording.kernels import Target
        from planner.step import make_source

        key = repr((structure, stacks))
        if key not in self._sources:
            changed = config.model_copy(update={"precision": structure["precision"]})
            target = Target(compute_capability=self.card.compute_capability)
            self._sources[key] = make_source(self.workload, changed, target, stacks)
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
