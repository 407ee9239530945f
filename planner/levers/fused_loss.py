"""Cross-entropy that takes the output layer over: the logits of all tokens are never in memory together.

``LinearCrossEntropy`` is the emitted script's class of that name, statement for statement (a test compares them).
The idea is that of Liger's fused_linear_cross_entropy and of torch 2.13's linear_cross_entropy; this one needs
neither a kernel nor that release, and has the same number of parts at every shape.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.levers.base import output_layer
from planner.recording.kernels import Target
from planner.recording.recorder import Recorder
from planner.tasks import LossKind
from planner.workload import loss_function

if TYPE_CHECKING:
    from planner.workload import LossOfLogits

PARTS = 8
"""Parts of the tokens: each makes an eighth of the logits. Half precision pads lengths to multiples of 8."""


class LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of ``hidden @ weight.T + bias``, a part of the tokens at a time.

    The gradients are made with the loss, while the part's logits are at hand; backward() only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """``hidden`` [tokens, features], ``labels`` [tokens] with -100 where none counts; products in ``dtype``."""
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None  # type: ignore[arg-type]
        ctx.grads = of_hidden, of_weight, of_bias
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        loss = torch.zeros((), device=hidden.device)
        size = -(-len(hidden) // PARTS)
        for start in range(0, len(hidden), size):
            part, target = hidden[start : start + size].to(dtype), labels[start : start + size]
            counts = (target != -100).unsqueeze(1)
            target = target.clamp(min=0).unsqueeze(1)
            scores = F.log_softmax(F.linear(part, weight, bias).float(), -1)
            loss -= (scores.gather(1, target) * counts).sum()
            if of_hidden is None:  # an evaluation
                continue
            scores.exp_().scatter_add_(1, target, scores.new_full(target.shape, -1)).mul_(counts)
            scores = scores.to(dtype)  # the logits' gradient
            of_hidden[start : start + size] = scores @ weight
            if of_weight is not None:
                of_weight += scores.t() @ part
            if of_bias is not None:
                of_bias += scores.sum(0)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, scaled in place; they are given away, so that autograd need not copy them."""
        grads, ctx.grads = ctx.grads, None
        of_hidden, of_weight, of_bias = (None if grad is None else grad.mul_(grad_output) for grad in grads)
        return of_hidden, None, of_weight, of_bias, None


def fused_loss(hidden: Tensor, labels: Tensor, items: float, *, head: nn.Module, dtype: torch.dtype) -> Tensor:
    """The emitted script's ``mean_loss`` with this loss: over the effective batch's items."""
    apply: Any = LinearCrossEntropy.apply
    hidden = hidden.view(-1, hidden.size(-1))
    loss: Tensor = apply(hidden, labels.view(-1), head.weight, head.bias, dtype)
    return loss / items


def skip_output_layer(model: nn.Module, dtype: torch.dtype) -> None:
    """Have the model return what its output layer would get; the loss is to multiply in ``dtype``."""
    head = output_layer(model)
    assert head is not None
    head.forward = lambda hidden: hidden
    head.product_dtype = dtype  # type: ignore[assignment]


def loss_of_outputs(model: nn.Module, kind: LossKind) -> LossOfLogits:
    """The emitted script's loss of what a model returns as its logits, whichever loss the model is for.

    To be called with the logits as nobody's variable: it frees those in a lower precision.
    """
    head = output_layer(model)
    dtype: Any = getattr(head, "product_dtype", None)
    if head is None or dtype is None:
        return loss_function(kind)
    return partial(fused_loss, head=head, dtype=dtype)


def obstacle(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    """Why the loss can't take over a model's output layer, one clause; empty where it can.

    The model must return its output layer's result as it is: then it returns what the layer gets once that is
    skipped. ``model`` is used up.
    """
    head = output_layer(model)
    if type(head) is not nn.Linear:
        return "its output layer is no plain linear one" if head is not None else "it names no output layer"
    returned: list[Tensor] = []

    def skip(hidden: Tensor) -> Tensor:
        returned.append(hidden)
        return hidden

    head.forward = skip  # type: ignore[assignment, method-assign]
    try:
        with torch.no_grad(), Recorder(Target(compute_capability=(8, 0))):  # answers what code asks of missing data
            logits = model(**inputs).logits
    except Exception:  # model code may fail in any way, also in adding a bias of the logits' shape
        logits = None
    same = len(returned) == 1 and logits is returned[0]
    if not returned:
        return "its code needs data to run"
    return "" if same else "its code changes the logits after the output layer (softcapping, scaling or a bias)"
