"""How long an optimizer step takes: a roofline for every recorded operator, behind a queue that the CPU fills.

A kernel takes the longer of its arithmetic and its memory traffic, at what kernels of its kind reach of the card's
peaks, and a constant for starting and draining. PyTorch launches operators one after the other without waiting for
them, so the card works in order and idles whenever the CPU is behind. The numbers are in ``profiles/timing.json``,
fitted to published measurements by ``benchmarks/time_accuracy.py``. What is meant to hold is the order of
configurations on one card; measured trials replace it where there is a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.achievable import Achievable, achievable, reached_on
from planner.communication import together_seconds
from planner.config import TrainingConfig
from planner.hardware import Card
from planner.host_memory import TO_CARD, TO_HOST, bytes_outside_layers, trained_tensors
from planner.levers.optimizer import PAGED_BYTES_PER_PARAMETER
from planner.levers.precision import WEIGHT_DTYPES, has_masters
from planner.memory.model import MemoryModel, StepModel
from planner.memory.polynomials import Shape
from planner.recording.record import Op

Seconds = NDArray[np.float64]
Amounts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Time:
    """How long one optimizer step takes: all its micro-batches, then the update."""

    step_ms: float
    """One optimizer step."""
    micro_batch_ms: float
    """One of its micro-batches, forward and backward, on average."""
    update_ms: float
    """Clipping and the optimizer's step, with transfers where the optimizer is offloaded."""
    tokens_per_s: float
    """Tokens of the step's sequences a second."""
    source: str = "simulated"
    """simulated or measured."""

    def scaled(self, factor: float) -> Time:
        """The same at another pace."""
        return replace(
            self,
            step_ms=self.step_ms * factor,
            micro_batch_ms=self.micro_batch_ms * factor,
            update_ms=self.update_ms * factor,
            tokens_per_s=self.tokens_per_s / factor,
        )


@dataclass(frozen=True, kw_only=True)
class InferenceTime(Time):
    """Time of one batch of the longest texts, and speeds over texts of all lengths.

    ``tokens_per_s``: of texts that are read; of a generating task, of what is written, prefill included.
    """

    sequences_per_s: float
    """Texts, documents or requests a second, at the planned lengths."""
    prefill_ms: float | None = None
    """Of a generating task: from a batch's arrival to its first token."""
    prefill_tokens_per_s: float | None = None
    """Prompt tokens a second in that."""
    decode_ms_per_token: float | None = None
    """For each further token of the whole batch, on average."""
    decode_tokens_per_s: float | None = None
    """Tokens of all the batch's sequences a second, after the first."""
    lower_ms: float | None = None
    """With offloaded weights: the batch's time if transfers took what the link's rate says and nothing else."""
    upper_ms: float | None = None
    """With offloaded weights: the batch's time if nothing overlapped and every copy waited for the one before."""


# -- kernels ---------------------------------------------------------------------------------------------------------

_NO_KERNEL = frozenset(
    {"aten._unsafe_view", "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.set_"}
)
"""Operators that only make a tensor; their CPU time is in ``operator_us``, as that of views is."""
_CAST = "aten._to_copy"


@dataclass(frozen=True)
class Operators:
    """The operators of a step in order, as arrays."""

    kinds: tuple[str, ...]
    """Each kind once."""
    kind: NDArray[np.intp]
    """[operators] index into ``kinds``"""
    has_kernel: NDArray[np.bool_]
    """[operators] whether the card has something to do"""
    is_cast: NDArray[np.bool_]
    """[operators]"""
    is_transfer: NDArray[np.bool_]
    """[operators] copies between card and host, which run on the same stream as the kernels"""

    @classmethod
    def of(cls, ops: Sequence[Op]) -> Operators:
        """From recorded operators."""
        index: dict[str, int] = {}
        kind = np.array([index.setdefault(op.kind, len(index)) for op in ops], dtype=np.intp)
        has_kernel = np.array([op.name not in _NO_KERNEL for op in ops], dtype=np.bool_)
        is_cast = np.array([op.name == _CAST for op in ops], dtype=np.bool_)
        is_transfer = np.array([op.name in (TO_HOST, TO_CARD) for op in ops], dtype=np.bool_)
        return cls(tuple(index), kind, has_kernel, is_cast, is_transfer)

    def kernel_seconds(
        self, flops: Amounts, moved_bytes: Amounts, card: Card, *, tf32: bool, reached: Achievable
    ) -> Seconds:
        """Time of each kernel alone on the card. [operators]"""
        rates = np.array([_rate(kind, card, tf32=tf32, reached=reached) for kind in self.kinds])
        arithmetic = flops / rates[self.kind] if len(rates) else np.zeros(0)
        bandwidth = card.memory_bandwidth_bytes_per_s * reached.bandwidth_fraction
        traffic = moved_bytes / np.where(self.is_transfer, card.pcie_bytes_per_s * reached.pcie_fraction, bandwidth)
        seconds: Seconds = np.where(self.has_kernel, np.maximum(arithmetic, traffic) + reached.kernel_us * 1e-6, 0.0)
        return seconds

    def launch_seconds(self, reached: Achievable) -> Seconds:
        """CPU time of each operator. [operators]"""
        if not reached.operator_us:  # in the kernels' own time
            return np.zeros(len(self.kind))
        busy = np.where(self.is_cast, reached.bare_operator_us, reached.operator_us)
        seconds: Seconds = np.where(self.has_kernel, busy, 0.0) * 1e-6
        return seconds


def _rate(kind: str, card: Card, *, tf32: bool, reached: Achievable) -> float:
    """FLOP/s that operators of a kind reach; elementwise ones are bound by memory alone."""
    if kind == "elementwise":
        return float("inf")
    family, dtype = kind.split(":")
    rates = card.dense_flops_per_s
    if family == "matmul" and dtype == "fp32" and tf32:  # fused attention doesn't follow the tf32 switch
        dtype = "tf32"
    on_cuda_cores = dtype == "fp32" or dtype not in rates or not card.has_tensor_cores
    rate = rates.get(dtype, rates["fp32"])
    if family == "attention":
        return rate * (reached.attention_fp32_fraction if on_cuda_cores else reached.attention_half_fraction)
    return rate * (reached.matmul_fp32_fraction if on_cuda_cores else reached.matmul_tensor_core_fraction)


# -- the queue -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward and backward pass."""

    kernels_s: float
    """Sum of its kernels."""
    launches_s: float
    """Sum of the CPU's work."""
    alone_s: float
    """From an idle card to an idle card."""

    @classmethod
    def of(cls, kernels: Seconds, launches: Seconds) -> Pass:
        """A kernel starts when it has been launched and the one before it has ended.

        So the last one ends at ``max over i of (time at which i is launched + kernels from i on)``.
        """
        total = float(kernels.sum())
        waiting = np.cumsum(launches) - (np.cumsum(kernels) - kernels)
        return cls(kernels_s=total, launches_s=float(launches.sum()), alone_s=total + float(waiting.max(initial=0.0)))

    def repeated(self, times: int, *, between_s: float = 0.0) -> float:
        """Seconds of several passes without waiting in between; each further one has ``between_s`` more to do.

        The CPU runs ahead across passes: after the first, one takes as long as the slower of the two sides.
        """
        return self.alone_s + (times - 1) * max(self.kernels_s + between_s, self.launches_s)


# -- the update ------------------------------------------------------------------------------------------------------

_UPDATE_PASSES = {
    # Reads and writes of values of the parameters' type, for each parameter; torch 2.13 where not said otherwise.
    # fused_adam_impl.cu: reads weight, gradient and both moments, writes all but the gradient.
    "adamw_fused": 7,
    # torch/optim/adam.py, _multi_tensor_adam: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4.
    "adamw_foreach": 20,
    # bitsandbytes/csrc/kernels.cu, kOptimizerStatic8bit2StateBlockwise: gradient, and the weight both ways.
    "adamw_8bit": 3,
    "paged_adamw_8bit": 3,
    # torch/optim/_adafactor.py, _single_tensor_adafactor: three norms 3, product 1, div 2, clamp 2, rsqrt 2, mul 3,
    # norm 1, add 3.
    "adafactor": 17,
    # torch/optim/sgd.py, _multi_tensor_sgd without momentum: one add.
    "sgd": 3,
}
_UPDATE_STATE_BYTES = dict.fromkeys(("adamw_8bit", "paged_adamw_8bit"), 2 * 2 * (1 + 4 / 256))
"""Bytes a parameter besides: two moments of one byte with an fp32 scale for each 256, both ways."""
_UPDATE_OPERATORS = {"adafactor": 20, "adamw_8bit": 4, "paged_adamw_8bit": 4}
"""Operators for each tensor where the optimizer loops over tensors; multi-tensor kernels have bookkeeping only."""
_MASTER_BYTES = 2 * (2 + 4)
"""MasterWeights: the gradient to fp32, the fp32 weight to bf16; each reads one and writes the other."""
_MASTER_OPERATORS = 4
"""MasterWeights, for each tensor: those two copies, and an optimizer of its own."""
_CLIP_PASSES = 3
"""torch.nn.utils.clip_grad_norm_: gradients are read for the norm, then read and written to scale them."""
_UNSCALE_PASSES = 2
"""torch.amp.GradScaler.unscale_: gradients are read and written."""
_ACCUMULATE_PASSES = 3
"""accumulate_grad.h: the old and the new gradient are read, their sum is written."""
_HOST_ADAMW_BYTES = 28
"""FusedAdamKernel.cpp, fp32: reads weight, gradient and both moments, writes all but the gradient."""


def parameter_bytes(config: TrainingConfig) -> int:
    """Bytes of a trained parameter: adapters and everything under autocast are fp32."""
    return 2 if config.precision in WEIGHT_DTYPES and config.method == "full" else 4


def update_seconds(
    config: TrainingConfig,
    card: Card,
    *,
    trainable_parameters: int,
    trainable_tensors: int,
    reached: Achievable,
    bytes_on_card: int = 0,
) -> float:
    """From the last gradient to the new weights. The norm is looked at in between, so the queue is empty then.

    ``bytes_on_card``: weights that stay on the card where the layers' are offloaded.
    """
    value_bytes = parameter_bytes(config)
    if config.offload == "parameters":
        clip = _CLIP_PASSES * 4 * trainable_parameters / reached.host_bandwidth_bytes_per_s
        publish = bytes_on_card / (card.pcie_bytes_per_s * reached.pcie_fraction)
        return clip + publish + _host_adamw_seconds(value_bytes, trainable_parameters, reached)
    bandwidth = card.memory_bandwidth_bytes_per_s * reached.bandwidth_fraction
    passes = _CLIP_PASSES + (_UNSCALE_PASSES if config.precision == "fp16-amp" else 0)
    clip = passes * value_bytes * trainable_parameters / bandwidth
    if config.offload == "optimizer":
        return clip + _host_update_seconds(value_bytes, card, trainable_parameters, reached)
    masters = has_masters(config.precision, config.method)
    each_bytes = _UPDATE_PASSES[config.optimizer] * (4 if masters else value_bytes)
    state_bytes = _UPDATE_STATE_BYTES.get(config.optimizer, 0) + masters * _MASTER_BYTES
    traffic_s = (each_bytes + state_bytes) * trainable_parameters / bandwidth
    operators = trainable_tensors * (_UPDATE_OPERATORS.get(config.optimizer, 1) + masters * _MASTER_OPERATORS)
    paging = 2 * PAGED_BYTES_PER_PARAMETER.get(config.optimizer, 0) * trainable_parameters  # in and out again
    paging_s = paging / (card.pcie_bytes_per_s * reached.pcie_fraction)
    return clip + paging_s + max(traffic_s, operators * reached.bare_operator_us * 1e-6)


def _host_update_seconds(value_bytes: int, card: Card, parameters: int, reached: Achievable) -> float:
    """Gradients to the host, AdamW there, weights back, one after the other as the emitted script does it."""
    transfers = 2 * value_bytes * parameters / (card.pcie_bytes_per_s * reached.pcie_fraction)
    return transfers + _host_adamw_seconds(value_bytes, parameters, reached)


def _host_adamw_seconds(value_bytes: int, parameters: int, reached: Achievable) -> float:
    conversion_bytes = 0 if value_bytes == 4 else 2 * (value_bytes + 4)  # gradients to fp32, weights back
    return (_HOST_ADAMW_BYTES + conversion_bytes) * parameters / reached.host_bandwidth_bytes_per_s


# -- the step --------------------------------------------------------------------------------------------------------


def step_time(
    model: MemoryModel,
    config: TrainingConfig,
    card: Card,
    *,
    trainable_parameters: int,
    tokens_per_sequence: int,
    reached: Achievable | None = None,
) -> Time:
    """One optimizer step of ``gradient_accumulation_steps`` micro-batches and an update.

    ``tokens_per_sequence`` is what one sequence counts for; ``reached`` replaces the shipped values.
    """
    reached = reached or reached_on(card)
    shape = (config.micro_batch_size, config.seq_len)
    step = model.step(shape)
    operators = Operators.of(step.template.ops)
    tf32 = config.precision == "tf32" and "tf32" in card.dense_flops_per_s
    kernels = operators.kernel_seconds(*step.ops_at(shape), card, tf32=tf32, reached=reached)
    micro_batches, tensors = config.gradient_accumulation_steps, len(step.template.gradients)
    launches, together_s = operators.launch_seconds(reached), 0.0
    if config.gpus > 1:
        moved = step.ops_at(shape)[1]
        together_s = _together_seconds(config, step, moved, (kernels, launches), card, trainable_parameters, reached)
        tensors = len(trained_tensors(model.update))
        trainable_parameters = _own_parameters(config, trainable_parameters)
    passes_s = _passes_seconds(Pass.of(kernels, launches), config, card, trainable_parameters, reached) + together_s
    if model.contrast is not None:
        passes_s += _contrast_seconds(model, step, shape, config, card, tf32=tf32, reached=reached)
    on_card = bytes_outside_layers(model.update) if config.offload == "parameters" else 0
    sizes = {"trainable_parameters": trainable_parameters, "trainable_tensors": tensors, "bytes_on_card": on_card}
    update_s = update_seconds(config, card, reached=reached, **sizes)
    step_s = passes_s + update_s
    tokens = config.gpus * config.micro_batch_size * micro_batches * tokens_per_sequence
    return Time(
        step_ms=step_s * 1e3,
        micro_batch_ms=passes_s / micro_batches * 1e3,
        update_ms=update_s * 1e3,
        tokens_per_s=tokens / step_s,
    )


def _together_seconds(
    config: TrainingConfig,
    step: StepModel,
    moved_bytes: Amounts,
    own: tuple[Seconds, Seconds],
    card: Card,
    trainable_parameters: int,
    reached: Achievable,
) -> float:
    """What several cards wait for each other; ``own`` are kernels and launches of one of them."""
    return together_seconds(
        config,
        step.template.ops,
        moved_bytes,
        own,
        gradient_bytes=parameter_bytes(config) * trainable_parameters,
        bytes_per_s=card.link_bytes_per_s * reached.pcie_fraction,
    )


def _own_parameters(config: TrainingConfig, trainable_parameters: int) -> int:
    """Trained parameters that one card updates: its shards, or all."""
    return -(-trainable_parameters // config.gpus) if config.parallelism == "fsdp2" else trainable_parameters


def _contrast_seconds(
    model: MemoryModel,
    step: StepModel,
    shape: Shape,
    config: TrainingConfig,
    card: Card,
    *,
    tf32: bool,
    reached: Achievable,
) -> float:
    """What gradient caching takes: every micro-batch forward once more, and the loss over all vectors."""
    ops = step.template.ops
    operators, forward = Operators.of(ops), np.array([not op.in_backward for op in ops], dtype=np.bool_)
    kernels = operators.kernel_seconds(*step.ops_at(shape), card, tf32=tf32, reached=reached)
    first_pass = Pass.of(kernels[forward], operators.launch_seconds(reached)[forward])
    assert model.contrast is not None
    ops = model.contrast.ops
    operators = Operators.of(ops)
    flops = np.array([op.flops for op in ops], dtype=np.int64)
    moved = np.array([sum(op.moved_bytes) for op in ops], dtype=np.int64)
    kernels = operators.kernel_seconds(flops, moved, card, tf32=tf32, reached=reached)
    comparing = Pass.of(kernels, operators.launch_seconds(reached))
    return first_pass.repeated(config.gradient_accumulation_steps) + comparing.alone_s


def _passes_seconds(
    one_pass: Pass, config: TrainingConfig, card: Card, trainable_parameters: int, reached: Achievable
) -> float:
    """All micro-batches. Where they wait for the host, the CPU doesn't run ahead from one to the next.

    Offloaded activations: the emitted script waits for its pinned buffers before each pass. Offloaded parameters:
    from the second pass on each gradient is waited for and added to the host's, which the card waits for.
    """
    micro_batches = config.gradient_accumulation_steps
    accumulated_bytes = _ACCUMULATE_PASSES * parameter_bytes(config) * trainable_parameters
    if config.offload == "activations":
        on_card_s = accumulated_bytes / (card.memory_bandwidth_bytes_per_s * reached.bandwidth_fraction)
        return micro_batches * one_pass.alone_s + (micro_batches - 1) * on_card_s
    if config.offload == "parameters":
        on_host_s = accumulated_bytes / reached.host_bandwidth_bytes_per_s
        return micro_batches * one_pass.alone_s + (micro_batches - 1) * on_host_s
    on_card_s = accumulated_bytes / (card.memory_bandwidth_bytes_per_s * reached.bandwidth_fraction)
    return one_pass.repeated(micro_batches, between_s=on_card_s)


__all__ = [
    "Achievable",
    "InferenceTime",
    "Operators",
    "Pass",
    "Time",
    "achievable",
    "parameter_bytes",
    "reached_on",
    "step_time",
    "update_seconds",
]
