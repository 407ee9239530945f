"""A dispatch mode that writes a Recording while torch code runs, on tensors without data or on real ones."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import RecordingError
from planner.recording import calls
from planner.recording.kernels import Scratch, Target, kernel_workspaces, op_cost
from planner.recording.record import (
    ACTIVATIONS,
    GRADIENTS,
    OUTSIDE_LAYERS,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACE,
    Op,
    Recording,
)

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
# The reference counts of a tensor, and of its storage, that only the autograd engine's input buffer and this
# Python call hold: see Recorder._accumulates_in_place.
_SOLE_TENSOR_USES, _SOLE_STORAGE_USES = 4, 2
_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default})


Conversions = Sequence[tuple[Sequence[Tensor], Sequence[int]]]
"""Tensors, and the bytes of those that they are made from."""


class Recorder(TorchDispatchMode):
    """Records every storage that appears and disappears on one device, and every operator.

    Autograd runs above this mode, so forward, backward and recomputation are all seen, in the order in which the
    device would see them.
    """

    def __init__(self, target: Target, *, device: str | None = None) -> None:
        """``device``: the type of the tensors that are followed; None: what stands for the target's without data."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.target = target
        self._device = device or target.stand_in_device
        self._events: list[int] = []
        self._layers: list[int] = []
        self._sizes: list[int] = [0]
        self._categories: list[int] = [0]
        self._phases: dict[str, int] = {}
        self._gradients: list[tuple[int, int]] = []
        self._gates: list[tuple[int, int, int]] = []
        self._ops: list[Op] = []
        self._block_of: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._category = ACTIVATIONS
        self._layer = self._inside = OUTSIDE_LAYERS
        self._backward = False
        self._handles: set[bool] = set()
        self._layer_starts: list[int] = []
        self._layer_ids: list[int] = []
        self._open = True

    # -- the plain data ------------------------------------------------------------------------------------------

    def recording(self) -> Recording:
        """The events so far; later frees are no longer written."""
        self._open = False
        return Recording(
            sizes=self._sizes,
            categories=self._settled_categories(),
            events=self._events if self.target.kind == "cuda" else self._with_frees_in_order(),
            layers=self._layers,
            phases=self._phases,
            gradients=self._gradients,
            gates=self._gates,
            ops=self._ops,
        )

    def _with_frees_in_order(self) -> list[int]:
        """The events, with what goes at one moment in the order in which it came.

        Leaving ``torch.autocast`` drops its weight copies in the order of a hash table of addresses
        (autocast_mode.cpp, clear_cache), which is another one in each process.
        """
        borders = {*self._phases.values(), *(op.position for op in self._ops), *(at for at, _ in self._gradients)}
        events = list(self._events)
        start = 0
        for index in range(1, len(events) + 1):
            ends = index == len(events) or index in borders or self._layers[index] != self._layers[index - 1]
            if ends or events[index] > 0 or events[start] > 0:
                if events[start] < 0:
                    events[start:index] = sorted(events[start:index], reverse=True)
                start = index
        return events

    def _settled_categories(self) -> list[int]:
        """Tell temporaries of the forward pass from activations: they are gone before the backward pass begins."""
        begin, end = self._phases.get("forward", 0), self._phases.get("backward", len(self._events))
        short_lived = {-event for event in self._events[begin:end] if event < 0}
        categories = [
            TEMPORARIES if category == ACTIVATIONS and block in short_lived else category
            for block, category in enumerate(self._categories)
        ]
        for _, block in self._gradients:
            categories[block] = GRADIENTS
        return categories

    # -- what the caller tells -----------------------------------------------------------------------------------

    def phase(self, name: str, *, category: int = ACTIVATIONS, backward: bool = False) -> None:
        """Begin a phase: its blocks get ``category`` unless something says otherwise."""
        self._phases[name] = len(self._events)
        self._category = category
        self._backward = backward
        self._layer = OUTSIDE_LAYERS

    @contextmanager
    def categorised(self, category: int) -> Iterator[None]:
        """Blocks that appear within get ``category``."""
        before, self._category = self._category, category
        try:
            yield
        finally:
            self._category = before

    def adopt(
        self, tensors: Iterable[tuple[Tensor, int]], category: int = PARAMETERS, converted: Conversions = ()
    ) -> None:
        """Write the allocation of tensors that exist already, in the given order, each with its layer.

        ``converted``: tensors that follow each other and are made from others, of so many bytes, which go with the
        last of them.
        """
        sources = {id(parts[0]): nbytes for parts, nbytes in converted}
        last = {id(parts[-1]) for parts, _ in converted}
        held: list[int] = []
        with self.categorised(category):
            for tensor, self._layer in tensors:
                held += [self._allocate(nbytes, TEMPORARIES) for nbytes in sources.get(id(tensor), ())]
                self._track(tensor)
                while held and id(tensor) in last:
                    self._release(held.pop())
        self._layer = OUTSIDE_LAYERS

    def reserve(self) -> None:
        """Allocate a block and free it again, to have its memory in the cache; its size is left open."""
        self._release(self._allocate(0, TEMPORARIES))

    def mark(self, tensors: Iterable[Tensor], category: int) -> None:
        """Give the blocks of tensors that are there a category of their own."""
        for tensor in tensors:
            block = self.block(tensor)
            if block is not None:
                self._categories[block] = category

    def close(self) -> None:
        """Later frees are no longer written: what is recorded ends here, in the middle of a run."""
        self._open = False

    def block(self, tensor: Tensor) -> int | None:
        """The block that holds a tensor, or None when it was never seen."""
        return self._block_of.get(tensor.untyped_storage()._cdata)

    def watch_gradients(self, parameters: Iterable[Tensor]) -> list[Any]:
        """Write down when each parameter gets its gradient; returns hook handles to remove."""
        return [p.register_post_accumulate_grad_hook(self._note_gradient) for p in parameters]

    def _note_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.note_gradient(parameter.grad)

    def note_gradient(self, gradient: Tensor) -> None:
        """Write down that a tensor has become a gradient that the optimizer will see."""
        block = self.block(gradient)
        if block is not None:
            self._gradients.append((len(self._events), block))

    def watch_layers(self, layers: Sequence[torch.nn.Module]) -> list[Any]:
        """Tag events with the index of the repeated layer that they belong to; returns hook handles."""
        handles: list[Any] = []
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(partial(self._enter_layer, index)))
            handles.append(layer.register_forward_hook(self._leave_layer))
        return handles

    @contextmanager
    def in_layer(self, index: int) -> Iterator[None]:
        """A layer's recomputation within the backward pass."""
        self._enter_layer(index)
        try:
            yield
        finally:
            self._leave_layer()

    def _enter_layer(self, index: int, *_: object) -> None:
        self._layer_starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._layer_ids.append(index)
        self._inside = index

    def _leave_layer(self, *_: object) -> None:
        self._enter_layer(OUTSIDE_LAYERS)

    def _follow_backward(self) -> None:
        """In the backward pass the layer is the one whose forward created the autograd node that runs now."""
        node = torch._C._current_autograd_node()
        if node is None or not self._layer_starts:
            return
        sequence = node._sequence_nr()
        if sequence < 1 << 62:  # AccumulateGrad nodes carry the largest number: they stay where they happen
            found = bisect_right(self._layer_starts, sequence) - 1
            self._layer = self._layer_ids[found] if found >= 0 else OUTSIDE_LAYERS

    # -- the mode ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF:  # fake tensors are asked for their device thousands of times in a step
            return calls.device_of(args[0])
        if func is aten._local_scalar_dense.default:
            # on meta also of a tensor that has data: a host's, made of a size (Longformer's chunks), whose model also
            # asks meta tensors what only data tell
            known = self._device != "meta" and calls.has_data(args[0])
            return func(*args, **kwargs) if known else _scalar_of_unknown(args[0])
        if _is_view(func):
            return calls.run_view(func, args, kwargs)
        if not self._backward:
            # not at the layer's end: what is freed before the next operator goes with the layer that replaced it
            self._layer = self._inside
        else:
            self._follow_backward()
            if func is aten.add.Tensor and self._accumulates_in_place(*args, **kwargs):
                self._note_op(aten.add_.Tensor, op_cost(aten.add_.Tensor, args, args[0]))
                return args[0].add_(args[1]) if calls.has_data(args[0]) else args[0]
        if func in _MATMULS and self.target.kind == "cuda":
            self._open_cublas_handle()
        if self._device == "meta" or calls.fake_mode() is not None:
            out, call = calls.run(func, args, kwargs, self.target)
            scratch, cost = call.scratch, call.cost
        else:
            out = func(*args, **kwargs)
            scratch, cost = kernel_workspaces(func, args, self.target), op_cost(func, args, out)
        self._track_all(out)
        self._use_scratch(scratch)
        self._note_op(func, cost)
        return out

    def _accumulates_in_place(self, old: Tensor, new: Tensor, **kwargs: Any) -> bool:
        """Whether this addition is autograd's input buffer reusing ``old``.

        torch/csrc/autograd/input_buffer.cpp (can_accumulate_inplace) adds into the gradient that it already holds
        when nobody else does; under any dispatch mode it thinks it must not, so the mode does it here.
        """
        return (
            not kwargs
            and not torch.is_grad_enabled()
            and isinstance(new, Tensor)
            and old.shape == new.shape
            and old.dtype == new.dtype
            and torch._C._storage_Use_Count(old.untyped_storage()._cdata) == _SOLE_STORAGE_USES
            # one more use here than at the dispatch itself: the argument tuple of this call is the same object
            and old._use_count() == _SOLE_TENSOR_USES  # type: ignore[attr-defined]
            and _is_dense(old)
        )

    def _open_cublas_handle(self) -> None:
        """The first matmul of a thread allocates its cuBLAS handle's workspace (CUDABlas / CublasHandlePool.cpp).

        The backward pass runs on autograd's own thread, which has a handle of its own. Its size is the card's.
        """
        if self._backward in self._handles:
            return
        self._handles.add(self._backward)
        self._allocate(0, WORKSPACE)

    def _allocate(self, nbytes: int, category: int) -> int:
        block = len(self._sizes)
        self._sizes.append(nbytes)
        self._categories.append(category)
        self._events.append(block)
        self._layers.append(self._layer)
        return block

    def _release(self, block: int) -> None:
        if self._open:
            self._events.append(-block)
            self._layers.append(self._layer)

    def _use_scratch(self, buffers: list[Scratch]) -> None:
        blocks = [self._allocate(buffer.nbytes, TEMPORARIES) for buffer in buffers]
        for block, buffer in zip(blocks, buffers, strict=True):
            if buffer.threshold >= 0:
                self._gates.append((block, buffer.count, buffer.threshold))
            self._release(block)

    def _track_all(self, out: Any) -> None:
        if isinstance(out, Tensor):
            self._track(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._track_all(item)

    def _track(self, tensor: Tensor) -> None:
        if calls.device_type(tensor) != self._device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._block_of:
            return
        category = self._category
        if self._backward and category == ACTIVATIONS:
            category = TEMPORARIES
        block = self._allocate(storage.nbytes(), category)
        self._block_of[key] = block

        def gone(_: object) -> None:
            del self._block_of[key], self._watch[key]
            self._release(block)

        self._watch[key] = weakref.ref(storage, gone)

    def _note_op(self, func: Any, cost: calls.Cost) -> None:
        kind, flops, moved = cost
        if not moved:  # the profiler's markers, which optimizers call as operators
            return
        self._ops.append(Op(_name(func), flops, moved, kind, len(self._events), self._backward, self._layer))


_view_of: dict[Any, bool] = {}
_name_of: dict[Any, str] = {}


def _is_view(func: Any) -> bool:
    """Whether an operator returns its input's storage untouched, read from its schema."""
    known = _view_of.get(func)
    if known is None:
        returns = func._schema.returns
        known = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        _view_of[func] = known
    return known


def _name(func: Any) -> str:
    known = _name_of.get(func)
    if known is None:
        known = _name_of[func] = str(func.overloadpacket)
    return known


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _scalar_of_unknown(tensor: Tensor) -> bool | float:
    """A value for code that looks into a tensor which has no data.

    Model code asks whether a padding mask is all ones (a padded batch's is not) and whether a norm is finite.
    """
    if tensor.dtype == torch.bool:
        return False
    if tensor.dtype.is_floating_point:
        return 1.0
    raise RecordingError(
        "it reads a whole number out of a tensor during its step (data-dependent shapes), which needs real data"
    )
