"""The eager-versus-SDPA tables of transformers' documentation."""

from __future__ import annotations

from loops import (
    sum_of_logits,
)
from reproduction import Setup, card_of, known, shape_of, structure
from rows import Row

from planner.models import resolve_model
from planner.workload import Workload

_MASKED = "masked-lm"
TABLES = {
    "bert": ("bert-base-uncased", _MASKED),
    "opt350": ("facebook/opt-350m", "causal-lm"),
    "gpt2l": ("gpt2-large", "causal-lm"),
    "distilbert": ("distilbert-base-uncased", _MASKED),
    "albert": ("albert-base-v1", _MASKED),
    "electra": ("google/electra-base-generator", _MASKED),
}
_GPT2 = "GPT-2's model code of that time differs"
_OF_THAT_TIME = {
    ("opt350", "eager"): "OPT of that time copied queries, keys and values, and made its softmax in fp32",
    ("opt350", "sdpa"): "OPT of that time copied queries, keys, values and the attention's output",
    ("gpt2l", "eager"): _GPT2,
    ("gpt2l", "sdpa"): _GPT2,
}
_ASSUMED = {
    "albert": "checkpoint assumed (the table is nearer to another one, without attention dropout)",
    "electra": "checkpoint assumed",
    "bert": "BertForMaskedLM, for the BertLMHeadModel of huggingface/transformers#28802: the same layers",
}
_BESIDE_CHECKPOINT: dict[str, dict[str, int]] = {
    "bert": {
        "bert.pooler.dense.bias": 768,
        "bert.pooler.dense.weight": 768 * 768,
        "cls.seq_relationship.bias": 2,
        "cls.seq_relationship.weight": 2 * 768,
    },
    "distilbert": {},
    "gpt2l": {f"transformer.h.{layer}.attn.bias": 1024 * 1024 for layer in range(36)},
}
"""Of the checkpoints that safetensors loads: what they hold beside the model's parameters (BERT's pooler and next
sentence head, GPT-2's causal masks). OPT's is in torch's own format."""


def setup_of(row: Row) -> Setup:
    """How the row was run."""
    name, task = TABLES[row.source]
    attention = row["attention"]
    return Setup(
        workload=Workload(spec=resolve_model(name), task=task),
        config=structure(precision="fp32", attention=attention),
        weights="float16",
        loop=sum_of_logits,
        loop_name="sum_of_logits",
        card=card_of(row),
        shape=shape_of(row),
        caveats=known(_OF_THAT_TIME.get((row.source, attention))),
        measured_from=1,
        beside_checkpoint=_BESIDE_CHECKPOINT.get(row.source),
        notes=known(_ASSUMED.get(row.source)),
    )
