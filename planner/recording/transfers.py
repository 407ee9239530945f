"""Copies between the card and the host: what offloading moves, when, and what it leaves on the card.

Two operators stand for the copies, so that the recorder writes them down among the others: ``vramplan.to_host`` and
``vramplan.to_card``. On tensors with data they copy; on tensors without, the host side is an expanded CPU scalar of
the right length, which takes nothing on the card and nothing here. The emitted script copies with ``Tensor.copy_`` on
the stream that computes, as these operators do: freed memory is used again by later kernels of the same stream only,
so a block may go as soon as its copy has been queued, and no copy overlaps a kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from planner.levers.host_optimizer import to_host
from planner.recording.cuda import CudaSemantics

_LIBRARY = torch.library.Library("vramplan", "FRAGMENT")
_LIBRARY.define("to_host(Tensor content) -> Tensor")
_LIBRARY.define("to_card(Tensor content, Device device) -> Tensor")
SMALLEST_ROW = 16
"""Saved tensors with rows of fewer elements stay on the card: they are statistics of a row, not its content."""


def _to_host(content: Tensor) -> Tensor:
    if content.is_meta:
        return _without_memory(content)
    if content.is_cuda:
        return torch.empty_like(content, device="cpu", pin_memory=True).copy_(content, non_blocking=True)
    return content.clone()


def _to_card(content: Tensor, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(content.shape, dtype=content.dtype, device=device)
    return content.to(device, non_blocking=True, copy=True)


def _to_claimed_card(content: Tensor, device: torch.device) -> Tensor:
    """On tensors that claim to be on the CPU, whose weights come from disk."""
    return torch.empty(content.shape, dtype=content.dtype, device=device)


def _without_memory(content: Tensor) -> Tensor:
    return torch.zeros((), dtype=content.dtype, device="cpu").expand(content.numel())


_LIBRARY.impl("to_host", _to_host, "CompositeExplicitAutograd")
_LIBRARY.impl("to_card", _to_card, "CompositeExplicitAutograd")
torch.library.register_fake("vramplan::to_card", _to_claimed_card, lib=_LIBRARY)


# -- activations -----------------------------------------------------------------------------------------------------


class HostCopy:
    """The content of one storage in host memory; back on the card from its first use in the backward pass.

    Every saved tensor of the storage holds this object, so both copies go when the last of them has been used.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.version, self.dtype, self._device = tensor._version, tensor.dtype, tensor.device
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._host: Tensor = torch.ops.vramplan.to_host(tensor.detach().as_strided((length,), (1,), 0))
        self._card: Tensor | None = None

    def on_card(self) -> Tensor:
        """The storage's elements in one row."""
        if self._card is None:
            self._card = torch.ops.vramplan.to_card(self._host, self._device)
        return self._card


class HostActivations(torch.autograd.graph.saved_tensors_hooks):
    """What the forward pass saves for the backward pass waits in host memory.

    A storage is copied whole and once, however many of its views are saved (query, key and value of one projection;
    the input of three linear layers). torch's save_on_cpu copies each, expands what is expanded, and copies weights
    too. What stays: parameters and buffers, integers, and rows of fewer than SMALLEST_ROW elements.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, self._unpack)
        self._stay = weakref.WeakSet(t.untyped_storage() for t in (*model.parameters(), *model.buffers()))
        self._copies: weakref.WeakKeyDictionary[Any, weakref.ref[HostCopy]] = weakref.WeakKeyDictionary()

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if not _is_worth_moving(tensor) or storage in self._stay:
            return tensor.detach()  # the tensor itself would hold the graph that holds it
        known = self._copies.get(storage)
        copy = known() if known is not None else None
        if copy is None or copy.version != tensor._version or copy.dtype != tensor.dtype:
            copy = HostCopy(tensor)
            self._copies[storage] = weakref.ref(copy)
        return copy, tensor.size(), tensor.stride(), tensor.storage_offset()

    @staticmethod
    def _unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        copy, size, stride, offset = packed
        tensor: Tensor = copy.on_card().as_strided(size, stride, offset)
        return tensor


def _is_worth_moving(tensor: Tensor) -> bool:
    content = tensor.is_floating_point() or tensor.dtype == torch.bool
    return content and tensor.dim() > 1 and tensor.size(-1) >= SMALLEST_ROW


def offload_activations(model: nn.Module) -> None:
    """Have the model's forward pass save in host memory; with checkpointing these are the layers' inputs.

    torch.utils.checkpoint saves a layer's input under the hooks around it, and what the layer itself saves under its
    own; so only the inputs are moved, and nothing is during recomputation.
    """
    forward, hooks = model.forward, HostActivations(model)

    def saving_on_host(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the last pass has given its pinned memory back: it is used again
        with hooks:
            return forward(*args, **kwargs)

    model.forward = saving_on_host


# -- parameters ------------------------------------------------------------------------------------------------------


def layer_weights(model: nn.Module, layers: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """The parameters of each layer that no module outside of the layers has as well (tied weights stay outside)."""
    within = {id(layer) for layer in layers}
    outside = {id(p) for module in _outside(model, within) for p in module.parameters(recurse=False)}
    return [[p for p in layer.parameters() if id(p) not in outside] for layer in layers]


def _outside(module: nn.Module, layers: set[int]) -> Iterator[nn.Module]:
    if id(module) not in layers:
        yield module
        for child in module.children():
            yield from _outside(child, layers)


def keep_layers_on_host(model: nn.Module, layers: Sequence[nn.Module], card: torch.device) -> None:
    """Move what is in no layer alone to the card, and the layers' weights to pinned memory."""
    leave = {id(p) for weights in layer_weights(model, layers) for p in weights}
    for p in model.parameters():
        p.data = to_host(p) if id(p) in leave else p.data.to(card)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(card))


def offload_layers(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Have each layer's weights come to the card when it runs, forward and in its recomputation, and go after it.

    What autograd saves of them in the recomputation keeps them until the backward pass has used them. The card is
    where the model's other weights are.
    """
    moved = layer_weights(model, layers)
    leave = {id(p) for weights in moved for p in weights}
    card = next(p.device for p in model.parameters() if id(p) not in leave)
    layer: Any
    for layer, weights in zip(layers, moved, strict=True):
        hosts = [_without_memory(p) if p.is_meta else p.data.view(-1) for p in weights]
        there = _Fetched(weights, hosts, card)
        layer._gradient_checkpointing_func = partial(_on_card, there, layer._gradient_checkpointing_func)
        layer.forward = partial(_evaluating, layer, there, layer.forward)


class _Fetched:
    """Makes contexts in which a layer's weights are on the card; afterwards they are in host memory again."""

    def __init__(self, weights: Sequence[nn.Parameter], hosts: Sequence[Tensor], card: torch.device) -> None:
        self._weights, self._hosts, self._card = weights, hosts, card

    @contextmanager
    def __call__(self) -> Iterator[None]:
        homes = [p.data for p in self._weights]
        for p, host in zip(self._weights, self._hosts, strict=True):
            p.data = torch.ops.vramplan.to_card(host, self._card).view(p.shape)
        try:
            yield
        finally:
            for p, home in zip(self._weights, homes, strict=True):
                p.data = home


def _evaluating(layer: nn.Module, fetched: _Fetched, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """transformers' layers call their checkpoint function in training alone (modeling_layers.py)."""
    if layer.training and torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with fetched():
        return forward(*args, **kwargs)


def _on_card(
    fetched: _Fetched, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``torch.utils.checkpoint.checkpoint`` of a layer whose weights are only there while it runs."""

    def run(*inputs: Any) -> Any:
        with fetched():
            return forward(*inputs)

    return checkpoint(run, *args, **kwargs)


def gradients_to_host(parameters: Iterator[Tensor]) -> Iterator[Any]:
    """Have each gradient leave the card as soon as it is there; hook handles to remove."""

    def leave(parameter: Tensor) -> None:
        assert parameter.grad is not None
        torch.ops.vramplan.to_host(parameter.grad.reshape(-1))
        parameter.grad = None

    for parameter in parameters:
        yield parameter.register_post_accumulate_grad_hook(leave)


class CastsAreNotKept(CudaSemantics):
    """``torch.autocast(cache_enabled=False)``: its cache would keep a copy of every layer's weights on the card."""

    def _to_low(self, tensor: Tensor) -> Tensor:
        assert self._dtype is not None
        keep = not tensor.is_floating_point() or tensor.dtype in (self._dtype, torch.float64)
        return tensor if keep else tensor.to(self._dtype)
