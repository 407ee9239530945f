"""A recorder that also writes down where each block comes from: the module, and the operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from planner.recording.kernels import Target
from planner.recording.record import OUTSIDE_LAYERS, PARAMETERS, WORKSPACE, NamedRecording, Origin, Recording
from planner.recording.recorder import Conversions, Recorder


class NamingRecorder(Recorder):
    """Follows every module of a model as a recorder follows repeated layers, inner ones within outer ones.

    Its events' layers are indices of modules, so its recordings can't be repeated: they are of whole models.
    """

    def __init__(self, target: Target, model: torch.nn.Module) -> None:
        super().__init__(target)
        self._model = model
        self._names = [name or type(module).__name__ for name, module in model.named_modules()]
        self._kinds = [type(module).__name__ for module in model.modules()]
        # by storage: an update is recorded on detached parameters, which are other tensors
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = {tensor.untyped_storage()._cdata: name for name, tensor in tensors}
        self._owners = {name: index for index, name in enumerate(self._names)}
        self._origins = [Origin("", "", "")]
        self._operator = ""
        self._tensor = ""
        self._outer: list[int] = []
        self._recomputing = False

    def recording(self) -> Recording:
        """The events so far, and where each block comes from."""
        plain = super().recording()
        values = {field.name: getattr(plain, field.name) for field in fields(Recording)}
        return NamedRecording(**values, origins=self._origins)

    def adopt(
        self, tensors: Iterable[tuple[Tensor, int]], category: int = PARAMETERS, converted: Conversions = ()
    ) -> None:
        """Tensors that exist already are their modules', under their own names."""

        def owned() -> Iterator[tuple[Tensor, int]]:
            for tensor, _ in tensors:
                name = self._tensors.get(tensor.untyped_storage()._cdata, "")
                owner, _, self._operator = name.rpartition(".")
                yield tensor, self._owners.get(owner, 0 if name else OUTSIDE_LAYERS)

        super().adopt(owned(), category, converted)

    def watch_layers(self, layers: Sequence[torch.nn.Module]) -> list[Any]:
        """All modules, not only the repeated layers."""
        return super().watch_layers(list(self._model.modules()))

    @contextmanager
    def in_layer(self, index: int) -> Iterator[None]:
        """A recomputation: its modules announce themselves, except that it may end in the middle of one."""
        depth, inside = len(self._outer), self._inside
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False
            del self._outer[depth:]
            super()._enter_layer(inside)

    def _enter_layer(self, index: int, *_: object) -> None:
        self._outer.append(self._inside)
        super()._enter_layer(index)

    def _leave_layer(self, *_: object) -> None:
        super()._enter_layer(self._outer.pop())

    def _follow_backward(self) -> None:
        if self._recomputing:
            self._layer = self._inside
        else:
            super()._follow_backward()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._operator = str(func.overloadpacket).replace(".", "::")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        self._tensor = "" if first is None else self._tensors.get(first.untyped_storage()._cdata, "")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _allocate(self, nbytes: int, category: int) -> int:
        self._origins.append(self._origin(category))
        return super()._allocate(nbytes, category)

    def _origin(self, category: int) -> Origin:
        if category == WORKSPACE:
            return Origin("", "", "cuBLAS workspace")
        if self._layer == OUTSIDE_LAYERS:  # an optimizer's state is named after the parameter that it is made like
            return Origin(self._tensor, "Parameter" if self._tensor else "", self._operator)
        return Origin(self._names[self._layer], self._kinds[self._layer], self._operator)
