"""What the warm-up steps must show: gradients that are not zero, layers that are computed twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from planner.config import TrainingConfig
from planner.levers.checkpointing import checkpointing_layers, every_n
from planner.measure.course import Watched
from planner.measure.protocol import NO_GRADIENT, NOT_CHECKPOINTED
from planner.recording.record import ACTIVATIONS
from planner.recording.recorder import Recorder

ENOUGH_TOKENS = 4
"""With fewer, attention has one key to choose from, and its query and key weights have no gradient."""


class Evidence(Watched):
    """Is told where in the step it is, and looks at what happens; a recorder, if there is one, is told as well.

    Nothing here changes what is measured: hooks count calls, and gradients are looked at between passes.
    """

    def __init__(
        self, model: nn.Module, trained: Sequence[Tensor], config: TrainingConfig, recorder: Recorder | None
    ) -> None:
        super().__init__(recorder)
        self._model, self._config = model, config
        self._layers = checkpointing_layers(model)
        owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
        names = {id(p): name for name, p in model.named_parameters()}
        # a vector may have none by symmetry, like the bias of keys, which shifts all scores alike
        self._unproven = {names[id(p)]: (p, owners[id(p)]) for p in trained if p.dim() > 1}
        self._ran: set[int] = set()
        self._layers_run: set[int] = set()
        self.recomputed: set[int] = set()
        """Layers that ran in a backward pass."""
        self._backward = False

    # -- where the step is ---------------------------------------------------------------------------------------

    def phase(self, name: str, *, category: int = ACTIVATIONS, backward: bool = False) -> None:
        """A part of the step begins."""
        self._backward = backward
        super().phase(name, category=category, backward=backward)

    # -- what happens --------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls of modules are seen within."""
        owners = {id(owner): owner for _, owner in self._unproven.values()}
        handles = [owner.register_forward_pre_hook(self._note_run) for owner in owners.values()]
        for index, layer in enumerate(self._layers):
            # not of the layer itself: transformers 5.24 computes its forward again without its hooks; and not of its
            # children alone, which may be lists that are never called (T5)
            note = partial(self._note_layer, index)
            handles += [part.register_forward_pre_hook(note) for part in layer.modules() if part is not layer]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_run(self, module: nn.Module, *_: Any) -> None:
        self._ran.add(id(module))

    def _note_layer(self, index: int, *_: Any) -> None:
        (self.recomputed if self._backward else self._layers_run).add(index)

    @torch.no_grad()
    def look_at_gradients(self, gradient_of: Callable[[Tensor], Tensor | None]) -> None:
        """After a backward pass; what had a gradient once needs no further look."""
        for name, (parameter, _) in list(self._unproven.items()):
            gradient = gradient_of(parameter)
            if gradient is not None and bool(gradient.any()):
                del self._unproven[name]

    # -- what it says --------------------------------------------------------------------------------------------

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """Trained matrices that never had a gradient other than zero, although their module ran."""
        if self._config.seq_len < ENOUGH_TOKENS:
            return ()
        return tuple(name for name, (_, owner) in self._unproven.items() if id(owner) in self._ran)

    @property
    def problem(self) -> tuple[str, str] | None:
        """Status and reason; None where all is as it must be."""
        if names := self.without_gradient:
            return NO_GRADIENT, f"{len(names)} trained parameters got no gradient: {', '.join(names[:3])}"
        n = every_n(self._config.checkpointing)
        expected = {index for index in self._layers_run if n is not None and index % n == 0}
        if expected != self.recomputed:
            return (
                NOT_CHECKPOINTED,
                f"checkpointing {self._config.checkpointing} is to compute {len(expected)} layers twice; "
                f"{len(self.recomputed)} were",
            )
        return None
