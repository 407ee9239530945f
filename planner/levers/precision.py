"""Precision: the arithmetic of matrix products and the type of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.levers.base import Choice, Context, Lever, ruled_out_on_cpu
from planner.models import fp16_unsafe

if TYPE_CHECKING:
    import torch

WEIGHT_DTYPES = {"bf16": "bfloat16", "bf16-master": "bfloat16"}
AUTOCAST_DTYPES = {"fp16-amp": "float16", "bf16-amp": "bfloat16"}


def weight_dtype(precision: str) -> torch.dtype:
    """The type that the model's weights are built in."""
    import torch

    dtype: torch.dtype = getattr(torch, WEIGHT_DTYPES.get(precision, "float32"))
    return dtype


def autocast_dtype(precision: str) -> torch.dtype | None:
    """What autocast casts to, or None without autocast."""
    import torch

    name = AUTOCAST_DTYPES.get(precision)
    return getattr(torch, name) if name else None


def base_dtype(precision: str, method: str) -> torch.dtype:
    """The type of frozen base weights under adapters: the low precision that the step computes in, if any."""
    return (autocast_dtype(precision) if method != "full" else None) or weight_dtype(precision)


def width_multiple(precision: str) -> int:
    """What widths of batches are rounded up to: tensor cores like multiples of 8 of two-byte values."""
    return 1 if precision in ("fp32", "tf32") else 8


class PrecisionLever(Lever):
    """fp32, tf32, autocast to fp16 or bf16 over fp32 weights, or weights in bf16 with or without fp32 copies."""

    field = "precision"
    lowers_memory = (("tf32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16-master"))
    loss_tolerance = {"tf32": 1e-3, "fp16-amp": 5e-3, "bf16-amp": 2e-2, "bf16": 5e-2, "bf16-master": 5e-2}  # noqa: RUF012

    def choices(self, context: Context) -> list[Choice]:
        """By compute capability: torch says bf16 is supported where it is only emulated (T4), so don't ask it."""
        if context.card.kind == "cpu":
            return self._on_cpu(context)
        return self._on_cuda(context)

    def _on_cpu(self, context: Context) -> list[Choice]:
        """bf16 runs on every CPU; without AMX or AVX512_BF16 its products are many times slower than fp32's."""
        rates = context.card.dense_flops_per_s
        speed = (
            f"; products reach {rates['bf16'] / rates['fp32']:.2g} times fp32's rate here" if "bf16" in rates else ""
        )
        only_named = "only when named"
        choices = [
            Choice(value="fp32", reason="the reference"),
            Choice(value="tf32", reason=""),
            Choice(value="fp16-amp", reason=""),
            Choice(value="bf16-amp", reason=f"half the bytes of what a step keeps{speed}"),
            Choice(value="bf16", swept=False, reason=f"weights without an fp32 copy lose small updates: {only_named}"),
            Choice(value="bf16-master", swept=False, reason=f"bf16 throughout, with fp32 copies: {only_named}"),
        ]
        reasons = {"tf32": "tf32 is a format of CUDA's tensor cores", "fp16-amp": "loss scaling is for CUDA devices"}
        return ruled_out_on_cpu(choices, context, reasons)

    def _on_cuda(self, context: Context) -> list[Choice]:
        major, minor = context.card.compute_capability
        ampere, where = context.card.supports_bf16, f"compute capability {major}.{minor}"
        unsafe = fp16_unsafe(context.spec)
        tensor_cores = context.card.has_tensor_cores
        fp16_reason = unsafe or (
            f"{where} has fp16 tensor cores" if tensor_cores else f"{where} has no tensor cores: fp16 gains little"
        )
        return [
            Choice(value="fp32", reason="the reference"),
            Choice(
                value="tf32",
                valid=context.card.supports_tf32,
                reason=f"{where} runs fp32 matrix products on tf32 tensor cores, same memory"
                if context.card.supports_tf32
                else f"tf32 needs compute capability 8.0, this card has {major}.{minor}",
            ),
            Choice(
                value="fp16-amp",
                swept=not ampere and unsafe is None,
                reason=f"{fp16_reason}; bf16-amp is as fast and needs no loss scaling" if ampere else fp16_reason,
            ),
            Choice(
                value="bf16-amp",
                valid=ampere,
                reason=f"{where} computes bf16 in hardware"
                if ampere
                else f"bf16 needs compute capability 8.0, this card has {major}.{minor} and would emulate it",
            ),
            Choice(
                value="bf16",
                valid=ampere,
                swept=False,
                reason="weights without an fp32 copy lose updates below 1/256 of a weight: only when named"
                if ampere
                else f"bf16 needs compute capability 8.0, this card has {major}.{minor}",
            ),
            Choice(
                value="bf16-master",
                valid=ampere,
                swept=False,
                reason="bf16 weights, gradients and activations throughout; the optimizer steps on fp32 copies of the "
                "weights: only when named"
                if ampere
                else f"bf16 needs compute capability 8.0, this card has {major}.{minor}",
            ),
        ]


def has_masters(precision: str, method: str) -> bool:
    """Whether the optimizer holds fp32 copies of the trained weights; adapters are fp32 themselves."""
    return precision == "bf16-master" and method == "full"
