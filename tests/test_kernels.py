"""What kernels need while they run, and what operators cost, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from planner.recording.kernels import Scratch, Target, kernel_workspaces, op_cost
from planner.units import round_up

aten = torch.ops.aten
AMPERE, ADA, TURING = (Target(compute_capability=version) for version in ((8, 0), (8, 9), (7, 5)))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data."""
    return torch.zeros(*shape, device="meta", dtype=dtype)


def scratch(func: object, *args: object, target: Target = ADA) -> list[int]:
    """Bytes of a kernel's buffers."""
    return [buffer.nbytes for buffer in kernel_workspaces(func, args, target)]


@pytest.mark.parametrize(("value", "multiple", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)])
def test_round_up(value: int, multiple: int, expected: int) -> None:
    """To the next multiple, and no further."""
    assert expected == round_up(value, multiple)


def test_flash_attention_needs_compute_capability_8() -> None:
    """sm80 and newer have it."""
    assert [True, True, False] == [t.has_flash_attention for t in (AMPERE, ADA, TURING)]


# -- matrix products -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "operand", "copied"),
    [
        ("contiguous", zeros(6, 4), False),
        ("transposed", zeros(4, 6).t(), False),
        ("rows of a wider matrix", zeros(6, 9)[:, :4], False),
        ("expanded rows", zeros(1, 4).expand(6, 4), True),
        ("expanded scalar", zeros(1).expand(6, 4), True),
        ("every second column", zeros(6, 8)[:, ::2], True),
    ],
)
def test_operands_that_cublas_cannot_read_are_copied(name: str, operand: Tensor, copied: bool) -> None:
    """One of the last two dimensions must have stride one and the other must not fold onto it."""
    assert ([6 * 4 * 4] if copied else []) == scratch(aten.mm.default, operand, zeros(4, 5)), name


def test_batched_and_biased_products_copy_their_matrices_only() -> None:
    """The bias of addmm may be expanded; both matrices count."""
    bad = zeros(1, 1, 1).expand(3, 6, 4)
    assert [3 * 6 * 4 * 4] == scratch(aten.bmm.default, bad, zeros(3, 4, 5))
    assert [4 * 5 * 4] == scratch(aten.addmm.default, zeros(5).expand(6, 5), zeros(6, 4), zeros(1).expand(4, 5))


# -- normalisation and embeddings ------------------------------------------------------------------------------------


def test_layer_norm_backward_sums_in_parts_above_65536_rows() -> None:
    """Two buffers of one row for 32 rows, gated on the number of rows; none for wide rows or without a weight."""
    x, weight = zeros(8, 512, 768), zeros(768)
    args = (x, x, [768], zeros(1), zeros(1), weight, weight, [True] * 3)
    gated = Scratch(8 * 512 * 768 * 4 // 32, 8 * 512, 65_536)
    assert [gated, gated] == kernel_workspaces(aten.native_layer_norm_backward.default, args, ADA)
    wide = zeros(8, 16, 2048)
    assert [] == scratch(aten.native_layer_norm_backward.default, wide, wide, [2048], None, None, zeros(2048))
    assert [] == scratch(aten.native_layer_norm_backward.default, x, x, [768], None, None, None)


def test_softmax_backward_multiplies_gradient_and_result_first() -> None:
    """One more tensor of the result's size while the kernel runs."""
    result = zeros(2, 12, 64, 64, dtype=torch.float16)
    assert [2 * 12 * 64 * 64 * 2] == scratch(aten._softmax_backward_data.default, result, result, -1, torch.float16)


def test_softmax_kept_its_input_until_torch_1_10() -> None:
    """The installed torch and those from 1.11 on keep the result alone."""
    releases = (None, (1, 10), (1, 11), (2, 4))
    kept = [Target(compute_capability=(7, 0), torch_release=release).softmax_keeps_input for release in releases]
    assert [False, True, False, False] == kept


def test_gelu_left_autocasts_fp32_list_with_torch_1_10() -> None:
    """The installed torch runs it in the type that comes."""
    targets = [Target(compute_capability=(7, 0), torch_release=release) for release in (None, (1, 9), (1, 10))]
    assert [False, True, False] == [target.autocasts_gelu_to_fp32 for target in targets]


def test_embedding_backward_sorts_above_3072_indices() -> None:
    """Sorted and original indices, the sort's own two arrays, and a partial sum for ten rows."""
    grad, indices = zeros(8, 512, 768), zeros(8, 512, dtype=torch.int64)
    buffers = kernel_workspaces(aten.embedding_dense_backward.default, (grad, indices, 30522, 0, False), ADA)
    array = 4096 * 8
    assert [array, array, 2 * array, -(-4096 * 768 * 4 // 10)] == [b.nbytes for b in buffers]
    assert {(4096, 3072)} == {(b.count, b.threshold) for b in buffers}


def test_partial_sums_of_embeddings_are_fp32() -> None:
    """A bf16 gradient is summed in fp32."""
    indices = zeros(4, 100, dtype=torch.int64)
    full, low = (
        scratch(aten.embedding_dense_backward.default, zeros(4, 100, 64, dtype=dtype), indices, 9, 0, False)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert full == low


# -- attention -------------------------------------------------------------------------------------------------------


def heads(head_dim: int, dtype: torch.dtype, *, key_heads: int = 4, length: int = 100) -> tuple[Tensor, ...]:
    """Gradient, query, key and value of an attention with four query heads."""
    query = zeros(2, 4, length, head_dim, dtype=dtype)
    key = zeros(2, key_heads, length, head_dim, dtype=dtype)
    return query, query, key, key


def test_efficient_attention_backward_in_fp32_computes_delta_apart() -> None:
    """The product of gradient and output, its row sums, and their contiguous copy."""
    func = aten._scaled_dot_product_efficient_attention_backward.default
    rows = 2 * 4 * 100 * 4
    assert [rows * 64, rows, rows] == scratch(func, *heads(64, torch.float32))


@pytest.mark.parametrize(
    ("head_dim", "target", "elements"),
    [
        (64, ADA, 128 * 64),
        (80, ADA, 128 * 96 + 2 * 128 * 128),
        (80, AMPERE, 128 * 96),
        (128, AMPERE, 128 * 128),
        (160, AMPERE, 128 * 160 + 2 * 128 * 192),
    ],
)
def test_efficient_attention_backward_accumulates_in_fp32(head_dim: int, target: Target, elements: int) -> None:
    """dq always, dk and dv where they don't stay in registers; rows in tiles of 64."""
    func = aten._scaled_dot_product_efficient_attention_backward.default
    expected = [2 * 4 * 100 * 4, 2 * 4 * elements * 4]
    assert expected == scratch(func, *heads(head_dim, torch.bfloat16), target=target)


@pytest.mark.parametrize(("head_dim", "rounded"), [(64, 64), (80, 96), (128, 128), (160, 192)])
def test_flash_attention_backward_accumulates_dq_in_fp32(head_dim: int, rounded: int) -> None:
    """[batch, rows rounded up to 128, heads, rounded head size] of fp32, and row sums."""
    func = aten._scaled_dot_product_flash_attention_backward.default
    assert [2 * 4 * 128 * 4, 2 * 128 * 4 * rounded * 4] == scratch(func, *heads(head_dim, torch.bfloat16))


def test_grouped_flash_attention_expands_dk_and_dv() -> None:
    """One for each query head, summed afterwards."""
    func = aten._scaled_dot_product_flash_attention_backward.default
    both = scratch(func, *heads(64, torch.bfloat16, key_heads=2))[2:]
    assert [2 * 100 * 4 * 64 * 2] * 2 == both


def test_other_operators_need_nothing_more() -> None:
    """No rule, no buffer."""
    assert [] == scratch(aten.gelu.default, zeros(4))


# -- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")]
)
def test_products_cost_two_operations_for_each_multiplication(dtype: torch.dtype, kind: str) -> None:
    """[6, 4] x [4, 5]: 240 operations, each matrix moved once."""
    a, b = zeros(6, 4, dtype=dtype), zeros(4, 5, dtype=dtype)
    size = dtype.itemsize
    expected = (f"matmul:{kind}", 2 * 6 * 4 * 5, (24 * size, 20 * size, 30 * size))
    assert expected == op_cost(aten.mm.default, (a, b), a @ b)


def test_attention_costs_its_two_products() -> None:
    """Scores and weighted values: 2 x 2 x b x h x s x s x d."""
    q = zeros(2, 4, 100, 64, dtype=torch.bfloat16)
    func = aten._scaled_dot_product_flash_attention.default
    kind, flops, _ = op_cost(func, (q, q, q), func(q, q, q))
    assert ("attention:bf16", 4 * 2 * 4 * 100 * 100 * 64) == (kind, flops)


@pytest.mark.parametrize(
    ("operand", "moved"), [(zeros(6, 4), 96), (zeros(1, 4).expand(6, 4), 16), (zeros(()).expand(6, 4), 4)]
)
def test_expanded_operands_are_read_once(operand: Tensor, moved: int) -> None:
    """Traffic counts distinct elements."""
    out = operand + operand
    assert ("elementwise", 0, (moved, moved, 96)) == op_cost(aten.add.Tensor, (operand, operand), out)


def test_lists_of_tensors_are_moved_too() -> None:
    """cat reads each of its inputs and writes all of them."""
    parts: Callable[[], list[Tensor]] = lambda: [zeros(2), zeros(3)]  # noqa: E731
    assert (8, 12, 20) == op_cost(aten.cat.default, (parts(),), torch.cat(parts()))[2]
    assert 4 == F.relu(zeros(1)).nbytes
