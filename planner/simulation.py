"""Configurations to answers: memory, time and host memory of one workload on one card."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from planner.allocator_settings import AllocatorOptions
from planner.budget import PARTS, Budget, Memory
from planner.calibration import DEFAULT_RISK
from planner.communication import gather_pool_bytes
from planner.config import TrainingConfig
from planner.hardware import Card, context_bytes, nccl_bytes
from planner.host_memory import LEAST_BYTES_PER_PARAMETER, saved_bytes, state_bytes
from planner.inspection import ModelFacts
from planner.lengths import Lengths
from planner.levers.offload import ON_HOST
from planner.levers.optimizer import PAGED_BYTES_PER_PARAMETER, STATE_BYTES_PER_PARAMETER
from planner.levers.precision import AUTOCAST_DTYPES, WEIGHT_DTYPES, has_masters
from planner.memory.block_sizes import AllocatorSettings
from planner.memory.host import HostSettings
from planner.memory.model import MemoryModel
from planner.memory.polynomials import Shape
from planner.recordings import Recordings
from planner.timing import Time, step_time
from planner.units import round_up
from planner.whole_run import whole_run
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.measurements import Corrections

MIB = 2**20


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Size of a cuBLAS handle's workspace (aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize)."""
    return 32 * MIB if compute_capability[0] in (9, 10, 12) else 8_519_680


def budget_shapes(config: TrainingConfig, sequences_per_sample: int = 1) -> Iterator[Shape]:
    """The micro-batches of half, a quarter, ... of the longest length that fill the token budget."""
    seq_len, micro_batch_size = config.seq_len, config.micro_batch_size
    while seq_len >= 32 and micro_batch_size < config.effective_batch_size:
        seq_len = round_up(seq_len // 2, 16)
        fitting = config.max_tokens_per_micro_batch // (seq_len * sequences_per_sample)
        micro_batch_size = min(config.effective_batch_size, fitting)
        yield micro_batch_size, seq_len


def _this_machines_ram_bytes() -> int:
    return int(psutil.virtual_memory().total)


class OnCard:
    """A card's ceiling, what is kept off it, and what else answers about it depend on.

    ``allocator`` is what the run sets; None: PyTorch's defaults. ``lengths`` of the user's data, and the ``seed`` of
    their order in a run. ``context``: bytes that the process holds outside of its tensors, and how that is known;
    None: the catalogue's figure, which a CPU has none of (ValueError). ``gpus``: cards that train together, whose NCCL
    buffers count too.
    """

    def __init__(
        self,
        card: Card,
        *,
        ceiling_bytes: int,
        headroom_bytes: int = 0,
        host_ram_bytes: int | None = None,
        risk: float = DEFAULT_RISK,
        allocator: AllocatorOptions | None = None,
        lengths: Lengths | None = None,
        seed: int = 0,
        context: tuple[int, str] | None = None,
        gpus: int = 1,
    ) -> None:
        self.card = card
        if context is None and card.kind == "cpu":
            raise ValueError("context: got None; accepted for a CPU: what a process holds there, as measured")
        held_bytes, self.context_reason = context or context_bytes(card)
        if gpus > 1:
            buffers, why = nccl_bytes(card)
            held_bytes, self.context_reason = held_bytes + buffers, f"{self.context_reason}; {why}"
        self.budget = Budget(
            ceiling_bytes=ceiling_bytes,
            context_bytes=held_bytes,
            headroom_bytes=headroom_bytes,
            risk=risk,
            device=card.kind,
        )
        self._host_ram_bytes = host_ram_bytes or _this_machines_ram_bytes()
        options = allocator or AllocatorOptions(text="")
        self.allocator: AllocatorSettings | HostSettings = HostSettings()
        if card.kind == "cuda":
            self.allocator = options.settings(allowed_bytes=ceiling_bytes - held_bytes)
        self.lengths, self.seed = lengths, seed

    @property
    def ceiling_bytes(self) -> int:
        """What the card can give."""
        return self.budget.ceiling_bytes


class Simulator(OnCard):
    """Answers what a training configuration of one workload needs on one card.

    ``seq_len`` is the planned length: the polynomials are checked against a recording there. ``on_card``: what OnCard
    takes.
    """

    def __init__(self, workload: Workload, card: Card, *, seq_len: int | None = None, **on_card: Any) -> None:
        super().__init__(card, **on_card)
        self.workload = workload
        self.recordings = Recordings(workload, card, checked_seq_len=seq_len)
        self._models: dict[str, MemoryModel] = {}
        self._corrections: Corrections | None = None

    def corrected(self, corrections: Corrections) -> Simulator:
        """The same, with answers as measurements on this device make them; recordings are shared."""
        other = copy.copy(self)
        other._corrections = corrections
        context_bytes = corrections.context_bytes
        if context_bytes is not None:
            other.budget = replace(self.budget, context_bytes=context_bytes)
            other.context_reason = "median of the trials on this machine"
        return other

    def corrected_bytes(self, config: TrainingConfig, reserved_bytes: int) -> int:
        """What is reserved as measurements make it; as it is where there are none."""
        factor = 1.0 if self._corrections is None else self._corrections.memory(config).factor
        return round(reserved_bytes * factor) + self._gather_pool_bytes(config)

    def _gather_pool_bytes(self, config: TrainingConfig) -> int:
        """What FSDP2's gathers reserve on a stream of their own; on one stream, as replayed, kernels would use it."""
        if config.parallelism != "fsdp2":
            return 0
        shape = (config.micro_batch_size, config.seq_len)
        step = self.model(config).step(shape)
        casts = config.precision in AUTOCAST_DTYPES
        return gather_pool_bytes(step.template.ops, step.ops_at(shape)[1], gpus=config.gpus, casts=casts)

    @property
    def facts(self) -> ModelFacts:
        """What the model is."""
        return self.recordings.facts

    def memory(self, config: TrainingConfig) -> Memory:
        """The peak of training with this configuration."""
        peak = self.model(config).peak(
            (config.micro_batch_size, config.seq_len), accumulate=config.gradient_accumulation_steps > 1
        )
        parts = dict(peak.breakdown)
        parts["activations"] += parts.pop("inputs")
        return self.budget.memory(
            config,
            allocated_bytes=peak.allocated_bytes,
            reserved_bytes=self.corrected_bytes(config, peak.reserved_bytes),
            breakdown={name: parts[name] for name in PARTS},
        )

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
        for shape in budget_shapes(config, self.workload.facts.sequences_per_sample):
            if model.allocated_bytes(shape, accumulate=accumulate) > own.peak_allocated_bytes:
                other = self.memory(config.model_copy(update={"micro_batch_size": shape[0], "seq_len": shape[1]}))
                own = max(own, other, key=lambda memory: memory.total_bytes)
        return own

    def whole_run(self, config: TrainingConfig) -> Memory:
        """The peak over every phase of a run, and an epoch of batches of different lengths."""
        return whole_run(self, config)

    def least_bytes(self, config: TrainingConfig) -> int:
        """A lower bound of what is allocated, found without recording: weights, gradients and optimizer state alone.

        Gradients and state count only where every parameter is trained; adapters have next to none.
        """
        weight = 2 if config.method == "lora" and config.precision in AUTOCAST_DTYPES else 4
        if config.quantization != "none":
            return self.facts.parameters if config.quantization == "int8" else self.facts.parameters // 2
        if config.offload == "parameters":  # what lies outside of the layers is known when they are recorded
            return 0
        each = 2 if config.precision in WEIGHT_DTYPES else weight
        if config.method == "full":
            state = 0 if config.offload == "optimizer" else STATE_BYTES_PER_PARAMETER[config.optimizer]
            masters = has_masters(config.precision, config.method) and config.offload != "optimizer"
            each += each + (4 + state if masters else state if each == 4 else state // 2)
        return self.facts.parameters * each // (config.gpus if config.parallelism == "fsdp2" else 1)

    def at_least(self, config: TrainingConfig) -> Memory | None:
        """The peak without the allocator's rounding and fragmentation, when that alone is over the ceiling."""
        shape = (config.micro_batch_size, config.seq_len)
        accumulate = config.gradient_accumulation_steps > 1
        least = self.least_bytes(config)
        budget_bytes = self.budget.allocator_bytes(config)
        if least <= budget_bytes:
            least = self.model(config).allocated_bytes(shape, accumulate=accumulate)
        if least <= budget_bytes:
            return None
        return self.budget.memory(config, allocated_bytes=least, reserved_bytes=least, breakdown={})

    def time(self, config: TrainingConfig) -> Time:
        """How long an optimizer step takes with this configuration."""
        time = step_time(
            self.model(config),
            config,
            self.card,
            trainable_parameters=self.trainable_parameters(config),
            tokens_per_sequence=self.workload.tokens_per_sequence(config.seq_len),
        )
        return time if self._corrections is None else time.scaled(self._corrections.time(config).factor)

    def trainable_parameters(self, config: TrainingConfig) -> int:
        """Number of parameters that get gradients."""
        return self.recordings.trainable_parameters(config)

    def host_bytes(self, config: TrainingConfig) -> int:
        """Host memory that offloading or paging needs; the process itself and its data come on top."""
        if config.offload in ON_HOST:
            return state_bytes(config, self.recordings.update(config))
        paged = PAGED_BYTES_PER_PARAMETER.get(config.optimizer, 0)
        total = paged * self.trainable_parameters(config) * config.gpus if paged else 0
        if config.offload == "activations":
            smaller = budget_shapes(config, self.workload.facts.sequences_per_sample)
            model, shapes = self.model(config), [(config.micro_batch_size, config.seq_len), *smaller]
            total += saved_bytes((model.step(shape), shape) for shape in shapes)
        return total

    def host_shortage_bytes(self, config: TrainingConfig) -> int:
        """Host memory that offloading or paging needs beyond what there is; at most zero when there is enough."""
        if config.offload in ON_HOST:
            least = LEAST_BYTES_PER_PARAMETER * self.trainable_parameters(config) - self._host_ram_bytes
            if least > 0:  # known without recording
                return least
        return self.host_bytes(config) - self._host_ram_bytes

    def model(self, config: TrainingConfig) -> MemoryModel:
        """The memory model of a configuration's structure."""
        masters = has_masters(config.precision, config.method)
        contrast = self.recordings.contrast(config)
        compared = (config.micro_batch_size, config.gradient_accumulation_steps) if contrast else ()
        key = repr((self.recordings.structure(config), config.optimizer, config.offload, masters, compared))
        if key not in self._models:
            self._models[key] = MemoryModel(
                lambda variant: self.recordings.step_model(config, variant),
                self.recordings.update(config),
                exact=lambda shape: self.recordings.record(config, shape),
                evaluation=lambda shape: self.recordings.evaluation(config, shape),
                contrast=contrast,
                cublas_workspace_bytes=cublas_workspace_bytes(self.card.compute_capability),
                settings=self.allocator,
            )
        return self._models[key]
