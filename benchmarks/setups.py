"""Which rows can be reproduced, and by which family's setup."""

from __future__ import annotations

from types import ModuleType

import boundaries
import fms
import generation
import guide
import hfbench
import milabench
import octo
import qwen
import tables
from reproduction import Setup, card_of
from rows import Row

__all__ = ["Setup", "card_of", "setup_of"]

_FAMILIES: dict[str, ModuleType] = {
    **dict.fromkeys(tables.TABLES, tables),
    "mila": milabench,
    "perf": guide,
    "fms": fms,
    **dict.fromkeys(("t4", "litgpt", "litgptrt"), boundaries),
    "qwen": qwen,
    "swift": qwen,
}
_INFERENCE: dict[str, ModuleType] = {
    **dict.fromkeys(("qwen25", "qwen3"), generation),
    **{"octo": octo, "hfbench": hfbench},
}


def setup_of(row: Row) -> Setup | str:
    """How to reproduce a row, or why it can't be."""
    if row.quality == "C":
        return f"quality C: {_VAGUE.get(row.id, 'vague, or another framework')}"
    if row.source in _INFERENCE:
        return _INFERENCE[row.source].setup_of(row)
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


_VAGUE = dict.fromkeys(("octo-004", "octo-005"), "how many tokens the prompt has is not stated")
_REASONS = {
    "liger": "a single fused or plain kernel, no model",
    "peft": "reserved above the start, at the longest batch of a data set that isn't here",
    "fsdpq": "sharded over two cards",
    "tune": "torchtune's own model code",
    "ao": "torchtune's own model code; batch and length not stated",
    "galore": "another optimizer (GaLore)",
    "stasml": "speed only: the memory boundary isn't one",
}
