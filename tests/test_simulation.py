"""From configurations to what they need on a card."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.config import LoraSettings, TrainingConfig
from planner.hardware import find_card
from planner.host_memory import pinned_bytes
from planner.measurements import Corrections
from planner.memory.model import MemoryModel, Variant, fit_step
from planner.models import ModelSpec, published_parameters, resolve_model
from planner.recording.kernels import Target
from planner.recording.source import make_source
from planner.recordings import Recordings
from planner.residuals import Residual
from planner.simulation import Simulator, budget_shapes, cublas_workspace_bytes
from planner.workload import Workload

GIB, MIB = 2**30, 2**20


def tiny(name: str, **changes: Any) -> ModelSpec:
    """A bundled model with other dimensions."""
    spec = resolve_model(name)
    special = {key: 1 for key in ("bos_token_id", "eos_token_id") if key in spec.config}
    return dataclasses.replace(spec, config={**spec.config, "vocab_size": 1000, **special, **changes})


BERT = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
WORKLOAD = Workload(spec=tiny("bert-base-uncased", **BERT, num_hidden_layers=3), task="sequence-classification")


def simulator(card: str = "RTX 3090", workload: Workload = WORKLOAD, **options: Any) -> Simulator:
    """Of a three-layer BERT."""
    return Simulator(workload, find_card(card), **{"ceiling_bytes": 8 * GIB, **options})


def config(**fields: Any) -> TrainingConfig:
    """Full fine-tuning in fp32 at 8 x 128, accumulated."""
    values = {
        "micro_batch_size": 8,
        "seq_len": 128,
        "max_tokens_per_micro_batch": 1024,
        "gradient_accumulation_steps": 2,
        "effective_batch_size": 16,
        "precision": "fp32",
        "lora": LoraSettings() if fields.get("method", "full") != "full" else None,
    }
    return TrainingConfig.model_validate({**values, **fields})


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((6, 1), 8_519_680), ((7, 5), 8_519_680), ((8, 9), 8_519_680), ((9, 0), 32 * MIB), ((10, 0), 32 * MIB)],
)
def test_cublas_workspaces_follow_the_card(capability: tuple[int, int], expected: int) -> None:
    """4096 x 2 + 16 x 8 KiB before Hopper, 32 MiB since."""
    assert expected == cublas_workspace_bytes(capability)


def test_the_total_is_reserved_context_and_margin() -> None:
    """What must be under the ceiling; the user's headroom is part of it."""
    memory = simulator(headroom_bytes=300 * MIB).memory(config())
    assert 300 * MIB <= memory.margin_bytes
    assert memory.context_bytes > 100 * MIB
    assert memory.peak_reserved_bytes + memory.context_bytes + memory.margin_bytes == memory.total_bytes
    assert memory.peak_allocated_bytes <= memory.peak_reserved_bytes
    assert memory.fits


def test_the_budget_is_what_the_ceiling_leaves() -> None:
    """A configuration fits exactly when its reserved bytes are within the budget."""
    for ceiling in (400 * MIB, 8 * GIB):
        sim = simulator(ceiling_bytes=ceiling)
        memory = sim.memory(config())
        assert (memory.peak_reserved_bytes <= sim.budget.allocator_bytes(config())) == memory.fits


def test_at_the_ceiling_it_fits_and_a_byte_above_it_does_not() -> None:
    """The ceiling itself may be used."""
    total = simulator().memory(config()).total_bytes
    assert simulator(ceiling_bytes=total).memory(config()).fits
    assert not simulator(ceiling_bytes=total - 1).memory(config()).fits


def test_the_breakdown_has_the_plans_parts() -> None:
    """The six of plan.json, near the allocated peak."""
    memory = simulator().memory(config())
    names = ["parameters", "gradients", "optimizer", "activations", "temporaries", "workspace"]
    assert names == list(memory.breakdown)
    assert memory.peak_allocated_bytes == pytest.approx(sum(memory.breakdown.values()), rel=0.1)


def test_static_parts_follow_from_the_parameter_count() -> None:
    """Weights and both of AdamW's states: 4 and 8 bytes a parameter, and a little for small blocks."""
    sim = simulator()
    parts = sim.memory(config()).breakdown
    assert 4 * sim.facts.parameters == pytest.approx(parts["parameters"], rel=0.1)
    assert 8 * sim.facts.parameters == pytest.approx(parts["optimizer"], rel=0.15)


@pytest.mark.parametrize("name", ["bert-base-uncased", "gpt2", "t5-small"])
def test_models_have_their_published_number_of_parameters(name: str) -> None:
    """Tied weights count once."""
    tasks = {"bert-base-uncased": "masked-lm", "gpt2": "causal-lm", "t5-small": "seq2seq-lm"}
    sim = simulator(workload=Workload(spec=resolve_model(name), task=tasks[name], target_seq_len=8))
    assert published_parameters(name).count == pytest.approx(sim.facts.parameters, rel=0.01)


def test_accumulation_costs_gradients_once_and_then_nothing() -> None:
    """Two micro-batches or a thousand need the same; one needs no gradients beside its activations."""
    sim = simulator()
    one, two, many = (
        sim.memory(config(gradient_accumulation_steps=n, effective_batch_size=8 * n)) for n in (1, 2, 1000)
    )
    assert two == many
    gradients = 4 * sim.facts.parameters
    assert 0 < two.peak_allocated_bytes - one.peak_allocated_bytes <= 1.2 * gradients


def test_offload_takes_the_optimizers_state_off_the_card() -> None:
    """It is in host memory then, which must have room for it."""
    sim = simulator(host_ram_bytes=MIB)
    assert 0 == sim.memory(config(offload="optimizer")).breakdown["optimizer"]
    parameters = WORKLOAD.build_model(attention="eager", dtype=torch.float32).parameters()
    expected = sum(2 * pinned_bytes(4 * p.numel()) + 8 * p.numel() for p in parameters)
    assert expected == sim.host_bytes(config(offload="optimizer"))
    assert 0 < sim.host_shortage_bytes(config(offload="optimizer")) <= expected - MIB
    assert sim.host_shortage_bytes(config()) <= 0


def test_precisions_that_record_alike_share_a_recording() -> None:
    """tf32 holds what fp32 holds; bf16 needs another step."""
    sim = simulator()
    structures = {p: sim.recordings.structure(config(precision=p)) for p in ("fp32", "tf32", "bf16-amp", "bf16")}
    assert structures["fp32"] == structures["tf32"]
    assert 3 == len({repr(structure) for structure in structures.values()})
    assert sim.memory(config()) == sim.memory(config(precision="tf32"))


def test_fp16_on_older_cards_uses_their_kernels() -> None:
    """A T4 has no flash attention and no bf16: its fp16 step is recorded as such."""
    assert "fp16-amp" == simulator("Tesla T4").recordings.structure(config(precision="fp16-amp"))["precision"]
    assert simulator("Tesla T4").memory(config(precision="fp16-amp")).fits


def test_a_simulator_on_a_filled_cache_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, from files that nobody touched."""
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path))
    first = simulator().memory(config())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pickle")}
    assert len(before) >= 3
    monkeypatch.setattr(Recordings, "_source", None)  # whoever records needs it
    assert first == simulator().memory(config())
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pickle")}
    assert os.environ["VRAMPLAN_CACHE"] == str(tmp_path)


@pytest.mark.parametrize("checkpointing", ["none", "full", "every-2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-amp"])
def test_deep_models_from_shallow_recordings_are_those_recorded_in_full(precision: str, checkpointing: str) -> None:
    """Ten layers: the peak, its breakdown and the operators' cost are the full recording's."""
    workload = dataclasses.replace(WORKLOAD, spec=tiny("bert-base-uncased", **BERT, num_hidden_layers=10))
    wanted = config(precision=precision, checkpointing=checkpointing)
    sim = simulator(workload=workload)
    shape = (wanted.micro_batch_size, wanted.seq_len)
    source = make_source(workload, wanted, Target(compute_capability=sim.card.compute_capability))
    full = fit_step(source.record, Variant.of(shape).shapes())
    reference = MemoryModel(
        lambda _: full, sim.model(wanted).update, cublas_workspace_bytes=cublas_workspace_bytes((8, 6))
    )
    for accumulate in (False, True):
        assert reference.peak(shape, accumulate=accumulate) == sim.model(wanted).peak(shape, accumulate=accumulate)
    ours = sim.model(wanted).step(shape)
    assert sorted(full.sizes_at(shape).tolist()) == sorted(ours.sizes_at(shape).tolist())
    assert [sum(part.tolist()) for part in full.ops_at(shape)] == [sum(part.tolist()) for part in ours.ops_at(shape)]


def test_a_lower_bound_is_one() -> None:
    """``at_least`` answers only where even the sum of live blocks is over the ceiling, never above the total."""
    memory = simulator().memory(config())
    assert simulator().at_least(config()) is None
    small = simulator(ceiling_bytes=memory.context_bytes + 10 * MIB)
    bound = small.at_least(config())
    assert bound is not None
    assert small.ceiling_bytes < bound.total_bytes <= memory.total_bytes
    assert small.least_bytes(config()) <= memory.total_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp"])
def test_the_token_budget_holds_for_shorter_sequences(precision: str) -> None:
    """No micro-batch of shorter sequences that fills the budget allocates more than what is planned for."""
    sim = simulator(workload=Workload(spec=tiny("gpt2", n_embd=64, n_head=2, n_layer=3), task="causal-lm"))
    planned = config(
        micro_batch_size=1,
        seq_len=256,
        max_tokens_per_micro_batch=256,
        gradient_accumulation_steps=8,
        effective_batch_size=8,
        precision=precision,
    )
    assert [(2, 128), (4, 64), (8, 32)] == list(budget_shapes(planned))
    peaks = [
        sim.memory(planned.model_copy(update={"micro_batch_size": b, "seq_len": s})).total_bytes
        for b, s in [(1, 256), *budget_shapes(planned)]
    ]
    assert max(peaks) >= sim.memory_of_budget(planned).total_bytes >= peaks[0]
    assert sim.memory_of_budget(planned).peak_allocated_bytes >= sim.memory(planned).peak_allocated_bytes


def test_measurements_of_a_device_correct_the_simulator() -> None:
    """One measured structure that took twice the time and a tenth more memory moves its own answers that way, and a
    context that trials found replaces the catalogue's; the simulator itself stays as it was.
    """
    plain, chosen = simulator(), config()
    noise = 1e-6
    corrections = Corrections(
        workload="w",
        kind="cuda",
        context_bytes=500 * MIB,
        times=(Residual(config=chosen, workload="w", log_ratio=math.log(2), variance=noise),),
        memories=(Residual(config=chosen, workload="w", log_ratio=math.log(1.1)),),
    )
    corrected = plain.corrected(corrections)
    before, after = plain.memory(chosen), corrected.memory(chosen)
    assert pytest.approx(1.1, rel=0.01) == after.peak_reserved_bytes / before.peak_reserved_bytes
    assert before.peak_allocated_bytes == after.peak_allocated_bytes
    assert (500 * MIB, simulator().budget.context_bytes) == (after.context_bytes, before.context_bytes)
    slow, fast = corrected.time(chosen), plain.time(chosen)
    assert pytest.approx(2.0, rel=0.01) == slow.step_ms / fast.step_ms == fast.tokens_per_s / slow.tokens_per_s
    neighbour = config(micro_batch_size=4, max_tokens_per_micro_batch=512, gradient_accumulation_steps=4)
    assert 1.5 < corrected.time(neighbour).step_ms / plain.time(neighbour).step_ms <= 2.1
