"""The one step: built from a configuration, the same for the simulator and for a trial on a real device.

The order is the emitted script's: batch to the device, forward under autocast, loss in fp32, outputs dropped,
backward, batch dropped; after the last micro-batch clip, update, and gradients set to None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.config import TrainingConfig
from planner.levers import LEVERS
from planner.levers.checkpointing import checkpointing_layers
from planner.levers.fused_loss import loss_of_outputs
from planner.levers.precision import base_dtype
from planner.parts import losses
from planner.recording.record import ACTIVATIONS, INPUTS, TEMPORARIES
from planner.tasks import TASK_FACTS, LossKind
from planner.workload import Workload, loss_function

MakeBatch = Callable[[], dict[str, Tensor]]
"""Makes a micro-batch on the device."""
Autocasting = Callable[[], AbstractContextManager[Any]]
"""The region that autocast covers."""


TEXTS = TASK_FACTS["embedding"].sequences_per_sample
"""Texts of a sample that are encoded apart."""


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


@dataclass(frozen=True, kw_only=True)
class CachedGradients:
    """What the loss of a whole effective batch says of each of its vectors (Gao et al. 2021, arXiv:2101.06983)."""

    vectors: Tensor
    """Gradients by vector. fp32 [rows of the effective batch, features]."""
    place: Tensor
    """Which of them the micro-batch's rows are. int64 [rows of the micro-batch]."""


def run_micro_batch(
    model: nn.Module,
    make_batch: MakeBatch,
    watcher: Watcher,
    autocasting: Autocasting | None,
    *,
    loss: LossKind = "cross-entropy",
    backward: Callable[[Tensor], None] = Tensor.backward,
    items: int = 1,
    cached: CachedGradients | None = None,
) -> None:
    """One micro-batch of the emitted loop, from the batch's arrival to its end. ``autocasting`` is None without AMP.

    ``items``: what the effective batch's mean loss is over; it changes the loss, and neither memory nor time.
    ``cached``: for a contrastive loss over more than one micro-batch.
    """
    if loss == "contrastive":
        _run_vectors(model, make_batch, watcher, autocasting, backward, cached)
        return
    watcher.phase("inputs", category=INPUTS)
    batch = make_batch()
    watcher.phase("forward", category=ACTIVATIONS)
    inputs = dict(batch)
    labels = inputs.pop("labels")
    value = loss_of_outputs(model, loss)(_outputs(model, inputs, autocasting).logits, labels, items)
    del inputs, labels
    watcher.phase("backward", category=TEMPORARIES, backward=True)
    backward(value)
    watcher.phase("end")
    del value, batch


def _run_vectors(
    model: nn.Module,
    make_batch: MakeBatch,
    watcher: Watcher,
    autocasting: Autocasting | None,
    backward: Callable[[Tensor], None],
    cached: CachedGradients | None,
) -> None:
    """Vectors of texts, and their gradients: of the loss at once, or of what the whole effective batch's said."""
    watcher.phase("inputs", category=INPUTS)
    batch = make_batch()
    device = batch["input_ids"].device
    place = torch.arange(len(batch["input_ids"]), device=device) if cached is None else cached.place
    watcher.phase("forward", category=ACTIVATIONS)
    found = embed(model, batch, autocasting)
    del batch
    if cached is None:
        vectors = torch.zeros(len(found), found.size(-1), device=device)
        vectors = vectors.index_add(0, place, found)
        value = losses.contrastive_loss(vectors, TEXTS)
    else:
        value = (found * cached.vectors[place]).sum()
    watcher.phase("backward", category=TEMPORARIES, backward=True)
    backward(value)
    watcher.phase("end")
    del value


def embed(model: nn.Module, inputs: dict[str, Tensor], autocasting: Autocasting | None) -> Tensor:
    """Unit vectors of texts. fp32 [rows, features]."""
    return losses.mean_pool(_outputs(model, inputs, autocasting).last_hidden_state, inputs["attention_mask"])


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What lasts from a contrastive loss over an effective batch to the step's last micro-batch."""

    places: list[Tensor]
    """Which of the rows each micro-batch has. int64 [rows of a micro-batch] each."""
    vectors: Tensor
    """The vectors, with the loss's gradients. fp32 [rows of the effective batch, features]."""
    loss: Tensor
    """A number."""


def contrast(shape: tuple[int, int, int], device: torch.device | str, watcher: Watcher) -> Compared:
    """What the emitted script does once a step between its two passes over the micro-batches.

    ``shape``: micro-batches, rows of each, features. Random vectors stand for those that the first pass finds.
    """
    parts, rows, features = shape
    watcher.phase("contrast", category=ACTIVATIONS)
    places = [torch.arange(rows * part, rows * (part + 1), device=device) for part in range(parts)]
    vectors = torch.zeros(rows * parts, features, device=device)
    for place in places:
        found = torch.randn(rows, features, device=device).mul_(features**-0.5)
        vectors = vectors.index_add(0, place, found)
        del found
    vectors.requires_grad_()
    loss = losses.contrastive_loss(vectors, TEXTS)
    watcher.phase("contrast_backward", category=TEMPORARIES, backward=True)
    loss.backward()
    return Compared(places=places, vectors=vectors, loss=loss.detach())


@torch.no_grad()
def first_pass(
    model: nn.Module, make_batch: MakeBatch, watcher: Watcher, autocasting: Autocasting | None, compared: Compared
) -> CachedGradients:
    """The pass without gradients that finds a micro-batch's vectors; what the loss said of as many."""
    assert compared.vectors.grad is not None
    watcher.phase("first_pass")
    found = embed(model, make_batch(), autocasting)
    place = compared.places[0]
    if len(place) != len(found):
        place = torch.arange(len(found), device=found.device)
    return CachedGradients(vectors=compared.vectors.grad, place=place)


@torch.no_grad()
def run_evaluation_batch(
    model: nn.Module,
    make_batch: MakeBatch,
    watcher: Watcher,
    autocasting: Autocasting | None,
    *,
    loss: LossKind = "cross-entropy",
    measured: bool,
    parts: int = 1,
) -> None:
    """One micro-batch of the emitted script's evaluation, whose sums stay on the card and nothing else does.

    ``measured``: how right the answers are as well as the loss. Of a contrastive loss the last micro-batch of
    ``parts``, beside the vectors of the others.
    """
    if loss == "contrastive":
        _evaluate_vectors(model, make_batch, watcher, autocasting, parts)
        return
    watcher.phase("inputs", category=INPUTS)
    batch = make_batch()
    watcher.phase("forward", category=ACTIVATIONS)
    inputs = dict(batch)
    labels = inputs.pop("labels")
    if measured:
        logits = _outputs(model, inputs, autocasting).logits
        value = loss_function(loss)(logits, labels, 1)
        right = _rightness(logits, labels, loss)
        del logits, right
    else:
        value = loss_of_outputs(model, loss)(_outputs(model, inputs, autocasting).logits, labels, 1)
    watcher.phase("end")
    del value, inputs, labels, batch


def _rightness(logits: Tensor, labels: Tensor, loss: LossKind) -> Tensor:
    """The sum of the emitted script's second measure."""
    if loss == "cross-entropy":
        return (logits.argmax(-1) == labels).sum()
    if loss == "squared-error":
        return (logits.float() - labels).abs().sum()
    return ((logits > 0) == (labels > 0.5)).sum()


def _evaluate_vectors(
    model: nn.Module, make_batch: MakeBatch, watcher: Watcher, autocasting: Autocasting | None, parts: int
) -> None:
    watcher.phase("inputs", category=INPUTS)
    batch = make_batch()
    rows, device = len(batch["input_ids"]), batch["input_ids"].device
    watcher.phase("forward", category=ACTIVATIONS)
    found = [embed(model, batch, autocasting)]
    found += [torch.zeros_like(found[0]) for _ in range(parts - 1)]
    del batch
    joined = torch.cat(found)
    vectors = joined[torch.arange(rows * parts, device=device).argsort()]
    half = len(vectors) // TEXTS
    nearest = (vectors[:half] @ vectors[half:].T).argmax(-1)
    value = losses.contrastive_loss(vectors, TEXTS) * half
    right = (nearest == torch.arange(half, device=device)).sum()
    watcher.phase("end")
    del value, right, nearest, vectors, joined, found


def _outputs(model: nn.Module, inputs: dict[str, Tensor], autocasting: Autocasting | None) -> Any:
    if autocasting is None:
        return model(**inputs)
    from accelerate.utils import convert_to_fp32

    with autocasting():
        outputs = model(**inputs)
    # accelerate.Accelerator.prepare_model wraps forward in autocast, and that in this
    return convert_to_fp32(outputs)
