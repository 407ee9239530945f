"""Operator calls on tensors without data, remembered: equal calls have equal results.

Many of torch's kernels for such tensors are written in Python and take a millisecond; a transformer makes the same
few calls in each of its layers. A call is told from another by its operator, the types, shapes and strides of its
tensors, and its other arguments; its result is then only a matter of empty tensors with the same layout.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from planner.recording.kernels import Scratch, Target, kernel_workspaces, op_cost

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str]
"""Shape, strides, type and device type."""
Cost = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Call:
    """What a call gives and needs."""

    outputs: tuple[Layout, ...] | None
    """Layouts of fresh outputs; None when the operator must be run each time."""
    is_single: bool
    """Whether the operator returns a tensor rather than a tuple."""
    scratch: list[Scratch]
    """Buffers of its CUDA kernel."""
    cost: Cost
    """Kind, FLOPs, bytes of each operand."""

    def make_outputs(self) -> Any:
        """Fresh outputs without data."""
        assert self.outputs is not None
        made = [_empty(*layout) for layout in self.outputs]
        return made[0] if self.is_single else tuple(made)


def fake_mode() -> FakeTensorMode | None:
    """The mode under which tensors claim to be on a device without having data there; None on meta and with data."""
    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


def has_data(tensor: Tensor) -> bool:
    """Whether there is something to read. A fake tensor may know its value: one made from a number of Python's."""
    if isinstance(tensor, FakeTensor):
        return tensor.constant is not None
    return not tensor.is_meta


def device_of(tensor: Tensor) -> torch.device:
    """``tensor.device``; of a fake tensor without asking the dispatcher."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def device_type(tensor: Tensor) -> str:
    """``tensor.device.type``"""
    return device_of(tensor).type


def run_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that returns its input's storage; on fake tensors without the mode, which takes ten times as long.

    Its kernel runs on what is behind them, which is on meta, and the result claims to be where the input is.
    """
    mode, first = fake_mode(), args[0] if args else None
    if mode is None or not isinstance(first, FakeTensor) or first.constant is not None:
        return func(*args, **kwargs)
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    device = first.fake_device
    if isinstance(out, Tensor):
        return FakeTensor(mode, out, device)
    return type(out)(FakeTensor(mode, part, device) for part in out)


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor without data, under the active fake mode one that claims to be on the device."""
    mode = fake_mode()
    if mode is None:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, made, torch.device(device))


_KNOWN: dict[Hashable, Call] = {}


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target) -> tuple[Any, Call]:
    """The operator's result, and what the call needs."""
    key = (func, target, _key(args), _key(tuple(kwargs.items())))
    call = _KNOWN.get(key)
    if call is None:
        out = func(*args, **kwargs)
        call = _KNOWN[key] = _describe(func, args, out, target)
        return out, call
    return (func(*args, **kwargs) if call.outputs is None else call.make_outputs()), call


def _describe(func: Any, args: tuple[Any, ...], out: Any, target: Target) -> Call:
    results = out if isinstance(out, tuple) else (out,)
    fresh = not func._schema.is_mutable and all(_is_fresh(result) for result in results)
    return Call(
        outputs=tuple(_layout(t) for t in results) if fresh else None,
        is_single=not isinstance(out, tuple),
        scratch=kernel_workspaces(func, args, target),
        cost=op_cost(func, args, out),
    )


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, device_type(tensor)


def _is_fresh(result: Any) -> bool:
    """Whether a result is a new tensor that fills its own storage."""
    return (
        isinstance(result, Tensor)
        and not has_data(result)
        and result.storage_offset() == 0
        and result.untyped_storage().nbytes() == result.numel() * result.element_size()
        and torch._C._storage_Use_Count(result.untyped_storage()._cdata) == _FRESH_STORAGE_USES
    )


_FRESH_STORAGE_USES = 2
"""A tensor of its own, and the Python object that looks at its storage."""


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, device_type(value))
    if isinstance(value, (tuple, list)):
        return tuple([_key(item) for item in value])
    return (type(value), value)
