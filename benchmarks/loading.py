"""What loading a checkpoint leaves behind in the allocator: holes between the model's parameters.

The tables' scripts call ``from_pretrained`` under ``with torch.device("cuda")``. safetensors makes each tensor of the
file with ``torch.asarray`` (bindings/python/src/lib.rs, get_tensor), which obeys that device
(torch/utils/_device.py, _device_constructors): the fp32 checkpoint lies on the card, in the order of its names, before
the model's own fp16 parameters are made (modeling_utils.py of 4.41 to 4.46, from_pretrained), and goes when they are
filled. What lies between its blocks stays where it is. ``torch.load(map_location="cpu")``, for checkpoints in the older
format, does nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from loops import ITERATION
from torch import nn

from planner.recording.record import OUTSIDE_LAYERS, TEMPORARIES, Recording


def checkpoint_sizes(model: nn.Module, beside: Mapping[str, int]) -> list[int]:
    """Bytes of the fp32 tensors of a model's checkpoint, in the order of their names.

    ``beside`` are tensors that the checkpoint has and the model's parameters don't: name to elements.
    """
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()} | dict(beside)
    return [4 * elements[name] for name in sorted(elements)]


def after_checkpoint(recording: Recording, sizes: Sequence[int]) -> Recording:
    """The recording with these blocks there while the model is loaded."""
    count, loaded = len(sizes), recording.phases[ITERATION.format(0)]

    def moved(events: Sequence[int]) -> list[int]:
        return [event + count if event > 0 else event - count for event in events]

    blocks = list(range(1, count + 1))
    outside = [OUTSIDE_LAYERS] * count
    return replace(
        recording,
        sizes=[0, *sizes, *recording.sizes[1:]],
        categories=[0, *[TEMPORARIES] * count, *recording.categories[1:]],
        events=[*blocks, *moved(recording.events[:loaded]), *(-b for b in blocks), *moved(recording.events[loaded:])],
        layers=[*outside, *recording.layers[:loaded], *outside, *recording.layers[loaded:]],
        phases={name: at + 2 * count if at >= loaded else at for name, at in recording.phases.items()},
        gradients=[(at + 2 * count, block + count) for at, block in recording.gradients],
        gates=[(block + count, *gate) for block, *gate in recording.gates],
        ops=[replace(op, position=op.position + 2 * count) for op in recording.ops],
    )
