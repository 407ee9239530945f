"""fms-acceleration's fine-tuning table."""

from __future__ import annotations

from loops import (
    TrainerLoop,
    optimizer_of,
)
from reproduction import Setup, card_of, shape_of, structure
from rows import Row

from planner.config import LoraSettings
from planner.hardware import context_bytes
from planner.models import resolve_model
from planner.workload import Workload

_LORA = LoraSettings(r=16, alpha=16, dropout=0.1, target_modules=r".*\.(q_proj|k_proj|v_proj|o_proj|c_attn)")


def setup_of(row: Row) -> Setup | str:
    """The Trainer in bf16 with activation checkpointing on packed sequences; sdpa's flash kernel for flash2."""
    if "GPTQ" in row["model_id"] or "triton" in row["notes"]:
        return "fused kernels, not stock transformers"
    method = row["finetune_method"].split(";")[0]
    if method == "qlora" and "prepare_model_for_kbit" not in row["notes"]:
        return "nf4 without the upcast of norms that peft makes"
    autocast = "autocast flag on" in row["precision"]
    return Setup(
        workload=Workload(spec=resolve_model(row["model_id"]), task="causal-lm"),
        config=structure(
            precision="bf16-amp" if autocast else "bf16",
            attention="sdpa",
            checkpointing="full",
            method=method,
            quantization="nf4" if method == "qlora" else "none",
            lora=_LORA if method != "full" else None,
        ),
        weights="bfloat16",
        loop=TrainerLoop(optimizer=optimizer_of("adamw_foreach"), upcasts_outputs=autocast),
        loop_name=f"fms adamw_foreach {autocast}",
        use_cache=False,
        card=card_of(row),
        shape=shape_of(row),
        few_shapes=True,
        kbit_preparation=method == "qlora",
        context_bytes=context_bytes(card_of(row))[0],
        # a full update's peak is the optimizer's, whatever the loss does
        caveats=()
        if method == "full"
        else ("the causal loss of that time copied the shifted logits (suspected, not recorded)",),
    )
