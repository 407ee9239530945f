"""Weights that don't stay on the card: what is recorded with none of them there, for any number of layers that are.

A recording with ``offload`` set has the weights of every repeated layer come and go (planner/recording/streaming.py).
From it follows, without another recording, what a model does whose first layers stay: their weights are there from
loading on and their copies are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.config import InferenceConfig
from planner.host_memory import TO_CARD
from planner.memory.model import StepModel
from planner.memory.polynomials import Polynomials
from planner.recording.record import OUTSIDE_LAYERS, PARAMETERS, Op, Recording

_STORED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}
_RESERVED = 1
"""The block that transformers reserves before it loads (planner/recording/streaming.py, load_resident)."""


# -- what goes together ----------------------------------------------------------------------------------------------


def conflict(config: InferenceConfig) -> str | None:
    """Why a configuration's offload doesn't go with its other values, or None."""
    return clash(config.offload, quantization=config.quantization)


def clash(offload: str, *, quantization: str) -> str | None:
    """Why an offload doesn't go with a quantization, or None.

    bitsandbytes: transformers (quantizer_bnb_8bit.py and quantizer_bnb_4bit.py, validate_environment) refuses a device
    map with cpu or disk. With llm_int8_enable_fp32_cpu_offload it doesn't quantize what is elsewhere
    (modules_to_not_convert), so that crosses PCIe whole.
    """
    if offload == "none" or quantization == "none":
        return None
    without = f"offload {offload} doesn't go with {quantization}"
    if quantization in ("int8", "nf4"):
        return f"{without}: transformers refuses bitsandbytes weights that are not on the card"
    if quantization == "int8-dynamic":
        return f"{without}, which runs on processors alone"
    return f"{without}: this version streams whole weights alone"


def stored_precision(model_config: Mapping[str, Any]) -> str:
    """The type that a model's checkpoint has its weights in (fp32, fp16 or bf16), by its ``config.json``.

    ``save_pretrained`` writes the model's type there; fp32 where it says nothing.
    """
    named = model_config.get("dtype") or model_config.get("torch_dtype") or "float32"
    return _STORED.get(str(named).removeprefix("torch."), "fp32")


# -- a recording with some layers on the card ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Streamed:
    """A weight that came to the card once."""

    layer: int
    visit: int
    """Number of the layer's turn; a layer has one in each pass."""
    block: int
    staged: int | None
    """The block that had it in the checkpoint's type, if that is another one."""
    ops: tuple[int, ...]
    """Indices of the operators that made it."""


def streamed_weights(recording: Recording) -> list[_Streamed]:
    """Every weight that came to the card after loading, in order."""
    found: list[_Streamed] = []
    visit, before = 0, OUTSIDE_LAYERS
    for index, op in enumerate(recording.ops):
        if op.layer != before:
            visit, before = visit + 1, op.layer
        if op.name == TO_CARD:
            found += _streamed(recording, index, op, visit)
    return found


def _streamed(recording: Recording, index: int, op: Op, visit: int) -> Iterator[_Streamed]:
    """A weight, or what it is converted from; nothing that a cache brings."""
    block = recording.events[op.position - 1]
    if recording.categories[block] == PARAMETERS:
        yield _Streamed(op.layer, visit, block, None, (index,))
        return
    if op.layer == OUTSIDE_LAYERS:  # vectors that were looked up in host memory
        return
    converted = recording.events[recording.ops[index + 1].position - 1]
    if recording.categories[converted] == PARAMETERS:
        yield _Streamed(op.layer, visit, converted, block, (index, index + 1))


@dataclass(frozen=True)
class _Change:
    """What becomes of a recording whose first layers stay on the card."""

    recording: Recording
    blocks: list[int]
    """Old number of each block; 0 stays 0."""
    ops: list[int]
    """Indices of the operators that are left."""
    gates: list[int]
    """Indices of the gates that are left."""
    adopted_bytes: int
    """By how much more is reserved before it is loaded."""


def with_layers_on_card(recording: Recording, layers_on_card: int) -> Recording:
    """The recording of a model whose first layers stay on the card, from one whose layers all come and go."""
    return _change(recording, layers_on_card).recording


def step_with_layers_on_card(model: StepModel, layers_on_card: int) -> StepModel:
    """The same of a recording with a polynomial for each size."""
    change = _change(model.template, layers_on_card)
    counts = [len(op.moved_bytes) for op in model.template.ops]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    operands = [row for index in change.ops for row in range(starts[index], starts[index + 1])]
    sizes = _rows(model.sizes, change.blocks)
    sizes.numerators[_RESERVED, 0] += change.adopted_bytes * sizes.denominators[_RESERVED]
    return StepModel(
        template=change.recording,
        sizes=sizes,
        gate_counts=_rows(model.gate_counts, change.gates),
        flops=_rows(model.flops, change.ops),
        moved=_rows(model.moved, operands),
    )


def _rows(polynomials: Polynomials, rows: Sequence[int]) -> Polynomials:
    index = np.array(rows, dtype=np.intp)
    return Polynomials(polynomials.numerators[index], polynomials.denominators[index])


def _change(recording: Recording, layers_on_card: int) -> _Change:
    gone = [weight for weight in streamed_weights(recording) if 0 <= weight.layer < layers_on_card]
    adopted = _resident(recording, gone)
    events, layers, place = _moved_events(recording, gone, adopted)
    left_out = {index for weight in gone for index in weight.ops}
    ops = [index for index in range(len(recording.ops)) if index not in left_out]
    number = {block: index + 1 for index, block in enumerate(event for event in events if event > 0)}
    gates = [index for index, (block, _, _) in enumerate(recording.gates) if block in number]
    reserves = recording.sizes[_RESERVED] > 0  # not on a CPU
    adopted_bytes = reserves * sum(recording.sizes[weight.block] for weight in adopted)
    blocks = [0, *number]
    sizes = [recording.sizes[block] for block in blocks]
    sizes[_RESERVED] += adopted_bytes
    changed = Recording(
        sizes=sizes,
        categories=[recording.categories[block] for block in blocks],
        events=[number[event] if event > 0 else -number[-event] for event in events],
        layers=layers,
        phases={name: place[start] for name, start in recording.phases.items()},
        gradients=[(place[at], number[block]) for at, block in recording.gradients],
        gates=[(number[recording.gates[i][0]], *recording.gates[i][1:]) for i in gates],
        ops=[replace(recording.ops[i], position=place[recording.ops[i].position]) for i in ops],
    )
    return _Change(changed, blocks, ops, gates, adopted_bytes)


def _moved_events(
    recording: Recording, gone: Sequence[_Streamed], adopted: Sequence[_Streamed]
) -> tuple[list[int], list[int], list[int]]:
    """Events and their layers without those of ``gone``, with ``adopted`` at the end of loading; and the new index of
    each old event, and of their end."""
    dropped = {weight.block for weight in gone} | {w.staged for w in gone if w.staged is not None}
    loaded = _end_of_loading(recording)
    events = recording.events[:loaded] + [weight.block for weight in adopted]
    layers = recording.layers[:loaded] + [weight.layer for weight in adopted]
    place = [*range(loaded), len(events)]
    for event, layer in zip(recording.events[loaded:], recording.layers[loaded:], strict=True):
        if abs(event) not in dropped:
            events.append(event)
            layers.append(layer)
        place.append(len(events))
    return events, layers, place


def _resident(recording: Recording, weights: Sequence[_Streamed]) -> list[_Streamed]:
    """What each layer brings in its first turn, layer by layer, the largest first."""
    first = {weight.layer: weight.visit for weight in reversed(weights)}
    once = [weight for weight in weights if weight.visit == first[weight.layer]]
    return sorted(once, key=lambda weight: (weight.layer, -recording.sizes[weight.block]))


def _end_of_loading(recording: Recording) -> int:
    """Index of the first event that isn't loading's."""
    starts = sorted(recording.phases.values())
    return starts[1] if len(starts) > 1 else len(recording.events)


def reserved(recording: Recording) -> Recording:
    """The recording with the size of the block that transformers reserves: all that it loads to the card.

    Its bound of 1.2 GiB below the card's memory is left out: so much is hardly left for weights, and where it is the
    card holds the same in more pieces.
    """
    loaded = [event for event in recording.events[: _end_of_loading(recording)] if event > _RESERVED]
    recording.sizes[_RESERVED] = sum(recording.sizes[block] for block in loaded)
    return recording


# -- the host --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """What weights that aren't on the card take elsewhere. Measured against transformers 5.24 in the tests."""

    waiting_bytes: int
    """In host memory, as long as the model runs."""
    mapped_bytes: int
    """Of those, pages of the checkpoint's files, which the kernel may drop and read again: weights that have the
    checkpoint's type aren't copied (safetensors maps its files, ``Tensor.to`` has nothing to do)."""
    loading_bytes: int
    """In host memory while they are loaded, the files' pages left out: a weight on its way to the card is converted
    on the CPU (ATen/native/cuda/Copy.cu), one at a time as far as size matters."""
    disk_bytes: int
    """Read from disk in every pass, where they don't happen to be in the page cache."""
    folder_bytes: int
    """At most written to the offload folder: nothing where the checkpoint is in safetensors files and its tensors are
    the model's, which are then read in place (transformers/integrations/accelerate.py, accelerate_disk_offload)."""


def host_need(config: InferenceConfig, recording: Recording, stored: str, *, table_parameters: int = 0) -> HostNeed:
    """For a recording whose layers all come and go; ``stored`` is the precision of the checkpoint.

    ``table_parameters``: of the token embeddings, which wait in host memory where they are not on the card, those of a
    model on disk as well: each token needs its row.
    """
    on_card = config.layers_on_card
    weights = [] if on_card is None else [w for w in _first_turns(recording) if w.layer >= on_card]
    nbytes = sum(recording.sizes[weight.block] for weight in weights)
    precision = "fp32" if config.precision == "tf32" else config.precision
    table_bytes = 0 if config.embedding_on_card else table_parameters * _WIDTHS[precision]
    converted = precision != stored
    loaded = [event for event in recording.events[: _end_of_loading(recording)] if event > _RESERVED]
    passing = max((recording.sizes[block] for block in loaded), default=0) if converted else 0
    on_disk = nbytes if config.offload == "disk" else 0
    waiting = table_bytes + nbytes - on_disk
    mapped = 0 if converted else waiting
    return HostNeed(
        waiting_bytes=waiting,
        mapped_bytes=mapped,
        loading_bytes=waiting - mapped + passing,
        disk_bytes=on_disk * _WIDTHS[stored] // _WIDTHS[precision],
        folder_bytes=on_disk,
    )


def weight_bytes(recording: Recording) -> list[int]:
    """Bytes of every weight: those that are loaded, buffers among them, then those that come and go."""
    loaded = [event for event in recording.events[: _end_of_loading(recording)] if event > _RESERVED]
    return [recording.sizes[block] for block in (*loaded, *(weight.block for weight in _first_turns(recording)))]


def layer_bytes(recording: Recording) -> dict[int, int]:
    """Bytes of each layer's weights, by the layer's index, from a recording whose layers all come and go."""
    found: dict[int, int] = {}
    for weight in _first_turns(recording):
        found[weight.layer] = found.get(weight.layer, 0) + recording.sizes[weight.block]
    return found


def _first_turns(recording: Recording) -> list[_Streamed]:
    return _resident(recording, [w for w in streamed_weights(recording) if w.layer != OUTSIDE_LAYERS])
