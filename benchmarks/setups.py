"""What each source ran: model, precision, attention, loop and card of every row that can be reproduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loops import (
    HuggingFaceAdafactor,
    HuggingFaceAdamW,
    Loop,
    Session,
    TrainerLoop,
    never_zeroed,
    optimizer_of,
    sum_of_logits,
)
from rows import Row, whole

from planner.config import LoraSettings, TrainingConfig
from planner.hardware import Card, context_bytes, find_card
from planner.memory.polynomials import Shape
from planner.models import ModelSpec, resolve_model
from planner.workload import Workload

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a row's authors ran."""

    workload: Workload
    config: TrainingConfig
    """Precision, attention, checkpointing and method; the rest is the loop's."""
    weights: str
    """``float32``, ``float16`` or ``bfloat16``."""
    loop: Loop
    loop_name: str
    """Names the loop and its settings in the cache."""
    card: Card
    shape: Shape
    kbit_preparation: bool = False
    """Whether peft.prepare_model_for_kbit_training ran between quantization and adapters."""
    micro_batches: int = 1
    context_bytes: int = 0
    """Outside the allocator, for rows measured from outside; the source's own figure where it gives one."""
    few_shapes: bool = False
    """So few rows share this structure that recording each at its own shape is less work than a fit."""
    use_cache: bool = True
    """As transformers' configurations have it; the Trainer turns it off with activation checkpointing."""
    caveats: tuple[str, ...] = ()
    """What the model code or the loop of that time did otherwise."""
    notes: tuple[str, ...] = ()
    """What else was assumed."""


def setup_of(row: Row) -> Setup | str:
    """How to reproduce a row, or why it can't be."""
    if row.quality == "C":
        return "quality C: vague, or another framework"
    if row["kind"] != "train":
        return _inference_reason(row)
    if row.source not in _FAMILIES:
        return _REASONS.get(row.source, "no loop is known for this source")
    if row.micro_batch is None or row.seq_len is None:
        return "micro-batch or length is not one number"
    return _FAMILIES[row.source](row)


def _inference_reason(row: Row) -> str:
    if "generat" in row["notes"] + row["model_class/task"]:
        return "generation: no step of training to record"
    return "inference: no step of training to record"


_REASONS = {
    "liger": "a single fused or plain kernel, no model",
    "litgpt": "LitGPT's own model code",
    "litgptrt": "LitGPT's own model code",
    "peft": "reserved above the start, at the longest batch of a data set that isn't here",
    "swift": "remote-code models, and lengths that depend on data",
    "qwen": "remote-code model, and how memory was read is not stated",
    "fsdpq": "sharded over two cards",
    "tune": "torchtune's own model code",
    "ao": "torchtune's own model code; batch and length not stated",
    "galore": "another optimizer (GaLore)",
    "stasml": "speed only: the memory boundary isn't one",
    "t4": "int8 and nf4 LoRA of unstated rank, prepared by library versions of 2023",
}


def card_of(row: Row) -> Card:
    """The row's card; a laptop's or an unlisted size of it counts as the nearest listed one."""
    name = row.gpu.split("(")[0].replace("NVIDIA", "").strip()
    vram = whole(row["vram_gb"])
    return find_card(name, vram_bytes=vram * GIB if vram else None)


def _config(**fields: Any) -> TrainingConfig:
    """A structure; shapes and optimizer are the loop's."""
    ones = dict.fromkeys(("micro_batch_size", "seq_len", "max_tokens_per_micro_batch"), 1)
    ones |= dict.fromkeys(("gradient_accumulation_steps", "effective_batch_size"), 1)
    return TrainingConfig(**ones, **fields)


def _shape(row: Row) -> Shape:
    assert row.micro_batch is not None and row.seq_len is not None
    return row.micro_batch, row.seq_len


# -- the eager-versus-SDPA tables of transformers' documentation ---------------------------------------------------

_MASKED = "masked-lm"
_TABLES = {
    "bert": ("bert-base-uncased", _MASKED),
    "opt350": ("facebook/opt-350m", "causal-lm"),
    "gpt2l": ("gpt2-large", "causal-lm"),
    "distilbert": ("distilbert-base-uncased", _MASKED),
    "albert": ("albert-base-v1", _MASKED),
    "electra": ("google/electra-base-generator", _MASKED),
}
_GPT2 = "GPT-2's model code of that time differs (fused cache, causal masks; that these explain it is not shown)"
_OF_THAT_TIME = {
    ("opt350", "eager"): "OPT of that time copied queries, keys and values, and made its softmax in fp32",
    ("opt350", "sdpa"): "OPT of that time copied queries, keys, values and the attention's output",
    ("gpt2l", "eager"): _GPT2,
    ("gpt2l", "sdpa"): _GPT2,
}
_ASSUMED = {
    "albert": "checkpoint assumed (the table is nearer to another one, without attention dropout)",
    "electra": "checkpoint assumed",
    "bert": "head assumed",
}


def _table(row: Row) -> Setup:
    name, task = _TABLES[row.source]
    attention = row["attention"]
    return Setup(
        workload=Workload(spec=resolve_model(name), task=task),
        config=_config(precision="fp32", attention=attention),
        weights="float16",
        loop=sum_of_logits,
        loop_name="sum_of_logits",
        card=card_of(row),
        shape=_shape(row),
        caveats=_known(_OF_THAT_TIME.get((row.source, attention))),
        notes=_known(_ASSUMED.get(row.source)),
    )


def _known(text: str | None) -> tuple[str, ...]:
    return (text,) if text else ()


# -- milabench -----------------------------------------------------------------------------------------------------

MILABENCH_CONTEXT_BYTES = 1250 * MIB
"""What milabench's H100 holds outside the allocator as NVML counts it (FACTS: three of its rows)."""


def _milabench(row: Row) -> Setup:
    seq2seq = "t5" in row["model_id"]
    spec = resolve_model("t5-small") if seq2seq else _default_bert()
    amp = row["precision"].startswith("fp16-amp")
    return Setup(
        workload=Workload(spec=spec, task="seq2seq-lm" if seq2seq else _MASKED),
        config=_config(precision="fp16-amp" if amp else "fp32", attention="eager" if seq2seq else "sdpa"),
        weights="float32",
        loop=never_zeroed,
        loop_name="never_zeroed",
        card=card_of(row),
        shape=_shape(row),
        context_bytes=MILABENCH_CONTEXT_BYTES,
        caveats=("T5's model code of that time differs (recorded with 4.48: within 0.2 %)",) if seq2seq else (),
        notes=("context taken from the H100",) if row.gpu != "H100" else (),
    )


def _default_bert() -> ModelSpec:
    """``BertConfig()``: bert-base-uncased's sizes."""
    return resolve_model("bert-base-uncased")


# -- transformers' single-GPU guide --------------------------------------------------------------------------------

GUIDE_CONTEXT_BYTES = 1343 * MIB
"""The guide's own figure: one tensor on its V100."""
_GUIDE_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw_hf": HuggingFaceAdamW,
    "adafactor": HuggingFaceAdafactor,
    "bnb Adam8bit": optimizer_of("adamw_8bit"),
}


def _guide(row: Row) -> Setup | str:
    name = next((name for name in _GUIDE_OPTIMIZERS if row["optimizer"].startswith(name)), None)
    if name is None:
        return f"optimizer {row['optimizer']!r} isn't modelled"
    accumulate = (whole(row["grad_accum"]) or 1) > 1
    checkpointed = row["grad_checkpointing"] == "y"
    return Setup(
        workload=Workload(spec=resolve_model("bert-large-uncased"), task="sequence-classification"),
        config=_config(
            precision=row["precision"],
            attention="eager",
            checkpointing="full" if checkpointed else "none",
        ),
        weights="float32",
        loop=TrainerLoop(optimizer=_GUIDE_OPTIMIZERS[name], zero_grads=True, labels=_one_label),
        loop_name=f"guide {name}",
        use_cache=False,
        card=card_of(row),
        shape=_shape(row),
        micro_batches=2 if accumulate else 1,
        few_shapes=True,
        context_bytes=GUIDE_CONTEXT_BYTES,
        # derivatives.yaml until torch 1.10: _softmax_backward_data(grad, result, dim, self)
        caveats=()
        if checkpointed
        else ("torch before 1.11 kept every softmax's input (explains fp32 rows; fp16 in part)",),
    )


def _one_label(session: Session) -> Any:
    return session.tokens(session.shape[0])


# -- fms-acceleration ----------------------------------------------------------------------------------------------

_LORA = LoraSettings(r=16, alpha=16, dropout=0.1, target_modules=r".*\.(q_proj|k_proj|v_proj|o_proj|c_attn)")


def _fms(row: Row) -> Setup | str:
    """The Trainer in bf16 with activation checkpointing on packed sequences; sdpa's flash kernel for flash2."""
    if "GPTQ" in row["model_id"] or "triton" in row["notes"]:
        return "fused kernels, not stock transformers"
    method = row["finetune_method"].split(";")[0]
    if method == "qlora" and "prepare_model_for_kbit" not in row["notes"]:
        return "nf4 without the upcast of norms that peft makes"
    autocast = "autocast flag on" in row["precision"]
    return Setup(
        workload=Workload(spec=resolve_model(row["model_id"]), task="causal-lm"),
        config=_config(
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
        shape=_shape(row),
        few_shapes=True,
        kbit_preparation=method == "qlora",
        context_bytes=context_bytes(card_of(row))[0],
        # a full update's peak is the optimizer's, whatever the loss does
        caveats=()
        if method == "full"
        else ("the causal loss of that time copied the shifted logits (suspected, not recorded)",),
    )


_FAMILIES: dict[str, Callable[[Row], Setup | str]] = {
    **dict.fromkeys(_TABLES, _table),
    "mila": _milabench,
    "perf": _guide,
    "fms": _fms,
}
