"""The recordings that inference configurations need: each made once, fitted, and remembered in the user's cache."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from planner import cache
from planner.config import InferenceConfig
from planner.inference.kv_cache import attention_window
from planner.inference.offload import step_with_layers_on_card
from planner.inference.pass_kinds import GenerationFacts
from planner.inference.run_model import Beginning, GenerationModel
from planner.inference.workload import InferenceWorkload
from planner.memory.allocator import AllocatorSettings
from planner.memory.host import HostSettings
from planner.memory.model import StepModel, Variant
from planner.memory.polynomials import Shape
from planner.recording.record import Recording
from planner.recording.repetition import Stack
from planner.recordings import RecordingsOf, Structure

if TYPE_CHECKING:
    from planner.inference.source import InferenceSource
    from planner.recording.kernels import Target
    from planner.recording.recorder import Recorder
    from planner.step import MakeBatch


def all_streamed(config: InferenceConfig) -> InferenceConfig:
    """The same with no layer on the card."""
    return config.model_copy(update={"layers_on_card": 0})


NO_UPDATE = Recording(
    sizes=[0], categories=[0], events=[], layers=[], phases={"first_update": 0, "later_update": 0, "end": 0}
)
"""What follows a batch at inference, where training updates weights."""
_SAME_MEMORY = {"tf32": "fp32"}


class InferenceRecordings(RecordingsOf[InferenceConfig, "InferenceSource"]):
    """Passes of one workload on one card."""

    def structure(self, config: InferenceConfig) -> Structure:
        """The fields that decide which events a pass has."""
        precision = _SAME_MEMORY.get(config.precision, config.precision)
        if precision == "fp16" and self.card.supports_bf16 and config.attention in ("sdpa", "flash2"):
            precision = "bf16"  # two bytes either way, and the same kernels
        return {
            "precision": precision,
            "attention": config.attention,
            "quantization": config.quantization,
            "offload": config.offload,
            "layers_on_card": config.layers_on_card,
            "embedding_on_card": config.embedding_on_card,
            **(self._cache_structure(config) if self.workload.facts.generates else {}),
        }

    @staticmethod
    def _cache_structure(config: InferenceConfig) -> Structure:
        return {name: getattr(config, name) for name in ("kv_cache", "prefill_chunk_tokens", "prefix_tokens")}

    def step_model(self, config: InferenceConfig, variant: Variant) -> StepModel | None:
        """The fitted model; of offloaded weights for any number of layers on the card from one whose layers all go."""
        if config.offload == "none" or not config.layers_on_card:
            return super().step_model(config, variant)
        model = super().step_model(all_streamed(config), variant)
        return model and step_with_layers_on_card(model, config.layers_on_card)

    def weights(self, config: InferenceConfig) -> Recording:
        """A small batch whose weights all come and go: what each of them takes can be read off it."""
        key = {**self.key(all_streamed(config)), "weights": True}
        return cache.remembered("steps", key, lambda: self.record(all_streamed(config), (2, 16)))

    @cached_property
    def attention(self) -> tuple[int, bool]:
        """Tokens that layers with sliding attention see (0: there are none), and whether a stack of its own reads."""

        def look() -> tuple[int, bool]:
            config = self.workload.hf_config()
            return attention_window(config), bool(config.is_encoder_decoder)

        return cache.remembered("attention", self._workload_key, look)

    def record(self, config: InferenceConfig, shape: Shape) -> Recording:
        """One batch of texts at one shape."""
        return self._from_layers(config, lambda source: source.record_batch(shape))

    def beginning(self, config: InferenceConfig, beginning: Beginning) -> Recording:
        """The first passes of a generation."""
        from planner.inference.generation import run_generation

        def run(model: Any, make_batch: MakeBatch, recorder: Recorder) -> None:
            run_generation(model, make_batch, recorder, config, beginning)

        return self._from_layers(config, lambda source: source.record((beginning.batch, beginning.prompt), run))

    def generation(
        self, config: InferenceConfig, *, cublas_workspace_bytes: int, settings: AllocatorSettings | HostSettings
    ) -> GenerationModel:
        """What generation needs at any batch, prompt and number of tokens."""
        window, encodes = self.attention
        limit = self.workload.spec.max_seq_len
        facts = GenerationFacts.of(config, window=window, encodes=encodes, max_positions=limit)
        key = self.key(config)
        return GenerationModel(
            lambda beginning: self.beginning(config, beginning),
            facts,
            cublas_workspace_bytes=cublas_workspace_bytes,
            settings=settings,
            remember=lambda part, make: cache.remembered("generations", {**key, **part}, make),
        )

    def _make_source(
        self, config: InferenceConfig, structure: Structure, target: Target, stacks: tuple[Stack, ...]
    ) -> InferenceSource:
        from planner.inference.source import InferenceSource

        changed = config.model_copy(update={"precision": structure["precision"]})
        assert isinstance(self.workload, InferenceWorkload)
        return InferenceSource.make(self.workload, changed, target, stacks)

    def _plan_stacks(self, config: InferenceConfig) -> tuple[Stack, ...]:
        from planner.recording.source import plan_stacks

        return plan_stacks(self.workload, config.attention, self.facts.stacks)
