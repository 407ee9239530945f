"""Weights as they are stored at inference: whole, or quantized by bitsandbytes, torchao or torch.

On meta, stand-ins hold what the real layers hold, and do in a pass without gradients what those do: as on CUDA where
tensors are on meta, as on the CPU where they claim to be there. Training's stand-ins (recording/stand_ins.py), whose
passes have gradients, are what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from planner.errors import InputError, Problem
from planner.levers.quantization import SKIPPED, bitsandbytes_layer, exchange, mark
from planner.recording.stand_ins import (
    OUTLIER_COLUMNS,
    OUTLIER_THRESHOLD,
    Int8Linear,
    Nf4Linear,
    dequantized,
    features,
    int8_matmul,
    mixed_product,
)
from planner.units import round_up

if TYPE_CHECKING:
    from planner.levers.quantization import Place

BITSANDBYTES, WEIGHT_ONLY, DYNAMIC = ("int8", "nf4"), "int8-weight-only", "int8-dynamic"
CONVERTED_ON_LOAD = (*BITSANDBYTES, WEIGHT_ONLY)
"""Quantizations whose whole weights pass over the device while ``from_pretrained`` loads (loading.load_quantized)."""


def quantize(model: nn.Module, quantization: str, compute_dtype: torch.dtype) -> nn.Module:
    """The model with its linear layers stored as ``quantization`` says; on meta stand-ins for them.

    With data, weights are quantized one by one where they are. ``compute_dtype`` is the type of the other weights.
    Raises InputError where the package isn't there, where the model has no such layers, and for int8-dynamic with
    weights that aren't fp32.
    """
    if quantization == "none":
        return model
    if quantization == DYNAMIC and compute_dtype != torch.float32:
        raise _problem(f"got {DYNAMIC} with {compute_dtype}; accepted with fp32: torch.ao quantizes fp32 values alone")
    make = _STAND_INS if next(model.parameters()).is_meta else _REAL
    found = list(places(model, quantization))
    if not found:
        raise _problem(
            f"got {quantization}, which stores linear layers; the model has none that it takes; ask for none"
        )
    exchange(found, partial(make[quantization], quantization, compute_dtype))
    if quantization in BITSANDBYTES:
        mark(model, quantization)
    return model


def unquantized(model: nn.Module) -> list[str]:
    """What ``from_pretrained`` is told to leave as it is: heads, and transformers' own choice without being told.

    For BitsAndBytesConfig's ``llm_int8_skip_modules`` and TorchAoConfig's ``modules_to_not_convert``; a list that is
    given replaces transformers' own (quantizers/base.py, get_modules_to_not_convert), so both are in it.
    """
    from transformers.quantizers.base import get_keys_to_not_convert

    heads = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in SKIPPED}
    outermost = {name for name in heads if not any(name.startswith(f"{other}.") for other in heads)}
    return sorted({*outermost, *get_keys_to_not_convert(model)})


def places(model: nn.Module, quantization: str) -> Iterator[Place]:
    """Each layer that is quantized, with its parent and its name there: what ``from_pretrained`` would choose.

    Modules that transformers keeps in fp32 (T5's wo) stay so with bitsandbytes. torchao compares names of weights
    (quantizer_torchao.py, param_needs_quantization), which no name of a module ends like, and takes linear layers
    alone; so does torch.ao.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = [*unquantized(model), *(getattr(model, "_keep_in_fp32_modules", None) or ())]
    kinds = (nn.Linear, Conv1D) if quantization in BITSANDBYTES else (nn.Linear,)
    suffix = ".weight" if quantization == WEIGHT_ONLY else ""
    for name, module in model.named_modules():
        if type(module) in kinds and should_convert_module(name + suffix, kept):
            parent, _, own = name.rpartition(".")
            yield model.get_submodule(parent), own, module


def held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor that a model's layers hold, real ones' and stand-ins' alike: parameters alone miss many.

    bitsandbytes keeps scales in ``quant_state`` and ``state``, torchao's weights are made of several tensors.
    """
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
            yield from (getattr(tensor, part) for part in parts)
            if not parts:
                yield tensor
            state: Any = getattr(tensor, "quant_state", None)
            if state is not None:
                nested = (state.state2.absmax, state.state2.code) if state.nested else ()
                yield from (state.absmax, state.code, state.offset, *nested)
            for holder in (tensor, getattr(module, "state", None)):
                yield from (held for name in ("SCB", "idx") if isinstance(held := getattr(holder, name, None), Tensor))


def outside_bytes(model: nn.Module) -> int:
    """What a model quantized by torch.ao holds beside torch's allocator: fbgemm's packed weights (PackedWeight)."""
    from torch.ao.nn.quantized.dynamic import Linear

    layers = [module for module in model.modules() if isinstance(module, Linear)]
    return sum(packed_bytes(layer.in_features, layer.out_features) for layer in layers)


def _problem(message: str) -> InputError:
    return InputError([Problem(argument="quantization", message=message)])


# -- real layers -----------------------------------------------------------------------------------------------------


def _real_bitsandbytes(quantization: str, compute_dtype: torch.dtype, layer: Any) -> nn.Module:
    """Quantized on the weight's device; int8's from host memory (integrations/bitsandbytes.py, Bnb8bitQuantize)."""
    device = layer.weight.device
    made: Any = bitsandbytes_layer(layer.cpu() if quantization == "int8" else layer, quantization, compute_dtype)
    made.weight = made.weight.to(device)
    if made.bias is not None:
        made.bias = nn.Parameter(made.bias.data.to(device), requires_grad=False)
    return cast("nn.Module", made)


def _real_weight_only(quantization: str, compute_dtype: torch.dtype, layer: nn.Module) -> nn.Module:
    """What transformers/integrations/torchao.py does with TorchAoConfig(Int8WeightOnlyConfig())."""
    try:
        from torchao.quantization import (  # type: ignore[import-not-found,unused-ignore]
            Int8WeightOnlyConfig,
            quantize_,
        )
    except ImportError:
        raise _problem(f"got {quantization}, whose package isn't installed; pip install torchao") from None
    quantize_(layer, Int8WeightOnlyConfig(), filter_fn=lambda *_: True)
    return layer


def _real_dynamic(quantization: str, compute_dtype: torch.dtype, layer: Any) -> nn.Module:
    """What ``torch.ao.quantization.quantize_dynamic`` makes of a linear layer."""
    from torch.ao.nn.quantized.dynamic import Linear
    from torch.ao.quantization import default_dynamic_qconfig

    layer.qconfig = default_dynamic_qconfig
    return cast("nn.Module", Linear.from_float(layer))


_REAL = {
    **dict.fromkeys(BITSANDBYTES, _real_bitsandbytes),
    WEIGHT_ONLY: _real_weight_only,
    DYNAMIC: _real_dynamic,
}

# -- nf4 -------------------------------------------------------------------------------------------------------------

FUSED_ROWS = 4
"""Rows up to which each card's product reads the packed weight (bitsandbytes' _GEMM_4BIT_CUSTOM_FLOOR_M)."""


class Nf4Inference(Nf4Linear):
    """``bitsandbytes.nn.Linear4bit`` (0.50) without gradients: ``gemm_4bit``.

    On CUDA (backends/cuda/ops.py) few rows are multiplied by a kernel that reads the packed weight, more by a
    dequantized one. Between FUSED_ROWS and 1536 rows it depends on the layer's size and the card's number of
    multiprocessors: taken as dequantized here, which is never less memory. The CPU's (backends/default/ops.py)
    dequantizes always; with AVX512-BF16, bitsandbytes packs its weights anew at the first pass, which isn't followed.
    """

    absmax: Tensor
    offset: Tensor

    def __init__(self, linear: Any, compute_dtype: torch.dtype) -> None:
        super().__init__(linear, compute_dtype)
        elements, weight = linear.weight.numel(), linear.weight
        # backends/default/ops.py, quantize_4bit: an fp32 copy, scales, scaled, codes of 4 bytes, of one, their halves
        copied = () if weight.dtype == torch.float32 else (4 * elements,)
        made = (elements // 16, 4 * elements, 4 * elements, elements, elements // 2)
        self.loaded_from_on_cpu = (weight.nbytes, *copied, *made)

    def forward(self, input: Tensor) -> Tensor:
        """In the compute type, back to the input's."""
        if isinstance(input, FakeTensor):
            return self._on_cpu(input)
        aligned = self.in_features % 64 == 0
        if input.numel() > FUSED_ROWS * self.in_features or not aligned:
            return super().forward(input)
        x = input.to(self.compute_dtype).contiguous()
        out: Tensor = torch.ops.vramplan.gemm_4bit(x, self.weight, self.absmax, self.out_features)
        return out.to(input.dtype)

    def _on_cpu(self, input: Tensor) -> Tensor:
        x = input.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        _scales = torch.empty_like(self.absmax, dtype=torch.float32) + self.offset
        weight = dequantized(self.weight, [self.out_features, self.in_features], x.dtype)
        return nn.functional.linear(x, weight, bias).to(input.dtype)


@torch.library.custom_op("vramplan::gemm_4bit", mutates_args=())
def gemm_4bit(x: Tensor, packed: Tensor, scales: Tensor, outputs: int) -> Tensor:
    """The product with a packed 4-bit weight, bias included, that bitsandbytes' kernel makes in one go."""
    return x.new_empty(*x.shape[:-1], outputs)


@gemm_4bit.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


@register_flop_formula(torch.ops.vramplan.gemm_4bit)
def _gemm_4bit_flops(x: Any, packed: Any, scales: Any, outputs: int, *_: Any, **__: Any) -> int:
    return 2 * int(torch.Size(x).numel()) * outputs


# -- int8 by bitsandbytes --------------------------------------------------------------------------------------------


class Int8Inference(Int8Linear):
    """``bitsandbytes.nn.Linear8bitLt`` (0.50) without gradients: MatMul8bitLt on every device, in ``eval()``.

    The layer keeps the index of the columns with outliers until the next pass (MatmulLtState.idx): some dozen bytes,
    left out here, so that a pass leaves nothing and all are alike.
    """

    scales: Tensor
    outlier_columns = OUTLIER_COLUMNS
    """Columns of the input with outliers: only data tell."""

    def __init__(self, linear: Any) -> None:
        super().__init__(linear)
        elements, weight = linear.weight.numel(), linear.weight
        # backends/default/ops.py, int8_vectorwise_quant: an fp16 copy, an fp32 one, its product with the scales
        copied = () if weight.dtype == torch.float16 else (2 * elements,)
        self.loaded_from_on_cpu = (weight.nbytes, *copied, 4 * elements, 4 * elements)

    def forward(self, input: Tensor) -> Tensor:
        """In the input's type."""
        shape = input.shape
        x = input.reshape(-1, shape[-1]) if input.dim() == 3 else input
        product = self._on_cpu if isinstance(input, FakeTensor) else mixed_product
        out, _, _ = product(x, self.weight, self.scales, self.bias)
        return out.reshape(*shape[:-1], -1) if len(shape) == 3 else out

    def _on_cpu(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """backends/default/ops.py: int8_vectorwise_quant, int8_mixed_scaled_mm."""
        codes, row_scales, columns = self._quantized_rows_on_cpu(x.to(torch.float16))
        if not len(columns):
            return _scaled_product_on_cpu(codes, weight, row_scales, scales, bias, x.dtype), None, columns
        outlying = x[:, columns]
        weight_columns = (weight[:, columns] * scales.view(-1, 1) * (1 / 127)).to(x.dtype).t()
        out = _scaled_product_on_cpu(codes, weight, row_scales, scales, bias, x.dtype)
        return out.addmm(outlying, weight_columns), outlying, columns

    def _quantized_rows_on_cpu(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outliers = x.abs() >= OUTLIER_THRESHOLD
        outliers.any()
        columns = torch.zeros(min(self.outlier_columns, x.shape[1]), dtype=torch.int64, device=x.device)
        if len(columns):
            outliers.any(dim=0)
            _restored = torch.empty(len(x) * len(columns), dtype=x.dtype, device=x.device)
        row_scales = torch.max(x.abs(), dim=1).values.float()
        # TensorIterator.cpp: on the CPU operands of different types are cast before their product
        codes = torch.round(x.float() * (127.0 / row_scales.unsqueeze(-1))).to(torch.int8)
        return codes, row_scales, columns


def _scaled_product_on_cpu(
    codes: Tensor, weight: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """int8_linear_matmul, of whole numbers with AVX512 and of fp32 copies without, and int8_mm_dequant."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        product: Tensor = int8_matmul(codes, weight)
    else:
        product = torch.matmul(codes.float(), weight.float().t()).to(torch.int32)
    out = product.float() * (row_scales.unsqueeze(-1) * scales.unsqueeze(0)) * (1 / 127**2)
    if bias is not None:
        out += bias
    return out.to(dtype)


# -- int8 by torchao and torch.ao ------------------------------------------------------------------------------------


class WeightOnlyInt8(nn.Linear):
    """A linear layer whose weight is torchao's Int8Tensor (0.18, Int8WeightOnlyConfig): a scale and a zero a row.

    Zeros are int8, all 0, and kept (from_hp). The whole weight is cast for each product, on every device.
    """

    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = features(linear)
        elements = linear.weight.numel()
        self.loaded_from = (int(linear.weight.nbytes), 4 * elements, 4 * elements)  # quantize_affine: fp32 copies
        codes = torch.empty_like(linear.weight, dtype=torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias: Any = linear.bias
        self.register_buffer("scale", torch.empty(self.out_features, 1, device=codes.device))
        self.register_buffer("zero_point", torch.empty(self.out_features, 1, dtype=torch.int8, device=codes.device))

    def forward(self, input: Tensor) -> Tensor:
        """torchao/quantization/quantize_/workflows/int8/int8_tensor.py, linear."""
        product = torch.mm(input.reshape(-1, self.in_features), self.weight.t().to(input.dtype))
        out = product * self.scale.to(product.dtype).flatten()
        out = out.reshape(*input.shape[:-1], self.out_features)
        if self.bias is not None:
            out += self.bias
        return out.to(input.dtype)


class DynamicInt8(nn.Linear):
    """``torch.ao.nn.quantized.dynamic.Linear``: rows are quantized in a kernel, into registers' blocks.

    Its weight lies in fbgemm's memory, not in torch's; here in a buffer, so that it counts.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = features(linear)
        nbytes, device = packed_bytes(*features(linear)), linear.weight.device
        self.register_buffer("packed", torch.empty(nbytes, dtype=torch.uint8, device=device))
        self.bias: Any = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """aten/src/ATen/native/quantized/cpu/qlinear_dynamic.cpp: beside the result an int32 buffer of its size."""
        out: Tensor = torch.ops.vramplan.linear_dynamic(input.contiguous(), self.packed, self.out_features)
        _buffer = torch.empty_like(out, dtype=torch.int32)
        return out


def packed_bytes(inputs: int, outputs: int) -> int:
    """A weight in fbgemm's blocks, and an int32 for each output (PackBMatrix; qlinear_prepack.cpp, col_offsets)."""
    rows, columns = _blocks()
    return round_up(inputs, rows) * round_up(outputs, columns) + 4 * outputs


def _blocks() -> tuple[int, int]:
    """fbgemm's KCB and NCB for int8 with sums of 32 bits (PackingTraits-inl.h), by this processor's instructions."""
    if torch.cpu._is_avx512_supported():
        return (512, 48) if torch.cpu._is_vnni_supported() else (256, 32)
    return 512, 8


@torch.library.custom_op("vramplan::linear_dynamic", mutates_args=())
def linear_dynamic(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """The fp32 product of rows that are quantized on the way with a packed int8 weight."""
    return x.new_empty(*x.shape[:-1], outputs)


@linear_dynamic.register_fake
def _(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


@register_flop_formula(torch.ops.vramplan.linear_dynamic)
def _linear_dynamic_flops(x: Any, packed: Any, outputs: int, *_: Any, **__: Any) -> int:
    return 2 * int(torch.Size(x).numel()) * outputs


_STAND_INS: dict[str, Any] = {
    "int8": lambda _, __, layer: Int8Inference(layer),
    "nf4": lambda _, dtype, layer: Nf4Inference(layer, dtype),
    WEIGHT_ONLY: lambda _, __, layer: WeightOnlyInt8(layer),
    DYNAMIC: lambda _, __, layer: DynamicInt8(layer),
}
