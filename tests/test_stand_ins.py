"""Stand-ins against the real optimizers and layers, allocation by allocation, both run on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn

from planner.recording.kernels import Target
from planner.recording.record import WORKSPACE
from planner.recording.recorder import Recorder
from planner.recording.stand_ins import EightBitAdamW, FusedAdamW, Nf4Linear

SHAPES = ((64, 64), (4096,), (4095,), (100, 77), (3,), (8, 8))
"""Around bitsandbytes' limit of 4096 elements, and no multiple of its blocks; the last one gets no gradient."""


def recorded(*steps: Callable[[], object]) -> list[list[int]]:
    """Bytes allocated (+) and freed (-) in order, for each step."""
    recorder = Recorder(Target(compute_capability=(8, 6)), device="cpu")
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
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype
) -> list[list[int]]:
    """The first update and a later one."""
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters[:-1]:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    return recorded(optimizer.step, optimizer.step)


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
    """Scales, the dequantized weight, the gradient of the input: same bytes in the same order.

    The stand-in ends with the clone that peft's wrapper makes of the real layer's result; its gradient passes through.
    """
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
    clone = 40 * 128 * input_dtype.itemsize
    ours.remove(clone)
    ours.remove(-clone)
    assert sorted(real) == sorted(ours)


def test_the_packed_weight_is_all_that_a_layer_keeps() -> None:
    """No dequantized weight waits for the backward pass."""
    layer = stand_in(256, 128, torch.bfloat16)
    kept: list[Tensor] = []
    x = torch.ones(40, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert {layer.weight.data_ptr()} == {t.data_ptr() for t in kept}
