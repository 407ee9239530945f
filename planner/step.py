"""The one step: built from a configuration, the same for the simulator and for a trial on a real device.

The order is the emitted script's: batch to the device, forward under autocast, loss in fp32, outputs dropped,
backward, batch dropped; after the last micro-batch clip, update, and gradients set to None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.config import TrainingConfig
from planner.levers import LEVERS
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
        model = workload.build_model(
            attention=config.attention, dtype=base_dtype(config.precision, config.method), device=device, **changes
        )
        for lever in LEVERS:
            model = lever.change_model(model, config)
    return model.train()


def run_micro_batch(
    model: nn.Module,
    make_batch: MakeBatch,
    watcher: Watcher,
    autocasting: Autocasting | None,
    *,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> None:
    """One micro-batch of the emitted loop, from the batch's arrival to its end. ``autocasting`` is None without AMP."""
    watcher.phase("inputs", category=INPUTS)
    batch = make_batch()
    watcher.phase("forward", category=ACTIVATIONS)
    inputs = dict(batch)
    labels = inputs.pop("labels")
    loss = loss_of_outputs(model, _outputs(model, inputs, autocasting).logits, labels, items=1)
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
