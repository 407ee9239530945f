"""The loss that takes the output layer over: its mathematics, which models allow it, and what it saves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import NothingFitsError, plan
from planner.config import TrainingConfig
from planner.hardware import find_card
from planner.inspection import fused_loss_obstacle
from planner.levers.fused_loss import PARTS, LinearCrossEntropy
from planner.memory.model import agrees
from planner.models import ModelSpec, resolve_model
from planner.recording.kernels import Target
from planner.recording.recorder import Recorder
from planner.simulation import Simulator
from planner.workload import Workload

GIB = 2**30


def tiny(name: str, **changes: Any) -> ModelSpec:
    """A bundled model with other dimensions."""
    spec = resolve_model(name)
    special = {key: 1 for key in ("bos_token_id", "eos_token_id") if key in spec.config}
    return dataclasses.replace(spec, config={**spec.config, **special, **changes})


def config(**fields: Any) -> TrainingConfig:
    """Full fine-tuning at 8 x 128, accumulated."""
    values = {
        "micro_batch_size": 8,
        "seq_len": 128,
        "gradient_accumulation_steps": 2,
        "precision": "bf16-amp",
        **fields,
    }
    tokens = values["micro_batch_size"] * values["seq_len"]
    sizes = {"max_tokens_per_micro_batch": tokens, "effective_batch_size": 2 * values["micro_batch_size"]}
    return TrainingConfig.model_validate(sizes | values)


# -- mathematics -----------------------------------------------------------------------------------------------------


def both(
    tokens: int, dtype: torch.dtype, *, bias: bool = True, reached: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients of the plain loss and of the fused one; every third label doesn't count."""
    torch.manual_seed(0)
    leaves = [torch.randn(tokens, 16), torch.randn(50, 16), torch.randn(50)][: 3 if bias else 2]
    labels = torch.randint(0, 50, (tokens,))
    labels[:: 3 if reached else 1] = -100
    results = []
    for fused in (False, True):
        hidden, weight, *rest = [leaf.clone().requires_grad_() for leaf in leaves]
        b = rest[0] if rest else None
        if fused:
            loss = LinearCrossEntropy.apply(hidden, labels, weight, b, dtype)  # type: ignore[no-untyped-call]
        else:
            loss = F.cross_entropy(F.linear(hidden, weight, b), labels, reduction="sum")
        (loss / 7).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in (hidden, weight, *rest) if leaf.grad is not None)])
    return results[0], results[1]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, PARTS, 24, 100])
def test_loss_and_gradients_are_the_plain_ones(tokens: int, bias: bool) -> None:
    """Whether the parts are equal, the last is shorter, or there are fewer tokens than parts."""
    expected, got = both(tokens, torch.float32, bias=bias)
    assert len(expected) == len(got) == (4 if bias else 3)
    for theirs, ours in zip(expected, got, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_in_bf16_they_are_so_to_its_rounding() -> None:
    """Products in bf16, softmax and sums in fp32."""
    for theirs, ours in zip(*both(96, torch.bfloat16), strict=True):
        assert (ours - theirs).norm() <= 0.01 * theirs.norm()


def test_without_a_label_that_counts_nothing_is_learned() -> None:
    """Zero loss and zero gradients, not a division by zero."""
    _, got = both(24, torch.float32, reached=False)
    assert all(not tensor.any() for tensor in got)


def test_a_frozen_output_layer_costs_no_gradient() -> None:
    """As under adapters: hidden states alone get one."""
    hidden, weight = torch.randn(24, 16, requires_grad=True), torch.randn(50, 16)
    loss = LinearCrossEntropy.apply(hidden, torch.zeros(24, dtype=torch.int64), weight, None, torch.float32)  # type: ignore[no-untyped-call]
    loss.backward()
    assert hidden.grad is not None and weight.grad is None


def test_gradients_are_given_away_uncopied() -> None:
    """A parameter's gradient is the memory that the loss filled: no second one for a moment."""
    hidden, head = torch.randn(24, 16, requires_grad=True), nn.Linear(16, 50, bias=False)
    loss = LinearCrossEntropy.apply(hidden, torch.zeros(24, dtype=torch.int64), head.weight, None, torch.float32)  # type: ignore[no-untyped-call]
    made = loss.grad_fn.grads[1].data_ptr()
    loss.backward()
    assert head.weight.grad is not None
    assert made == head.weight.grad.data_ptr()


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "task", "said"),
    [
        ("bert-base-uncased", "masked-lm", ""),
        ("gpt2", "causal-lm", ""),
        ("t5-small", "seq2seq-lm", ""),
        ("google/gemma-2-2b", "causal-lm", "changes the logits"),
        ("facebook/bart-base", "seq2seq-lm", "changes the logits"),
        ("bert-base-uncased", "sequence-classification", "few outputs"),
    ],
)
def test_models_allow_it_that_return_their_output_layers_result(name: str, task: str, said: str) -> None:
    """A transform before the layer (BERT) or a scaling there (T5) is no obstacle; softcapping or a bias after it is."""
    layers = {"num_hidden_layers": 1, "num_layers": 1, "n_layer": 1, "layer_types": ["full_attention"]}
    known = resolve_model(name).config
    spec = tiny(name, **{key: value for key, value in layers.items() if key in known})
    found = fused_loss_obstacle(Workload(spec=spec, task=task, target_seq_len=8))
    assert (said in found) if said else found == ""


# -- memory ----------------------------------------------------------------------------------------------------------


def peaks(spec: ModelSpec, **fields: Any) -> tuple[int, int]:
    """Allocated with the plain loss and with the fused one."""
    simulator = Simulator(Workload(spec=spec, task="causal-lm"), find_card("A100 80GB"), ceiling_bytes=80 * GIB)
    plain, fused = (simulator.memory(config(loss=loss, **fields)) for loss in ("standard", "fused-linear"))
    return plain.peak_allocated_bytes, fused.peak_allocated_bytes


def test_it_saves_most_of_what_logits_need() -> None:
    """Logits, their log-softmax and its gradient are 12 bytes of fp32 each; an eighth of 8 is left, and 1.2 layers."""
    spec = tiny("gpt2", n_layer=1, vocab_size=50_000, n_embd=64, n_head=2)
    plain, fused = peaks(spec)
    assert 8 <= (plain - fused) / (8 * 128 * 50_000) <= 12


@pytest.mark.parametrize("shape", [(8, 128), (1, 256), (3, 40)])
def test_its_sizes_follow_micro_batch_and_length(shape: tuple[int, int]) -> None:
    """Replayed at a shape that was never recorded, they are those of a recording there."""
    spec = tiny("gpt2", n_layer=1, vocab_size=5000, n_embd=64, n_head=2)
    simulator = Simulator(Workload(spec=spec, task="causal-lm"), find_card("A100 80GB"), ceiling_bytes=80 * GIB)
    asked = config(loss="fused-linear")
    model = simulator.model(asked)
    assert model.is_polynomial(shape)
    assert agrees(model.step(shape), simulator.recordings.record(asked, shape), shape)


def test_without_data_it_allocates_what_it_does_with_data() -> None:
    """Block for block, forward and backward."""
    events = []
    for device in ("cpu", "meta"):
        hidden, weight, bias = (
            torch.ones(shape, device=device, requires_grad=True) for shape in ((24, 16), (50, 16), (50,))
        )
        labels = torch.ones(24, dtype=torch.int64, device=device)
        recorder = Recorder(Target(compute_capability=(8, 0)), device=device)
        with recorder:
            recorder.phase("forward")
            loss = LinearCrossEntropy.apply(hidden, labels, weight, bias, torch.bfloat16)  # type: ignore[no-untyped-call]
            recorder.phase("backward", backward=True)
            loss.backward()
            recorder.phase("end")
        recording = recorder.recording()
        events.append([(event > 0, recording.sizes[abs(event)]) for event in recording.events])
    # on the CPU a Python number within an expression is a tensor for a moment
    assert [e for e in events[0] if e[1] > 8] == [e for e in events[1] if e[1] > 8]


# -- what is said about it -------------------------------------------------------------------------------------------


@pytest.fixture
def wide(tmp_path: Path) -> str:
    """A narrow model with a large vocabulary, as a folder."""
    spec = tiny("gpt2", n_layer=1, n_embd=64, n_head=2, vocab_size=60_000)
    (tmp_path / "config.json").write_text(json.dumps(spec.config))
    return str(tmp_path)


def asked(model: str, **arguments: Any) -> dict[str, Any]:
    """Everything but the loss and the card's memory decided."""
    levers = {"precision": "bf16-amp", "checkpointing": "none", "offload": "none", "attention": "sdpa"}
    return {"model": model, "gpu": "RTX 3090", "method": "full", "seq_len": 512, "batch_size": 4, **levers, **arguments}


@pytest.mark.slow
def test_it_is_offered_where_it_would_make_a_model_fit(wide: str) -> None:
    """Tried: the plan with it is made, and says what it does."""
    with pytest.raises(NothingFitsError, match="--loss fused-linear"):
        plan(**asked(wide, batch_size=1, vram="1000MB"))
    found = plan(**asked(wide, batch_size=1, vram="1000MB", loss="fused-linear"))
    assert found.config.loss == "fused-linear"
    assert "an eighth of the logits" in next(r.reason for r in found.reasons if r.field == "loss")


def test_large_vocabularies_are_told_what_it_would_buy(wide: str) -> None:
    """The table of levers has a row for it, which saves memory; the plan itself keeps the model's own loss."""
    found = plan(**asked(wide, vram="8GB"))
    row = next(row for row in found.levers if row["lever"] == "loss")
    assert found.config.loss == "standard"
    assert row["saves_bytes"] > 100_000_000
    assert 0.5 < row["speed_ratio"] < 2
