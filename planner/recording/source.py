"""What a step is recorded from: the model on a device that isn't there, watched while it runs the one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from planner.config import TrainingConfig
from planner.errors import InputError, RecordingError
from planner.levers.checkpointing import checkpointing_layers, stack_sizes
from planner.levers.offload import ON_HOST
from planner.levers.optimizer import make_optimizer
from planner.levers.precision import autocast_dtype
from planner.memory.polynomials import Shape
from planner.recording import cpu
from planner.recording.cuda import CudaSemantics
from planner.recording.kernels import Target
from planner.recording.loading import load_quantized, warmed_up
from planner.recording.record import GRADIENTS, OPTIMIZER, OUTSIDE_LAYERS, PARAMETERS, TEMPORARIES, Recording
from planner.recording.recorder import Recorder
from planner.recording.repetition import Stack, repeat_layers
from planner.recording.sharding import Sharding, buckets, gradients_into_buckets
from planner.recording.transfers import CastsAreNotKept, gradients_to_host, layer_weights
from planner.step import CachedGradients, MakeBatch, build_model, contrast, run_evaluation_batch, run_micro_batch
from planner.workload import Workload, device_tensors


@dataclass(frozen=True, kw_only=True)
class StepSource:
    """What a step is recorded from: one model, built once, recorded at many shapes."""

    workload: Workload
    """Model and task."""
    config: TrainingConfig
    """The structure; its micro-batch and length are not looked at, and of its accumulation whether there is any."""
    model: nn.Module
    """The model with every lever applied; shallow where ``stacks`` repeat."""
    stacks: tuple[Stack, ...]
    """How the model's layers become those of the model that is asked for."""
    target: Target
    """What the card does to kernels."""
    new_recorder: Callable[[Target], Recorder] = Recorder
    """What writes a recording."""
    sharding: Sharding | None = None
    """The shards of the parameters with parallelism fsdp2."""
    buckets: list[Tensor] = field(default_factory=list)
    """Those of the last recording's gradients with parallelism ddp: they outlive the pass."""

    def record(self, shape: Shape) -> Recording:
        """Load, one micro-batch forward and backward, at ``(micro-batch, seq_len)``.

        Raises RecordingError, and NotRegularError when the layers don't repeat as a shallow model's must.
        """
        self.model.zero_grad(set_to_none=True)
        facts, cached = self.workload.facts, None
        if facts.loss == "contrastive" and self.config.gradient_accumulation_steps > 1:
            cached = self._cached(shape[0] * facts.sequences_per_sample)
        return self._record(shape, partial(run_micro_batch, loss=facts.loss, cached=cached))

    def _cached(self, rows: int) -> CachedGradients:
        """Those of the micro-batch's own rows; how many others there are doesn't change the pass."""
        with cpu.fake_tensors() if self.target.kind == "cpu" else nullcontext():
            vectors = torch.empty(rows, self.workload.vector_size, device=self.target.stand_in_device)
            place = torch.empty(rows, dtype=torch.int64, device=self.target.stand_in_device)
        return CachedGradients(vectors=vectors, place=place)

    def record_contrast(self, samples: int, parts: int) -> Recording:
        """What comes before a step's micro-batches, of which there are so many, where its loss compares them all."""
        workload = self.workload
        shape = (parts, samples * workload.facts.sequences_per_sample, workload.vector_size)
        recorder = self.new_recorder(self.target)
        with _semantics(self), recorder:
            held = contrast(shape, self.target.stand_in_device, recorder)
            recorder.phase("end")
            recording = recorder.recording()
        del held
        return recording

    def record_evaluation(self, shape: Shape, *, parts: int = 1) -> Recording:
        """Load, and one micro-batch of the emitted script's ``evaluate``: no gradients, no dropout.

        ``parts``: micro-batches of an effective batch, whose vectors a contrastive loss compares.
        Raises what ``record`` raises.
        """
        self.model.eval()
        try:
            facts = self.workload.facts
            run = partial(run_evaluation_batch, loss=facts.loss, measured=facts.new_head, parts=parts)
            return self._record(shape, run)
        finally:
            self.model.train()

    def _record(self, shape: Shape, run: Callable[..., None]) -> Recording:
        with _model_code(self.workload, self.config):
            recording = _record(self, shape, run)
        recording = repeat_layers(recording, self.stacks)
        return warmed_up(recording) if self.config.quantization != "none" else recording

    @property
    def trainable(self) -> list[Tensor]:
        """The parameters that are trained, in model order."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast casts to, None without; fsdp2 casts weights and inputs itself (MixedPrecisionPolicy)."""
        return None if self.sharding else autocast_dtype(self.config.precision)


def make_source(workload: Workload, config: TrainingConfig, target: Target, stacks: Sequence[Stack] = ()) -> StepSource:
    """Build the model with every lever applied; shallow when ``stacks`` says how to deepen its recordings."""
    with _model_code(workload, config):
        model = build_model(workload, config, **shallow_changes(workload, stacks))
    if target.kind == "cpu":
        model = cpu.moved(model)
    sharding = None
    if config.parallelism == "fsdp2":
        sharding = Sharding.of(model, config.gpus, autocast_dtype(config.precision))
    return StepSource(
        workload=workload, config=config, model=model, stacks=tuple(stacks), target=target, sharding=sharding
    )


Semantics = CudaSemantics | cpu.CpuSemantics
"""The mode under which a step runs as the target would run it."""


def _semantics(source: StepSource) -> Semantics:
    target, config, dtype = source.target, source.config, source.dtype
    if target.kind == "cpu":
        return cpu.CpuSemantics(autocast_dtype=dtype)
    kind = CastsAreNotKept if config.offload == "parameters" else CudaSemantics
    return kind(target, autocast_dtype=dtype)


# transformers' names for the number of layers of a stack: the common one, then encoders' and decoders'.
_DEPTH_FIELDS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def plan_stacks(
    workload: Workload, attention: str, layers_of_stacks: Sequence[int], *, every: int = 1
) -> tuple[Stack, ...]:
    """How to record a shallow model instead; empty when there is nothing to gain.

    ``every``: layers after which what they do repeats, beside what the model's configuration says of that.
    """
    period = every
    types = getattr(workload.hf_config(), "layer_types", None)
    if types:
        period = math.lcm(period, _period(types))
    stacks = tuple(Stack(layers=count, period=period) for count in layers_of_stacks)
    if not any(stack.repeats for stack in stacks) or any(stack.layers % period for stack in stacks):
        return ()
    try:
        shallow = workload.build_model(attention=attention, dtype=torch.float32, **shallow_changes(workload, stacks))
    except Exception:  # the model's own code may refuse the changed configuration in any way: record it whole
        return ()
    return stacks if stack_sizes(shallow) == [stack.template_layers for stack in stacks] else ()


def _period(types: Sequence[str]) -> int:
    return next(p for p in range(1, len(types) + 1) if list(types) == (list(types[:p]) * len(types))[: len(types)])


def shallow_changes(workload: Workload, stacks: Sequence[Stack]) -> dict[str, Any]:
    """Changes to the model's configuration that leave it the stacks' template layers."""
    config = workload.hf_config()
    changes: dict[str, Any] = {}
    for stack in stacks if any(stack.repeats for stack in stacks) else ():
        for name in _DEPTH_FIELDS:
            if getattr(config, name, None) == stack.layers:
                changes[config.attribute_map.get(name, name)] = stack.template_layers
        for name, value in config.to_dict().items():  # lists with an entry for each layer: layer_types and the like
            if isinstance(value, list) and len(value) == stack.layers:
                changes[name] = value[: stack.template_layers]
    return changes


@contextmanager
def recording_modes(source: StepSource) -> Iterator[tuple[Recorder, Semantics]]:
    """The model on the device, and everything that runs within the block written down."""
    recorder = source.new_recorder(source.target)
    layers_on_host = source.config.offload == "parameters"
    semantics = _semantics(source)
    layers = checkpointing_layers(source.model)
    shared = list(buckets(source.model, layers)) if source.config.parallelism == "ddp" else []
    source.buckets[:] = [bucket for bucket, _ in shared]
    with ExitStack() as stack:
        for handle in _hooks(source, recorder, semantics):
            stack.callback(handle.remove)
        stack.enter_context(_recomputation(source.model, recorder, semantics))
        stack.enter_context(semantics)
        stack.enter_context(recorder)
        recorder.phase("load", category=PARAMETERS)
        on_card = device_tensors(source.model, layers)
        if source.config.quantization != "none":
            load_quantized(recorder, source.model, on_card)
        elif source.sharding:
            recorder.adopt(source.sharding.held(on_card))
        else:
            recorder.adopt(_without_layers(on_card, source.model) if layers_on_host else on_card)
        recorder.adopt(shared, GRADIENTS)
        yield recorder, semantics


def _without_layers(tensors: Iterable[tuple[Tensor, int]], model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """In the order of the emitted script's ``keep_layers_on_host``: parameters first, then buffers."""
    on_host = {id(p) for weights in layer_weights(model, checkpointing_layers(model)) for p in weights}
    layer_of = {id(tensor): layer for tensor, layer in tensors}
    buffers = (buffer for module in model.modules() for buffer in module.buffers(recurse=False))
    moved = (*(p for p in model.parameters() if id(p) not in on_host), *buffers)
    return ((tensor, layer_of[id(tensor)]) for tensor in moved)


def _record(source: StepSource, shape: Shape, run: Callable[..., None]) -> Recording:
    make_batch: MakeBatch = partial(source.workload.make_batch, *shape)
    if source.target.kind == "cpu":
        make_batch = cpu.arriving(make_batch())
    with recording_modes(source) as (recorder, semantics):
        autocasting = semantics.autocasting if source.dtype else None
        run(source.model, make_batch, recorder, autocasting)
    return recorder.recording()


def _hooks(source: StepSource, recorder: Recorder, semantics: Semantics) -> Iterable[Any]:
    layers = checkpointing_layers(source.model)
    if source.config.offload == "parameters":
        yield from gradients_to_host(iter(source.trainable))
    elif source.config.parallelism == "ddp" and source.config.gradient_accumulation_steps == 1:
        yield from gradients_into_buckets(source.trainable)
    elif not source.sharding:
        yield from recorder.watch_gradients(source.trainable)
    yield from recorder.watch_layers(layers)
    if source.sharding:
        yield from source.sharding.watch(source.model, layers, recorder.note_gradient)
    for module in source.model.modules():
        if "RotaryEmbedding" in type(module).__name__:  # their code runs under maybe_autocast(enabled=False)
            yield from semantics.exempt(module)


@contextmanager
def _recomputation(model: nn.Module, recorder: Recorder, semantics: Semantics) -> Iterator[None]:
    """Have torch.utils.checkpoint enter the modes' contexts when it recomputes a layer (its ``context_fn``)."""

    @contextmanager
    def recompute(index: int) -> Iterator[None]:
        with recorder.in_layer(index), semantics.recomputing():
            yield

    recomputed: list[tuple[Any, Any]] = []
    layer: Any
    for index, layer in enumerate(checkpointing_layers(model)):
        if getattr(layer, "gradient_checkpointing", False):
            function = layer._gradient_checkpointing_func
            recomputed.append((layer, function))
            layer._gradient_checkpointing_func = partial(function, context_fn=partial(_contexts, recompute, index))
    try:
        yield
    finally:
        for layer, function in recomputed:
            layer._gradient_checkpointing_func = function


def _contexts(recompute: Callable[[int], Any], index: int) -> tuple[Any, Any]:
    return nullcontext(), recompute(index)


def record_update(source: StepSource, optimizer_name: str, offload: str, *, masters: bool = False) -> Recording:
    """Clip and update, twice: the first update makes the optimizer's state. Phases first_update, later_update.

    An offloaded optimizer makes nothing on the card, and offloaded gradients are clipped on the host.
    """
    with cpu.fake_tensors() if source.target.kind == "cpu" else nullcontext():
        return _record_update(source, optimizer_name, offload, masters=masters)


def _record_update(source: StepSource, optimizer_name: str, offload: str, *, masters: bool) -> Recording:
    recorder = source.new_recorder(source.target)
    layers = _layers_of_weights(source.model)
    held = source.sharding.shards if source.sharding else {}
    parameters = [held.get(id(p), p).detach().requires_grad_() for p in source.trainable]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = make_optimizer(optimizer_name, parameters, masters=masters)
    tags = [layers.get(id(p), OUTSIDE_LAYERS) for p in source.trainable]
    recorder.adopt((t, tag) for p, tag in zip(parameters, tags, strict=True) for t in (p, p.grad) if t is not None)
    with recorder:
        for name in ("first_update", "later_update"):
            recorder.phase(name, category=TEMPORARIES)
            if offload != "parameters":
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            if offload not in ON_HOST:
                with recorder.categorised(OPTIMIZER):
                    optimizer.step()
        recorder.phase("end")
    return _persistent_only_as_state(recorder.recording())


def _layers_of_weights(model: nn.Module) -> dict[int, int]:
    """``id`` of each parameter that one of the repeated layers has alone, to the layer's index."""
    weights = layer_weights(model, checkpointing_layers(model))
    return {id(p): index for index, parameters in enumerate(weights) for p in parameters}


def _persistent_only_as_state(recording: Recording) -> Recording:
    """Blocks that an update frees again are temporaries, whatever made them."""
    freed = {-event for event in recording.events if event < 0}
    for block in freed:
        recording.categories[block] = TEMPORARIES
    return recording


@contextmanager
def _model_code(workload: Workload, config: TrainingConfig) -> Iterator[None]:
    """Code of the model, of transformers and of peft, which may fail in any way: one line that says whose."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        name = f"{workload.spec.model_id} ({workload.task}, method {config.method})"
        raise RecordingError(f"{name} can't be simulated: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
