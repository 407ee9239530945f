"""fms-acceleration's fine-tuning table.

Its benchmark (scripts/benchmarks/benchmark.py) runs TRL's SFTTrainer on sequences packed to one length, 100 steps.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import flash_attn_stand_in
import fused_kernels
import torch
from configs import spec_of
from loops import Session, TrainerLoop, optimizer_of
from reproduction import Setup, card_of, shape_of, structure
from rows import Row
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from planner.config import LoraSettings
from planner.hardware import context_bytes
from planner.levers.checkpointing import checkpointing_layers
from planner.workload import Workload

_LORA = LoraSettings(r=16, alpha=16, dropout=0.1, target_modules=r".*\.(q_proj|k_proj|v_proj|o_proj|c_attn)")


@dataclass(frozen=True, kw_only=True)
class PackedSequences(Workload):
    """A decoder with flash_attn, as SFTTrainer leaves it."""

    norms_in_fp32: bool = False
    """trl/trainer/utils.py, peft_module_casting_to_bf16: after peft's k-bit preparation has cast everything that isn't
    quantized to fp32, embeddings and output layer go back to bf16 and norms stay. The rows "without fp32 upcasting"
    have neither: fms_acceleration_peft/framework_plugin_bnb.py, _prepare_model_for_kbit_training."""
    fused: str = "none"
    """Triton kernels of fms_acceleration_foak: ``none``, ``logits`` (norms, rotary embeddings, the loss) or ``linear``
    (the same, the loss with the output layer)."""

    def build_model(self, *, attention: str, dtype: torch.dtype, device: str = "meta", **changes: Any) -> nn.Module:
        """The model; ``attention`` is not looked at."""
        model = super().build_model(attention="eager", dtype=dtype, device=device, **changes)
        flash_attn_stand_in.use(model)
        # what attention of that time casts to where norms leave fp32 behind (quantizers/base.py sets it)
        model.config._pre_quantization_dtype = dtype  # type: ignore[union-attr]
        if self.fused != "none":
            fused_kernels.use(model, fused_linear_loss=self.fused == "linear")
        if self.norms_in_fp32:
            for name, module in model.named_modules():
                if "norm" in name:
                    for parameter in module.parameters():
                        parameter.data = parameter.data.float()
        return model


@dataclass(frozen=True, kw_only=True)
class ReentrantTrainer(TrainerLoop):
    """The Trainer with torch's reentrant checkpointing, its default until transformers 5.

    A layer is computed again to its very end, and its result is there while its backward pass runs
    (torch/utils/checkpoint.py, CheckpointFunction.backward); the other kind stops at the last tensor that is needed.
    """

    fused: bool = False
    """Whether fms_acceleration_foak's kernels are in the model's code."""
    fused_adapters: bool = False
    """Whether fms_acceleration_foak's functions compute adapters on 4-bit layers."""

    def __call__(self, session: Session) -> None:
        """With the layers' checkpointing exchanged for the time of the loop."""
        if self.fused_adapters:
            fused_kernels.fuse_adapters(session.model)
        layers: list[Any] = checkpointing_layers(session.model)
        functions = [layer._gradient_checkpointing_func for layer in layers]
        for index, layer in enumerate(layers):
            layer._gradient_checkpointing_func = partial(_reentrant, session, index)
        # PreTrainedModel.enable_input_require_grads: without it nothing below the adapters would be trained
        handle = session.model.get_input_embeddings().register_forward_hook(_require_grad)
        kernels = fused_kernels.patched(session.model) if self.fused else nullcontext()
        try:
            with kernels:
                super().__call__(session)
        finally:
            handle.remove()
            for layer, function in zip(layers, functions, strict=True):
                layer._gradient_checkpointing_func = function


_SANTACODER = (
    "its configuration is written down from memory, and something in its code or run is missing here: runs need what "
    "one copy more of the logits would take"
)


def _require_grad(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def _reentrant(session: Session, index: int, run: Any, *args: Any) -> Any:
    """``checkpoint(run, *args, use_reentrant=True)``, whose second computation the recording's modes must see."""
    done: list[bool] = []

    def either(*args: Any) -> Any:
        if not done:
            done.append(True)
            return run(*args)
        with session.recorder.in_layer(index), session.semantics.recomputing():
            return run(*args)

    return CheckpointFunction.apply(either, False, *args)


def setup_of(row: Row) -> Setup | str:
    """The Trainer in bf16 with activation checkpointing."""
    if "GPTQ" in row["model_id"]:
        return "GPTQ weights under LoRA: auto_gptq's triton kernels aren't modelled"
    method = row["finetune_method"].split(";")[0]
    autocast = "autocast flag on" in row["precision"]
    fused = _fused(row)
    fused_adapters = fused != "none" and method == "qlora"
    return Setup(
        workload=PackedSequences(
            spec=spec_of(row["model_id"]),
            task="causal-lm",
            norms_in_fp32="prepare_model_for_kbit" in row["notes"],
            fused=fused,
        ),
        config=structure(
            precision="bf16-amp" if autocast else "bf16",
            attention="sdpa",
            checkpointing="full",
            method=method,
            quantization="nf4" if method == "qlora" else "none",
            lora=_LORA if method != "full" else None,
        ),
        weights="bfloat16",
        loop=ReentrantTrainer(
            optimizer=optimizer_of("adamw_foreach"),
            upcasts_outputs=autocast,
            fused=fused != "none",
            fused_adapters=fused_adapters,
        ),
        loop_name=f"fms reentrant adamw_foreach {autocast} {fused_adapters}",
        use_cache=False,
        card=card_of(row),
        shape=shape_of(row),
        few_shapes=True,
        context_bytes=context_bytes(card_of(row))[0],
        # a full update's peak is the optimizer's, whatever the loss does
        caveats=()
        if method == "full"
        else ("that release upcast the logits otherwise, and copied them shifted by a token",),
        remaining=(_SANTACODER,) if "santacoder" in row["model_id"] else (),
    )


def _fused(row: Row) -> str:
    if "triton" not in row["notes"]:
        return "none"
    return "linear" if "Liger" in row["notes"] else "logits"
