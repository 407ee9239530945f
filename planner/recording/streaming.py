"""Weights that come to the card for one module's forward pass at a time, as accelerate's hooks bring them.

``from_pretrained(device_map=...)`` ends in ``accelerate.dispatch_model``. Of each module below an offloaded layer that
holds parameters itself, an ``AlignDevicesHook`` copies those to the card, one by one, right before the module's
forward, and drops them in the same order right after it (accelerate/hooks.py). Buffers stay on the card
(``offload_buffers=False``), and so do parameters that a module elsewhere has as well.

Weights in host memory have the model's type already and cross PCIe as they are. Weights on disk are tensors of the
checkpoint's files: safetensors puts them on the card in the checkpoint's type, where they are converted
(accelerate/utils/offload.py, OffloadedWeightsLoader).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from planner.recording import cpu
from planner.recording.record import PARAMETERS, TEMPORARIES
from planner.recording.recorder import Recorder
from planner.recording.transfers import layer_weights


@dataclass(frozen=True)
class _Weight:
    """A parameter that isn't on the card."""

    home: nn.Parameter
    """What stands in its place meanwhile."""
    host: Tensor
    """One element, expanded: what crosses PCIe, without its memory."""

    @classmethod
    def of(cls, parameter: nn.Parameter, stored: torch.dtype | None) -> _Weight:
        dtype = stored if stored is not None and parameter.is_floating_point() else parameter.dtype
        with cpu.fake_tensors() if isinstance(parameter, FakeTensor) else nullcontext():
            return cls(parameter, torch.zeros((), dtype=dtype, device="cpu").expand(parameter.numel()))


class _Arriving(ModelHook):  # type: ignore[misc]
    """What ``AlignDevicesHook(offload=True)`` does with one module's own parameters."""

    def __init__(self, weights: dict[str, _Weight], recorder: Recorder) -> None:
        self._weights, self._recorder = weights, recorder

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Copy each parameter to the card."""
        for name, weight in self._weights.items():
            module._parameters[name] = self._arrived(weight)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Drop them again."""
        for name, weight in self._weights.items():
            module._parameters[name] = weight.home
        return output

    def _arrived(self, weight: _Weight) -> nn.Parameter:
        home, host = weight.home, weight.host
        converted = host.dtype != home.dtype
        with self._recorder.categorised(TEMPORARIES if converted else PARAMETERS):
            card: Tensor = torch.ops.vramplan.to_card(host, home.device).view(home.shape)
        if converted:
            with self._recorder.categorised(PARAMETERS):
                card = card.to(home.dtype)
        return nn.Parameter(card, requires_grad=False)


@contextmanager
def looked_up_on_host(table: nn.Module | None) -> Iterator[None]:
    """Have the rows of a table in host memory come to the card (planner/parts/placing.py, look_up_on_host)."""
    if table is None:
        yield
        return
    weight: Any = table.weight

    def rows(ids: Tensor) -> Tensor:
        vectors = torch.zeros((), dtype=weight.dtype, device="cpu").expand(ids.numel() * weight.shape[1])
        card: Tensor = torch.ops.vramplan.to_card(vectors, ids.device)
        return card.view(*ids.shape, weight.shape[1])

    table.forward = rows
    try:
        yield
    finally:
        del table.forward


@contextmanager
def streamed(
    model: nn.Module, layers: Sequence[nn.Module], recorder: Recorder, stored: torch.dtype | None
) -> Iterator[None]:
    """Have the layers' weights come and go while the block runs; to be entered before the recorder.

    ``stored``: the type that the checkpoint has them in, where they come from there (disk); None: the model's.
    """
    leaving = {id(p) for weights in layer_weights(model, layers) for p in weights}
    hooked: list[nn.Module] = []
    for module in (module for layer in layers for module in layer.modules()):
        own = {name: p for name, p in module.named_parameters(recurse=False) if id(p) in leaving}
        if own:
            weights = {name: _Weight.of(p, stored) for name, p in own.items()}
            add_hook_to_module(module, _Arriving(weights, recorder))
            hooked.append(module)
    try:
        yield
    finally:
        for module in hooked:
            remove_hook_from_module(module)


def load_resident(
    recorder: Recorder,
    model: nn.Module,
    layers: Sequence[nn.Module],
    layers_on_card: int,
    on_card: Iterable[tuple[Tensor, int]],
    table: nn.Module | None = None,
) -> None:
    """Write down what ``from_pretrained(device_map=...)`` puts on the card and leaves there.

    transformers first reserves what it will load in one piece (modeling_utils.py, caching_allocator_warmup), from
    which the weights are then cut; the order in which they are doesn't matter. Here they are what is in no layer
    alone, all buffers, then the weights of the first layers, in each layer the largest first: what
    ``planner.inference.offload.with_layers_on_card`` knows of them is their sizes. ``table`` is elsewhere.
    """
    weights = layer_weights(model, layers)
    apart = {id(p) for some in weights for p in some} | {id(p) for p in (table.parameters() if table else ())}
    recorder.reserve()
    recorder.adopt((tensor, layer) for tensor, layer in on_card if id(tensor) not in apart)
    for index, some in enumerate(weights[:layers_on_card]):
        largest_first = sorted(_once(some), key=lambda p: -p.untyped_storage().nbytes())
        recorder.adopt((p, index) for p in largest_first)


def _once(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(p): p for p in parameters}.values())
