"""The one step: built from a configuration, the same for the simulator and for a trial on a real device.

The order is the emitted script's: batch to the device, forward under autocast, loss in fp32, outputs dropped,
backward, batch dropped; after the last micro-batch clip, update, and gradients set to None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.config import TrainingConfig
from planner.levers import LEVERS
from planner.levers.checkpointing import checkpointing_layers
from planner.levers.fused_loss import loss_of_outputs
from planner.levers.precision import base_dtype
from planner.recording.record import ACTIVATIONS, INPUTS, TEMPORARIES
from planner.workload import Workload, loss_of

MakeBatch = Callable[[], dict[str, Tensor]]
"""Makes a micro-batch on the device."""
Autocasting = Callable[[], AbstractContextManager[Any]]
"""The region that autocast covers."""


class Watcher(Protocol):
    """What is told where in the step it is: a Recorder, or what resets a device's peaks."""

    def phase(self, name: str, *, category: int = ACTIVATIONS, backward: bool = False) -> None:
        """A phase begins: inputs, forward, backward, end."""


def build_model(workload: Workload, config: TrainingConfig, *, device: str = "meta", **changes: Any) -> nn.Module:
    """The model with every lever applied, in training mode; on a device other than meta with random weights.

    ``changes`` replace values of the model's configuration (for example the number of layers).
    """
    from transformers.initialization import no_init_weights

    # no initialisation where there is no data: that of peft's adapters alone would take seconds
    without_data = no_init_weights() if device == "meta" else nullcontext()
    with warnings.catch_warnings(), without_data:
        warnings.simplefilter("ignore")  # about peft's use of older names, and its own correction of its settings
        model = _base_model(workload, config, device, **changes)
        for lever in LEVERS:
            if lever.field == "offload":  # it holds on to tensors where they are
                _place(model, config, device)
            model = lever.change_model(model, config)
            if lever.field == "quantization" and config.quantization != "none" and device != "meta":
                model = model.to(device)  # quantizes; from_pretrained's device_map does so before there are adapters
    return model.train()


def _base_model(workload: Workload, config: TrainingConfig, device: str, **changes: Any) -> nn.Module:
    """Without levers; for a card in host memory, from where the emitted script moves it as well.

    Random weights are made on the card where they fit, which takes a hundredth of the time.
    """
    dtype = base_dtype(config.precision, config.method)
    build = partial(workload.build_model, attention=config.attention, dtype=dtype, **changes)
    if torch.device(device).type != "cuda":
        return build(device=device)
    model = None
    with suppress(torch.OutOfMemoryError):
        model = build(device=device).to("cpu")
    if model is None:
        model = build(device="cpu")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return model


def _place(model: nn.Module, config: TrainingConfig, device: str) -> None:
    """Move a model to a card as the emitted script does."""
    if torch.device(device).type != "cuda":
        return
    if config.offload == "parameters":
        from planner.recording.transfers import keep_layers_on_host

        keep_layers_on_host(model, checkpointing_layers(model), torch.device(device))
    else:
        model.to(device)


def run_micro_batch(
    model: nn.Module,
    make_batch: MakeBatch,
    watcher: Watcher,
    autocasting: Autocasting | None,
    *,
    backward: Callable[[Tensor], None] = Tensor.backward,
    items: int = 1,
) -> None:
    """One micro-batch of the emitted loop, from the batch's arrival to its end. ``autocasting`` is None without AMP.

    ``items``: what the effective batch's mean loss is over; it changes the loss, and neither memory nor time.
    """
    watcher.phase("inputs", category=INPUTS)
    batch = make_batch()
    watcher.phase("forward", category=ACTIVATIONS)
    inputs = dict(batch)
    labels = inputs.pop("labels")
    loss = loss_of_outputs(model, _outputs(model, inputs, autocasting).logits, labels, items=items)
    del inputs, labels
    watcher.phase("backward", category=TEMPORARIES, backward=True)
    backward(loss)
    watcher.phase("end")
    del loss, batch


@torch.no_grad()
def run_evaluation_batch(
    model: nn.Module, make_batch: MakeBatch, watcher: Watcher, autocasting: Autocasting | None, *, classifies: bool
) -> None:
    """One micro-batch of the emitted script's evaluation, whose sums stay on the card and nothing else does."""
    watcher.phase("inputs", category=INPUTS)
    batch = make_batch()
    watcher.phase("forward", category=ACTIVATIONS)
    inputs = dict(batch)
    labels = inputs.pop("labels")
    if classifies:
        logits = _outputs(model, inputs, autocasting).logits
        loss = loss_of(logits, labels, items=1)
        hits = (logits.argmax(-1) == labels).sum()
        del logits, hits
    else:
        loss = loss_of_outputs(model, _outputs(model, inputs, autocasting).logits, labels, items=1)
    watcher.phase("end")
    del loss, inputs, labels, batch


def _outputs(model: nn.Module, inputs: dict[str, Tensor], autocasting: Autocasting | None) -> Any:
    if autocasting is None:
        return model(**inputs)
    from accelerate.utils import convert_to_fp32

    with autocasting():
        outputs = model(**inputs)
    # accelerate.Accelerator.prepare_model wraps forward in autocast, and that in this
    return convert_to_fp32(outputs)
