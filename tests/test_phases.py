"""Peaks of every phase of a run, on steps made by hand and on a real model."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_memory_model import MIB, STATE, UPDATE, WORKSPACE_BYTES, memory_model, step_model

from planner.config import TrainingConfig
from planner.emit.trainer import training_arguments
from planner.hardware import find_card
from planner.memory.life import Life, replay_life
from planner.memory.model import MemoryModel
from planner.memory.program import resumed
from planner.models import resolve_model
from planner.recording.record import ACTIVATIONS, INPUTS, OUTSIDE_LAYERS, PARAMETERS, TEMPORARIES, Recording
from planner.render import phase_table
from planner.simulation import Simulator
from planner.whole_run import whole_run
from planner.workload import Workload

SHAPE = (16, 512)
WEIGHTS = GRADIENTS = 40 * MIB


def evaluation(hidden_bytes: int) -> Recording:
    """A pass without gradients: weights, a batch, one activation."""
    return Recording(
        sizes=[0, WEIGHTS, 8 * 512, hidden_bytes],
        categories=[0, PARAMETERS, INPUTS, ACTIVATIONS],
        events=[1, 2, 3, -3, -2],
        layers=[OUTSIDE_LAYERS] * 5,
        phases={"load": 0, "inputs": 1, "forward": 2, "end": 5},
    )


def life(hidden_bytes: int = 0, *, accumulate: bool = False) -> Life:
    """Of the step made by hand, with an evaluation where ``hidden_bytes`` is given."""
    record = (lambda _: evaluation(hidden_bytes)) if hidden_bytes else None
    model = MemoryModel(lambda _: step_model(), UPDATE, cublas_workspace_bytes=WORKSPACE_BYTES, evaluation=record)
    return replay_life(model, SHAPE, accumulate=accumulate)


def test_each_phase_has_its_own_peak() -> None:
    """Loading: the weights. First step: no state beside the activations. Later: the state too."""
    b, s = SHAPE
    activations = b * s * (8 + 10_240 + 20_480) + 48 * b * s * s
    allocated = {name: peak.allocated_bytes for name, peak in life().phases.items()}
    assert {
        "load": WEIGHTS,
        "first_step": WEIGHTS + WORKSPACE_BYTES + activations,
        "steady_step": WEIGHTS + WORKSPACE_BYTES + activations + STATE,
        "resume": WEIGHTS + WORKSPACE_BYTES + activations + STATE,
    } == allocated


def test_an_evaluation_holds_weights_state_and_its_own_pass() -> None:
    """No gradients: they are dropped before it begins."""
    hidden = 7 * MIB
    peak = life(hidden).phases["evaluate"]
    assert WEIGHTS + STATE + WORKSPACE_BYTES + 8 * 512 + hidden == peak.allocated_bytes


def test_an_evaluation_larger_than_training_is_the_runs_peak() -> None:
    """Of allocated and reserved memory, and the breakdown is the one there."""
    hidden = 2000 * MIB
    found = life(hidden)
    assert found.allocated_bytes == found.phases["evaluate"].allocated_bytes
    assert found.reserved_bytes == found.phases["evaluate"].reserved_bytes
    assert hidden == found.breakdown["activations"]
    assert 0 == found.breakdown["gradients"]


def test_reserved_memory_of_a_phase_includes_what_earlier_ones_cached() -> None:
    """Within one process it never falls."""
    phases = life(7 * MIB).phases
    reserved = [phases[name].reserved_bytes for name in ("load", "first_step", "steady_step")]
    assert sorted(reserved) == reserved
    assert phases["evaluate"].reserved_bytes >= phases["first_step"].reserved_bytes


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_whole_life_is_never_less_than_its_two_steps(accumulate: bool) -> None:
    """The peak that a search looks at is part of it."""
    two_steps = memory_model().peak(SHAPE, accumulate=accumulate)
    steady = life(accumulate=accumulate).phases["steady_step"]
    assert (two_steps.allocated_bytes, two_steps.reserved_bytes) == (steady.allocated_bytes, steady.reserved_bytes)


def test_a_resumed_run_has_its_state_before_its_first_gradients() -> None:
    """The state comes right after the weights, and no first update makes it again."""
    step = step_model().template
    program = resumed(step, UPDATE, accumulate=False)
    assert [("resume", 0)] == list(program.phases)
    names = [name for name, _ in program.marks]
    assert ["load", "state", "micro_batch", "later_update", "zero_grad"] == names[:5]
    rows = program.rows[program.events[program.events > 0]].tolist()
    assert 1 == rows.count(len(step.sizes) + 4)  # row 4 of the update is its state


# -- a real model ----------------------------------------------------------------------------------------------------


@cache
def simulator() -> Simulator:
    """GPT-2 on an 8 GB card."""
    torch.set_num_threads(1)
    card = find_card("rtx 4060")
    return Simulator(
        Workload(spec=resolve_model("gpt2"), task="causal-lm"), card, ceiling_bytes=card.label_bytes, seq_len=256
    )


def config(**changes: object) -> TrainingConfig:
    """Four sequences of 256 tokens at a time, twice a step."""
    fields = {
        "micro_batch_size": 4,
        "seq_len": 256,
        "max_tokens_per_micro_batch": 1024,
        "gradient_accumulation_steps": 2,
        "effective_batch_size": 8,
        "precision": "bf16-amp",
    }
    return TrainingConfig.model_validate(fields | changes)


def test_a_plans_memory_has_every_phase_and_holds_the_largest() -> None:
    """Loading, first and steady step, evaluation, resume and an epoch of different lengths."""
    memory = whole_run(simulator(), config())
    assert ["load", "first_step", "steady_step", "evaluate", "resume", "epoch"] == list(memory.phases)
    for measure in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert max(phase[measure] for phase in memory.phases.values()) == getattr(memory, measure)
    assert memory.total_bytes == memory.peak_reserved_bytes + memory.context_bytes + memory.margin_bytes


def test_an_evaluation_of_a_real_model_needs_less_than_its_training() -> None:
    """Nothing is kept for a backward pass, and there are no gradients; weights and state stay."""
    sim = simulator()
    phases = whole_run(sim, config(), epoch=False).phases
    static = (4 + 8) * sim.facts.parameters
    assert static < phases["evaluate"]["peak_allocated_bytes"] < phases["steady_step"]["peak_allocated_bytes"]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_pass_without_gradients_is_within_training_with_any_checkpointing(checkpointing: str) -> None:
    """The logits and their loss are the same; the layers keep nothing."""
    phases = whole_run(simulator(), config(checkpointing=checkpointing), epoch=False).phases
    assert phases["evaluate"]["peak_allocated_bytes"] <= phases["steady_step"]["peak_allocated_bytes"]


@pytest.mark.parametrize(("quantization", "bytes_a_weight"), [("nf4", 0.5), ("int8", 1)])
def test_a_quantized_model_is_loaded_weight_by_weight(quantization: str, bytes_a_weight: float) -> None:
    """Each weight is there twice while its codes are made, and no two weights at once.

    int8 codes are made of an fp16 copy; for nf4, GPT-2's transposed weights are made contiguous. Before the first
    there was a block of the size of all weights as they will be; the adapters come last.
    """
    sim = simulator()
    chosen = config(method="qlora", quantization=quantization, lora={})
    recording = sim.recordings.record(chosen, (2, 80))
    end = recording.phases["adapters"]
    load = recording.events[:end]
    assert [1, -1] == load[:2]
    signs = [1 if event > 0 else -1 for event in load[2:] if recording.categories[abs(event)] == TEMPORARIES]
    assert [1, 1, -1, -1] * 4 * sim.facts.layers == signs
    vocabulary, hidden, positions = 50257, 768, 1024
    blocks = 12 * (12 * hidden * hidden) * bytes_a_weight
    biases_and_norms = 12 * (9 * hidden + 4 * hidden) * 2 + 2 * hidden * 2
    assert blocks + (vocabulary + positions) * hidden * 2 + biases_and_norms == recording.sizes[1]
    adapters = [recording.sizes[e] for e in recording.events[end : recording.phases["inputs"]]]
    assert 4 * sim.trainable_parameters(chosen) == sum(adapters)


def test_the_report_shows_every_phase() -> None:
    """A row each, with what is allocated and what is reserved."""
    memory = whole_run(simulator(), config())
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(phase_table(memory))
    lines = [line.split("  ")[0].strip() for line in console.export_text().splitlines()[1:]]
    assert ["load", "first step", "steady step", "evaluate"] == lines[:4]
    assert ["resume from a checkpoint", "an epoch of different lengths"] == lines[4:]


@pytest.mark.parametrize(
    ("task", "expected"),
    [("masked-lm", (True, None)), ("sequence-classification", (False, 1)), ("causal-lm", (True, None))],
)
def test_the_trainer_collects_no_logits_on_the_card(
    task: str, expected: tuple[bool, int | None], tmp_path: Path
) -> None:
    """With a vocabulary's logits only the loss is kept; a class a label goes to the host batch by batch."""
    arguments = training_arguments(config(precision="fp32"), task=task, output_dir=str(tmp_path), use_cpu=True)
    assert expected == (arguments.prediction_loss_only, arguments.eval_accumulation_steps)
    assert arguments.per_device_train_batch_size == arguments.per_device_eval_batch_size
