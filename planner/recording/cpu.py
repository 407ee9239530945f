"""The CPU's own choices, on tensors that claim to be there without holding data: torch's fake tensors.

Nothing about the CPU needs to be told to torch, unlike what ``cuda.py`` tells of a card: the dispatcher of the
machine that records is the one that will train. It picks the attention kernel, dropout's mask and the multi-tensor
updates, and ``torch.autocast("cpu")`` casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.utils import import_utils


class CpuSemantics:
    """What ``CudaSemantics`` is for a card: the regions of a step, as the CPU runs them."""

    def __init__(self, *, autocast_dtype: torch.dtype | None = None) -> None:
        self._dtype = autocast_dtype
        self._entered = ExitStack()

    def __enter__(self) -> CpuSemantics:
        self._entered.enter_context(fake_tensors())
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def autocasting(self) -> AbstractContextManager[Any]:
        """torch's own autocast, whose weight copies go when it ends."""
        return torch.autocast("cpu", self._dtype, enabled=self._dtype is not None)

    def recomputing(self) -> AbstractContextManager[Any]:
        """The engine runs a CPU graph in the thread that called ``backward()``; checkpoint() restores autocast."""
        return nullcontext()

    def exempt(self, module: nn.Module) -> list[Any]:
        """The module's code disables autocast itself."""
        return []


@contextmanager
def fake_tensors() -> Iterator[None]:
    """New tensors hold no data, whatever device they are made on. May be entered again within.

    transformers asks ``is_fake_tensor`` to take the code paths that torch.compile traces, where a padding mask is
    never looked at; training doesn't take them.
    """
    asked = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda _: False  # type: ignore[assignment]
    try:
        with _mode():
            yield
    finally:
        import_utils.is_fake_tensor = asked


def moved(model: nn.Module) -> nn.Module:
    """A model that was built on meta, in place with fake tensors on the CPU for its own.

    Built under the mode, ``Module.to()`` would fail, which peft calls: it can't swap fake parameters.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:  # tied weights stay one tensor
            made[id(tensor)] = _like(_claiming(tensor), tensor)
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers, module.__dict__):
            held: dict[str, Any] = tensors
            held.update({name: fake(value) for name, value in held.items() if isinstance(value, Tensor)})
    return model


def _like(claims: Tensor, tensor: Tensor) -> Tensor:
    with _mode():
        return nn.Parameter(claims, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else claims


def arriving(host: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Makes a micro-batch of one that is on meta: copied tensor by tensor, as from the collator's memory."""
    waiting = {name: _claiming(tensor) for name, tensor in host.items()}
    return lambda: {name: tensor.to("cpu", copy=True) for name, tensor in waiting.items()}


def _claiming(tensor: Tensor) -> Tensor:
    """The tensor, said to be on the CPU."""
    return FakeTensor(_mode(), tensor.detach(), torch.device("cpu"))


@cache
def _mode() -> FakeTensorMode:
    """One for the process: fake tensors of different modes don't mix."""
    return FakeTensorMode()
