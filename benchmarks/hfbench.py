"""transformers' benchmark utility on BERT: one forward pass of a plain encoder in fp32 on a TITAN RTX.

PyTorchBenchmark of transformers 2.11 (src/transformers/benchmark/benchmark.py, _inference_memory) makes the model with
random weights, runs ``model(input_ids)`` once under ``no_grad`` in a process of its own and then reads from NVML what
the card has in use. Rows of other sizes of BERT share a context, which no source states: it is taken from one of them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from loops import Session
from reproduction import MIB, Setup, card_of, shape_of, structure
from rows import Row
from torch import Tensor, nn

from planner.models import resolve_model
from planner.recording.record import TEMPORARIES, WORKSPACE, Recording
from planner.workload import Workload

_CONTEXT_ROW = "hfbench-001"
CONTEXT_BYTES = 803 * MIB
"""Torch 1.4's on a TITAN RTX: what that row has in use beyond the 474 MiB that its replay reserves.

An assumption, made of that one row, which is no prediction then; the others are.
"""
_LAYERS = re.compile(r"bert-(\d+)-lay\b")


def setup_of(row: Row) -> Setup | str:
    """How the row was run."""
    if row.micro_batch is None or row.seq_len is None:
        return "micro-batch or length is not one number"
    if row.id == _CONTEXT_ROW:
        return "what its process holds beside torch's memory is taken from this row for the others"
    spec = resolve_model("bert-base-uncased")
    if found := _LAYERS.match(row["model_id"]):
        spec = replace(spec, model_id=found[0], config={**spec.config, "num_hidden_layers": int(found[1])})
    return Setup(
        workload=WithPooler(spec=spec, task="embedding"),
        config=structure(precision="fp32", attention="eager"),
        weights="float32",
        loop=forward,
        loop_name="hfbench 2.11",
        card=card_of(row),
        shape=shape_of(row),
        context_bytes=CONTEXT_BYTES,
        few_shapes=True,
        unrolled=without_workspaces,
        torch_release=(1, 4),
        notes=(f"the context, {CONTEXT_BYTES // MIB} MiB, is taken from {_CONTEXT_ROW}",),
    )


@dataclass(frozen=True, kw_only=True)
class WithPooler(Workload):
    """The whole BertModel: an embedding script does without its last layer."""

    def build_model(self, **options: Any) -> nn.Module:
        """With the pooler."""
        from transformers.models.bert.modeling_bert import BertPooler

        model: Any = super().build_model(**options)
        with torch.device(options.get("device", "meta")):
            model.pooler = BertPooler(model.config).to(options["dtype"])
        return model  # type: ignore[no-any-return]


@torch.no_grad()
def forward(session: Session) -> None:
    """Once; ``model(input_ids)`` made a mask of ones itself."""
    session.begin(0)
    ids = session.tokens()
    mask = (1.0 - torch.ones(session.shape, device="meta")[:, None, None, :]) * -10000.0
    for module in session.model.modules():
        if type(module).__name__ == "BertSelfAttention":
            module.forward = partial(attend, module, mask)
    session.model.eval()(input_ids=ids)


def attend(module: Any, mask: Tensor, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """BertSelfAttention.forward of 2.11 (modeling_bert.py): scores and probabilities are there until it ends.

    Today's returns the probabilities, which its layer then holds on to.
    """
    heads = (*hidden_states.shape[:-1], module.num_attention_heads, module.attention_head_size)
    query, key, value = (
        layer(hidden_states).view(heads).permute(0, 2, 1, 3) for layer in (module.query, module.key, module.value)
    )
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(module.attention_head_size)
    scores = scores + mask
    probabilities = torch.softmax(scores, dim=-1)
    context = torch.matmul(probabilities, value)
    context = context.permute(0, 2, 1, 3).contiguous()
    return context.view(hidden_states.shape), None


def without_workspaces(recording: Recording) -> Recording:
    """cuBLAS had memory of its own: CUDA 11 lets a program give it a workspace, torch does since pull request 83461."""
    for block, category in enumerate(recording.categories):
        if category == WORKSPACE:
            recording.categories[block], recording.sizes[block] = TEMPORARIES, 0
    return recording
