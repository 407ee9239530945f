"""Linear layers with packed weights, as auto_gptq 0.7.1 and autoawq 0.2.6 keep and multiply them, without data.

What each holds is what its checkpoint stores; what its forward pass makes is named at the library's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_GROUP = 128
"""Weights that share a scale and a zero point: Qwen's quantized checkpoints."""


class _Packed(nn.Module):
    """qweight, qzeros and scales of ``bits`` a weight, and an fp16 bias."""

    bits = 4

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        device = linear.weight.device
        groups = -(-self.in_features // _GROUP)
        words = self.in_features * self.bits // 32  # of 32 bits, along the input (GPTQ)
        self.register_buffer("qweight", torch.empty(words, self.out_features, dtype=torch.int32, device=device))
        zeros = self.out_features * self.bits // 32
        self.register_buffer("qzeros", torch.empty(groups, zeros, dtype=torch.int32, device=device))
        self.register_buffer("scales", torch.empty(groups, self.out_features, dtype=torch.float16, device=device))
        if linear.bias is None:
            self.bias = None
        else:
            self.register_buffer("bias", torch.empty(self.out_features, dtype=torch.float16, device=device))

    def _plus_bias(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out + self.bias


class CudaOldLinear(_Packed):
    """auto_gptq's qlinear_cuda_old.QuantLinear in 8 bits: exllama's kernels take 4 bits alone."""

    bits = 8
    _SWITCH = 128
    """kernel_switch_threshold: from so many rows on, the weight is unpacked for an ordinary product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.register_buffer("g_idx", torch.empty(self.in_features, dtype=torch.int32, device=linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """Its kernel multiplies in fp32; more rows are multiplied with the weight, unpacked by operators of torch."""
        shape, dtype = (*x.shape[:-1], self.out_features), x.dtype
        x = x.reshape(-1, x.shape[-1])
        if len(x) < self._SWITCH:
            out = torch.zeros(len(x), self.out_features, device=x.device)
            x = x.to(torch.float32)
            self.scales.float()
        else:
            out = torch.matmul(x, self._unpacked())
        out = out.to(dtype=dtype).reshape(shape)
        return self._plus_bias(out)

    def _unpacked(self) -> Tensor:
        shifts = torch.empty(1, 32 // self.bits, dtype=torch.int32, device=self.qweight.device)
        expanded = self.qzeros.unsqueeze(2).expand(-1, -1, 32 // self.bits)
        zeros = torch.bitwise_right_shift(expanded, shifts.unsqueeze(0)).to(torch.int16)
        zeros = zeros + 1
        zeros = torch.bitwise_and(zeros, 255).reshape(-1, 1, self.out_features)
        scales = self.scales.reshape(-1, 1, self.out_features)
        expanded = self.qweight.unsqueeze(1).expand(-1, 32 // self.bits, -1)
        weight = torch.bitwise_right_shift(expanded, shifts.unsqueeze(-1)).to(torch.int16)
        weight = torch.bitwise_and(weight, 255)
        weight = weight.reshape(-1, _GROUP, self.out_features)
        weight = scales * (weight - zeros)
        return weight.reshape(-1, self.out_features)


class ExllamaLinear(_Packed):
    """auto_gptq's qlinear_exllama.QuantLinear, which transformers' GPTQConfig chooses for 4 bits.

    Its kernels unpack into the one buffer that the whole model has for it (``add_exllama_buffer``).
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.register_buffer("g_idx", torch.empty(self.in_features, dtype=torch.int32, device=linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """ext_q4_matmul: nothing but the result, to which the bias is added in place."""
        out = torch.empty(x.numel() // x.shape[-1], self.out_features, dtype=torch.float16, device=x.device)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out.add_(self.bias)


class AwqLinear(_Packed):
    """awq.modules.linear.WQLinear_GEMM with autoawq_kernels."""

    _SPLITS = 8
    """split_k_iters, as WQLinearMMFunction.forward passes it."""

    def forward(self, x: Tensor) -> Tensor:
        """From 1024 tokens on the weight is unpacked; below, gemm_forward_cuda sums the results of its splits."""
        if x.shape[0] * x.shape[1] >= 1024:
            weight = torch.empty(self.in_features, self.out_features, dtype=torch.float16, device=x.device)
            out = torch.matmul(x, weight)
            del weight
        else:
            rows = x.reshape(-1, x.shape[-1])
            out = torch.empty(self._SPLITS, len(rows), self.out_features, dtype=torch.float16, device=x.device).sum(0)
        return self._plus_bias(out).reshape(*x.shape[:-1], self.out_features)


_KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "gptq-int8": CudaOldLinear,
    "gptq-int4": ExllamaLinear,
    "awq-int4": AwqLinear,
}
QUANTIZATIONS = tuple(_KINDS)
"""Names that the rows use."""


def pack(model: Any, quantization: str) -> None:
    """Replace the linear layers of a decoder's blocks; embeddings and the output layer stay in fp16."""
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, _KINDS[quantization](child))
    if quantization == "gptq-int4":
        add_exllama_buffer(model)


def add_exllama_buffer(model: nn.Module) -> None:
    """auto_gptq/modeling/_utils.py, autogptq_post_init: fp16 for the largest weight, kept for good."""
    largest = max(m.in_features * m.out_features for m in model.modules() if isinstance(m, ExllamaLinear))
    device = next(model.parameters()).device
    model.register_buffer("temp_state", torch.empty(1, 1, dtype=torch.float16, device=device), persistent=False)
    model.register_buffer("temp_dq", torch.empty(1, largest, dtype=torch.float16, device=device), persistent=False)
