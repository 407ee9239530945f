"""AdamW in host memory: the emitted script's ``HostAdamW``, statement for statement (a test compares).

The script brings one of two: one for weights on the card, one for layers whose weights are in host memory as well.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def to_host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in host memory; pinned memory is copied at the full speed of the bus."""
    pinned = torch.cuda.is_available()
    return torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=pinned).copy_(tensor.detach())


class HostAdamW(torch.optim.Optimizer):
    """AdamW in host memory: the card holds weights and gradients, the host fp32 weights and both moments."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.weights: list[Tensor] = self.param_groups[0]["params"]
        self.grads = [to_host(p) for p in self.weights]
        self.on_host = [to_host(p, torch.float32) for p in self.weights]
        self.adamw = torch.optim.AdamW(self.on_host, lr=lr, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Gradients to the host, the step there, weights back."""
        for grad, p in zip(self.grads, self.weights, strict=True):
            if p.grad is not None:
                grad.copy_(p.grad, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for grad, master, p in zip(self.grads, self.on_host, self.weights, strict=True):
            master.grad = None if p.grad is None else grad.float()  # fp32 gradients are not copied again
        self.adamw.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.adamw.step()
        for p, master in zip(self.weights, self.on_host, strict=True):
            p.copy_(master, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """The fp32 weights and AdamW's state."""
        return {"weights": self.on_host, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` gave."""
        for master, weight in zip(self.on_host, state["weights"], strict=True):
            master.copy_(weight)
        self.adamw.load_state_dict(state["adamw"])


class HostAdamWOfLayers(torch.optim.Optimizer):
    """AdamW in host memory, where each gradient goes as soon as it is there."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.weights: list[Tensor] = self.param_groups[0]["params"]
        self.grads = [to_host(p) for p in self.weights]
        self.on_host = [p.data if self.is_master(p) else to_host(p, torch.float32) for p in self.weights]
        self.adamw = torch.optim.AdamW(self.on_host, lr=lr, fused=True)
        self.arrived: set[Tensor] = set()
        for grad, p in zip(self.grads, self.weights, strict=True):
            p.register_post_accumulate_grad_hook(partial(self.take_gradient, grad))

    @staticmethod
    def is_master(weight: Tensor) -> bool:
        """Whether the weight itself is what the host's AdamW steps on."""
        return weight.device.type == "cpu" and weight.dtype == torch.float32

    def take_gradient(self, grad: Tensor, weight: Tensor) -> None:
        """Move a gradient to the host."""
        if weight in self.arrived:
            grad += to_host(weight.grad)  # type: ignore[arg-type]  # of a further micro-batch
        else:
            grad.copy_(weight.grad, non_blocking=True)  # type: ignore[arg-type]
            self.arrived.add(weight)
        weight.grad = None  # the card needs it no more

    def collect(self) -> list[Tensor]:
        """The fp32 weights with their gradients, once these have all arrived."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for grad, master, p in zip(self.grads, self.on_host, self.weights, strict=True):
            master.grad = grad.float() if p in self.arrived else None  # fp32 gradients are not copied again
        self.arrived.clear()
        return self.on_host

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """The step on the host; weights that are on the card get the result."""
        self.adamw.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.adamw.step()
        for p, master in zip(self.weights, self.on_host, strict=True):
            if not self.is_master(p):
                p.copy_(master, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """The fp32 weights and AdamW's state."""
        return {"weights": self.on_host, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` gave."""
        for master, weight in zip(self.on_host, state["weights"], strict=True):
            master.copy_(weight)
        self.adamw.load_state_dict(state["adamw"])
