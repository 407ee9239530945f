"""fp32 copies of bf16 weights: the emitted script's ``MasterWeights``, statement for statement (a test compares)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class MasterWeights(torch.optim.Optimizer):
    """Steps on fp32 copies of the weights, tensor by tensor: one fp32 gradient at a time."""

    def __init__(self, parameters: list[Tensor], lr: float, make: Callable[[list[Tensor]], Any]) -> None:
        super().__init__(parameters, {"lr": lr})
        self.make = make
        self.weights: list[Tensor] = self.param_groups[0]["params"]
        self.masters: list[Tensor] = []
        self.optimizers: list[torch.optim.Optimizer] = []

    def make_masters(self) -> None:
        """At the first step, as with other state."""
        self.masters = [p.detach().float() for p in self.weights]
        self.optimizers = [self.make([master]) for master in self.masters]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Gradient to fp32, the optimizer's step on the copy, copy to the weight; tensor by tensor."""
        if not self.masters:
            self.make_masters()
        for p, master, optimizer in zip(self.weights, self.masters, self.optimizers, strict=True):
            if p.grad is not None:
                master.grad = p.grad.float()
                optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
                optimizer.step()
                master.grad = None
                p.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """The copies and each one's state."""
        return {"masters": self.masters, "optimizers": [o.state_dict() for o in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` gave; accelerate also loads that of an optimizer which made no step yet."""
        if state["masters"]:
            self.make_masters()
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
