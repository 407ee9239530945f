"""The recordings that configurations need: each made once, fitted, and remembered in the user's cache."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from planner import cache
from planner.config import TrainingConfig
from planner.hardware import Card
from planner.inspection import ModelFacts, inspect_model
from planner.memory.model import StepModel, Variant, agrees, fit_step
from planner.memory.polynomials import NotPolynomialError, Shape
from planner.recording.record import Recording
from planner.recording.repetition import NotRegularError, Stack
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.step import StepSource

Structure = dict[str, Any]
"""The fields of a configuration that decide which events its step has."""
_SAME_MEMORY = {"tf32": "fp32"}
"""Precisions that record like another."""


class Recordings:
    """Step models and update recordings of one workload on one card.

    ``checked_seq_len`` is the planned length: polynomials are checked against a recording there.
    """

    def __init__(self, workload: Workload, card: Card, *, checked_seq_len: int | None = None) -> None:
        self.workload = workload
        self.card = card
        self._checked_seq_len = checked_seq_len
        self._sources: dict[str, StepSource] = {}
        self._stacks: dict[str, tuple[Stack, ...]] = {}

    @cached_property
    def facts(self) -> ModelFacts:
        """What the model is."""
        return cache.remembered("facts", self._workload_key, lambda: inspect_model(self.workload))

    def trainable_parameters(self, config: TrainingConfig) -> int:
        """Number of parameters that get gradients."""
        if config.method == "full":
            return self.facts.parameters
        structure = self.structure(config)
        return cache.remembered(
            "trainable",
            self._key(_trained(structure)),
            lambda: sum(p.numel() for p in self._source(config, structure).trainable),
        )

    def structure(self, config: TrainingConfig) -> Structure:
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

    def step_model(self, config: TrainingConfig, variant: Variant) -> StepModel | None:
        """The fitted model, None where sizes follow no polynomial or don't at the planned length."""
        structure = self.structure(config)
        key = {**self._key(structure), "variant": variant._asdict()}
        model = cache.remembered("steps", key, lambda: self._fit(config, variant))
        shape = (1 if variant.single else 2, self._checked_seq_len or 0)
        if model is None or Variant.of(shape) != variant or not shape[1]:
            return model
        agreed = cache.remembered(
            "checks",
            {**key, "shape": shape},
            lambda: agrees(model, self.record(config, shape), shape),
        )
        return model if agreed else None

    def _fit(self, config: TrainingConfig, variant: Variant) -> StepModel | None:
        """From recordings of a shallow model where its layers repeat, else of the whole one."""
        try:
            return fit_step(lambda shape: self.record(config, shape), variant.shapes())
        except NotPolynomialError:
            return None

    def record(self, config: TrainingConfig, shape: Shape) -> Recording:
        """Record one shape, remembering whether the structure's layers repeat."""
        structure = self.structure(config)
        key = repr(structure)
        if key not in self._stacks:
            from planner.step import plan_stacks

            self._stacks[key] = plan_stacks(self.workload, config, self.facts.stacks)
        try:
            return self._source(config, structure, self._stacks[key]).record(shape)
        except NotRegularError:
            self._stacks[key] = ()
            return self._source(config, structure).record(shape)

    def update(self, config: TrainingConfig) -> Recording:
        """Clip and update, the first time and later."""
        structure = self.structure(config)
        # which parameters are trained, and in what type, doesn't depend on recomputation, attention or autocast
        weights = "bf16" if config.precision == "bf16" else "fp32"  # adapters are fp32 on any base
        key = {**_trained(structure), "weights": weights, "optimizer": config.optimizer, "offload": config.offload}

        def record() -> Recording:
            from planner.step import record_update

            return record_update(self._source(config, structure), config.optimizer, config.offload)

        return cache.remembered("updates", self._key(key), record)

    def _source(self, config: TrainingConfig, structure: Structure, stacks: tuple[Stack, ...] = ()) -> StepSource:
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

    def _key(self, structure: Structure) -> dict[str, Any]:
        return {
            "workload": self._workload_key,
            "compute_capability": self.card.compute_capability,
            "structure": structure,
        }


def _trained(structure: Structure) -> Structure:
    """What decides which parameters are trained."""
    return {name: structure[name] for name in ("method", "lora", "quantization")}
