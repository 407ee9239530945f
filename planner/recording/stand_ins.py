"""Stand-ins for optimizers and modules that can't be built on tensors without data.

Each allocates what the real one does, in the same order; tests compare them with the real ones run on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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
    maps of 256 floats for all.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})
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
        for name in ("state1", "state2"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
        for name in ("absmax1", "absmax2"):
            state[name] = torch.zeros(-(-parameter.numel() // 256), device=parameter.device)


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Nf4Linear(nn.Linear):
    """``bitsandbytes.nn.Linear4bit`` (0.50) with nf4 and double quantization.

    Weight: half a byte an element. Scales (bitsandbytes/functional.py, quantize_4bit with compress_statistics):
    one uint8 for each 64 elements, one fp32 for each 256 of those, two code books and an offset.
    """

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = compute_dtype
        elements, device = linear.weight.numel(), linear.weight.device
        packed = torch.empty((elements + 1) // 2, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
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
        """In the compute type, back to the input's; peft's wrapper of the real layer clones the result."""
        x = input.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        apply: Any = Matmul4Bit.apply
        out: Tensor = apply(x, self.weight, bias, (self.out_features, self.in_features))
        return out.to(input.dtype).clone()


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
