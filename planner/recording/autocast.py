"""What CUDA autocast does to each function: the lists of torch/aten/src/ATen/autocast_mode.h, as Python sees them.

``tests/test_cuda_semantics.py`` runs every function under torch's own AutocastCUDA kernels, on tensors that only
claim to be on a CUDA device, and compares operator for operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
LOW_DTYPES = (torch.float16, torch.bfloat16)

LOWER_PRECISION: frozenset[Any] = frozenset(
    {
        *(F.linear, F.scaled_dot_product_attention, F.prelu, torch.prelu, Tensor.prelu),
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(torch.conv1d, torch.conv2d, torch.conv3d),
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__),
        *(torch.mm, Tensor.mm, torch.mv, Tensor.mv, torch.bmm, Tensor.bmm),
        *(torch.addmm, Tensor.addmm, torch.addmv, Tensor.addmv, torch.addr, Tensor.addr),
        *(torch.addbmm, Tensor.addbmm, torch.baddbmm, Tensor.baddbmm),
        *(torch.einsum, torch.chain_matmul, torch.linalg.multi_dot),
    }
)
"""AT_FORALL_LOWER_PRECISION_FP: operands are cast to the low precision."""

_POINTWISE: tuple[str, ...] = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "pow", "reciprocal"),
    *("rsqrt", "sinh", "tan", "logsumexp", "dist", "renorm"),
)
FP32: frozenset[Any] = frozenset(
    {
        *(getattr(owner, name) for owner in (torch, Tensor) for name in _POINTWISE),
        *(Tensor.__pow__, Tensor.__rpow__, Tensor.__rdiv__, torch.cdist, F.pdist),
        *(F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.rms_norm, torch.rms_norm),
        *(F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.poisson_nll_loss),
        *(F.binary_cross_entropy_with_logits, F.cosine_similarity, F.cosine_embedding_loss, F.soft_margin_loss),
        *(F.margin_ranking_loss, F.hinge_embedding_loss, F.triplet_margin_loss, F.multi_margin_loss),
        *(F.softplus, F.interpolate),
    }
)
"""AT_FORALL_FP32 (and 1 / x, which is reciprocal): operands of low precision are copied to fp32."""

SOFTMAXES: dict[Any, Any] = {
    F.softmax: aten._softmax,
    torch.softmax: aten._softmax,
    Tensor.softmax: aten._softmax,
    F.log_softmax: aten._log_softmax,
    torch.log_softmax: aten._log_softmax,
    Tensor.log_softmax: aten._log_softmax,
}
"""Functions to the operator that is behind them."""

FP32_RESULT: frozenset[Any] = frozenset(
    {
        *SOFTMAXES,
        *(getattr(owner, name) for owner in (torch, Tensor) for name in ("sum", "prod", "cumsum", "cumprod", "norm")),
        *(torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm),
    }
)
"""AT_FORALL_FP32_SET_OPT_DTYPE (and norm, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE): asked for an fp32 result."""

WIDEST: frozenset[Any] = frozenset(
    {
        *(torch.addcmul, Tensor.addcmul, torch.addcdiv, Tensor.addcdiv, torch.dot, Tensor.dot, torch.atan2),
        *(torch.tensordot, torch.cross, torch.scatter_add, Tensor.scatter_add, F.bilinear, F.grid_sample),
    }
)
"""AT_FORALL_PROMOTE: all operands in the widest type among them."""


def cast_tensors(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``cast`` applied to the tensors in its tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, (tuple, list)):
        return type(value)(cast_tensors(item, cast) for item in value)
    if isinstance(value, dict):
        return {key: cast_tensors(item, cast) for key, item in value.items()}
    return value


def to_fp32(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is of low precision."""
    return tensor.float() if tensor.dtype in LOW_DTYPES else tensor


def to_widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in fp32 if any of them is."""
    found: list[Tensor] = []
    cast_tensors((args, kwargs), lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    if any(tensor.dtype == torch.float32 for tensor in found):
        args, kwargs = cast_tensors((args, kwargs), to_fp32)
    return args, kwargs


def asking_for_fp32(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with ``dtype`` set, unless the caller chose one."""
    chosen = kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
    first = args[0] if args else kwargs.get("input")
    if chosen or not isinstance(first, Tensor) or first.dtype not in LOW_DTYPES:
        return kwargs
    return {**kwargs, "dtype": torch.float32}


def softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps_input: bool = False) -> Tensor:
    """CUDA's kernel reads fp16 and writes fp32 without a copy; not so bf16 (aten/src/ATen/native/SoftMax.cpp).

    ``keeps_input`` is how torch up to 1.10 does it.
    """
    tensor, *others = args if args else (kwargs["input"],)
    dim = kwargs.get("dim", others[0] if others else None)
    dtype = kwargs.get("dtype") or next((value for value in others if isinstance(value, torch.dtype)), None)
    fused = tensor.dtype == torch.float16 and dtype == torch.float32 and isinstance(dim, int)
    if keeps_input:
        apply: Any = KeepingSoftmax.apply
        log = SOFTMAXES[func] is aten._log_softmax
        return apply(tensor if fused or dtype is None else tensor.to(dtype), dim, fused, log)  # type: ignore[no-any-return]
    if fused:
        return SOFTMAXES[func](tensor, dim, True)  # type: ignore[no-any-return]
    return func(*args, **kwargs)  # type: ignore[no-any-return]


class KeepingSoftmax(torch.autograd.Function):
    """softmax and log_softmax of torch up to 1.10, whose input stays until the backward pass (pytorch#65242)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int, to_fp32: bool, log: bool) -> Tensor:
        """As the operator does; ``to_fp32`` writes fp32 from an fp16 input."""
        result: Tensor = (aten._log_softmax if log else aten._softmax)(input, dim, to_fp32)
        ctx.save_for_backward(input, result)
        ctx.dim, ctx.log = dim, log
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """Reads the result alone."""
        input, result = ctx.saved_tensors
        backward = aten._log_softmax_backward_data if ctx.log else aten._softmax_backward_data
        return backward(grad_output, result, ctx.dim, input.dtype), None, None, None


def cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """log_softmax is asked for in its input's type, so it stays; nll_loss casts (aten/src/ATen/native/LossNLL.cpp)."""
    tensor, target, *others = args
    if tensor.dtype not in LOW_DTYPES or target.is_floating_point() or kwargs.get("label_smoothing") or others:
        return F.cross_entropy(*args, **kwargs)
    kwargs.pop("label_smoothing", None)
    scores = F.log_softmax(tensor, min(1, tensor.dim() - 1))
    return F.nll_loss(scores.float(), target, **kwargs)


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """Divided by an fp32 norm, hence an fp32 result."""
    if input.dtype not in LOW_DTYPES or out is not None:
        return F.normalize(input, p, dim, eps, out)
    norm = torch.linalg.vector_norm(input, p, dim, keepdim=True, dtype=torch.float32)
    result: Tensor = input / norm.clamp_min(eps).expand_as(input)
    return result
