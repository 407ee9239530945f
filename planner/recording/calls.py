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

from planner.recording.kernels import Scratch, Target, kernel_workspaces, op_cost

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
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
        made = [torch.empty_strided(size, stride, dtype=t, device="meta") for size, stride, t in self.outputs]
        return made[0] if self.is_single else tuple(made)


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
        outputs=tuple((tuple(t.shape), t.stride(), t.dtype) for t in results) if fresh else None,
        is_single=not isinstance(out, tuple),
        scratch=kernel_workspaces(func, args, target),
        cost=op_cost(func, args, out),
    )


def _is_fresh(result: Any) -> bool:
    """Whether a result is a new tensor that fills its own storage."""
    return (
        isinstance(result, Tensor)
        and result.device.type == "meta"
        and result.storage_offset() == 0
        and result.untyped_storage().nbytes() == result.numel() * result.element_size()
        and torch._C._storage_Use_Count(result.untyped_storage()._cdata) == _FRESH_STORAGE_USES
    )


_FRESH_STORAGE_USES = 2
"""A tensor of its own, and the Python object that looks at its storage."""


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device.type)
    if isinstance(value, (tuple, list)):
        return tuple([_key(item) for item in value])
    return (type(value), value)
