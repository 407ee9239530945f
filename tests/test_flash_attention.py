"""The flash_attn package's stand-in: what transformers and its kernels allocate for a padded batch."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.config import TrainingConfig
from planner.hardware import find_card
from planner.memory.model import agrees
from planner.models import resolve_model
from planner.recording import flash_attention
from planner.recording.kernels import Target
from planner.recording.recorder import Recorder
from planner.simulation import Simulator
from planner.workload import Workload

BATCH, LENGTH, HEADS, SIZE = 2, 40, 4, 16
TOKENS = BATCH * LENGTH


def made(*, key_heads: int = HEADS, size: int = SIZE) -> tuple[list[int], list[int], list[tuple[str, str, int]]]:
    """Bytes allocated by one attention forward and backward in bf16, and its kernels: name, kind and FLOPs."""
    recorder = Recorder(Target(compute_capability=(8, 0)))
    shapes = [(BATCH, LENGTH, heads, size) for heads in (HEADS, key_heads, key_heads)]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool, device="meta")
    with recorder:
        recorder.phase("forward")
        out = flash_attention.attend(q, k, v, mask, 0.0, True)
        assert (BATCH, LENGTH, HEADS, size) == tuple(out.shape)
        recorder.phase("backward", backward=True)
        out.backward(torch.empty_like(out))
        recorder.phase("end")
    recording = recorder.recording()
    starts = list(recording.phases.values())
    forward, backward = (
        [recording.sizes[event] for event in recording.events[first:last] if event > 0]
        for first, last in pairwise(starts)
    )
    kernels = [(op.name, op.kind, op.flops) for op in recording.ops if "flash" in op.name]
    return forward, backward, kernels


def test_the_forward_pass_unpads_attends_and_pads() -> None:
    """Copies of q, k and v without padding, result and log-sum-exp, and the result with padding."""
    forward, _, _ = made()
    rows = TOKENS * HEADS * SIZE * 2
    assert 5 == forward.count(rows)
    assert 1 == forward.count(HEADS * TOKENS * 4)


@pytest.mark.parametrize("key_heads", [HEADS, 1])
def test_the_backward_pass_accumulates_in_fp32(key_heads: int) -> None:
    """128 rows more for each sequence (mha_varlen_bwd), heads of 16 as 32; grouped heads expand dk and dv."""
    _, backward, _ = made(key_heads=key_heads)
    rows = TOKENS + 128 * BATCH
    assert {rows * HEADS * 4, rows * HEADS * 32 * 4} <= set(backward)
    whole = backward.count(TOKENS * HEADS * SIZE * 2)
    expanded = 2 if key_heads != HEADS else 0
    # grad_output with and without padding, dq without and with it; dk and dv as well where they are as large
    assert 4 + (4 if key_heads == HEADS else 0) + expanded == whole


def test_head_sizes_are_padded_to_eights() -> None:
    """12 becomes 16 within the kernel (flash_attn_interface.py)."""
    forward, _, _ = made(size=12)
    assert 4 == forward.count(TOKENS * HEADS * 16 * 2)


def test_kernels_cost_what_causal_attention_costs() -> None:
    """Two products of S x S forward and five backward, half of them above the diagonal."""
    _, _, kernels = made()
    product = 2 * BATCH * LENGTH * LENGTH * HEADS * SIZE // 2
    assert [("attention:bf16", 2 * product), ("attention:bf16", 5 * product)] == [op[1:] for op in kernels]


def test_real_tensors_never_get_there() -> None:
    """A model in the same process that has data attends with what transformers has under that name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    spec = dataclasses.replace(small(), config={**small().config, "num_hidden_layers": 1})
    Workload(spec=spec, task="masked-lm").build_model(attention="flash2", dtype=torch.float32)
    attend: Any = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    tensors: list[Tensor] = [torch.ones(1, 2, 4, 8) for _ in range(3)]
    module = torch.nn.Linear(1, 1)
    module.config = type("Config", (), {"_attn_implementation": "flash_attention_2"})()  # type: ignore[assignment]
    with pytest.raises(Exception, match=r"flash|kernels"):
        attend(module, *tensors, None, is_causal=True)


def small() -> Any:
    """A narrow BERT."""
    spec = resolve_model("bert-base-uncased")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 128}
    return dataclasses.replace(spec, config={**spec.config, "vocab_size": 500, **sizes})


@pytest.mark.parametrize("precision", ["bf16-amp", "bf16"])
def test_its_sizes_follow_micro_batch_and_length(precision: str) -> None:
    """Replayed at a shape that was never recorded, they are those of a recording there; scores are never whole."""
    config = TrainingConfig(
        micro_batch_size=4,
        seq_len=256,
        max_tokens_per_micro_batch=1024,
        gradient_accumulation_steps=1,
        effective_batch_size=4,
        precision=precision,  # type: ignore[arg-type]
        attention="flash2",
    )
    simulator = Simulator(Workload(spec=small(), task="masked-lm"), find_card("A100 80GB"), ceiling_bytes=80 * 2**30)
    model = simulator.model(config)
    assert model.is_polynomial((4, 256))
    recording = simulator.recordings.record(config, (4, 256))
    assert agrees(model.step((4, 256)), recording, (4, 256))
    assert 4 * 2 * 256 * 256 * 2 not in recording.sizes
    assert simulator.time(config).step_ms > 0
