"""Runs of which only is known whether they went through: the T4 table of the 4-bit blog post, and LitGPT's.

The blog post (huggingface.co/blog/4bit-transformers-bitsandbytes) ran TRL's SFTTrainer of May 2023 from a gist that
isn't at hand: rank, adapted modules and precision are assumed as peft and that trainer have them by default.
LitGPT has model code of its own, of the same architectures; transformers' is recorded in its place: the two peaks of
LoRA on Llama-2-7B that it measured on that card (litgptrt-011 and -014) come out 0.03 % and 0.44 % off with this setup.
"""

from __future__ import annotations

from typing import Any

from configs import spec_of
from loops import Session, TrainerLoop, optimizer_of
from reproduction import Setup, card_of, shape_of, structure
from rows import Row

from planner.config import LoraSettings
from planner.workload import Workload

_LITGPT_NOTE = "LitGPT's own model code; transformers' of the same architecture in its place"
_BLOG_NOTE = "rank 16 on q_proj and v_proj and fp16 autocast assumed; bitsandbytes of today"


def setup_of(row: Row) -> Setup | str:
    """How the row was run; only boundaries."""
    if row.source == "t4":
        return _blog(row)
    if row.measure != "ooms":
        return "LitGPT's own model code"
    return _litgpt(row)


def _blog(row: Row) -> Setup:
    """Adapters on an 8-bit or 4-bit base, prepared by peft, four micro-batches a step."""
    return Setup(
        workload=Workload(spec=spec_of(row["model_id"]), task="causal-lm"),
        config=structure(
            precision="fp16-amp",
            attention="eager",
            checkpointing="full" if row["grad_checkpointing"] == "y" else "none",
            method="qlora",
            # fp4 and nf4 differ in their code book alone
            quantization="int8" if row["quantization"] == "bnb-int8" else "nf4",
            lora=LoraSettings(r=16, alpha=32, dropout=0.05, target_modules=r".*\.(q_proj|v_proj)"),
        ),
        weights="float16",
        loop=TrainerLoop(optimizer=optimizer_of("adamw_foreach"), upcasts_outputs=True),
        loop_name="t4 adamw_foreach",
        use_cache=False,
        card=card_of(row),
        shape=shape_of(row),
        micro_batches=2,
        few_shapes=True,
        kbit_preparation=True,
        notes=(_BLOG_NOTE,),
    )


def _litgpt(row: Row) -> Setup | str:
    """Fabric's plain loop: no checkpointing, AdamW."""
    spec = spec_of(row["model_id"])
    method = row["finetune_method"].split(";")[0]
    mixed = "mixed" in row["precision"]
    return Setup(
        workload=Workload(spec=spec, task="causal-lm"),
        config=structure(
            precision="bf16-amp" if mixed else "bf16",
            attention="sdpa",
            method=method,
            quantization="nf4" if method == "qlora" else "none",
            lora=_litgpt_lora(row) if method != "full" else None,
        ),
        weights="float32" if mixed else "bfloat16",
        loop=_fabric,
        loop_name="fabric",
        use_cache=False,
        card=card_of(row),
        shape=shape_of(row),
        few_shapes=True,
        notes=(_LITGPT_NOTE,),
    )


def _litgpt_lora(row: Row) -> LoraSettings:
    """q, k and v are one layer there; of all linear layers the blocks' are adapted here."""
    everything = "all linear" in row["finetune_method"]
    rank = int(row["finetune_method"].split("; r")[1].split(" ")[0].rstrip(";"))
    modules = r".*\.(q_proj|v_proj|query_key_value)"
    return LoraSettings(r=rank, alpha=16, dropout=0.05, target_modules="all-linear" if everything else modules)


def _fabric(session: Session) -> None:
    """litgpt/finetune/lora.py, fit: loss, backward, step, zero_grad; no clipping."""
    optimizer: Any = optimizer_of("adamw_foreach")(session.source.trainable)
    for iteration in range(2):
        session.begin(iteration)
        with session.semantics.autocasting():
            loss = session.model(input_ids=session.tokens(), labels=session.tokens()).loss
        session.backward(loss)
        with session.updating():
            optimizer.step()
        session.model.zero_grad()
        del loss
