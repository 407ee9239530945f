"""Stand-ins against the real optimizers and layers, allocation by allocation, both run on CPU tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.levers.optimizer import make_optimizer
from planner.recording.kernels import Target
from planner.recording.record import WORKSPACE
from planner.recording.recorder import Recorder
from planner.recording.stand_ins import OUTLIER_COLUMNS, EightBitAdamW, FusedAdamW, Int8Linear, Nf4Linear

SHAPES = ((64, 64), (4096,), (4095,), (100, 77), (3,), (8, 8))
"""Around bitsandbytes' limit of 4096 elements, and no multiple of its blocks; the last one gets no gradient."""


def recorded(*steps: Callable[[], object], device: str = "cpu") -> list[list[int]]:
    """Bytes allocated (+) and freed (-) in order, for each step."""
    recorder = Recorder(Target(compute_capability=(8, 6)), device=device)
    with recorder:
        for index, step in enumerate(steps):
            recorder.phase(str(index), backward=index == 1)
            step()
        recorder.phase("end")
    recording = recorder.recording()
    starts = list(recording.phases.values())
    return [
        [
            (1 if event > 0 else -1) * recording.sizes[abs(event)]
            for event in recording.events[first:last]
            if recording.categories[abs(event)] != WORKSPACE
        ]
        for first, last in pairwise(starts)
    ]


# -- optimizers ------------------------------------------------------------------------------------------------------


def optimizer_events(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype, device: str = "cpu"
) -> list[list[int]]:
    """The first update and a later one."""
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in SHAPES]
    for parameter in parameters[:-1]:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    return recorded(optimizer.step, optimizer.step, device=device)


def updated_bytes(dtype: torch.dtype) -> int:
    """Parameters with a gradient: an operator that writes to them shows them to the recorder as new blocks."""
    return sum(math.prod(shape) for shape in SHAPES[:-1]) * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_adamw_allocates_what_torchs_does(dtype: torch.dtype) -> None:
    """A step counter and two states at the first update, nothing at later ones."""
    real = optimizer_events(lambda p: torch.optim.AdamW(p, fused=True), dtype)
    assert real == optimizer_events(FusedAdamW, dtype)
    assert 3 * (len(SHAPES) - 1) == len(real[0])
    assert [] == real[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_adamw_allocates_what_bitsandbytes_does(dtype: torch.dtype) -> None:
    """Two states of a byte an element with their scales, fp32 below 4096 elements, nothing at later updates.

    The two quantization maps are made in host memory and copied to the parameters' device: on the CPU that copies
    nothing, so the real one shows no allocation for them here.
    """
    real = optimizer_events(bitsandbytes.optim.AdamW8bit, dtype)
    ours = optimizer_events(EightBitAdamW, dtype)
    assert [256 * 4] * 2 == ours[0][:2]
    assert real == [ours[0][2:], ours[1]]


def test_states_have_the_real_ones_shapes_and_types() -> None:
    """State by state, for every parameter."""
    described = []
    for make in (bitsandbytes.optim.AdamW8bit, EightBitAdamW):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        for parameter in parameters[:-1]:
            parameter.grad = torch.ones_like(parameter)
        optimizer = make(parameters)
        optimizer.step()
        described.append(
            [
                {
                    name: (tuple(state.shape), state.dtype)
                    for name, state in optimizer.state[parameter].items()
                    if isinstance(state, Tensor) and not name.startswith("qmap")
                }
                for parameter in parameters
            ]
        )
    assert described[0] == described[1]


def test_paged_states_are_not_on_the_card() -> None:
    """From 100,000 elements on (bitsandbytes' F.get_paged, CUDA alone): their scales stay, and smaller states."""
    shapes = ((400, 256), (400, 249), (4095,))
    made = []
    for paged in (False, True):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        made.append(sorted(recorded(EightBitAdamW(parameters, paged=paged).step)[0]))
    states = [400 * 256] * 2
    assert made[0] == sorted(made[1] + states)


def test_paged_adamw_is_the_eight_bit_one_without_cuda() -> None:
    """What a script with paged AdamW does on a machine without a GPU: the same states, in its memory."""
    with pytest.warns(UserWarning, match="Falling back to non-paged"):
        real = optimizer_events(bitsandbytes.optim.PagedAdamW8bit, torch.float32)
    assert optimizer_events(bitsandbytes.optim.AdamW8bit, torch.float32) == real


@pytest.mark.parametrize("name", ["adamw_foreach", "adafactor", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_optimizers_allocate_alike_without_data(name: str, dtype: torch.dtype) -> None:
    """On tensors without data they do what they do on real ones: block for block, in order.

    Adafactor's step counters are in host memory, which on the CPU is the same as the others'. SGD is the foreach one
    that torch chooses on a card.
    """
    on_a_card = {"sgd": partial(torch.optim.SGD, foreach=True)}.get(name) or partial(make_optimizer, name)
    expected = optimizer_events(on_a_card, dtype)
    got = optimizer_events(partial(make_optimizer, name), dtype, device="meta")
    without = [[[size for size in step if abs(size) != 4] for step in steps] for steps in (expected, got)]
    assert without[0] == without[1]
    assert bool(expected[0]) == (name != "sgd")


def test_adafactor_keeps_rows_and_columns() -> None:
    """fp32: a row and a column for a matrix, a variance for a vector; later updates leave nothing."""
    first, later = optimizer_events(lambda p: make_optimizer("adafactor", p), torch.float32, device="meta")
    assert 4 * (64 + 64 + 4096 + 4095 + 100 + 77 + 3) == sum(first) - updated_bytes(torch.float32)
    assert 0 == sum(later)


def test_master_weights_are_fp32_copies_beside_their_state() -> None:
    """12 bytes a parameter stay after the first step; a later one holds one tensor's fp32 gradient at a time."""
    first, later = optimizer_events(lambda p: make_optimizer("adamw_fused", p, masters=True), torch.bfloat16)
    sizes = [math.prod(shape) for shape in SHAPES]
    kept = 4 * sum(sizes) + 8 * sum(sizes[:-1]) + 4 * len(sizes[:-1])
    assert kept == sum(first) - updated_bytes(torch.bfloat16)
    assert [signed for size in sizes[:-1] for signed in (4 * size, -4 * size)] == later


def test_parameters_without_gradient_get_no_state() -> None:
    """As with the real ones."""
    parameter = nn.Parameter(torch.ones(4))
    for make in (FusedAdamW, EightBitAdamW):
        optimizer = make([parameter])
        optimizer.step()
        assert not optimizer.state[parameter]


# -- the 4-bit layer -------------------------------------------------------------------------------------------------

SIZES = ((256, 128), (128, 96), (320, 50))


def real_layer(inputs: int, outputs: int, dtype: torch.dtype) -> bitsandbytes.nn.Linear4bit:
    """Quantised for real, from weights of the type that the emitted script loads."""
    layer = bitsandbytes.nn.Linear4bit(
        inputs, outputs, bias=False, compute_dtype=dtype, compress_statistics=True, quant_type="nf4"
    )
    weight = torch.linspace(-1, 1, inputs * outputs).view(outputs, inputs).to(dtype)
    layer.weight = bitsandbytes.nn.Params4bit(
        weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
    )
    return layer.to("cpu")


def stand_in(inputs: int, outputs: int, dtype: torch.dtype) -> Nf4Linear:
    """Ours, for the same layer."""
    return Nf4Linear(nn.Linear(inputs, outputs, bias=False), dtype)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_quantized_weights_take_the_real_ones_bytes(inputs: int, outputs: int) -> None:
    """Packed weight, scales, scales of the scales, their offset and both code books."""
    layer, ours = real_layer(inputs, outputs, torch.bfloat16), stand_in(inputs, outputs, torch.bfloat16)
    state = layer.weight.quant_state
    real = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    assert [t.nbytes for t in real] == [buffer.nbytes for buffer in ours.buffers()]
    assert layer.weight.nbytes == ours.weight.nbytes
    assert layer.weight.dtype == ours.weight.dtype


def layer_events(layer: nn.Module, input_dtype: torch.dtype) -> list[list[int]]:
    """Allocations of its forward and backward pass."""
    x = torch.ones(40, 256, dtype=input_dtype, requires_grad=True)
    layer(x.detach())  # bitsandbytes looks at its first input and decides on a type
    out: list[Tensor] = []
    grad = torch.ones(40, 128, dtype=input_dtype)
    return recorded(lambda: out.append(layer(x)), lambda: out.pop().backward(grad))


@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32])
def test_the_backward_pass_dequantizes_as_the_real_one(input_dtype: torch.dtype) -> None:
    """Scales, the dequantized weight, the gradient of the input: same bytes in the same order."""
    real, ours = (layer_events(make(256, 128, torch.bfloat16), input_dtype)[1] for make in (real_layer, stand_in))
    assert 256 * 128 * 2 in real
    assert real == ours


@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32])
def test_the_forward_pass_makes_the_real_ones_results(input_dtype: torch.dtype) -> None:
    """What is alive afterwards is the result and, where types differ, the cast input.

    On CUDA the weight is dequantized within the operator (backends/cuda/ops.py, _dequant_linear_fallback): two
    buffers of scales and the weight, which the stand-in shows. The CPU kernel works block by block without them.
    """
    real, ours = (layer_events(make(256, 128, torch.bfloat16), input_dtype)[0] for make in (real_layer, stand_in))
    assert sum(real) == sum(ours)
    within = [256 * 128 // 64 * 4] * 2 + [256 * 128 * 2]
    for nbytes in within:
        ours.remove(nbytes)
        ours.remove(-nbytes)
    assert sorted(real) == sorted(ours)


def test_the_packed_weight_is_all_that_a_layer_keeps() -> None:
    """No dequantized weight waits for the backward pass."""
    layer = stand_in(256, 128, torch.bfloat16)
    kept: list[Tensor] = []
    x = torch.ones(40, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert {layer.weight.data_ptr()} == {t.data_ptr() for t in kept}


# -- the 8-bit layer -------------------------------------------------------------------------------------------------


INDEX_BYTES = 8 * OUTLIER_COLUMNS


def int8_layers(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> tuple[Any, Int8Linear]:
    """The real layer, quantised from weights of the type that the emitted script loads, and ours.

    On the CPU bitsandbytes trains with MatMul8bitFp: the real one here is given what it uses on CUDA, MatMul8bitLt.
    """
    real = bitsandbytes.nn.Linear8bitLt(inputs, outputs, bias=bias, has_fp16_weights=False, threshold=6.0)
    weight = torch.linspace(-1, 1, inputs * outputs).view(outputs, inputs).to(dtype)
    real.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    real = real.to("cpu")
    real.init_8bit_state()
    apply = bitsandbytes.autograd._functions.MatMul8bitLt.apply
    if bias:
        real.bias = nn.Parameter(real.bias.detach().to(dtype), requires_grad=False)
    real.forward = lambda x: apply(x, real.weight, None, real.bias, real.state)
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    return real, Int8Linear(plain.requires_grad_(False))


def with_outliers(dtype: torch.dtype, shape: tuple[int, ...] = (5, 8, 256)) -> Tensor:
    """An input with as many columns of outliers as the stand-in takes for granted."""
    x = torch.ones(shape, dtype=dtype)
    x[..., :OUTLIER_COLUMNS] = 10
    return x.requires_grad_()


def int8_events(layer: Any, x: Tensor) -> list[list[int]]:
    """Allocations of its forward and backward pass."""
    out: list[Tensor] = []
    grad = torch.ones(*x.shape[:-1], 128, dtype=x.dtype)
    return recorded(lambda: out.append(layer(x)), lambda: out.pop().backward(grad))


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_int8_weights_take_the_real_ones_bytes(inputs: int, outputs: int) -> None:
    """A byte an element and an fp32 scale for each output."""
    real, ours = int8_layers(inputs, outputs, torch.bfloat16)
    assert (real.state.CB.dtype, real.state.CB.shape) == (ours.weight.dtype, ours.weight.shape)
    assert [(real.state.SCB.dtype, real.state.SCB.shape)] == [(b.dtype, b.shape) for b in ours.buffers()]
    assert real.weight.data_ptr() != 0 and real.state.CB.nbytes == inputs * outputs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_8_bit_backward_pass_copies_the_weight(dtype: torch.dtype) -> None:
    """In the input's type: same bytes in the same order. The index of outliers stays with the real layer's state."""
    real, ours = (int8_events(layer, with_outliers(dtype))[1] for layer in int8_layers(256, 128, dtype))
    assert 256 * 128 * dtype.itemsize in real
    assert real == [size for size in ours if size != -INDEX_BYTES]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_8_bit_forward_pass_leaves_what_the_real_one_leaves(dtype: torch.dtype, bias: bool) -> None:
    """The result, the columns with outliers and their index; the input stays as well, which was there before."""
    real, ours = (int8_events(layer, with_outliers(dtype))[0] for layer in int8_layers(256, 128, dtype, bias=bias))
    outlying = 40 * OUTLIER_COLUMNS * dtype.itemsize
    assert sum(real) == sum(ours) == 40 * 128 * dtype.itemsize + outlying + INDEX_BYTES


def test_the_8_bit_forward_pass_needs_what_cudas_kernels_do() -> None:
    """In order, for bf16 (backends/cuda/ops.py): the input in fp16, scales, codes, outliers; int32, fp16, bf16."""
    _, layer = int8_layers(256, 128, torch.bfloat16)
    made = [size for size in int8_events(layer, with_outliers(torch.bfloat16))[0] if size > 0]
    rows = 40
    quantized = [rows * 256 * 2, rows * 4, rows * 256, rows * 256 * 2, rows * 256]
    assert quantized == made[:5]
    products = [rows * 128 * 4, rows * 128 * 2, rows * 128 * 2, rows * 128 * 2]
    assert products == made[-4:]


def test_checkpointing_keeps_the_8_bit_layers_inputs() -> None:
    """The real one holds them as attributes, which torch's checkpoint doesn't see; so does ours."""
    kept = []
    for layer in int8_layers(256, 128, torch.bfloat16):
        hidden: list[Any] = []

        def run(x: Tensor, layer: Any = layer, hidden: list[Any] = hidden) -> Tensor:
            double = x * 2
            hidden.append(weakref.ref(double.untyped_storage()))
            return layer(double)

        out = checkpoint(run, with_outliers(torch.bfloat16), use_reentrant=False)
        kept.append(hidden[0]() is not None)
        del out
    assert kept == [True, True]
