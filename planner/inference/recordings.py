"""The recordings that inference configurations need: each made once, fitted, and remembered in the user's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.config import InferenceConfig
from planner.inference.workload import InferenceWorkload
from planner.memory.polynomials import Shape
from planner.recording.record import Recording
from planner.recording.repetition import Stack
from planner.recordings import RecordingsOf, Structure

if TYPE_CHECKING:
    from planner.inference.source import InferenceSource
    from planner.recording.kernels import Target

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
        }

    def record(self, config: InferenceConfig, shape: Shape) -> Recording:
        """One batch of texts at one shape."""
        return self._from_layers(config, lambda source: source.record_batch(shape))

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
