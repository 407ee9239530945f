"""Inference configurations to answers: memory, time and host memory of one workload on one card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from planner.budget import PARTS, Memory
from planner.config import InferenceConfig
from planner.hardware import Card
from planner.host_memory import pinned_bytes
from planner.inference.kv_cache import kv_cache_bytes
from planner.inference.offload import HostNeed, host_need, layer_bytes, stored_precision
from planner.inference.recordings import NO_UPDATE, InferenceRecordings, all_streamed
from planner.inference.run_model import GenerationModel
from planner.inference.times import Times
from planner.inference.timing import batch_shapes
from planner.inference.workload import InferenceWorkload
from planner.inspection import ModelFacts
from planner.lengths import Lengths, assumed_lengths
from planner.memory.epoch import replay_epoch
from planner.memory.model import MemoryModel, Peak, largest
from planner.memory.polynomials import Shape
from planner.simulation import OnCard, cublas_workspace_bytes
from planner.timing import InferenceTime
from planner.units import round_up

LONGEST_LOOKED_AT, LARGEST_LOOKED_AT = 2**20, 2**16
"""Tokens and sequences up to which it is told what fits."""
PREFIXES_KEPT = 4
"""Beginnings that requests share for which there is room; beyond them the least recently used go."""
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
        self._generations: dict[str, GenerationModel] = {}
        self._cache_bytes: dict[tuple[int, int, int], int] = {}
        self._seq_len = seq_len

    @property
    def facts(self) -> ModelFacts:
        """What the model is."""
        return self.recordings.facts

    @property
    def context_is_read_apart(self) -> bool:
        """Whether one stack reads the prompt and another one writes."""
        return self.recordings.attention[1]

    @property
    def generates(self) -> bool:
        """Whether the task writes text."""
        return self.workload.facts.generates

    @cached_property
    def texts(self) -> Lengths:
        """Lengths of the texts that speeds are told for."""
        return self.lengths or assumed_lengths(self._seq_len)

    @property
    def window(self) -> Sequence[int]:
        """Lengths of the texts that are sorted together."""
        return self.texts.tokens[:WINDOW_TEXTS]

    # -- models ------------------------------------------------------------------------------------------------------

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

    def generation(self, config: InferenceConfig) -> GenerationModel:
        """The memory and work of batches of requests."""
        key = repr(self.recordings.structure(config))
        if key not in self._generations:
            workspace = cublas_workspace_bytes(self.card.compute_capability)
            self._generations[key] = self.recordings.generation(
                config, cublas_workspace_bytes=workspace, settings=self.allocator
            )
        return self._generations[key]

    def _peak(self, config: InferenceConfig, shape: Shape) -> Peak:
        if self.generates:
            return self.generation(config).peak(shape, config.max_new_tokens)
        return self.model(config).peak(shape, accumulate=False)

    def _allocated_bytes(self, config: InferenceConfig, shape: Shape) -> int:
        """A lower bound of what is reserved, much cheaper than the peak."""
        if self.generates:
            least = self.generation(config).allocated_bytes(shape, config.max_new_tokens)
            return least + self._other_prefixes_bytes(config)
        return self.model(config).allocated_bytes(shape, accumulate=False)

    # -- keys and values ---------------------------------------------------------------------------------------------

    def cache_bytes(self, config: InferenceConfig, sequences: int, tokens: int) -> int:
        """Keys and values of so many sequences of a dynamic cache, as they are stored."""
        width = 4 if config.precision in ("fp32", "tf32") else 2
        key = (sequences, tokens, width)
        if key not in self._cache_bytes:
            self._cache_bytes[key] = kv_cache_bytes(self.workload.hf_config(), sequences, tokens, width)
        return self._cache_bytes[key]

    def _other_prefixes_bytes(self, config: InferenceConfig) -> int:
        """Of shared beginnings that are kept, those beside the one that a batch goes on from, which is recorded."""
        if not config.prefix_cache_bytes:
            return 0
        return max(0, config.prefix_cache_bytes - self.cache_bytes(config, 1, config.prefix_tokens))

    def with_prefixes(self, config: InferenceConfig) -> InferenceConfig:
        """With room for PREFIXES_KEPT shared beginnings, where there are any."""
        if not config.prefix_tokens:
            return config
        nbytes = self.cache_bytes(config, PREFIXES_KEPT, config.prefix_tokens)
        return config.model_copy(update={"prefix_cache_bytes": nbytes})

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory(self, config: InferenceConfig) -> Memory:
        """The peak of batches of the longest texts."""
        return self._memory(config, (config.micro_batch_size, config.seq_len))

    def _memory(self, config: InferenceConfig, shape: Shape) -> Memory:
        peak = self._peak(config, shape)
        parts = dict(peak.breakdown)
        parts["activations"] += parts.pop("inputs")
        kept = self._other_prefixes_bytes(config)
        cache = {"kv_cache": parts["kv_cache"] + kept} if "kv_cache" in parts else {}
        return self.budget.memory(
            config,
            allocated_bytes=peak.allocated_bytes + kept,
            reserved_bytes=peak.reserved_bytes + kept,
            breakdown={name: parts[name] for name in PARTS} | cache,
        )

    def memory_of_budget(self, config: InferenceConfig) -> Memory:
        """The peak over every shape that the token budget lets through: short texts go in larger batches."""
        own = self.memory(config)
        for shape in budget_shapes(config):
            if self._allocated_bytes(config, shape) > own.peak_allocated_bytes:
                own = max(own, self._memory(config, shape), key=lambda memory: memory.total_bytes)
        return own

    def at_least(self, config: InferenceConfig) -> Memory | None:
        """The peak without the allocator's rounding and fragmentation, when that alone is over the ceiling."""
        least = self._allocated_bytes(config, (config.micro_batch_size, config.seq_len))
        if least <= self.budget.allocator_bytes(config):
            return None
        return self.budget.memory(config, allocated_bytes=least, reserved_bytes=least, breakdown={})

    def whole_run(self, config: InferenceConfig) -> Memory:
        """The peak of loading, of the largest batch, and of a run over batches of different lengths."""
        own = self.memory_of_budget(config)
        loaded = own.breakdown["parameters"]
        if config.quantization == "int8-dynamic":  # whole weights are there before torch makes packed ones of them
            loaded = max(loaded, 4 * self.facts.parameters)
        phases = {"load": _phase(loaded, loaded), "batch": _phase(own.peak_allocated_bytes, own.peak_reserved_bytes)}
        shape = (config.micro_batch_size, config.seq_len)
        if not self.generates and self.model(config).is_polynomial(shape):
            varied = replay_epoch(self.model(config), ([shape] for shape in batch_shapes(self.window, config)))
            phases["epoch"] = _phase(varied.allocated_bytes, varied.reserved_bytes)
        return self.budget.memory(
            config,
            allocated_bytes=max(phase["peak_allocated_bytes"] for phase in phases.values()),
            reserved_bytes=max(phase["peak_reserved_bytes"] for phase in phases.values()),
            breakdown=own.breakdown,
            phases=phases,
        )

    # -- what fits ---------------------------------------------------------------------------------------------------

    def placed(self, config: InferenceConfig) -> InferenceConfig:
        """Where weights are offloaded and nothing says how many layers stay: as many of the first ones as fit.

        The table of token embeddings goes first, where it can and the host has room: of it only the vectors of a
        batch's tokens cross the link.
        """
        if config.offload == "none" or config.layers_on_card is not None:
            return config
        waiting = config.model_copy(update={"embedding_on_card": not self._table_may_wait})
        waiting = self._with_most_layers(waiting)
        if waiting.embedding_on_card or self.host_shortage_bytes(waiting) <= 0:
            return waiting
        staying = self._with_most_layers(config)
        return staying if self._fits(staying) else waiting

    @property
    def _table_may_wait(self) -> bool:
        return self.facts.table_parameters > 0 and self.card.kind == "cuda"

    def _with_most_layers(self, config: InferenceConfig) -> InferenceConfig:
        """A layer more on the card adds its weights to the need; none of them stays where not even that fits.

        Where nothing else waits one layer does.
        """
        streamed = all_streamed(config)
        shape = (config.micro_batch_size, config.seq_len)
        room = self.budget.allocator_bytes(config) - self._allocated_bytes(streamed, shape)
        sizes = layer_bytes(self.recordings.weights(config))
        count = 0
        while count < len(sizes) - config.embedding_on_card and sizes[count] <= room:
            room -= sizes[count]
            count += 1
        while count and not self._fits(config.model_copy(update={"layers_on_card": count})):
            count -= 1
        return config.model_copy(update={"layers_on_card": count})

    def _fits(self, config: InferenceConfig) -> bool:
        return self.at_least(config) is None and self.memory_of_budget(config).fits

    def settled(self, config: InferenceConfig) -> InferenceConfig:
        """With what a batch costs beside its tokens, which infer.py weighs against padding."""
        return config.model_copy(update={"overhead_tokens": Times(self, config).overhead_tokens()})

    def longest_text(self, config: InferenceConfig) -> int:
        """The longest text (or prompt) that fits in the configuration's batch, in tokens; 0 when none does."""
        limit = (self.workload.spec.max_seq_len or LONGEST_LOOKED_AT) - config.max_new_tokens
        least = config.prefix_tokens + 1  # a prompt is longer than the beginning that it shares
        return self._largest(lambda n: config.model_copy(update={"seq_len": max(n, least)}), limit)

    def largest_batch(self, config: InferenceConfig) -> int:
        """The most sequences of the configuration's length that fit; 0 when not even one does."""
        return self._largest(lambda n: config.model_copy(update={"micro_batch_size": n}), LARGEST_LOOKED_AT)

    def _largest(self, changed: Callable[[int], InferenceConfig], limit: int) -> int:
        """The largest number that fits: first by live bytes, which are cheap, then exactly, a little below."""
        high = largest(lambda n: self.at_least(changed(n)) is None, limit)
        low, step = high, 1
        while low > 0 and not self.memory(changed(low)).fits:
            high, low, step = low, max(0, low - step), 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.memory(changed(middle)).fits else (low, middle)
        return low

    def host_need(self, config: InferenceConfig) -> HostNeed | None:
        """What offloaded weights take elsewhere; None where all stay on the card."""
        if config.offload == "none":
            return None
        stored = stored_precision(self.workload.spec.config)
        placed = self.placed(config)
        table_parameters = self.facts.table_parameters
        return host_need(placed, self.recordings.weights(placed), stored, table_parameters=table_parameters)

    def host_bytes(self, config: InferenceConfig) -> int:
        """Host memory that offloaded weights and an offloaded cache take; the process itself comes on top."""
        need = self.host_need(config)
        weights = 0 if need is None else max(need.waiting_bytes, need.loading_bytes)
        return weights + (self._offloaded_cache_bytes(config) if config.kv_cache == "offloaded" else 0)

    def _offloaded_cache_bytes(self, config: InferenceConfig) -> int:
        """Keys and values of each layer in pinned tensors: a copy to the CPU that doesn't block pins what it makes.

        aten/src/ATen/native/TensorConversions.cpp, _to_copy: ``pin_out``.
        """
        halves = 2 * self.facts.layers
        tokens = config.seq_len + config.max_new_tokens
        return halves * pinned_bytes(self.cache_bytes(config, config.micro_batch_size, tokens) // halves)

    def host_shortage_bytes(self, config: InferenceConfig) -> int:
        """Host memory that is needed beyond what there is; at most zero when there is enough."""
        return self.host_bytes(config) - self._host_ram_bytes

    # -- time --------------------------------------------------------------------------------------------------------

    def time(self, config: InferenceConfig) -> InferenceTime:
        """A batch of the longest texts, and the speed over texts of the planned lengths."""
        return Times(self, config).all()

    def batch_seconds(self, config: InferenceConfig, shape: Shape) -> float:
        """A batch of a shape, from its arrival to its answers."""
        return Times(self, config).batch_seconds(shape)


def _phase(allocated_bytes: int, reserved_bytes: int) -> dict[str, int]:
    return {"peak_allocated_bytes": allocated_bytes, "peak_reserved_bytes": reserved_bytes}


def budget_shapes(config: InferenceConfig) -> Iterator[Shape]:
    """The batches of half, a quarter, ... of the longest length that fill the token budget."""
    seq_len = config.seq_len
    while seq_len >= 32:
        seq_len = round_up(seq_len // 2, 16)
        if seq_len <= config.prefix_tokens:  # a prompt is longer than the beginning that it shares
            return
        rows = config.max_tokens_per_micro_batch // (seq_len + config.max_new_tokens)
        yield min(rows, config.max_sequences or rows), seq_len
