"""milabench's BERT and T5 rows."""

from __future__ import annotations

from loops import (
    never_zeroed,
)
from reproduction import MIB, Setup, card_of, shape_of, structure
from rows import Row

from planner.models import ModelSpec, resolve_model
from planner.workload import Workload

MILABENCH_CONTEXT_BYTES = 1250 * MIB
"""What milabench's H100 holds outside the allocator as NVML counts it (FACTS: three of its rows)."""


def setup_of(row: Row) -> Setup:
    """How the row was run."""
    seq2seq = "t5" in row["model_id"]
    spec = resolve_model("t5-small") if seq2seq else _default_bert()
    amp = row["precision"].startswith("fp16-amp")
    return Setup(
        workload=Workload(spec=spec, task="seq2seq-lm" if seq2seq else "masked-lm"),
        config=structure(precision="fp16-amp" if amp else "fp32", attention="eager" if seq2seq else "sdpa"),
        weights="float32",
        loop=never_zeroed,
        loop_name="never_zeroed",
        card=card_of(row),
        shape=shape_of(row),
        context_bytes=MILABENCH_CONTEXT_BYTES,
        caveats=("T5's model code of that time differs",) if seq2seq else (),
        notes=("context taken from the H100",) if row.gpu != "H100" else (),
    )


def _default_bert() -> ModelSpec:
    """``BertConfig()``: bert-base-uncased's sizes."""
    return resolve_model("bert-base-uncased")
