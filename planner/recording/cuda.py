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

from planner.recording import autocast, flash_attention
from planner.recording.kernels import Target

aten = torch.ops.aten


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
            if func in autocast.LOWER_PRECISION or func is flash_attention.attend:
                args, kwargs = autocast.cast_tensors((args, kwargs), self._to_low)
            elif func in autocast.FP32 or (func is F.gelu and self._target.autocasts_gelu_to_fp32):
                args, kwargs = autocast.cast_tensors((args, kwargs), autocast.to_fp32)
            elif func in autocast.FP32_RESULT:
                kwargs = autocast.asking_for_fp32(args, kwargs)
            elif func in autocast.WIDEST:
                args, kwargs = autocast.to_widest(args, kwargs)
            elif func in _REWRITTEN:
                return _REWRITTEN[func](*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(self._target, *args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func in autocast.SOFTMAXES:
            return autocast.softmax(func, args, kwargs, keeps_input=self._target.softmax_keeps_input)
        return func(*args, **kwargs)

    def _to_low(self, tensor: Tensor) -> Tensor:
        """autocast_mode.cpp, cached_cast: the copy of an fp32 leaf that trains is kept until autocast ends."""
        assert self._dtype is not None
        if not tensor.is_floating_point() or tensor.dtype in (self._dtype, torch.float64):
            return tensor
        cacheable = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not cacheable:
            return tensor.to(self._dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = (tensor, tensor.to(self._dtype))
        return self._weights[id(tensor)][1]


_REWRITTEN: dict[Any, Callable[..., Tensor]] = {
    F.cross_entropy: autocast.cross_entropy,
    F.normalize: autocast.normalize,
}
"""Functions of several operators that autocast sees one by one, and this mode doesn't."""


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
    grouped = enable_gqa and key.shape[1] != query.shape[1]
    if attn_mask is None and _flash_takes(target, query, key, value, dropout_p, is_causal):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if not grouped and _efficient_takes(target, query, value):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if grouped:  # check_batch_size_and_num_heads_dense: only flash (and cuDNN) take grouped heads
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _flash_takes(target: Target, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool) -> bool:
    """sdp_utils.cpp, can_use_flash_attention."""
    head_dim = query.shape[-1]
    if not target.has_flash_attention or query.dtype not in autocast.LOW_DTYPES:
        return False
    if head_dim > 256 or value.shape[-1] != head_dim or (is_causal and query.shape[-2] != key.shape[-2]):
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    small_shared_memory = (8, 6) <= target.compute_capability <= (8, 9) or target.compute_capability >= (12, 0)
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    too_large = 192 < head_dim <= 224 or (head_dim > 224 and dropout_p > 0)
    return not (small_shared_memory and trains and too_large)


def _efficient_takes(target: Target, query: Tensor, value: Tensor) -> bool:
    """sdp_utils.cpp, can_use_mem_efficient_attention, check_head_dim_size_mem_efficient, minimum_gemm_alignment."""
    ampere, volta = (target.compute_capability >= version for version in ((8, 0), (7, 0)))
    if query.dtype == torch.bfloat16 and not ampere:
        return False
    half = query.dtype in autocast.LOW_DTYPES
    alignment = 4 if ampere else 1
    if ampere or (volta and half):
        alignment = max(alignment, 8 if half else 4)
    return query.shape[-1] % alignment == 0 and value.shape[-1] % alignment == 0


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
