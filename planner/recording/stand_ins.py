"""Stand-ins for optimizers and modules that can't be built on tensors without data.

Each allocates what the real one does, in the same order; tests compare them with the real ones run on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

PAGED_FROM = 100_000
"""Elements from which bitsandbytes' paged optimizers page a tensor's state."""
OUTLIER_THRESHOLD = 6.0
"""Activations from which transformers' BitsAndBytesConfig leaves a column out of int8 (llm_int8_threshold)."""
OUTLIER_COLUMNS = 7
"""Such columns in a layer's input, which only data tell: Dettmers et al. 2022 find up to 7 of a hidden state's."""


def without_data(tensors: Iterable[Tensor]) -> bool:
    """Whether these are tensors that only have a shape: on meta, or fake ones of a device."""
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


class FusedAdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW(fused=True)``, which torch refuses on tensors without data (torch/optim/adam.py)."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the state at the first call; the fused kernel itself needs nothing more."""
        for parameter in _with_gradients(self):
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


class EightBitAdamW(torch.optim.Optimizer):
    """``bitsandbytes.optim.AdamW8bit`` (0.50: bitsandbytes/optim/optimizer.py, Optimizer2State.init_state).

    Two uint8 states with an fp32 scale for each 256 elements; fp32 states below 4096 elements; two quantization
    maps of 256 floats for all. Paged, the states of 100,000 elements and more are in CUDA's managed memory
    (get_state_buffer, functional.py get_paged): outside of torch's allocator, and evicted where others need the card.
    """

    def __init__(self, parameters: list[Tensor], *, paged: bool = False) -> None:
        super().__init__(parameters, {})
        self._paged = paged
        self._maps: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the state at the first call; the kernel updates in place."""
        for parameter in _with_gradients(self):
            if not self.state[parameter]:
                self._make_state(parameter)

    def _make_state(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if parameter.numel() < 4096:
            for name in ("state1", "state2"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            return
        if not self._maps:
            self._maps = [torch.zeros(256, device=parameter.device) for _ in range(2)]
        if not self._paged or parameter.numel() < PAGED_FROM:
            for name in ("state1", "state2"):
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
        for name in ("absmax1", "absmax2"):
            state[name] = torch.zeros(-(-parameter.numel() // 256), device=parameter.device)


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def features(linear: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer; GPT-2's Conv1D holds its weight the other way round."""
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, nn.Linear) else (rows, columns)


def arrived(linear: Any) -> tuple[int, ...]:
    """Bytes on the card before quantization: the weight, for Conv1D also its transpose (Params4bit._quantize)."""
    nbytes = int(linear.weight.nbytes)
    return (nbytes,) if isinstance(linear, nn.Linear) else (nbytes, nbytes)


class Nf4Linear(nn.Linear):
    """``bitsandbytes.nn.Linear4bit`` (0.50) with nf4 and double quantization.

    Weight: half a byte an element. Scales (bitsandbytes/functional.py, quantize_4bit with compress_statistics):
    one uint8 for each 64 elements, one fp32 for each 256 of those, two code books and an offset.
    """

    def __init__(self, linear: Any, compute_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = features(linear)
        self.compute_dtype = compute_dtype
        self.loaded_from = arrived(linear)
        elements, device = linear.weight.numel(), linear.weight.device
        packed = torch.empty((elements + 1) // 2, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias: Any = linear.bias
        scales = -(-elements // 64)
        for name, size, dtype in (
            ("absmax", scales, torch.uint8),
            ("code", 16, torch.float32),
            ("offset", 1, torch.float32),
            ("nested_absmax", -(-scales // 256), torch.float32),
            ("nested_code", 256, torch.float32),
        ):
            self.register_buffer(name, torch.empty(size, dtype=dtype, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """In the compute type, back to the input's."""
        x = input.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        apply: Any = Matmul4Bit.apply
        out: Tensor = apply(x, self.weight, bias, (self.out_features, self.in_features))
        return out.to(input.dtype)


@torch.library.custom_op("vramplan::dequantized", mutates_args=())
def dequantized(packed: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """The weight that bitsandbytes' dequantize_4bit writes, as one operator that reads half a byte an element."""
    return torch.empty(shape, dtype=dtype, device=packed.device)


@dequantized.register_fake
def _(packed: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=packed.device)


def _dequantized_scales(packed: Tensor) -> Tensor:
    """One fp32 for each 64 elements, two of which share a byte."""
    return torch.empty(-(-packed.numel() // 32), dtype=torch.float32, device=packed.device)


class Matmul4Bit(torch.autograd.Function):
    """bitsandbytes/autograd/_functions.py, MatMul4Bit: the weight is dequantized into a temporary each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """``x @ weight.T``, keeping only the packed weight."""
        ctx.save_for_backward(packed)
        ctx.shape, ctx.dtype = shape, x.dtype
        # backends/cuda/ops.py, _dequant_linear_fallback: the scales without and with their offset stay to the end
        scales = [_dequantized_scales(packed) for _ in range(2)]
        weight = dequantized(packed, list(shape), x.dtype)
        with torch._C.DisableTorchFunction():
            out = torch.nn.functional.linear(x, weight, bias)
        del scales
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """``grad_output @ weight``, dequantized again."""
        (packed,) = ctx.saved_tensors
        scales = _dequantized_scales(packed)  # functional.py, dequantize_4bit
        weight = dequantized(packed, list(ctx.shape), ctx.dtype)
        del scales
        with torch._C.DisableTorchFunction():
            return torch.matmul(grad_output, weight.to(grad_output.dtype)), None, None, None


class Int8Linear(nn.Linear):
    """``bitsandbytes.nn.Linear8bitLt(has_fp16_weights=False)`` (0.50): a byte an element, one fp32 scale a row."""

    def __init__(self, linear: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = features(linear)
        self.loaded_from = (linear.weight.nbytes, 2 * linear.weight.numel())  # Int8Params._quantize: of an fp16 copy
        codes = torch.empty(self.out_features, self.in_features, dtype=torch.int8, device=linear.weight.device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias: Any = linear.bias
        self.register_buffer("scales", torch.empty(self.out_features, device=codes.device))

    def forward(self, input: Tensor) -> Tensor:
        """In the input's type."""
        apply: Any = Matmul8Bit.apply
        out: Tensor = apply(input, self.weight, self.scales, self.bias)
        return out


class Matmul8Bit(torch.autograd.Function):
    """bitsandbytes/autograd/_functions.py, MatMul8bitLt: rows of the input in int8, but for columns with outliers.

    Like the real one it keeps its input and those columns as attributes: activation checkpointing, which drops what
    is saved for the backward pass, doesn't drop them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``"""
        shape = x.shape
        x = x.reshape(-1, shape[-1]) if x.dim() == 3 else x
        out, outlying, columns = mixed_product(x, weight, scales, bias)
        ctx.kept = outlying, x, columns
        ctx.weight, ctx.scales, ctx.shape, ctx.dtype = weight, scales, shape, x.dtype
        return out.reshape(*shape[:-1], -1) if len(shape) == 3 else out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """``grad_output @ weight``, from a copy of the weight in the input's type."""
        if grad_output.dim() == 3:
            grad_output = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        weight = ctx.weight.to(ctx.dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1 / 127))
        return torch.matmul(grad_output.to(ctx.dtype), weight).view(ctx.shape), None, None, None


def mixed_product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``x @ weight.T + bias`` of rows, the columns with outliers, and their index (int8_mixed_scaled_mm)."""
    codes, _row_scales, columns = _quantized_rows(x.to(torch.float16))
    outlying = x[:, columns]
    weight_columns = (weight[:, columns] * scales.unsqueeze(1)).to(x.dtype).t()
    out = _scaled_product(codes, weight, bias, x.dtype).addmm(outlying, weight_columns)
    return out, outlying, columns


def _quantized_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """backends/cuda/ops.py, int8_vectorwise_quant: int8 rows, their scales, and the columns with outliers."""
    row_scales = torch.empty(len(x), device=x.device)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    outliers = x.abs() >= OUTLIER_THRESHOLD
    outliers.any()
    outliers.any(dim=0)
    columns = torch.zeros(min(OUTLIER_COLUMNS, x.shape[1]), dtype=torch.int64, device=x.device)
    return codes, row_scales, columns


def _scaled_product(codes: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """backends/default/ops.py, int8_scaled_mm: an int32 product, scaled to fp16 (int8_mm_dequant), cast."""
    product = int8_matmul(codes, weight)
    out = torch.empty_like(product, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:  # else within the kernel
        out.add_(bias)
    return out.to(dtype)


@torch.library.custom_op("vramplan::int8_matmul", mutates_args=())
def int8_matmul(codes: Tensor, weight: Tensor) -> Tensor:
    """The int32 product that cuBLASLt makes of int8 rows and an int8 weight."""
    return torch.empty(len(codes), len(weight), dtype=torch.int32, device=codes.device)


@int8_matmul.register_fake
def _(codes: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(len(codes), len(weight), dtype=torch.int32, device=codes.device)


@register_flop_formula(torch.ops.vramplan.int8_matmul)
def _int8_matmul_flops(codes: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * int(codes[0]) * int(codes[1]) * int(weight[0])
