"""What CUDA kernels need beyond their outputs, and what each operator costs.

Tensors without data show what an operator returns, not what its kernel allocates while it runs. Each rule here
names the kernel that does so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from planner.units import round_up

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Target:
    """What recording must know of the card: the properties that choose kernels."""

    compute_capability: tuple[int, int] = (0, 0)
    """Major and minor; of a CUDA device."""
    kind: str = "cuda"
    """torch's device type: ``cuda``, or ``cpu``, whose kernels' own buffers the recorder doesn't follow."""
    torch_release: tuple[int, int] | None = None
    """Whose kernels run, where measurements of an older torch are reproduced; None is the installed one."""

    @property
    def stand_in_device(self) -> str:
        """The device of tensors without data that stand for the target's: fake tensors can only claim the CPU."""
        return "meta" if self.kind == "cuda" else self.kind

    @property
    def softmax_keeps_input(self) -> bool:
        """Until 1.10 softmax and log_softmax saved their input for the backward pass (pytorch/pytorch#65242)."""
        return self.torch_release is not None and self.torch_release < (1, 11)

    @property
    def autocasts_gelu_to_fp32(self) -> bool:
        """Until 1.9 gelu was on autocast's fp32 list (pytorch/pytorch#59639)."""
        return self.torch_release is not None and self.torch_release < (1, 10)

    @property
    def has_flash_attention(self) -> bool:
        """sdp_utils.cpp, check_flash_attention_hardware_support: sm80 and newer."""
        return self.compute_capability >= (8, 0)


# -- workspaces ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scratch:
    """A buffer that lives while one kernel runs."""

    nbytes: int
    """Size as requested."""
    count: int = 0
    """The quantity that decides whether the kernel takes the path that needs it ..."""
    threshold: int = -1
    """... which it does above this value."""


def kernel_workspaces(func: Any, args: tuple[Any, ...], target: Target) -> list[Scratch]:
    """The buffers that the operator's CUDA kernel allocates while it runs, all alive together."""
    rule = _WORKSPACES.get(func) if target.kind == "cuda" else None
    return list(rule(args, target)) if rule else []


def _matmul_copies(args: tuple[Any, ...], target: Target) -> Iterator[Scratch]:
    """CUDABlas wants unit stride in one of the last two dimensions: other operands are copied first.

    aten/src/ATen/native/cuda/Blas.cpp, prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas.
    """
    for operand in args[-2:]:
        if isinstance(operand, Tensor) and operand.dim() >= 2 and not _is_cublas_layout(operand):
            yield Scratch(operand.numel() * operand.element_size())


def _is_cublas_layout(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    return (column_stride == 1 and row_stride >= max(1, columns)) or (row_stride == 1 and column_stride >= max(1, rows))


def _layer_norm_backward(args: tuple[Any, ...], target: Target) -> Iterator[Scratch]:
    """Partial sums of dgamma and dbeta, one row for each block of 32 rows.

    aten/src/ATen/native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: above 64 x 1024 rows (and
    columns / 32 below half the multiprocessors, which holds for hidden sizes up to 1024 on cards with 70 or more).
    """
    x, normalized_shape, weight = args[1], args[2], args[5]
    columns = math.prod(normalized_shape)
    if weight is None or columns > 1024:
        return
    rows = x.numel() // columns
    for _ in range(2):
        yield Scratch(-(-rows * columns * weight.element_size() // 32), rows, 64 * 1024)


def _softmax_backward(args: tuple[Any, ...], target: Target) -> Iterator[Scratch]:
    """``tmp = grad * output``, beside the result (aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    grad, output = args[0], args[1]
    yield Scratch(output.numel() * max(grad.element_size(), output.element_size()))


def _embedding_backward(args: tuple[Any, ...], target: Target) -> Iterator[Scratch]:
    """Sorting the indices, and partial sums of long runs of one index.

    aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda (above 3072 indices) and
    EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel (NROWS_PER_THREAD = 10 rows a partial segment, at
    most one partial segment more for each distinct index).
    """
    grad, indices = args[0], args[1]
    count = indices.numel()
    array_bytes = count * indices.element_size()
    for arrays in (1, 1, 2):  # sorted_indices; orig_indices; cub's range and key scratch
        yield Scratch(arrays * array_bytes, count, 3072)
    yield Scratch(-(-count * grad.shape[-1] * max(4, grad.element_size()) // 10), count, 3072)


def _efficient_attention_backward(args: tuple[Any, ...], target: Target) -> Iterator[Scratch]:
    """Row sums and fp32 accumulators of the memory-efficient (cutlass) backward kernel.

    aten/src/ATen/native/transformers/cuda/attention_backward.cu, _efficient_attention_backward, and
    mem_eff_attention/kernel_backward.h: workspace_elements_gq, _gk and _gv, kKernelComputesDelta, kOutputInRF.
    """
    query, key = args[1], args[2]
    batch, heads, rows, head_dim = query.shape
    delta_bytes = batch * heads * rows * 4
    if query.element_size() == 4:  # delta = (grad_out * out).sum(-1).contiguous(), by separate kernels
        yield Scratch(query.numel() * 4)
        yield Scratch(delta_bytes)
        yield Scratch(delta_bytes)
        return
    yield Scratch(delta_bytes)
    elements = round_up(rows, 64) * round_up(head_dim, 32)
    # dk and dv stay in registers for head sizes up to 64, and up to 128 where shared memory allows 128-row tiles
    if head_dim > (128 if target.compute_capability in ((8, 0), (9, 0), (10, 0)) else 64):
        elements += 2 * round_up(key.shape[2], 64) * round_up(head_dim, 64)
    yield Scratch(batch * heads * elements * 4)


def _flash_attention_backward(args: tuple[Any, ...], target: Target) -> Iterator[Scratch]:
    """Row sums and the fp32 dq accumulator; dk and dv expanded under grouped-query attention.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: rows rounded up to 128, head size to
    32 (64 above 128).
    """
    query, key = args[1], args[2]
    batch, heads, rows, head_dim = query.shape
    rows_rounded = round_up(rows, 128)
    yield Scratch(batch * heads * rows_rounded * 4)
    yield Scratch(batch * rows_rounded * heads * round_up(head_dim, 32 if head_dim <= 128 else 64) * 4)
    if key.shape[1] != heads:
        for _ in range(2):
            yield Scratch(batch * key.shape[2] * heads * head_dim * key.element_size())


_WORKSPACES: dict[Any, Callable[[tuple[Any, ...], Target], Iterator[Scratch]]] = {
    aten.mm.default: _matmul_copies,
    aten.bmm.default: _matmul_copies,
    aten.addmm.default: _matmul_copies,
    aten.baddbmm.default: _matmul_copies,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
}


# -- costs -----------------------------------------------------------------------------------------------------------


@register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu)
def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The CPU's fused kernel, for which torch has none."""
    return int(sdpa_flop_count(query, key, value))


@register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward_flops(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad_out, query, key, value))


_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "fp16"}

_NOT_READ: dict[Any, int] = {
    # overwritten, whatever was there
    aten.copy_.default: 0,
    aten.zero_.default: 0,
    aten.fill_.Scalar: 0,
    # a few of its rows or columns are read, as many bytes as other operands count
    aten.embedding.default: 0,
    aten.gather.default: 0,
    aten.nll_loss_forward.default: 0,
    # only its shape matters
    aten.nll_loss_backward.default: 1,
    aten.zeros_like.default: 0,
    aten.ones_like.default: 0,
    aten.full_like.default: 0,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 0,
    aten.new_full.default: 0,
}
"""Operand that an operator's kernel doesn't read, or next to nothing of it."""
_IS_CAUSAL: dict[Any, int] = {
    aten._scaled_dot_product_flash_attention.default: 4,
    aten._scaled_dot_product_efficient_attention.default: 6,
    aten._scaled_dot_product_flash_attention_backward.default: 11,
    aten._scaled_dot_product_efficient_attention_backward.default: 11,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
}
"""Position of ``is_causal`` in a fused attention operator's arguments (native_functions.yaml)."""


def op_cost(func: Any, args: tuple[Any, ...], out: Any) -> tuple[str, int, tuple[int, ...]]:
    """``(kind, flops, bytes of each operand)`` of one operator call."""
    operands = list(_tensors(args))
    moved = [_touched_bytes(t) for t in (*operands, *_tensors((out,)))]
    if func in _NOT_READ:
        moved[_NOT_READ[func]] = 0
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return "elementwise", 0, tuple(moved)
    flops = int(formula(*args, out_val=out))
    if func in _IS_CAUSAL and any(args[_IS_CAUSAL[func] :][:1]):  # arguments at their default may be left out
        flops //= 2  # blocks above the diagonal are skipped
    # the first operand: an attention backward's last ones are the state of the random generator
    dtype = _DTYPE_NAMES.get(operands[0].dtype, "fp32")
    name = func.overloadpacket.__name__
    return ("attention:" if name.startswith(_ATTENTION) else "matmul:") + dtype, flops, tuple(moved)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _touched_bytes(tensor: Tensor) -> int:
    """An expanded tensor is read once for each distinct element."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            elements *= size
    return elements * tensor.element_size()
