"""Configurations to memory models: which recordings a configuration needs, each made once and remembered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psutil

from planner import cache
from planner.calibration import margin_fraction
from planner.config import TrainingConfig
from planner.hardware import Card, context_bytes
from planner.inspection import ModelFacts, inspect_model
from planner.levers.offload import HOST_BYTES_PER_PARAMETER
from planner.levers.optimizer import STATE_BYTES_PER_PARAMETER
from planner.levers.precision import AUTOCAST_DTYPES
from planner.memory.model import MemoryModel, StepModel, Variant, agrees, fit_step
from planner.memory.polynomials import NotPolynomialError, Shape
from planner.recording.record import Recording
from planner.recording.repetition import NotRegularError, Stack
from planner.timing import Time, step_time
from planner.units import round_up
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.step import StepSource

MIB = 2**20
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "workspace")
"""The parts of a breakdown."""
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
    """Allocated bytes at the peak by parameters, gradients, optimizer, activations, temporaries, workspace;
    empty where the other figures are a lower bound that was over the ceiling."""

    @property
    def fits(self) -> bool:
        """Whether the total is under the ceiling."""
        return self.total_bytes <= self.ceiling_bytes


def budget_shapes(config: TrainingConfig) -> Iterator[Shape]:
    """The micro-batches of half, a quarter, ... of the longest length that fill the token budget."""
    seq_len, micro_batch_size = config.seq_len, config.micro_batch_size
    while seq_len >= 32 and micro_batch_size < config.effective_batch_size:
        seq_len = round_up(seq_len // 2, 16)
        micro_batch_size = min(config.effective_batch_size, config.max_tokens_per_micro_batch // seq_len)
        yield micro_batch_size, seq_len


def _this_machines_ram_bytes() -> int:
    return int(psutil.virtual_memory().total)


class Simulator:
    """Answers what a configuration of one workload needs on one card.

    ``seq_len`` is the planned length: the polynomials are checked against a recording there.
    """

    def __init__(
        self,
        workload: Workload,
        card: Card,
        *,
        ceiling_bytes: int,
        seq_len: int | None = None,
        headroom_bytes: int = 0,
        host_ram_bytes: int | None = None,
    ) -> None:
        self.workload = workload
        self.card = card
        self.ceiling_bytes = ceiling_bytes
        self._headroom_bytes = headroom_bytes
        self._host_ram_bytes = host_ram_bytes or _this_machines_ram_bytes()
        self._context_bytes, self.context_reason = context_bytes(card)
        self._checked_seq_len = seq_len
        self._sources: dict[str, StepSource] = {}
        self._stacks: dict[str, tuple[Stack, ...]] = {}
        self._models: dict[str, MemoryModel] = {}

    @cached_property
    def facts(self) -> ModelFacts:
        """What the model is."""
        return cache.remembered("facts", self._workload_key, lambda: inspect_model(self.workload))

    @property
    def budget_bytes(self) -> int:
        """What the allocator may reserve: the ceiling without context and margin."""
        fraction, _ = margin_fraction()
        return int((self.ceiling_bytes - self._headroom_bytes) / (1 + fraction)) - self._context_bytes

    def _with_rest(self, allocated_bytes: int, reserved_bytes: int, breakdown: Mapping[str, int]) -> Memory:
        """Add what lies outside the allocator."""
        fraction, _ = margin_fraction()
        held = reserved_bytes + self._context_bytes
        margin = math.ceil(fraction * held) + self._headroom_bytes
        return Memory(
            peak_allocated_bytes=allocated_bytes,
            peak_reserved_bytes=reserved_bytes,
            context_bytes=self._context_bytes,
            margin_bytes=margin,
            total_bytes=held + margin,
            ceiling_bytes=self.ceiling_bytes,
            breakdown=breakdown,
        )

    def memory(self, config: TrainingConfig) -> Memory:
        """The peak of training with this configuration."""
        peak = self.model(config).peak(
            (config.micro_batch_size, config.seq_len), accumulate=config.gradient_accumulation_steps > 1
        )
        parts = dict(peak.breakdown)
        parts["activations"] += parts.pop("inputs")
        return self._with_rest(peak.allocated_bytes, peak.reserved_bytes, {name: parts[name] for name in PARTS})

    def memory_of_budget(self, config: TrainingConfig) -> Memory:
        """The peak over every shape that the token budget lets through.

        Shorter sequences go in larger micro-batches, up to the effective batch. They mostly need less (attention is
        quadratic in length); but kernels round rows up, and one sequence alone needs fewer copies than two. A target
        sequence counts in proportion to its own longest, so it never adds to a full budget.
        """
        own = self.memory(config)
        if self.workload.target_seq_len is not None:
            return own
        model, accumulate = self.model(config), config.gradient_accumulation_steps > 1
        for shape in budget_shapes(config):
            if model.allocated_bytes(shape, accumulate=accumulate) > own.peak_allocated_bytes:
                other = self.memory(config.model_copy(update={"micro_batch_size": shape[0], "seq_len": shape[1]}))
                own = max(own, other, key=lambda memory: memory.total_bytes)
        return own

    def least_bytes(self, config: TrainingConfig) -> int:
        """A lower bound of what is allocated, found without recording: weights, gradients and optimizer state alone.

        Gradients and state count only where every parameter is trained; adapters have next to none.
        """
        weight = 2 if config.method == "lora" and config.precision in AUTOCAST_DTYPES else 4
        if config.quantization == "nf4":
            return self.facts.parameters // 2
        each = 2 if config.precision == "bf16" else weight
        if config.method == "full":
            state = 0 if config.offload == "optimizer" else STATE_BYTES_PER_PARAMETER[config.optimizer]
            each += each + (state if each == 4 else state // 2)
        return self.facts.parameters * each

    def at_least(self, config: TrainingConfig) -> Memory | None:
        """The peak without the allocator's rounding and fragmentation, when that alone is over the ceiling."""
        shape = (config.micro_batch_size, config.seq_len)
        accumulate = config.gradient_accumulation_steps > 1
        least = self.least_bytes(config)
        if least <= self.budget_bytes:
            least = self.model(config).allocated_bytes(shape, accumulate=accumulate)
        return self._with_rest(least, least, {}) if least > self.budget_bytes else None

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
        trained = {name: structure[name] for name in ("method", "lora", "quantization")}
        return cache.remembered(
            "trainable",
            self._key(trained),
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
                exact=lambda shape: self._record(config, structure, shape),
                cublas_workspace_bytes=cublas_workspace_bytes(self.card.compute_capability),
            )
        return self._models[key]

    def structure(self, config: TrainingConfig) -> dict[str, Any]:
        """The fields that decide which events a step has; configurations that share them share recordings."""
        precision = _SAME_MEMORY.get(config.precision, config.precision)
        if precision == "fp16-amp" and self.card.supports_bf16 and config.attention == "sdpa":
            precision = "bf16-amp"  # two bytes either way, and the same kernels
        return {
            "precision": precision,
            "checkpointing": config.checkpointing,
            "attention": config.attention,
            "quantization": config.quantization,
            "method": config.method,
            "lora": config.lora.model_dump() if config.lora else None,
        }

    def _step_model(self, config: TrainingConfig, structure: dict[str, Any], variant: Variant) -> StepModel | None:
        """The fitted model, None where sizes follow no polynomial or don't at the planned length."""
        key = {**self._key(structure), "variant": variant._asdict()}
        model = cache.remembered("steps", key, lambda: self._fit(config, structure, variant))
        shape = (1 if variant.single else 2, self._checked_seq_len or 0)
        if model is None or Variant.of(shape) != variant or not shape[1]:
            return model
        agreed = cache.remembered(
            "checks",
            {**key, "shape": shape},
            lambda: agrees(model, self._record(config, structure, shape), shape),
        )
        return model if agreed else None

    def _fit(self, config: TrainingConfig, structure: dict[str, Any], variant: Variant) -> StepModel | None:
        """From recordings of a shallow model where its layers repeat, else of the whole one."""
        try:
            return fit_step(lambda shape: self._record(config, structure, shape), variant.shapes())
        except NotPolynomialError:
            return None

    def _record(self, config: TrainingConfig, structure: dict[str, Any], shape: Shape) -> Recording:
        """Record one shape, remembering whether the structure's layers repeat."""
        key = repr(structure)
        if key not in self._stacks:
            from planner.step import plan_stacks

            self._stacks[key] = plan_stacks(self.workload, config, self.facts.stacks)
        try:
            return self._source(config, structure, self._stacks[key]).record(shape)
        except NotRegularError:
            self._stacks[key] = ()
            return self._source(config, structure).record(shape)

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
