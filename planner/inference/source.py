"""What inference is recorded from: the model on a device that isn't there, watched while it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.config import InferenceConfig
from planner.inference.offload import reserved, stored_precision, with_layers_on_card
from planner.inference.passes import build_model, run_batch, weight_dtype
from planner.inference.quantized import CONVERTED_ON_LOAD
from planner.inference.workload import InferenceWorkload
from planner.levers.checkpointing import checkpointing_layers
from planner.memory.polynomials import Shape
from planner.recording import cpu
from planner.recording.cuda import CudaSemantics
from planner.recording.kernels import Target
from planner.recording.loading import load_quantized, warmed_up
from planner.recording.record import PARAMETERS, Recording
from planner.recording.recorder import Recorder
from planner.recording.repetition import Stack, repeat_layers
from planner.recording.source import shallow_changes
from planner.recording.streaming import load_resident, looked_up_on_host, streamed
from planner.step import MakeBatch
from planner.workload import device_tensors, token_table

Run = Callable[[nn.Module, MakeBatch, Recorder], None]
"""What is recorded: it gets the model, what makes a batch on the device, and the recorder to tell phases to."""


@dataclass(frozen=True, kw_only=True)
class InferenceSource:
    """A model, built once, recorded at many shapes."""

    workload: InferenceWorkload
    """Model and task."""
    config: InferenceConfig
    """The structure; its batch and lengths are not looked at."""
    model: nn.Module
    """The model; shallow where ``stacks`` repeat."""
    stacks: tuple[Stack, ...]
    """How the model's layers become those of the model that is asked for."""
    target: Target
    """What the card does to kernels."""

    @classmethod
    def make(
        cls, workload: InferenceWorkload, config: InferenceConfig, target: Target, stacks: Sequence[Stack] = ()
    ) -> InferenceSource:
        """Build the model; shallow when ``stacks`` says how to deepen its recordings."""
        model = build_model(workload, config, **shallow_changes(workload, stacks))
        if target.kind == "cpu":
            model = cpu.moved(model)
        return cls(workload=workload, config=config, model=model, stacks=tuple(stacks), target=target)

    def record_batch(self, shape: Shape) -> Recording:
        """Load, and one batch of ``(sequences, seq_len)``. Raises NotRegularError and RecordingError."""
        answer = self.workload.facts.answer
        assert answer is not None
        return self.record(shape, partial(run_batch, answer=answer))

    def record(self, shape: Shape, run: Run) -> Recording:
        """Load, and whatever ``run`` does with batches of a shape."""
        recording = repeat_layers(self._record(shape, run), self.stacks)
        if self.config.offload != "none":
            recording = reserved(recording) if self.target.kind == "cuda" else recording
            return with_layers_on_card(recording, self._layers_on_card) if self.stacks else recording
        return warmed_up(recording) if self.config.quantization in CONVERTED_ON_LOAD else recording

    @property
    def _layers_on_card(self) -> int:
        """Of an offloaded model that is asked for."""
        asked, layers = self.config.layers_on_card, len(checkpointing_layers(self.model))
        return asked if asked is not None else sum(stack.layers for stack in self.stacks) or layers

    @property
    def _stored(self) -> torch.dtype | None:
        """The type in which an offloaded weight comes to the card; None: the model's."""
        if self.config.offload != "disk":
            return None
        return weight_dtype(stored_precision(self.workload.spec.config))

    def _record(self, shape: Shape, run: Run) -> Recording:
        make_batch: MakeBatch = partial(self.workload.make_batch, *shape)
        if self.target.kind == "cpu":
            make_batch = cpu.arriving(make_batch())
        recorder = Recorder(self.target)
        semantics: Any = cpu.CpuSemantics() if self.target.kind == "cpu" else CudaSemantics(self.target)
        layers = checkpointing_layers(self.model)
        with ExitStack() as stack:
            for handle in recorder.watch_layers(layers):
                stack.callback(handle.remove)
            here = 0 if self.stacks else self._layers_on_card
            table = None if self.config.embedding_on_card else token_table(self.model)
            if self.config.offload != "none":
                stack.enter_context(streamed(self.model, layers[here:], recorder, self._stored))
                stack.enter_context(looked_up_on_host(table))
            stack.enter_context(semantics)
            stack.enter_context(recorder)
            recorder.phase("load", category=PARAMETERS)
            on_card = device_tensors(self.model, layers)
            if self.config.quantization in CONVERTED_ON_LOAD:
                load_quantized(recorder, self.model, on_card)
            elif self.config.offload != "none":
                load_resident(recorder, self.model, layers, here, on_card, table)
            else:
                recorder.adopt(on_card)
            run(self.model, make_batch, recorder)
        return recorder.recording()
