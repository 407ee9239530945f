"""FSDP2 in a recording: what ``fully_shard`` allocates, gathers and frees around the layers of a step.

The emitted script wraps each repeated layer, then the model. Each is a unit that keeps its shards and is whole while
it runs. The order is that of torch/distributed/fsdp/_fully_shard (2.13): ``_fsdp_param_group.py`` says when,
``_fsdp_collectives.py`` what is allocated. The model's own parameters stand for the gathered weights: they take no
memory here, blocks that come and go beside them do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from planner.recording.record import OUTSIDE_LAYERS
from planner.recording.transfers import layer_weights

_LIBRARY = torch.library.Library("vramplan", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor like, int elements) -> Tensor")
_LIBRARY.define("reduce_scatter(Tensor whole, int world) -> Tensor")


def _all_gather(like: Tensor, elements: int) -> Tensor:
    return torch.empty(elements, dtype=like.dtype, device=like.device)


def _reduce_scatter(whole: Tensor, world: int) -> Tensor:
    return torch.empty(whole.numel() // world, dtype=whole.dtype, device=whole.device)


_LIBRARY.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
_LIBRARY.impl("reduce_scatter", _reduce_scatter, "CompositeExplicitAutograd")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A model's parameters in shards, as one of several processes has them."""

    world: int
    """Processes."""
    compute_dtype: torch.dtype | None
    """What gathered weights are cast to (MixedPrecisionPolicy's ``param_dtype``), None where they aren't."""
    shards: dict[int, Tensor]
    """``id`` of each parameter to its shard: the first dimension's part, rounded up, in the type that the optimizer
    sees."""
    gradients: list[Tensor] = field(default_factory=list)
    """Of the pass that was watched last, one tensor for each unit's shards: they outlive the pass."""

    @classmethod
    def of(cls, model: nn.Module, world: int, compute_dtype: torch.dtype | None) -> Sharding:
        """Cut the parameters of a model; with ``compute_dtype`` they themselves become what is computed with."""
        shards: dict[int, Tensor] = {}
        for p in model.parameters():
            rows = -(-p.shape[0] // world)
            shard = torch.empty((rows, *p.shape[1:]), dtype=p.dtype, device=p.device)
            shards[id(p)] = shard.requires_grad_(p.requires_grad)
            if compute_dtype is not None:
                p.data = p.data.to(compute_dtype)
        return cls(world=world, compute_dtype=compute_dtype, shards=shards)

    def held(self, tensors: Iterable[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
        """What is on the card after loading: shards in place of parameters, buffers as they are."""
        return ((self.shards.get(id(tensor), tensor), layer) for tensor, layer in tensors)

    def watch(
        self, model: nn.Module, layers: Sequence[nn.Module], note_gradient: Callable[[Tensor], None]
    ) -> list[Any]:
        """Have each layer, and what is in none, gathered and dropped as it runs; hook handles to remove.

        ``note_gradient`` is told of each unit's new gradients, one tensor of all its shards'.
        """
        self.gradients.clear()
        return _Units(self, model, layers, note_gradient).handles


@dataclass
class _Stream:
    """What the units share (FSDPCommContext)."""

    gathered: Tensor | None = None
    """The forward pass's last gather, kept until the next is copied out (AllGatherState)."""
    reducing: Tensor | None = None
    """The last unit's gradients on their way (ReduceScatterState)."""
    order: list[_Unit] = field(default_factory=list)
    """In which units ended their forward pass."""
    ends: bool = False
    """Whether the backward pass's end has been asked for."""


class _Unit:
    """One ``fully_shard``: FSDPState and FSDPParamGroup in what they allocate."""

    def __init__(self, sharding: Sharding, parameters: Sequence[nn.Parameter], stream: _Stream) -> None:
        self._sharding, self._parameters, self._stream = sharding, list(parameters), stream
        self._shard_elements = [sharding.shards[id(p)].numel() for p in parameters]
        self._result: Tensor | None = None
        self._whole: list[Tensor] = []
        self.state = "idle"
        self._index = -1

    # -- weights -------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather (foreach_all_gather): shards in one row, cast where the policy casts, then everybody's."""
        if self._result is not None or self._whole or not self._parameters:
            return
        like, elements = self._parameters[0].detach(), sum(self._shard_elements)
        row = torch.empty(elements, dtype=like.dtype, device=like.device) if self._sharding.compute_dtype else None
        self._result = torch.ops.vramplan.all_gather(like.view(-1)[:1], elements * self._sharding.world)
        del row

    def wait_for_unshard(self) -> None:
        """Copy out into the parameters (foreach_all_gather_copy_out), and drop the gather or the one before it."""
        if self._result is None:
            return
        world, like = self._sharding.world, self._result
        self._whole = [torch.empty(n * world, dtype=like.dtype, device=like.device) for n in self._shard_elements]
        if self.state == "forward":
            self._stream.gathered = like  # the one before went through a local name: it is held until here
        self._result = None

    def reshard(self) -> None:
        """Drop the whole weights (free_storage)."""
        self._whole.clear()

    # -- backward ------------------------------------------------------------------------------------------------

    def pre_backward(self, _: Tensor) -> None:
        """The gradient of an output is there: gather, then begin with the unit that ran before."""
        if self.state == "pre_backward":
            return
        self.state = "pre_backward"
        self.unshard()
        self.wait_for_unshard()
        if self._index > 0:
            self._stream.order[self._index - 1].unshard()

    def post_backward(self) -> None:
        """All gradients of the unit are there: drop the weights, reduce (foreach_reduce, in fp32 under a policy)."""
        self.state = "post_backward"
        sharding = self._sharding
        gradients, elements = [], 0
        for p, shard_elements in zip(self._parameters, self._shard_elements, strict=True):
            if p.grad is not None:
                gradients.append(p.grad)
                elements += shard_elements * sharding.world
                p.grad = None
        self.reshard()
        self._stream.reducing = None
        if not gradients:
            return
        dtype = torch.float32 if sharding.compute_dtype is not None else gradients[0].dtype
        whole = torch.empty(elements, dtype=dtype, device=gradients[0].device)
        gradients.clear()
        self._stream.reducing = whole
        sharding.gradients.append(torch.ops.vramplan.reduce_scatter(whole, sharding.world))


class _AfterBackward(torch.autograd.Function):
    """RegisterPostBackwardFunction: its backward runs when the gradients of the unit's inputs are done."""

    @staticmethod
    def forward(ctx: Any, after: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.after = after
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.after()
        return (None, *gradients)


class _Units:
    """The hooks of all units of one recording."""

    def __init__(
        self,
        sharding: Sharding,
        model: nn.Module,
        layers: Sequence[nn.Module],
        note_gradient: Callable[[Tensor], None],
    ) -> None:
        self._stream, self._note, self._gradients = _Stream(), note_gradient, sharding.gradients
        self._dtype = sharding.compute_dtype
        weights = layer_weights(model, layers)
        within = {id(p) for parameters in weights for p in parameters}
        self._root = _Unit(sharding, [p for p in model.parameters() if id(p) not in within], self._stream)
        pairs = [(model, self._root)]
        pairs += [(layer, _Unit(sharding, own, self._stream)) for layer, own in zip(layers, weights, strict=True)]
        self._units = [unit for _, unit in pairs]
        self.handles: list[Any] = []
        for module, unit in pairs:
            enter, leave = self._entering(unit), self._leaving(unit)
            self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(leave))

    def _entering(self, unit: _Unit) -> Callable[..., Any]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            args, kwargs = self._cast((args, kwargs))
            if unit.state == "pre_backward":  # recomputation, for which the weights are there
                return args, kwargs
            unit.state = "forward"
            unit.unshard()
            unit.wait_for_unshard()
            return self._with_end(unit, args, kwargs)

        return enter

    def _cast(self, inputs: Any) -> Any:
        """``cast_forward_inputs`` of MixedPrecisionPolicy."""
        if self._dtype is None:
            return inputs
        return tree_map_only(Tensor, lambda t: t.to(self._dtype) if t.is_floating_point() else t, inputs)

    def _with_end(self, unit: _Unit, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return args, kwargs
        flat, spec = tree_flatten((args, kwargs))
        places = [i for i, value in enumerate(flat) if isinstance(value, Tensor) and value.requires_grad]
        if places:
            outputs: Any = _AfterBackward.apply(  # type: ignore[no-untyped-call]
                lambda: self._after(unit), *(flat[i] for i in places)
            )
            for i, output in zip(places, outputs, strict=True):
                flat[i] = output
        return tree_unflatten(flat, spec)

    def _leaving(self, unit: _Unit) -> Callable[..., Any]:
        is_root = unit is self._root

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if unit.state == "pre_backward":
                return
            if not is_root:
                unit.reshard()
            unit._index = len(self._stream.order)
            self._stream.order.append(unit)
            unit.state = "idle"
            for value in tree_flatten(output)[0] if torch.is_grad_enabled() else ():
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(lambda gradient: self._before(unit, gradient))
            if is_root:
                self._stream.gathered = None
                if not torch.is_grad_enabled():  # whole until the next pass; a recording ends here
                    self._finish()

        return leave

    def _before(self, unit: _Unit, gradient: Tensor) -> None:
        if not self._stream.ends:
            self._stream.ends = True
            Variable._execution_engine.queue_callback(self._at_the_end)
        unit.pre_backward(gradient)

    def _after(self, unit: _Unit) -> None:
        known = len(self._gradients)
        unit.post_backward()
        for gradient in self._gradients[known:]:
            self._note(gradient)

    def _at_the_end(self) -> None:
        """``_root_post_backward_final_callback``: units none of whose inputs had gradients, then the last buffers."""
        for unit in self._units:
            if unit.state != "post_backward":
                self._after(unit)
        self._finish()

    def _finish(self) -> None:
        for unit in self._units:
            unit.state = "idle"
            unit.reshard()
        self._stream.order.clear()
        self._stream.reducing = None
        self._stream.ends = False


# -- data parallel ---------------------------------------------------------------------------------------------------


def buckets(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[tuple[Tensor, int]]:
    """DistributedDataParallel's gradient buckets, of which gradients are views, each with its layer.

    torch/csrc/distributed/c10d/reducer.cpp, initialize_buckets: allocated when the model is wrapped, and kept. They
    hold up to 25 MiB; here each layer's gradients are one, so that they repeat as layers do.
    """
    weights = layer_weights(model, layers)
    within = {id(p) for parameters in weights for p in parameters}
    outside = [p for p in model.parameters() if id(p) not in within]
    for layer, parameters in ((OUTSIDE_LAYERS, outside), *enumerate(weights)):
        trained = [p for p in parameters if p.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in trained):
            elements = sum(p.numel() for p in trained if p.dtype == dtype)
            yield torch.empty(elements, dtype=dtype, device=trained[0].device), layer


def gradients_into_buckets(parameters: Iterable[Tensor]) -> Iterator[Any]:
    """Have each gradient go into its bucket as soon as it is there (mark_variable_ready_dense); hook handles."""

    def leave(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in parameters:
        yield parameter.register_post_accumulate_grad_hook(leave)


__all__ = ["Sharding", "buckets", "gradients_into_buckets"]
