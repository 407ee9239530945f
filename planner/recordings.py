"""The recordings that configurations need: each made once, fitted, and remembered in the user's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from planner import cache
from planner.config import InferenceConfig, TrainingConfig
from planner.hardware import Card
from planner.inspection import ModelFacts, flash2_obstacle, fused_loss_obstacle, inspect_model
from planner.levers.checkpointing import every_n
from planner.levers.offload import IN_THE_PASS
from planner.levers.precision import has_masters
from planner.memory.model import StepModel, Variant, agrees, fit_step
from planner.memory.polynomials import NotPolynomialError, Shape
from planner.recording.record import Recording
from planner.recording.repetition import NotRegularError, Stack
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.recording.kernels import Target
    from planner.recording.source import StepSource

C = TypeVar("C", TrainingConfig, InferenceConfig)
S = TypeVar("S")

Structure = dict[str, Any]
"""The fields of a configuration that decide which events its step has."""
_SAME_MEMORY = {"tf32": "fp32", "bf16-master": "bf16"}
"""Precisions whose step records like another's."""


class RecordingsOf(Generic[C, S]):
    """Step models of one workload on one card, for one kind of configuration, each from one kind of source.

    ``checked_seq_len`` is the planned length: polynomials are checked against a recording there.
    """

    def __init__(self, workload: Workload, card: Card, *, checked_seq_len: int | None = None) -> None:
        self.workload = workload
        self.card = card
        self._checked_seq_len = checked_seq_len
        self._sources: dict[str, S] = {}
        self._stacks: dict[str, tuple[Stack, ...]] = {}

    def structure(self, config: C) -> Structure:
        """The fields that decide which events a step has; configurations that share them share recordings."""
        raise NotImplementedError

    def record(self, config: C, shape: Shape) -> Recording:
        """Record one shape, remembering whether the structure's layers repeat."""
        raise NotImplementedError

    def _make_source(self, config: C, structure: Structure, target: Target, stacks: tuple[Stack, ...]) -> S:
        raise NotImplementedError

    def _plan_stacks(self, config: C) -> tuple[Stack, ...]:
        raise NotImplementedError

    @cached_property
    def facts(self) -> ModelFacts:
        """What the model is."""
        return cache.remembered("facts", self._workload_key, lambda: inspect_model(self.workload))

    @cached_property
    def fused_loss_obstacle(self) -> str:
        """Why the loss can't take over the model's output layer; empty where it can."""
        return cache.remembered("fused-loss", self._workload_key, lambda: fused_loss_obstacle(self.workload))

    @cached_property
    def flash2_obstacle(self) -> str:
        """Why the model can't run on the flash_attn package; empty where it can."""
        return cache.remembered("flash2", self._workload_key, lambda: flash2_obstacle(self.workload))

    def step_model(self, config: C, variant: Variant) -> StepModel | None:
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

    def _fit(self, config: C, variant: Variant) -> StepModel | None:
        """From recordings of a shallow model where its layers repeat, else of the whole one."""
        shapes = variant.shapes(self.workload.spec.max_seq_len)
        if not shapes:
            return None
        try:
            return fit_step(lambda shape: self.record(config, shape), shapes)
        except NotPolynomialError:
            return None

    def _from_layers(self, config: C, record: Callable[[S], Recording]) -> Recording:
        """From the shallow model where its layers repeat, else from the whole one."""
        structure = self.structure(config)
        key = repr(structure)
        if key not in self._stacks:
            self._stacks[key] = self._plan_stacks(config)
        try:
            return record(self._source(config, structure, self._stacks[key]))
        except NotRegularError:
            self._stacks[key] = ()
            return record(self._source(config, structure))

    def _source(self, config: C, structure: Structure, stacks: tuple[Stack, ...] = ()) -> S:
        from planner.recording.kernels import Target

        key = repr((structure, stacks))
        if key not in self._sources:
            target = Target(compute_capability=self.card.compute_capability, kind=self.card.kind)
            self._sources[key] = self._make_source(config, structure, target, stacks)
        return self._sources[key]

    @property
    def _workload_key(self) -> dict[str, Any]:
        return asdict(self.workload)

    def key(self, config: C) -> dict[str, Any]:
        """What all recordings of a configuration depend on."""
        return self._key(self.structure(config))

    def _key(self, structure: Structure) -> dict[str, Any]:
        return {
            "workload": self._workload_key,
            "compute_capability": self.card.compute_capability,
            "kind": self.card.kind,
            "structure": structure,
        }


class Recordings(RecordingsOf[TrainingConfig, "StepSource"]):
    """Step models and update recordings of training."""

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
        if precision == "fp16-amp" and self.card.supports_bf16 and config.attention in ("sdpa", "flash2"):
            precision = "bf16-amp"  # two bytes either way, and the same kernels
        contrastive = self.workload.facts.loss == "contrastive"
        return {
            **({"accumulates": config.gradient_accumulation_steps > 1} if contrastive else {}),
            "precision": precision,
            "checkpointing": config.checkpointing,
            "attention": config.attention,
            "loss": config.loss,
            "quantization": config.quantization,
            "method": config.method,
            "lora": config.lora.model_dump() if config.lora else None,
            "offload": config.offload if config.offload in IN_THE_PASS else "none",
            **_shared(config),
        }

    def record(self, config: TrainingConfig, shape: Shape) -> Recording:
        """Record one shape, remembering whether the structure's layers repeat."""
        return self._from_layers(config, lambda source: source.record(shape))

    def evaluation(self, config: TrainingConfig, shape: Shape) -> Recording:
        """A micro-batch of an evaluation at one shape."""
        parts = config.gradient_accumulation_steps if self.workload.facts.loss == "contrastive" else 1
        key = {**self.key(config), "shape": shape, "parts": parts}

        def record() -> Recording:
            return self._from_layers(config, lambda source: source.record_evaluation(shape, parts=parts))

        return cache.remembered("evaluations", key, record)

    def contrast(self, config: TrainingConfig) -> Recording | None:
        """What comes before each step's micro-batches; None for a loss that needs nothing of the kind."""
        samples, parts = config.micro_batch_size, config.gradient_accumulation_steps
        if self.workload.facts.loss != "contrastive" or parts == 1:
            return None
        structure = self.structure(config)
        key = {**self._key(structure), "samples": samples, "parts": parts}
        return cache.remembered(
            "contrasts", key, lambda: self._source(config, structure).record_contrast(samples, parts)
        )

    def update(self, config: TrainingConfig) -> Recording:
        """Clip and update, the first time and later."""
        structure = self.structure(config)
        # which parameters are trained, and in what type, doesn't depend on recomputation, attention or autocast
        weights = "bf16" if structure["precision"] == "bf16" else "fp32"  # adapters are fp32 on any base
        masters = has_masters(config.precision, config.method)
        key = {
            **_trained(structure),
            "weights": weights,
            "masters": masters,
            "optimizer": config.optimizer,
            "offload": config.offload,
        }

        def record() -> Recording:
            from planner.recording.source import record_update

            return record_update(self._source(config, structure), config.optimizer, config.offload, masters=masters)

        return cache.remembered("updates", self._key(key), record)

    def _make_source(
        self, config: TrainingConfig, structure: Structure, target: Target, stacks: tuple[Stack, ...]
    ) -> StepSource:
        from planner.recording.source import make_source

        changed = config.model_copy(update={"precision": structure["precision"]})
        return make_source(self.workload, changed, target, stacks)

    def _plan_stacks(self, config: TrainingConfig) -> tuple[Stack, ...]:
        from planner.recording.source import plan_stacks

        return plan_stacks(self.workload, config.attention, self.facts.stacks, every=every_n(config.checkpointing) or 1)


def _trained(structure: Structure) -> Structure:
    """What decides which parameters are trained."""
    # shards are as many as the cards; how weights are shared otherwise doesn't matter
    sharded = {"gpus": structure["gpus"]} if structure.get("parallelism") == "fsdp2" else {}
    return {name: structure[name] for name in ("method", "lora", "quantization")} | sharded


def _shared(config: TrainingConfig) -> Structure:
    """What parallelism makes of a step: shards by the number of cards; buckets by whether gradients wait for more."""
    if config.parallelism == "fsdp2":
        return {"parallelism": "fsdp2", "gpus": config.gpus}
    if config.parallelism == "ddp":
        return {"parallelism": "ddp", "accumulates": config.gradient_accumulation_steps > 1}
    return {}
