"""The choices of a CUDA device, made without one: held against torch's own CUDA autocast and against sdp_utils.cpp.

torch's CPU build carries the AutocastCUDA kernels. Fake tensors that say they are on ``cuda`` go through them, which
shows, operator for operator, what autocast really does. (Attention is the exception: its choice needs a device.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from planner.recording.cuda import CudaSemantics
from planner.recording.kernels import Target

AMPERE, ADA, HOPPER, BLACKWELL, TURING, PASCAL = ((8, 0), (8, 9), (9, 0), (12, 0), (7, 5), (6, 1))
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Make = Callable[..., Tensor]


class Operators(TorchDispatchMode):
    """Names and result types of the operators that run, without views and questions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        alias = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if isinstance(first, Tensor) and not alias and "zeros" not in str(func):
            self.seen.append((str(func.overloadpacket), first.dtype))
        return out


# f makes fp32 tensors, h tensors of the low precision, i whole numbers
CALLS: dict[str, Callable[[Make, Make, Make], object]] = {
    "linear": lambda f, h, i: F.linear(f(4, 8), f(8, 8), f(8)),
    "linear of mixed types": lambda f, h, i: F.linear(h(4, 8), f(8, 8)),
    "@": lambda f, h, i: f(4, 8) @ h(8, 4),
    "matmul": lambda f, h, i: torch.matmul(f(2, 4, 8), f(2, 8, 4)),
    "mm": lambda f, h, i: f(4, 8).mm(f(8, 4)),
    "mv": lambda f, h, i: f(4, 8).mv(f(8)),
    "bmm": lambda f, h, i: torch.bmm(f(2, 4, 8), f(2, 8, 4)),
    "addmm": lambda f, h, i: torch.addmm(f(4), f(4, 8), f(8, 4)),
    "method addmm": lambda f, h, i: f(4).addmm(f(4, 8), f(8, 4)),
    "addmv": lambda f, h, i: torch.addmv(f(4), f(4, 8), f(8)),
    "addr": lambda f, h, i: torch.addr(f(4, 8), f(4), f(8)),
    "baddbmm": lambda f, h, i: torch.baddbmm(f(2, 4, 4), f(2, 4, 8), f(2, 8, 4)),
    "addbmm": lambda f, h, i: f(4, 4).addbmm(f(2, 4, 8), f(2, 8, 4)),
    "einsum": lambda f, h, i: torch.einsum("ij,jk->ik", f(4, 8), f(8, 4)),
    "multi_dot": lambda f, h, i: torch.linalg.multi_dot([f(4, 8), f(8, 4)]),
    "conv1d": lambda f, h, i: F.conv1d(f(1, 4, 8), f(4, 4, 3)),
    "conv2d": lambda f, h, i: F.conv2d(f(1, 4, 8, 8), f(4, 4, 3, 3)),
    "conv_transpose1d": lambda f, h, i: F.conv_transpose1d(f(1, 4, 8), f(4, 4, 3)),
    "prelu": lambda f, h, i: F.prelu(f(4, 8), f(8)),
    "layer_norm": lambda f, h, i: F.layer_norm(h(4, 8), (8,), f(8), f(8)),
    "group_norm": lambda f, h, i: F.group_norm(h(4, 8), 2),
    "rms_norm": lambda f, h, i: F.rms_norm(h(4, 8), (8,)),
    "softmax": lambda f, h, i: F.softmax(h(4, 8), -1),
    "softmax to fp32": lambda f, h, i: F.softmax(h(4, 8), dim=-1, dtype=FP32),
    "softmax of fp32": lambda f, h, i: torch.softmax(f(4, 8), -1),
    "method softmax": lambda f, h, i: h(4, 8).softmax(-1),
    "log_softmax": lambda f, h, i: F.log_softmax(h(4, 8), -1),
    "cross_entropy": lambda f, h, i: F.cross_entropy(h(4, 8), i(4)),
    "cross_entropy of fp32": lambda f, h, i: F.cross_entropy(f(4, 8), i(4), reduction="sum"),
    "nll_loss": lambda f, h, i: F.nll_loss(h(4, 8), i(4)),
    "mse_loss": lambda f, h, i: F.mse_loss(h(4), h(4)),
    "l1_loss": lambda f, h, i: F.l1_loss(h(4), h(4)),
    "smooth_l1_loss": lambda f, h, i: F.smooth_l1_loss(h(4), h(4)),
    "huber_loss": lambda f, h, i: F.huber_loss(h(4), h(4)),
    "kl_div": lambda f, h, i: F.kl_div(h(4), h(4)),
    "binary_cross_entropy": lambda f, h, i: F.binary_cross_entropy_with_logits(h(4), h(4)),
    "cosine_similarity": lambda f, h, i: F.cosine_similarity(h(4, 8), h(4, 8)),
    "cosine_embedding_loss": lambda f, h, i: F.cosine_embedding_loss(h(4, 8), h(4, 8), f(4)),
    "softplus": lambda f, h, i: F.softplus(h(4)),
    "pow": lambda f, h, i: h(4).pow(2),
    "x ** 2": lambda f, h, i: h(4) ** 2,
    "2 ** x": lambda f, h, i: 2.0 ** h(4),
    "1 / x": lambda f, h, i: 1 / h(4),
    "exp": lambda f, h, i: torch.exp(h(4)),
    "expm1": lambda f, h, i: h(4).expm1(),
    "log": lambda f, h, i: h(4).log(),
    "log1p": lambda f, h, i: torch.log1p(h(4)),
    "log2": lambda f, h, i: h(4).log2(),
    "rsqrt": lambda f, h, i: torch.rsqrt(h(4)),
    "tan": lambda f, h, i: torch.tan(h(4)),
    "sum": lambda f, h, i: h(4, 8).sum(-1),
    "sum to bf16": lambda f, h, i: torch.sum(h(4, 8), dtype=BF16),
    "sum of whole numbers": lambda f, h, i: i(4, 8).sum(-1),
    "prod": lambda f, h, i: h(4, 8).prod(),
    "cumsum": lambda f, h, i: torch.cumsum(h(4), 0),
    "norm": lambda f, h, i: h(4, 8).norm(dim=-1),
    "torch.norm": lambda f, h, i: torch.norm(h(4)),
    "vector_norm": lambda f, h, i: torch.linalg.vector_norm(h(4, 8), dim=-1),
    "linalg.norm": lambda f, h, i: torch.linalg.norm(h(4, 8), dim=-1),
    "normalize": lambda f, h, i: F.normalize(h(4, 8)),
    "logsumexp": lambda f, h, i: h(4, 8).logsumexp(-1),
    "cdist": lambda f, h, i: torch.cdist(h(4, 8), h(4, 8)),
    "interpolate": lambda f, h, i: F.interpolate(h(1, 4, 8, 8), scale_factor=2.0, mode="bilinear"),
    "addcmul": lambda f, h, i: torch.addcmul(h(4), f(4), f(4)),
    "scatter_add": lambda f, h, i: f(4).scatter_add(0, i(4), h(4)),
    "tensordot": lambda f, h, i: torch.tensordot(f(4, 8), h(8, 4), dims=1),
    "bilinear": lambda f, h, i: F.bilinear(h(4, 8), h(4, 8), f(8, 8, 8)),
    # what autocast leaves alone
    "mean": lambda f, h, i: h(4, 8).mean(),
    "gelu": lambda f, h, i: F.gelu(h(4)),
    "silu": lambda f, h, i: F.silu(h(4)),
    "tanh": lambda f, h, i: h(4).tanh(),
    "sqrt": lambda f, h, i: h(4).sqrt(),
    "h + f": lambda f, h, i: h(4) + f(4),
    "h * h": lambda f, h, i: h(4) * h(4),
    "cat": lambda f, h, i: torch.cat([h(4), f(4)]),
    "embedding": lambda f, h, i: F.embedding(i(4), f(8, 8)),
    "masked_fill": lambda f, h, i: h(4).masked_fill(f(4) > 0, 0.0),
}


def makers(device: str, low: torch.dtype) -> tuple[Make, Make, Make]:
    """Makers of fp32, low-precision and whole-number tensors."""

    def make(dtype: torch.dtype) -> Make:
        return lambda *shape: torch.zeros(*shape, device=device, dtype=dtype)

    return make(FP32), make(low), make(torch.int64)


@contextmanager
def real_cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """As torch.autocast("cuda"), which itself does nothing where there is no device."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with torch.no_grad(), FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("low", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", CALLS)
def test_autocast_runs_the_operators_that_cuda_autocast_runs(name: str, low: torch.dtype) -> None:
    """Same operators, same copies, same result types as torch's AutocastCUDA kernels."""
    with real_cuda_autocast(low), Operators() as real:
        CALLS[name](*makers("cuda", low))
    semantics = CudaSemantics(Target(compute_capability=AMPERE), autocast_dtype=low)
    with torch.no_grad(), semantics, semantics.autocasting(), Operators() as ours:
        CALLS[name](*makers("meta", low))
    assert real.seen
    assert real.seen == ours.seen


def test_without_autocast_nothing_is_cast() -> None:
    """Outside of the region, and in a step without autocast, types stay as they are."""
    for dtype in (None, BF16):
        semantics = CudaSemantics(Target(compute_capability=AMPERE), autocast_dtype=dtype)
        x, layer = torch.ones(4, 8, device="meta"), nn.Linear(8, 8, device="meta")
        with semantics:
            assert FP32 == layer(x).dtype
        if dtype is None:
            with semantics, semantics.autocasting():
                assert FP32 == layer(x).dtype


# -- the cache of weight copies --------------------------------------------------------------------------------------


def copies(step: Callable[[CudaSemantics], object]) -> int:
    """How many casts to bf16 a step makes."""
    semantics = CudaSemantics(Target(compute_capability=AMPERE), autocast_dtype=BF16)
    with semantics, Operators() as operators:
        step(semantics)
    return operators.seen.count(("aten._to_copy", BF16))


def test_a_shared_weight_is_cast_once_in_a_region() -> None:
    """Two uses of a trained fp32 weight need one copy; each activation is cast for itself."""
    weight = nn.Parameter(torch.ones(8, 8, device="meta"))
    x = torch.ones(4, 8, device="meta")

    def step(semantics: CudaSemantics) -> None:
        with semantics.autocasting():
            F.linear(x, weight)
            F.linear(x, weight)

    assert 1 + 2 == copies(step)


def test_weight_copies_are_dropped_when_autocast_ends() -> None:
    """The next region casts again."""
    weight, x = nn.Parameter(torch.ones(8, 8, device="meta")), torch.ones(4, 8, device="meta", dtype=BF16)

    def step(semantics: CudaSemantics) -> None:
        for _ in range(2):
            with semantics.autocasting():
                F.linear(x, weight)

    assert 2 == copies(step)


def test_the_inner_of_two_regions_drops_nothing() -> None:
    """torch clears its cache when the outermost autocast exits."""
    weight, x = nn.Parameter(torch.ones(8, 8, device="meta")), torch.ones(4, 8, device="meta", dtype=BF16)

    def step(semantics: CudaSemantics) -> None:
        with semantics.autocasting():
            with semantics.autocasting():
                F.linear(x, weight)
            F.linear(x, weight)

    assert 1 == copies(step)


@pytest.mark.parametrize("frozen", [True, False])
def test_only_leaves_that_train_are_kept(frozen: bool) -> None:
    """A frozen weight is cast at every use (autocast_mode.cpp, cached_cast)."""
    weight = nn.Parameter(torch.ones(8, 8, device="meta"), requires_grad=not frozen)
    x = torch.ones(4, 8, device="meta", dtype=BF16)

    def step(semantics: CudaSemantics) -> None:
        with semantics.autocasting():
            F.linear(x, weight)
            F.linear(x, weight)

    assert (2 if frozen else 1) == copies(step)


def test_a_view_of_a_weight_is_cast_at_every_use() -> None:
    """Views are no leaves of their own."""
    weight = nn.Parameter(torch.ones(8, 8, device="meta"))
    x = torch.ones(4, 8, device="meta", dtype=BF16)

    def step(semantics: CudaSemantics) -> None:
        with semantics.autocasting():
            x @ weight.t()
            x @ weight.t()

    assert 2 == copies(step)


def test_recomputation_casts_again() -> None:
    """A checkpointed layer's recomputation is a region of its own: its copies go when it ends."""
    weight, x = nn.Parameter(torch.ones(8, 8, device="meta")), torch.ones(4, 8, device="meta", dtype=BF16)
    semantics = CudaSemantics(Target(compute_capability=AMPERE), autocast_dtype=BF16)
    with semantics, semantics.autocasting():
        F.linear(x, weight)
    with Operators() as operators:
        for _ in range(2):
            with semantics.recomputing():
                assert BF16 == F.linear(x, weight).dtype
    assert 2 == operators.seen.count(("aten._to_copy", BF16))


def test_rotary_embeddings_are_exempt() -> None:
    """They multiply under autocast(enabled=False); what follows is cast again."""

    class RotaryEmbedding(nn.Module):
        def forward(self, frequencies: Tensor, positions: Tensor) -> Tensor:
            return frequencies @ positions

    semantics = CudaSemantics(Target(compute_capability=AMPERE), autocast_dtype=BF16)
    rotary = RotaryEmbedding()
    handles = semantics.exempt(rotary)
    a, b = torch.ones(4, 1, device="meta"), torch.ones(1, 8, device="meta")
    with semantics, semantics.autocasting():
        assert FP32 == rotary(a, b).dtype
        assert BF16 == (a @ b).dtype
    for handle in handles:
        handle.remove()
    with semantics, semantics.autocasting():
        assert BF16 == rotary(a, b).dtype


# -- softmax ---------------------------------------------------------------------------------------------------------

SOFTMAXES = [F.softmax, torch.softmax, Tensor.softmax, F.log_softmax]


@pytest.mark.parametrize(("release", "tensors"), [(None, 1), ((1, 10), 2)])
@pytest.mark.parametrize("function", SOFTMAXES)
def test_softmax_of_an_old_torch_keeps_its_input(
    function: Callable[..., Tensor], release: tuple[int, int] | None, tensors: int
) -> None:
    """Saved for the backward pass: the result, and until torch 1.10 the input as well."""
    saved: list[Tensor] = []
    x = torch.ones(4, 8, device="meta", requires_grad=True)
    with (
        CudaSemantics(Target(compute_capability=(7, 0), torch_release=release)),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        function(x * 2, -1).sum()
    assert tensors == sum(t.numel() == 32 for t in saved)


@pytest.mark.parametrize("function", SOFTMAXES)
def test_softmax_of_an_old_torch_computes_the_same(function: Callable[..., Tensor]) -> None:
    """Value and gradient are torch's own, on real numbers."""
    found = []
    for release in (None, (1, 10)):
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        with CudaSemantics(Target(compute_capability=(7, 0), torch_release=release)):
            out = function(x, -1)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1])


def test_gelu_of_an_old_autocast_runs_in_fp32() -> None:
    """Today's runs in the type of its input."""
    x = torch.ones(4, 8, device="meta", dtype=BF16)
    found = []
    for release in (None, (1, 9)):
        semantics = CudaSemantics(Target(compute_capability=AMPERE, torch_release=release), autocast_dtype=BF16)
        with semantics, semantics.autocasting():
            found.append(F.gelu(x).dtype)
    assert [BF16, FP32] == found


# -- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fused_dropout_keeps_a_mask_of_one_byte_an_element(dtype: torch.dtype) -> None:
    """What is saved for the backward pass is a byte mask, whatever the type."""
    x = torch.ones(4, 8, device="meta", dtype=dtype, requires_grad=True)
    saved: list[Tensor] = []
    with (
        CudaSemantics(Target(compute_capability=AMPERE)),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        out = F.dropout(x, 0.1, training=True)
    assert [(torch.bool, 32)] == [(t.dtype, t.untyped_storage().nbytes()) for t in saved]
    assert dtype == out.dtype


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.1, False)])
def test_dropout_that_drops_nothing_keeps_nothing(p: float, training: bool) -> None:
    """Without dropout, and in evaluation, there is no mask."""
    x = torch.ones(4, 8, device="meta", requires_grad=True)
    with CudaSemantics(Target(compute_capability=AMPERE)), Operators() as operators:
        F.dropout(x, p, training=training)
    assert "aten.native_dropout" not in [name for name, _ in operators.seen]


# -- attention -------------------------------------------------------------------------------------------------------

FLASH, EFFICIENT, MATH = "flash", "efficient", "math"


def kernel(
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    mask: bool = False,
    head_dim: int = 64,
    groups: int = 1,
    dropout: float = 0.0,
    query_len: int = 32,
    causal: bool = False,
) -> str:
    """The kernel that runs forward; its backward must run as well."""
    query = torch.zeros(2, 4, query_len, head_dim, device="meta", dtype=dtype, requires_grad=True)
    key, value = (torch.zeros(2, 4 // groups, 32, head_dim, device="meta", dtype=dtype) for _ in range(2))
    attn_mask = torch.ones(2, 1, query_len, 32, device="meta", dtype=torch.bool) if mask else None
    with CudaSemantics(Target(compute_capability=capability)), Operators() as operators:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, is_causal=causal, enable_gqa=groups > 1
        )
    out.sum().backward()
    assert query.grad is not None
    assert query.shape == out.shape == query.grad.shape
    names = " ".join(name for name, _ in operators.seen)
    return FLASH if "flash" in names else EFFICIENT if "efficient" in names else MATH


@pytest.mark.parametrize(
    ("expected", "dtype", "capability", "options"),
    [
        (FLASH, BF16, AMPERE, {}),
        (FLASH, FP16, ADA, {"causal": True}),
        (FLASH, BF16, ADA, {"dropout": 0.1}),
        (FLASH, BF16, BLACKWELL, {"head_dim": 256}),
        (FLASH, FP16, AMPERE, {"head_dim": 20}),
        (FLASH, BF16, AMPERE, {"groups": 4}),
        (FLASH, BF16, AMPERE, {"head_dim": 208}),
        (EFFICIENT, BF16, ADA, {"head_dim": 208}),
        (EFFICIENT, BF16, ADA, {"head_dim": 256, "dropout": 0.1}),
        (EFFICIENT, BF16, AMPERE, {"head_dim": 264}),
        (EFFICIENT, BF16, AMPERE, {"mask": True}),
        (EFFICIENT, FP16, AMPERE, {"causal": True, "query_len": 16}),
        (EFFICIENT, FP32, AMPERE, {}),
        (EFFICIENT, FP32, AMPERE, {"mask": True, "dropout": 0.1}),
        (EFFICIENT, FP16, TURING, {}),
        (EFFICIENT, FP16, TURING, {"mask": True}),
        (EFFICIENT, FP32, TURING, {"head_dim": 26}),
        (EFFICIENT, FP32, PASCAL, {}),
        (MATH, BF16, TURING, {}),
        (MATH, FP32, AMPERE, {"head_dim": 26}),
        (MATH, FP16, TURING, {"head_dim": 20}),
        (MATH, FP16, AMPERE, {"head_dim": 20, "mask": True}),
        (MATH, FP32, AMPERE, {"groups": 4}),
        (MATH, BF16, AMPERE, {"groups": 2, "mask": True}),
        (MATH, FP16, TURING, {"groups": 2}),
    ],
)
def test_the_card_decides_which_attention_kernel_runs(
    expected: str, dtype: torch.dtype, capability: tuple[int, int], options: dict[str, Any]
) -> None:
    """By type, mask, head size, groups and compute capability, as sdp_utils.cpp has it."""
    assert expected == kernel(dtype, capability, **options)


def saved_sizes(dtype: torch.dtype, capability: tuple[int, int], length: int, *, mask: bool) -> list[int]:
    """Bytes of each storage kept for the backward pass beyond the inputs."""
    q, k, v = (torch.zeros(2, 4, length, 64, device="meta", dtype=dtype, requires_grad=True) for _ in range(3))
    attn_mask = torch.ones(2, 1, length, length, device="meta", dtype=torch.bool) if mask else None
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with (
        CudaSemantics(Target(compute_capability=capability)),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
    ):
        F.scaled_dot_product_attention(q, k, v, attn_mask, 0.1)
    own = {t.untyped_storage()._cdata for t in (q, k, v)}
    return [t.untyped_storage().nbytes() for key, t in kept.items() if key not in own]


@pytest.mark.parametrize(("dtype", "capability"), [(BF16, AMPERE), (FP32, AMPERE), (FP16, TURING)])
def test_fused_attention_keeps_memory_linear_in_the_length(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Four times the length keeps four times the bytes, dropout included: its mask is made again from a seed."""
    short, long = (sum(saved_sizes(dtype, capability, length, mask=False)) for length in (256, 1024))
    assert 4 * short == pytest.approx(long, rel=0.01)


@pytest.mark.parametrize("length", [64, 57])
def test_a_boolean_mask_is_kept_as_an_additive_one(length: int) -> None:
    """The memory-efficient kernel wants a bias of the query's type, its rows padded to 16 elements."""
    assert 2 * length * 64 * 2 in saved_sizes(BF16, AMPERE, length, mask=True)
    assert 2 * length * 64 * 2 not in saved_sizes(FP32, AMPERE, length, mask=False)
