"""The CPU as a device: what fake tensors record is what real ones do, event for event and byte for byte."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planner.config import LoraSettings, TrainingConfig
from planner.hardware import Card
from planner.levers import LEVERS, Choice, Context
from planner.levers.checkpointing import checkpointing_layers
from planner.levers.optimizer import make_optimizer
from planner.levers.precision import autocast_dtype
from planner.memory.host import HostAllocator, HostSettings
from planner.models import ModelSpec, resolve_model
from planner.recording.kernels import Target
from planner.recording.record import PARAMETERS, TEMPORARIES, WORKSPACE, Recording
from planner.recording.recorder import Recorder
from planner.recording.source import make_source, plan_stacks
from planner.simulation import Simulator
from planner.step import build_model, run_micro_batch
from planner.timing import step_time
from planner.workload import Workload, device_tensors

KIB, MIB, GIB = 2**10, 2**20, 2**30
CPU = Target(kind="cpu")
SHAPE = (3, 24)
CARD = Card(
    name="a processor",
    label_bytes=8 * GIB,
    reported_bytes=8 * GIB,
    compute_capability=(0, 0),
    memory_bandwidth_bytes_per_s=10e9,
    dense_flops_per_s=MappingProxyType({"fp32": 100e9, "bf16": 10e9}),
    pcie_bytes_per_s=10e9,
    has_tensor_cores=False,
    source="made up",
    kind="cpu",
    operator_us=20.0,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny(name: str, **changes: Any) -> ModelSpec:
    """A bundled model with few and narrow layers, its dropout left in: on a CPU it decides how attention runs."""
    spec = resolve_model(name)
    special = {key: 1 for key in ("bos_token_id", "eos_token_id") if key in spec.config}
    return dataclasses.replace(spec, config={**spec.config, "vocab_size": 300, **special, **changes})


SMALL_BERT = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
CLASSIFIER = Workload(spec=tiny("bert-base-uncased", num_hidden_layers=2, **SMALL_BERT), task="sequence-classification")
GENERATOR = Workload(spec=tiny("gpt2", n_embd=32, n_layer=4, n_head=2), task="causal-lm")


def make_config(**fields: Any) -> TrainingConfig:
    """A configuration; what isn't named is fp32 without levers."""
    micro_batch_size, seq_len = SHAPE
    accumulation = fields.pop("gradient_accumulation_steps", 1)
    lora = LoraSettings(r=4) if fields.get("method") == "lora" else None
    return TrainingConfig(
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        max_tokens_per_micro_batch=micro_batch_size * seq_len,
        gradient_accumulation_steps=accumulation,
        effective_batch_size=micro_batch_size * accumulation,
        lora=lora,
        **{"precision": "fp32", **fields},
    )


class RealStep:
    """The same model with random weights, and a recorder that follows its tensors."""

    def __init__(self, workload: Workload, config: TrainingConfig) -> None:
        self.config = config
        self.model = build_model(workload, config, device="cpu")
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.recorder = Recorder(CPU)
        layers = checkpointing_layers(self.model)
        self.recorder.watch_gradients(self.trained)
        self.recorder.watch_layers(layers)
        self.recorder.phase("load", category=PARAMETERS)
        self.recorder.adopt(device_tensors(self.model, layers))
        self._host = workload.make_batch(*SHAPE, device="cpu")

    def micro_batch(self) -> None:
        """One, under the recorder."""
        low = autocast_dtype(self.config.precision)
        autocasting = None if low is None else partial(torch.autocast, "cpu", dtype=low)
        with self.recorder:
            run_micro_batch(self.model, self._arrive, self.recorder, autocasting)

    def _arrive(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._host.items()}


STEPS = [
    pytest.param(CLASSIFIER, {}, id="dropout keeps attention from being fused"),
    pytest.param(CLASSIFIER, {"precision": "bf16-amp", "checkpointing": "full"}, id="autocast, checkpointed"),
    pytest.param(CLASSIFIER, {"precision": "bf16", "attention": "eager"}, id="bf16 weights, eager"),
    pytest.param(GENERATOR, {"checkpointing": "every-2"}, id="half of the layers checkpointed"),
    pytest.param(GENERATOR, {"precision": "bf16-amp", "loss": "fused-linear"}, id="autocast, fused loss"),
    pytest.param(GENERATOR, {"precision": "bf16-amp", "method": "lora"}, id="LoRA under autocast"),
]


@pytest.mark.parametrize(("workload", "fields"), STEPS)
def test_fake_tensors_record_what_real_ones_do(workload: Workload, fields: dict[str, Any]) -> None:
    """Every allocation, free and operator of a micro-batch, in order, with its size."""
    config = make_config(**fields)
    real = RealStep(workload, config)
    real.micro_batch()
    expected = real.recorder.recording()
    fake = make_source(workload, config, CPU).record(SHAPE)
    assert expected.sizes == fake.sizes
    assert expected.structure == fake.structure


def test_a_cpu_has_no_workspaces() -> None:
    """cuBLAS's, and the buffers of CUDA kernels, are not there: all that is recorded is tensors."""
    recording = make_source(CLASSIFIER, make_config(), CPU).record(SHAPE)
    assert WORKSPACE not in recording.categories
    assert [] == recording.gates


def test_layers_repeat_under_autocast() -> None:
    """Weight copies go in the order in which they came, so that a shallow model's recording can be deepened."""
    spec = tiny("bert-base-uncased", num_hidden_layers=7, **SMALL_BERT)
    workload = Workload(spec=spec, task="sequence-classification")
    config = make_config(precision="bf16-amp")
    stacks = plan_stacks(workload, config.attention, [7])
    deep = make_source(workload, config, CPU).record(SHAPE)
    repeated = make_source(workload, config, CPU, stacks).record(SHAPE)
    assert stacks
    assert (deep.events, deep.sizes) == (repeated.events, repeated.sizes)


def live_peak(recording: Recording) -> int:
    """Most bytes in live blocks."""
    live = np.cumsum([(1 if event > 0 else -1) * recording.sizes[abs(event)] for event in recording.events])
    return int(live.max())


@pytest.mark.parametrize(
    "fields",
    [{}, {"gradient_accumulation_steps": 2}, {"optimizer": "adamw_foreach"}, {"precision": "bf16-amp"}],
    ids=["one micro-batch", "two micro-batches", "foreach", "autocast"],
)
def test_the_simulated_peak_is_that_of_two_real_steps(fields: dict[str, Any]) -> None:
    """To the byte, updates with real optimizers included."""
    config = make_config(**fields)
    real = RealStep(GENERATOR, config)
    optimizer = make_optimizer(config.optimizer, real.trained)
    for _ in range(2):
        for _ in range(config.gradient_accumulation_steps):
            real.micro_batch()
        with real.recorder:
            real.recorder.phase("update", category=TEMPORARIES)
            nn.utils.clip_grad_norm_(real.trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    simulator = Simulator(GENERATOR, CARD, ceiling_bytes=GIB, context=(0, "none"))
    assert live_peak(real.recorder.recording()) == simulator.memory(config).peak_allocated_bytes


def test_a_cpus_context_is_what_was_measured() -> None:
    """It is in the total, with how it is known; there is no catalogue to look it up in."""
    simulator = Simulator(GENERATOR, CARD, ceiling_bytes=GIB, context=(300 * MIB, "measured"))
    memory = simulator.memory(make_config())
    assert (300 * MIB, "measured") == (memory.context_bytes, simulator.context_reason)
    with pytest.raises(ValueError, match="measured"):
        Simulator(GENERATOR, CARD, ceiling_bytes=GIB)


# -- the resident set ------------------------------------------------------------------------------------------------


def resident(sizes: list[int], events: list[int]) -> HostAllocator:
    """After events on blocks of these sizes."""
    allocator = HostAllocator(HostSettings())
    allocator.run(np.array(events), np.array([0, *sizes]))
    return allocator


def test_large_tensors_leave_nothing_behind() -> None:
    """From 64 KiB on each has pages of its own, which go with it."""
    allocator = resident([MIB, 3 * MIB], [1, 2, -1, -2])
    assert 4 * MIB + 2 * 4 * KIB == allocator.peak_reserved_bytes
    assert 4 * MIB == allocator.peak_allocated_bytes
    assert 0 == allocator.reserved_bytes


def test_small_tensors_leave_holes() -> None:
    """What lies before one that stays can't be given back; a smaller one fits in, one of the same size doesn't."""
    stays = resident([60 * KIB, 60 * KIB], [1, 2, -1])
    smaller = resident([60 * KIB, 60 * KIB, 50 * KIB], [1, 2, -1, 3])
    same = resident([60 * KIB, 60 * KIB, 60 * KIB], [1, 2, -1, 3])
    assert 120 * KIB <= stays.reserved_bytes < 128 * KIB
    assert stays.reserved_bytes == smaller.reserved_bytes
    assert 60 * KIB <= same.reserved_bytes - stays.reserved_bytes < 64 * KIB


# -- levers and time -------------------------------------------------------------------------------------------------


def choices(**context: Any) -> dict[tuple[str, str], Choice]:
    """Every lever's choices on the processor."""
    fields = {
        "spec": GENERATOR.spec,
        "card": CARD,
        "method": "full",
        "effective_batch_size": 8,
        "max_micro_batch_size": 8,
        "layers": 4,
        "supports_sdpa": True,
        **context,
    }
    return {(lever.field, c.value): c for lever in LEVERS for c in lever.choices(Context(**fields))}


def test_what_is_only_for_cards_is_ruled_out_with_a_reason() -> None:
    """Formats of tensor cores, offloading to where everything is already, kernels of CUDA packages, several cards."""
    found = {**choices(), **choices(method="qlora")}
    out = {key for key, choice in found.items() if not choice.valid}
    assert {
        *(("precision", value) for value in ("tf32", "fp16-amp")),
        *(("offload", value) for value in ("optimizer", "parameters", "activations")),
        *(("quantization", value) for value in ("nf4", "int8")),
        *(("optimizer", value) for value in ("adamw_8bit", "paged_adamw_8bit")),
        ("attention", "flash2"),
        *(("parallelism", value) for value in ("ddp", "fsdp2")),
    } == out
    assert all(found[key].reason and not found[key].swept and not found[key].last_resort for key in out)
    assert "0.1 times fp32's rate" in found["precision", "bf16-amp"].reason


def test_slow_bf16_products_make_a_slow_step() -> None:
    """Time is arithmetic, traffic and dispatch one after the other, at the rates that were measured."""
    simulator = Simulator(GENERATOR, CARD, ceiling_bytes=GIB, context=(0, "none"))
    fp32, low = (simulator.time(make_config(precision=precision)) for precision in ("fp32", "bf16-amp"))
    assert low.step_ms > fp32.step_ms
    model, config = simulator.model(make_config()), make_config()
    arguments = {"trainable_parameters": 1000, "tokens_per_sequence": 24}
    quicker = dataclasses.replace(CARD, operator_us=0.0)
    operators = len(model.step(SHAPE).template.ops)
    saved_ms = (
        step_time(model, config, CARD, **arguments).step_ms - step_time(model, config, quicker, **arguments).step_ms
    )
    assert 0.8 * operators * 0.020 < saved_ms < 1.1 * operators * 0.020


def test_recordings_of_a_cpu_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of no compute capability is not a CPU: neither reads the other's."""
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path))
    config = make_config()
    peaks = []
    for card in (CARD, dataclasses.replace(CARD, kind="cuda")):
        simulator = Simulator(CLASSIFIER, card, ceiling_bytes=GIB, context=(0, "none"))
        peaks.append(simulator.memory(config).breakdown["workspace"])
    assert 0 == peaks[0] < peaks[1]
