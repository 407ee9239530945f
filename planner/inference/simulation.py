"""Inference configurations to answers: memory, time and host memory of one workload on one card."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from planner.budget import PARTS, Memory
from planner.config import InferenceConfig
from planner.hardware import Card
from planner.inference.recordings import NO_UPDATE, InferenceRecordings
from planner.inference.timing import batch_shapes, pass_seconds, seconds_over
from planner.inference.workload import InferenceWorkload
from planner.inspection import ModelFacts
from planner.lengths import Lengths, assumed_lengths
from planner.memory.epoch import replay_epoch
from planner.memory.model import MemoryModel, largest
from planner.memory.polynomials import Shape
from planner.simulation import OnCard, cublas_workspace_bytes
from planner.timing import InferenceTime
from planner.units import round_up

LONGEST_LOOKED_AT, LARGEST_LOOKED_AT = 2**20, 2**16
"""Tokens and sequences up to which it is told what fits."""
WINDOW_TEXTS = 2048
"""Texts that infer.py sorts together."""


class InferenceSimulator(OnCard):
    """Answers what an inference configuration of one workload needs on one card.

    ``seq_len`` is the planned length: the polynomials are checked against a recording there. ``on_card``: what OnCard
    takes.
    """

    def __init__(self, workload: InferenceWorkload, card: Card, *, seq_len: int, **on_card: Any) -> None:
        super().__init__(card, **on_card)
        self.workload = workload
        self.recordings = InferenceRecordings(workload, card, checked_seq_len=seq_len)
        self._models: dict[str, MemoryModel] = {}
        self._seq_len = seq_len

    @property
    def facts(self) -> ModelFacts:
        """What the model is."""
        return self.recordings.facts

    @cached_property
    def texts(self) -> Lengths:
        """Lengths of the texts that speeds are told for."""
        return self.lengths or assumed_lengths(self._seq_len)

    def model(self, config: InferenceConfig) -> MemoryModel:
        """The memory of batches of texts."""
        key = repr(self.recordings.structure(config))
        if key not in self._models:
            self._models[key] = MemoryModel(
                lambda variant: self.recordings.step_model(config, variant),
                NO_UPDATE,
                exact=lambda shape: self.recordings.record(config, shape),
                cublas_workspace_bytes=cublas_workspace_bytes(self.card.compute_capability),
                settings=self.allocator,
            )
        return self._models[key]

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory(self, config: InferenceConfig) -> Memory:
        """The peak of batches of the longest texts."""
        return self._memory(config, (config.micro_batch_size, config.seq_len))

    def _memory(self, config: InferenceConfig, shape: Shape) -> Memory:
        peak = self.model(config).peak(shape, accumulate=False)
        parts = dict(peak.breakdown)
        parts["activations"] += parts.pop("inputs")
        return self.budget.memory(
            config,
            allocated_bytes=peak.allocated_bytes,
            reserved_bytes=peak.reserved_bytes,
            breakdown={name: parts[name] for name in PARTS},
        )

    def memory_of_budget(self, config: InferenceConfig) -> Memory:
        """The peak over every shape that the token budget lets through: short texts go in larger batches."""
        own, model = self.memory(config), self.model(config)
        for shape in budget_shapes(config):
            if model.allocated_bytes(shape, accumulate=False) > own.peak_allocated_bytes:
                own = max(own, self._memory(config, shape), key=lambda memory: memory.total_bytes)
        return own

    def at_least(self, config: InferenceConfig) -> Memory | None:
        """The peak without the allocator's rounding and fragmentation, when that alone is over the ceiling."""
        shape = (config.micro_batch_size, config.seq_len)
        least = self.model(config).allocated_bytes(shape, accumulate=False)
        if least <= self.budget.allocator_bytes(config):
            return None
        return self.budget.memory(config, allocated_bytes=least, reserved_bytes=least, breakdown={})

    def whole_run(self, config: InferenceConfig) -> Memory:
        """The peak of loading, of the largest batch, and of a run over batches of different lengths."""
        own = self.memory_of_budget(config)
        model, shape = self.model(config), (config.micro_batch_size, config.seq_len)
        loaded = sum(own.breakdown[name] for name in ("parameters",))
        phases = {
            "load": {"peak_allocated_bytes": loaded, "peak_reserved_bytes": loaded},
            "batch": {
                "peak_allocated_bytes": own.peak_allocated_bytes,
                "peak_reserved_bytes": own.peak_reserved_bytes,
            },
        }
        reserved, allocated = own.peak_reserved_bytes, own.peak_allocated_bytes
        if model.is_polynomial(shape):
            varied = replay_epoch(model, ([shape] for shape in batch_shapes(self.texts.tokens[:WINDOW_TEXTS], config)))
            phases["epoch"] = {
                "peak_allocated_bytes": varied.allocated_bytes,
                "peak_reserved_bytes": varied.reserved_bytes,
            }
            reserved, allocated = max(reserved, varied.reserved_bytes), max(allocated, varied.allocated_bytes)
        return self.budget.memory(
            config, allocated_bytes=allocated, reserved_bytes=reserved, breakdown=own.breakdown, phases=phases
        )

    # -- what fits ---------------------------------------------------------------------------------------------------

    def placed(self, config: InferenceConfig) -> InferenceConfig:
        """Where weights are offloaded and nothing says how many layers stay: as many of the first ones as fit.

        A layer more on the card never needs less there. None of them where not even that fits.
        """
        if config.offload == "none" or config.layers_on_card is not None:
            return config

        def with_layers(count: int) -> InferenceConfig:
            return config.model_copy(update={"layers_on_card": count})

        low, high = 0, self.facts.layers
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.at_least(with_layers(middle)) is None and self.memory_of_budget(with_layers(middle)).fits
            low, high = (middle, high) if fits else (low, middle)
        return with_layers(low)

    def longest_text(self, config: InferenceConfig) -> int:
        """The longest text (or prompt) that fits in the configuration's batch, in tokens; 0 when none does."""
        limit = (self.workload.spec.max_seq_len or LONGEST_LOOKED_AT) - config.max_new_tokens
        return largest(lambda n: self._fits(config, config.micro_batch_size, n), limit)

    def largest_batch(self, config: InferenceConfig) -> int:
        """The most sequences of the configuration's length that fit; 0 when not even one does."""
        return largest(lambda n: self._fits(config, n, config.seq_len), LARGEST_LOOKED_AT)

    def _fits(self, config: InferenceConfig, micro_batch_size: int, seq_len: int) -> bool:
        changed = config.model_copy(update={"micro_batch_size": micro_batch_size, "seq_len": seq_len})
        return self.at_least(changed) is None and self.memory(changed).fits

    def host_bytes(self, config: InferenceConfig) -> int:
        """Host memory that offloaded weights take; the process itself comes on top."""
        return 0

    def host_shortage_bytes(self, config: InferenceConfig) -> int:
        """Host memory that is needed beyond what there is; at most zero when there is enough."""
        return self.host_bytes(config) - self._host_ram_bytes

    # -- time --------------------------------------------------------------------------------------------------------

    def time(self, config: InferenceConfig) -> InferenceTime:
        """A batch of the longest texts, and the speed over texts of the planned lengths."""
        lengths = self.texts.tokens[:WINDOW_TEXTS]
        total_s = seconds_over(lengths, config, lambda shape: self._seconds(config, shape))
        batch_ms = self._seconds(config, (config.micro_batch_size, config.seq_len)) * 1e3
        return InferenceTime(
            step_ms=batch_ms,
            micro_batch_ms=batch_ms,
            update_ms=0.0,
            tokens_per_s=sum(min(n, config.seq_len) for n in lengths) / total_s,
            sequences_per_s=len(lengths) / total_s,
        )

    def _seconds(self, config: InferenceConfig, shape: Shape) -> float:
        step = self.model(config).step(shape)
        return pass_seconds(step.template.ops, step.ops_at(shape), config, self.card)


def budget_shapes(config: InferenceConfig) -> Iterator[Shape]:
    """The batches of half, a quarter, ... of the longest length that fill the token budget."""
    seq_len = config.seq_len
    while seq_len >= 32:
        seq_len = round_up(seq_len // 2, 16)
        rows = config.max_tokens_per_micro_batch // (seq_len + config.max_new_tokens)
        yield min(rows, config.max_sequences or rows), seq_len
