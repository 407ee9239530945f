"""What kernels reach of a card's peaks: the values of ``profiles/timing.json``, fitted to measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

from planner.hardware import Card


@dataclass(frozen=True, kw_only=True)
class Achievable:
    """What kernels reach of a card's peaks and what surrounds them: the values of ``profiles/timing.json``."""

    matmul_fp32_fraction: float
    """Of the fp32 rate, by matrix products on CUDA cores."""
    matmul_tensor_core_fraction: float
    """Of the tensor cores' dense rate for the type, by matrix products."""
    attention_fp32_fraction: float
    """Of the fp32 rate, by fused attention on fp32 (the memory-efficient kernel), or without tensor cores."""
    attention_half_fraction: float
    """Of the type's dense rate, by fused attention on fp16 or bf16."""
    bandwidth_fraction: float
    """Of the memory bandwidth, by every kernel."""
    kernel_us: float
    """What a kernel takes beyond its roofline: start, ramp-up and a last wave that doesn't fill the card."""
    operator_us: float
    """CPU time for each operator of a model, its module, its views and its autograd node included."""
    inference_operator_us: float
    """The same without an autograd node, where no gradients are asked for."""
    bare_operator_us: float
    """CPU time of an operator that no module calls: autocast's casts, an optimizer's work for each tensor."""
    pcie_fraction: float
    """Of the theoretical PCIe rate, by copies from and to pinned memory."""
    host_bandwidth_bytes_per_s: float
    """What the CPU's AdamW reaches of the host memory's bandwidth."""


def reached_on(card: Card) -> Achievable:
    """What kernels reach on a card. A CPU's rates were measured, so all of them is reached.

    There is no queue on it: what an operator takes beyond its roofline is its dispatch and its autograd node, which
    are measured together; nobody waits for anything.
    """
    if card.kind == "cuda":
        return achievable()
    return Achievable(
        matmul_fp32_fraction=1.0,
        matmul_tensor_core_fraction=1.0,
        attention_fp32_fraction=1.0,
        attention_half_fraction=1.0,
        bandwidth_fraction=1.0,
        kernel_us=card.operator_us or 0.0,
        operator_us=0.0,
        inference_operator_us=0.0,
        bare_operator_us=card.operator_us or 0.0,
        pcie_fraction=1.0,
        host_bandwidth_bytes_per_s=card.memory_bandwidth_bytes_per_s,
    )


@cache
def achievable() -> Achievable:
    """The shipped values."""
    text = resources.files("planner.profiles").joinpath("timing.json").read_text(encoding="utf-8")
    values = json.loads(text)["values"]
    return Achievable(**{field.name: float(values[field.name]["value"]) for field in fields(Achievable)})
