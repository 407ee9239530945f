"""What loading a quantized model does on the card: whole weights arrive there, and become smaller ones.

Other models are loaded in host memory, and ``model.to(device)`` moves them tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from planner.recording.record import PARAMETERS, TEMPORARIES, Recording
from planner.recording.recorder import Recorder


def load_quantized(recorder: Recorder, model: nn.Module, tensors: Iterable[tuple[Tensor, int]]) -> None:
    """Write down ``from_pretrained`` with a quantization, then peft's adapters; ``tensors`` each with its layer.

    transformers/core_model_loading.py, convert_and_load_state_dict_in_model: without threads, so one weight at a time
    is there as the checkpoint has it. What trains is made afterwards. Stand-ins of quantized layers say in
    ``loaded_from`` which tensors their weight is made from, and in ``loaded_from_on_cpu`` where the CPU's operators
    make others.
    """
    everything = list(tensors)
    layers: dict[int, Any] = {id(m.weight): m for m in model.modules() if hasattr(m, "loaded_from")}
    statistics = {id(buffer) for layer in layers.values() for buffer in layer.buffers(recurse=False)}

    def base() -> Iterator[tuple[Tensor, int]]:
        for tensor, layer in everything:
            if not tensor.requires_grad and id(tensor) not in statistics:
                yield tensor, layer
            if id(tensor) in layers:
                yield from ((buffer, layer) for buffer in layers[id(tensor)].buffers(recurse=False))

    recorder.reserve()
    kind = recorder.target.kind
    recorder.adopt(base(), converted=[(_parts(layer), _sources(layer, kind)) for layer in layers.values()])
    recorder.phase("adapters", category=PARAMETERS)
    recorder.adopt(pair for pair in everything if pair[0].requires_grad)


def _sources(layer: Any, kind: str) -> tuple[int, ...]:
    sources: tuple[int, ...] = getattr(layer, f"loaded_from_on_{kind}", layer.loaded_from)
    return sources


def _parts(layer: Any) -> list[Tensor]:
    return [layer.weight, *layer.buffers(recurse=False)]


def warmed_up(recording: Recording) -> Recording:
    """The recording with the size of the one block that transformers reserves before it loads a quantized model.

    transformers/modeling_utils.py, caching_allocator_warmup: all weights as they will be, their quantization's
    statistics not counted. Its bound of 1.2 GiB below the card's memory would leave no room for training.
    """
    nbytes, sources, packed = 0, set[int](), False
    for event in recording.events[: recording.phases["adapters"]]:
        if abs(event) == 1:
            continue
        if recording.categories[abs(event)] == TEMPORARIES:
            (sources.add if event > 0 else sources.discard)(abs(event))
            packed = False
        elif not sources or not packed:
            nbytes += recording.sizes[event]
            packed = bool(sources)
    recording.sizes[1] = nbytes
    return recording
