"""fms-acceleration's fused operators and kernels (fms_acceleration_foak), on tensors without data.

Each does what the plugin's Python does around its triton kernels, which themselves allocate nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_FUSED_SIZE = 65536
"""MAX_FUSED_SIZE: columns that one program of the cross-entropy kernel takes."""


def use(model: Any, *, fused_linear_loss: bool) -> None:
    """Patch a Llama as the rules of models/llama.py do: norms and the loss; the rest is ``patched``'s."""
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = partial(_norm, norm.weight.requires_grad_(False))  # its backward pass gives it no gradient
    if fused_linear_loss:
        model.forward = partial(_forward_with_loss, model)
    elif hasattr(model, "loss_function"):  # from 4.46 on
        model.loss_function = _causal_loss


@contextmanager
def patched(model: Any) -> Iterator[None]:
    """What the rules exchange in the module of the model's code: rotary embeddings, and the loss of older releases."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    module: Any = sys.modules[type(base).__module__]
    patches = {"apply_rotary_pos_emb": _rotate, "CrossEntropyLoss": FastCrossEntropyLoss}
    before = {name: getattr(module, name) for name in patches if hasattr(module, name)}
    for name in before:
        setattr(module, name, patches[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# -- norms and rotary embeddings -------------------------------------------------------------------------------------


class FastNorm(torch.autograd.Function):
    """kernels/unsloth/rms_layernorm.py: the gradient takes the place of the one that comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Keeps its input and the inverse deviation of each row."""
        deviations = torch.empty(x.numel() // x.shape[-1], device=x.device)
        ctx.save_for_backward(x, weight, deviations)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The weight gets no gradient."""
        return grad, None


def _norm(weight: Tensor, x: Tensor) -> Tensor:
    apply: Any = FastNorm.apply
    out: Tensor = apply(x, weight)
    return out


class FastRotation(torch.autograd.Function):
    """kernels/unsloth/rope_embedding.py, Fast_RoPE_Embedding: in place, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The same memory."""
        ctx.kept = cos, sin
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """A copy only where the gradient isn't contiguous."""
        return grad.reshape(grad.shape[0] * grad.shape[1], -1).view(grad.shape), None, None


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    apply: Any = FastRotation.apply
    query, key = (apply(t.transpose(1, 2), cos, sin).transpose(1, 2) for t in (query, key))
    return query, key


# -- losses ----------------------------------------------------------------------------------------------------------


class FastCrossEntropy(torch.autograd.Function):
    """kernels/unsloth/cross_entropy_loss.py, Fast_CrossEntropyLoss: the gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses of the rows."""
        rows, columns = logits.shape
        chunks = -(-columns // _FUSED_SIZE)
        losses = torch.empty(rows, device=logits.device)
        sums = torch.empty((rows, chunks) if chunks > 1 else rows, device=logits.device)
        if chunks > 1:
            sums = torch.logsumexp(sums, dim=1)
            losses += sums
            losses.masked_fill_(labels == -100, 0)
        ctx.save_for_backward(logits, sums, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """In the logits' memory."""
        return ctx.saved_tensors[0], None


class FastCrossEntropyLoss(nn.CrossEntropyLoss):
    """What model code finds as ``CrossEntropyLoss``."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Mean over the tokens that count."""
        apply: Any = FastCrossEntropy.apply
        losses: Tensor = apply(input, target)
        return losses.sum() / torch.count_nonzero(target != -100)


def _causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """FastForCausalLMLoss of the same file."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous().view(-1)
    loss: Tensor = FastCrossEntropyLoss()(shifted.view(-1, vocab_size), targets)
    return loss


class FusedLinearCrossEntropy(torch.autograd.Function):
    """kernels/liger/fused_linear_cross_entropy_loss.py: logits of a part of the tokens at a time, gradients at once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """As many parts as the vocabulary is larger than the features, in powers of two of tokens."""
        tokens, features = hidden.shape
        parts = -(-len(weight) // features)
        size = 1 << (-(-tokens // parts) - 1).bit_length()
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        of_hidden = torch.zeros_like(hidden)
        losses = torch.zeros(tokens, device=hidden.device)
        for start in range(0, tokens, size):
            part = hidden[start : start + size]
            logits = part @ weight.t()
            logits = logits.float()
            logits = logits.to(hidden.dtype)
            scaled = logits * 0.5
            of_hidden[start : start + size] = scaled @ weight
            if of_weight is not None:
                torch.addmm(of_weight, logits.t(), part, out=of_weight)
        ctx.save_for_backward(of_hidden, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Scaled in place."""
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden, of_weight, None


def _forward_with_loss(model: Any, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Any:
    """lce_forward of the same file: there are no logits."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = model.model(input_ids=input_ids, use_cache=False)[0]
    shifted = hidden[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous().view(-1)
    apply: Any = FusedLinearCrossEntropy.apply
    loss = apply(shifted.view(-1, shifted.shape[-1]), model.lm_head.weight, targets)
    return CausalLMOutputWithPast(loss=loss)


# -- adapters --------------------------------------------------------------------------------------------------------


def fuse_adapters(model: nn.Module) -> None:
    """fused_ops/unsloth_lora: q, k and v of an attention in one function, and o in one, on 4-bit layers."""
    for attention in model.modules():
        projections = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
        if not all(hasattr(projection, "lora_A") for projection in projections):
            continue
        *inward, outward = projections
        waiting: list[Tensor] = []
        for projection in inward:
            projection.forward = partial(_one_of, inward, waiting)
        outward.forward = partial(_alone, outward)


def _one_of(layers: list[Any], waiting: list[Tensor], x: Tensor) -> Tensor:
    """models/utils.py: the first call computes all three."""
    if not waiting:
        waiting.extend(_apply(x, layers, reuses_input=True))
    return waiting.pop(0)


def _alone(layer: Any, x: Tensor) -> Tensor:
    return _apply(x, [layer], reuses_input=False)[0]


def _apply(x: Tensor, layers: list[Any], *, reuses_input: bool) -> tuple[Tensor, ...]:
    adapters = [weight for layer in layers for weight in (_adapter(layer.lora_A), _adapter(layer.lora_B))]
    apply: Any = FusedAdapters.apply
    outputs: tuple[Tensor, ...] = apply(x, layers, reuses_input, *adapters)
    return outputs


def _adapter(weights: Any) -> Tensor:
    weight: Tensor = next(iter(weights.values())).weight
    return weight


class FusedAdapters(torch.autograd.Function):
    """unsloth_lora/bnb/fast_lora.py, LoRA_QKV and LoRA_W, with utils.py's matmul_lora and fast_dequantize."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[Any], reuses_input: bool, *adapters: Tensor) -> tuple[Tensor, ...]:
        """Keeps its input and what dropout left of it for each layer."""
        rows, dropped, outputs = x.view(-1, x.shape[-1]), [], []
        for layer, a, b in zip(layers, adapters[::2], adapters[1::2], strict=True):
            weight = _dequantized(layer.base_layer, x.dtype)
            out = torch.matmul(rows, weight.t())
            del weight
            left = torch.native_dropout(rows, 0.1, True)[0]
            out += (left @ a.t().to(x.dtype)) @ (0.5 * b.t().to(x.dtype))
            dropped.append(left)
            outputs.append(out.view(*x.shape[:-1], -1))
        ctx.layers, ctx.reuses_input = layers, reuses_input
        ctx.save_for_backward(x, *adapters, *dropped)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The input's gradient takes its place for q, k and v."""
        count = len(ctx.layers)
        x, *kept = ctx.saved_tensors
        adapters, dropped = kept[: 2 * count], kept[2 * count :]
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        of_adapters: list[Tensor] = []
        for grad, a, b, left in zip(flat, adapters[::2], adapters[1::2], dropped, strict=True):
            of_a = left.t() @ (grad @ b.to(grad.dtype))
            of_b = (a.to(grad.dtype) @ left.t()) @ grad
            of_adapters += [of_a.t(), of_b.t()]
        of_input = x.view(-1, x.shape[-1]) if ctx.reuses_input else None
        for layer, grad, a, b, left in zip(ctx.layers, flat, adapters[::2], adapters[1::2], dropped, strict=True):
            weight = _dequantized(layer.base_layer, grad.dtype)
            if of_input is None:
                of_input = grad @ weight
            elif grad is flat[0]:
                torch.matmul(grad, weight, out=of_input)
            else:
                of_input += grad @ weight
            del weight
            of_input += (left != 0) * (grad @ b.to(grad.dtype) @ (0.5 * a.to(grad.dtype)))
        assert of_input is not None
        return of_input.view(x.shape), None, None, *of_adapters


def _dequantized(layer: Any, dtype: torch.dtype) -> Tensor:
    """fast_dequantize: the weight, and the scales in fp32 while it is written."""
    weight = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=layer.weight.device)
    scales = torch.empty(-(-weight.numel() // 64), device=weight.device)
    del scales
    return weight
