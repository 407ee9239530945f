"""CUDA's choices, made on tensors that are on no CUDA device: a torch-function mode.

It decides what the dispatcher would decide on the target card: which attention kernel runs, that dropout is one
fused kernel with a byte mask, and which operators autocast casts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from planner.recording.kernels import Target

aten = torch.ops.aten

# torch/aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP: run in fp16 or bf16.
_LOWER_PRECISION: frozenset[Any] = frozenset(
    {
        F.linear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        torch.conv1d,
        torch.conv2d,
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        torch.mm,
        Tensor.mm,
        torch.mv,
        torch.bmm,
        Tensor.bmm,
        torch.addmm,
        torch.addbmm,
        torch.baddbmm,
        Tensor.baddbmm,
        torch.chain_matmul,
        torch.einsum,
        F.scaled_dot_product_attention,
        F.prelu,
    }
)
# AT_FORALL_FP32 and the set-opt-dtype list: run in fp32. cross_entropy is log_softmax and nll_loss inside.
_FP32: frozenset[Any] = frozenset(
    {
        F.layer_norm,
        torch.layer_norm,
        F.group_norm,
        F.softmax,
        torch.softmax,
        Tensor.softmax,
        F.log_softmax,
        torch.log_softmax,
        Tensor.log_softmax,
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.binary_cross_entropy_with_logits,
        F.cosine_similarity,
        F.softplus,
        torch.pow,
        Tensor.pow,
        Tensor.__pow__,
        Tensor.__rpow__,
        torch.exp,
        Tensor.exp,
        torch.log,
        Tensor.log,
        torch.rsqrt,
        Tensor.rsqrt,
        torch.reciprocal,
        Tensor.reciprocal,
        torch.sum,
        Tensor.sum,
        torch.prod,
        Tensor.prod,
        torch.cumsum,
        Tensor.cumsum,
        torch.cumprod,
        Tensor.cumprod,
        torch.norm,
        Tensor.norm,
        torch.logsumexp,
        Tensor.logsumexp,
        torch.cdist,
        torch.linalg.vector_norm,
    }
)
_LOW_DTYPES = (torch.float16, torch.bfloat16)


class CudaSemantics(TorchFunctionMode):
    """Run torch functions as they would run on the target card.

    ``autocast_dtype`` is what ``autocasting()`` casts to; None means that the step uses no autocast.
    """

    def __init__(self, target: Target, *, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._target = target
        self._dtype = autocast_dtype
        self._casting = False
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def autocasting(self) -> Iterator[None]:
        """The region that ``torch.autocast`` covers; leaving it drops the cached weight copies."""
        before, self._casting = self._casting, self._dtype is not None
        try:
            yield
        finally:
            self._casting = before
            if not before:
                self._weights.clear()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """The recomputation of a checkpointed layer, within ``backward()``.

        torch suspends function modes inside ``backward()``, and torch.utils.checkpoint restores autocast: a region
        of its own, so its weight copies go when it ends.
        """
        with self, self.autocasting():
            yield

    def exempt(self, module: nn.Module) -> list[Any]:
        """Don't cast in a module whose code disables autocast; returns hook handles."""
        before: list[bool] = []

        def enter(*_: object) -> None:
            before.append(self._casting)
            self._casting = False

        def leave(*_: object) -> None:
            self._casting = before.pop()

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._casting:
            if func in _LOWER_PRECISION:
                args, kwargs = self._cast((args, kwargs), self._to_low)
            elif func in _FP32:
                args, kwargs = self._cast((args, kwargs), _to_fp32)
        if func is F.scaled_dot_product_attention:
            return _attention(self._target, *args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return cast(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._cast(item, cast) for item in value)
        if isinstance(value, dict):
            return {key: self._cast(item, cast) for key, item in value.items()}
        return value

    def _to_low(self, tensor: Tensor) -> Tensor:
        """autocast_mode.cpp, cached_cast: the copy of an fp32 leaf that trains is kept until autocast ends."""
        assert self._dtype is not None
        if not tensor.is_floating_point() or tensor.dtype in (self._dtype, torch.float64):
            return tensor
        cacheable = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not cacheable or not torch.is_grad_enabled():
            return tensor.to(self._dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = (tensor, tensor.to(self._dtype))
        return self._weights[id(tensor)][1]


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW_DTYPES else tensor


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CUDA's fused dropout keeps a mask of one byte an element (aten/src/ATen/native/Dropout.cpp)."""
    if inplace or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that sdp_utils.cpp would choose, in its default order of flash, memory-efficient, math."""
    if enable_gqa and key.shape[1] != query.shape[1]:
        flash_takes_groups = True
        groups = query.shape[1] // key.shape[1]
    else:
        flash_takes_groups, groups = False, 1
    head_dim = query.shape[-1]
    half = query.dtype in _LOW_DTYPES
    same_head_dim = value.shape[-1] == head_dim
    if half and attn_mask is None and head_dim <= 256 and same_head_dim and target.has_flash_attention:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if flash_takes_groups:  # check_batch_size_and_num_heads_dense: only flash (and cuDNN) take grouped heads
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if query.dtype != torch.bfloat16 or target.compute_capability >= (8, 0):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    """The flash kernel wants the head size padded to a multiple of 8 (attention.cpp, pad_last_dim)."""
    head_dim = q.shape[-1]
    scale = scale if scale is not None else 1 / math.sqrt(head_dim)
    if head_dim % 8:
        q, k, v = (F.pad(t, (0, 8 - head_dim % 8)) for t in (q, k, v))
    out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :head_dim]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """A boolean mask becomes an additive one; its rows are padded to 16 elements (attention.cpp, preprocess_mask)."""
    bias = None
    if mask is not None:
        bias = mask
        if mask.dtype == torch.bool:  # convert_boolean_attn_mask
            bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -math.inf)
        columns = bias.shape[-1]
        if columns % 16:
            bias = F.pad(bias, (0, 16 - columns % 16))[..., :columns]
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    needs_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out: Tensor = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, needs_lse, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    out: Tensor = aten._scaled_dot_product_attention_math(q, k, v, mask, dropout_p, is_causal, scale=scale)[0]
    return out
