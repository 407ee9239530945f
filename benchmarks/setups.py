"""Which rows can be reproduced, and by which family's setup."""

from __future__ import annotations

from types import ModuleType

import fms
import guide
import milabench
import tables
from reproduction import Setup, card_of
from rows import Row

__all__ = ["Setup", "card_of", "setup_of"]

_FAMILIES: dict[str, ModuleType] = {
    **dict.fromkeys(tables.TABLES, tables),
    "mila": milabench,
    "perf": guide,
    "fms": fms,
}


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
    return _FAMILIES[row.source].setup_of(row)


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
