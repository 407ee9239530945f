"""Host memory that offloading needs: the second ceiling. Exact sums over tensors, from what was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from planner.config import TrainingConfig
from planner.levers.precision import WEIGHT_DTYPES
from planner.memory.model import StepModel
from planner.memory.polynomials import Shape
from planner.recording.record import OUTSIDE_LAYERS, Recording

TO_HOST, TO_CARD = "vramplan.to_host", "vramplan.to_card"
"""The operators that stand for copies across PCIe (planner/recording/transfers.py)."""
LEAST_BYTES_PER_PARAMETER = 16
"""Of an optimizer on the host: fp32 weight and both of AdamW's states, and a gradient, of 4 bytes each."""


def pinned_bytes(nbytes: int) -> int:
    """What a pinned tensor takes: the next power of two (torch: ATen/core/CachingHostAllocator.h, allocate)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def trained_tensors(update: Recording) -> list[tuple[int, bool]]:
    """Bytes of each trained parameter, and whether a repeated layer holds it: what an update was recorded with."""
    adopted = update.phases["first_update"]
    sizes, layers = update.sizes[1 : adopted + 1 : 2], update.layers[:adopted:2]  # each is followed by its gradient
    return [(nbytes, layer != OUTSIDE_LAYERS) for nbytes, layer in zip(sizes, layers, strict=True)]


def bytes_outside_layers(update: Recording) -> int:
    """Bytes of the trained parameters that no repeated layer holds."""
    return sum(nbytes for nbytes, in_layer in trained_tensors(update) if not in_layer)


def state_bytes(config: TrainingConfig, update: Recording) -> int:
    """What the emitted script's HostAdamW holds, and with ``offload parameters`` the layers' weights too.

    Pinned: a gradient of the weight's type, an fp32 weight. Not pinned: two moments, and for bf16 weights an fp32
    gradient. A layer's fp32 weight is the one that the optimizer updates; its bf16 weight is pinned besides.
    """
    low = config.precision in WEIGHT_DTYPES and config.method == "full"
    total = 0
    for nbytes, in_layer in trained_tensors(update):
        fp32_bytes = 2 * nbytes if low else nbytes
        total += pinned_bytes(nbytes) + pinned_bytes(fp32_bytes) + (3 if low else 2) * fp32_bytes
        if low and in_layer and config.offload == "parameters":
            total += pinned_bytes(nbytes)
    if config.offload == "parameters" and config.gradient_accumulation_steps > 1:
        # a further micro-batch's gradient comes to a pinned buffer; the allocator keeps one of each size
        total += sum({pinned_bytes(nbytes) for nbytes, _ in trained_tensors(update)})
    return total


def saved_bytes(steps: Iterable[tuple[StepModel, Shape]]) -> int:
    """What ``offload activations`` pins, for micro-batches of these shapes.

    A forward pass fills one block for each storage that it saves, and the backward pass gives them back. torch's
    allocator keeps blocks for requests of the same power of two: of each size as many as any shape needs.
    """
    most: Counter[int] = Counter()
    for model, shape in steps:
        most |= Counter(pinned_bytes(int(nbytes)) for nbytes in copied_bytes(model, shape, TO_HOST))
    return sum(size * count for size, count in most.items())


def copied_bytes(model: StepModel, shape: Shape, operator: str) -> list[int]:
    """Bytes of each copy of one kind in a micro-batch, in order."""
    ops = model.template.ops
    if not ops:
        return []
    starts = np.concatenate([[0], np.cumsum([len(op.moved_bytes) for op in ops])[:-1]]).astype(np.int64)
    largest = np.maximum.reduceat(model.moved.at(shape), starts)  # the other operand stands for the host's side
    return [int(nbytes) for op, nbytes in zip(ops, largest, strict=True) if op.name == operator]
