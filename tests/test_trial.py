"""One trial on a real device, the CPU: what it measures, and what it says of configurations that can't be measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from test_levers import BERT, GPT2, configuration, tiny
from torch import Tensor, nn

from planner.levers.checkpointing import checkpointing_layers
from planner.measure import protocol, trial
from planner.measure.backends import CpuBackend, CudaBackend, live_peaks
from planner.measure.course import jumping
from planner.measure.protocol import Measurement, TrialSpec
from planner.measure.trial import run_trial
from planner.recording.record import Recording
from planner.workload import Workload

CLASSIFIER = Workload(spec=BERT, task="sequence-classification")
LANGUAGE = Workload(spec=GPT2, task="causal-lm")
MIB = 2**20


def spec_of(workload: Workload = CLASSIFIER, limits: dict[str, Any] | None = None, **config: Any) -> TrialSpec:
    """A short trial of a tiny model on the CPU."""
    shape = {"micro_batch_size": 4, "seq_len": 32} | config
    values: dict[str, Any] = {"device": "cpu", "timed_s": 0.0} | (limits or {})
    return TrialSpec(workload=workload, config=configuration(**shape), **values)


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], object]) -> None:
    """Have something done to the trial's model behind the levers' backs."""
    build = trial.build_model

    def build_changed(*args: Any, **kwargs: Any) -> nn.Module:
        model = build(*args, **kwargs)
        change(model)
        return model

    monkeypatch.setattr(trial, "build_model", build_changed)


def in_a_process(line: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and lines of ``python -m planner.measure``."""
    done = subprocess.run(
        [sys.executable, "-m", "planner.measure", *arguments],
        input=line,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


# -- what is measured ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def phases_told() -> list[str]:
    """What the trial below said that it was at."""
    return []


@pytest.fixture(scope="module")
def measured(phases_told: list[str]) -> Measurement:
    """BERT, with the typical length as well."""
    return run_trial(spec_of(limits={"typical_seq_len": 8}), tell=phases_told.append)


def test_a_measurement_has_everything(measured: Measurement) -> None:
    """Each field is there, and none is a default that happens to look like a figure."""
    assert (protocol.OK, "") == (measured.status, measured.reason)
    assert {"load", "first_step", "steady_step", "typical"} == set(measured.phases)
    for phase, peaks in measured.phases.items():
        assert {"peak_allocated_bytes", "peak_reserved_bytes"} == set(peaks), phase
    assert measured.peak_allocated_bytes == max(p["peak_allocated_bytes"] for p in measured.phases.values())
    assert measured.peak_reserved_bytes == max(p["peak_reserved_bytes"] for p in measured.phases.values())
    assert measured.context_bytes + measured.peak_reserved_bytes <= measured.process_bytes
    assert min(len(measured.micro_batch_ms), len(measured.typical_micro_batch_ms)) >= protocol.MIN_PASSES
    assert min(*measured.micro_batch_ms, *measured.update_ms, *measured.typical_micro_batch_ms) > 0
    assert 2 + len(measured.update_ms) <= measured.steps_executed
    assert 0 < measured.loss < 2
    assert 0 < measured.setup_s < measured.wall_s
    assert {"torch": torch.__version__}.items() <= measured.versions.items()
    assert measured == Measurement.from_json(measured.to_json())


def test_a_step_is_all_its_micro_batches_and_one_update(measured: Measurement) -> None:
    """Medians of both; tokens are those of the longest length."""
    assert measured.step_ms == 2 * median(measured.micro_batch_ms) + median(measured.update_ms)
    assert measured.tokens_per_s == pytest.approx(1000 * 2 * 4 * 32 / measured.step_ms)
    assert len(measured.micro_batch_ms) == 2 * len(measured.update_ms)


def test_accumulation_costs_a_trial_no_more() -> None:
    """Of 16 micro-batches three are run, the first of which makes the gradients that the others add to."""
    many = run_trial(spec_of(gradient_accumulation_steps=16, effective_batch_size=64))
    assert protocol.OK == many.status
    assert many.step_ms == 16 * median(many.micro_batch_ms) + median(many.update_ms)
    assert len(many.micro_batch_ms) == 3 * len(many.update_ms) == 3


def test_live_tensors_are_counted_to_the_byte(measured: Measurement) -> None:
    """Loading: parameters and buffers. Later: gradients, two moments and AdamW's counters are there at least."""
    model = CLASSIFIER.build_model(attention="sdpa", dtype=torch.float32)
    parameters = sum(p.nbytes for p in model.parameters())
    loaded = parameters + sum(b.nbytes for b in model.buffers())
    assert loaded == measured.phases["load"]["peak_allocated_bytes"]
    state = 2 * parameters + 4 * len(list(model.parameters()))
    first, steady = (measured.phases[name]["peak_allocated_bytes"] for name in ("first_step", "steady_step"))
    assert loaded + parameters + state < first < steady
    assert loaded + state < measured.phases["typical"]["peak_allocated_bytes"] < steady


def test_progress_is_told_in_order(measured: Measurement, phases_told: list[str]) -> None:
    """One line for each pass at least, so that a hang can be told from work."""
    assert ["libraries", "load", "first_step", "steady_step", "timed", "typical"] == list(dict.fromkeys(phases_told))
    passes = len(measured.micro_batch_ms) + len(measured.typical_micro_batch_ms)
    assert len(phases_told) >= passes


def test_the_typical_shape_keeps_within_the_token_budget() -> None:
    """Sequences of 8 tokens where 4 of 32 fit: 8, all of the effective batch. The same shape is not run again."""
    shapes: list[tuple[int, ...]] = []

    class Watched(Workload):
        def make_batch(self, *shape: int, **options: Any) -> dict[str, Tensor]:
            shapes.append(shape)
            return super().make_batch(*shape, **options)

    watched = Watched(spec=BERT, task="sequence-classification")
    assert run_trial(spec_of(watched, {"typical_seq_len": 8})).ok
    assert [(4, 32), (8, 8)] == shapes
    same = run_trial(spec_of(watched, {"typical_seq_len": 32}))
    assert same.typical_micro_batch_ms == same.micro_batch_ms != ()
    assert same.phases["typical"] == same.phases["steady_step"]
    assert [(4, 32)] == shapes[2:]


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        (CLASSIFIER, {"method": "lora"}),
        (CLASSIFIER, {"method": "lora", "precision": "bf16-amp", "checkpointing": "full"}),
        (CLASSIFIER, {"precision": "fp16-amp"}),
        (LANGUAGE, {"precision": "bf16-master", "attention": "eager"}),
        (LANGUAGE, {"precision": "bf16-amp", "loss": "fused-linear", "checkpointing": "every-2"}),
        (LANGUAGE, {"quantization": "nf4", "precision": "bf16-amp"}),
        (LANGUAGE, {"quantization": "int8"}),
        (LANGUAGE, {"optimizer": "adamw_8bit"}),
        (LANGUAGE, {"optimizer": "adafactor"}),
        (LANGUAGE, {"offload": "parameters", "checkpointing": "full"}),
        (CLASSIFIER, {"offload": "activations", "precision": "bf16-amp"}),
        (CLASSIFIER, {"offload": "optimizer"}),
        (LANGUAGE, {"optimizer": "sgd", "precision": "bf16"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_every_lever_trains_for_real(workload: Workload, config: dict[str, Any]) -> None:
    """All parameters that are to be trained get gradients, and the layers that are to be are computed twice."""
    found = run_trial(spec_of(workload, **config))
    assert (protocol.OK, "", ()) == (found.status, found.reason, found.without_gradient)
    assert {"full": 4, "every-2": 2}.get(config.get("checkpointing", ""), 0) == found.recomputed_layers


# -- what can't be measured ------------------------------------------------------------------------------------------


def cut(model: nn.Module) -> None:
    """From the third layer on nothing flows back."""
    layer: Any = checkpointing_layers(model)[2]
    layer.register_forward_hook(
        lambda _module, _args, out: out.detach() if isinstance(out, Tensor) else out[0].detach()
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "trained parameters got no gradient: bert.embeddings"),
        (lambda model: model.requires_grad_(False), "no parameter is trained"),
        (lambda model: model.classifier.register_forward_hook(lambda *a: a[-1].detach()), "the loss depends on no"),
    ],
    ids=["cut", "frozen", "cut at the end"],
)
def test_parameters_that_learn_nothing_are_noticed(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], object], said: str
) -> None:
    """A graph that is cut somewhere trains what comes after the cut, and nobody would notice."""
    changed(monkeypatch, change)
    found = run_trial(spec_of())
    assert protocol.NO_GRADIENT == found.status
    assert said in found.reason


def test_the_parameters_without_gradient_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix before the cut, and none after it."""
    changed(monkeypatch, cut)
    names = run_trial(spec_of()).without_gradient
    assert "bert.encoder.layer.2.output.dense.weight" in names
    assert not any(name.startswith(("bert.encoder.layer.3", "bert.pooler", "classifier")) for name in names)


def test_a_module_that_does_not_run_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert that no token is sent to has none in a step, and learns in others."""
    changed(monkeypatch, lambda model: model.add_module("spare", nn.Linear(8, 8)))
    assert run_trial(spec_of()).ok


def test_layers_whose_parts_are_in_lists_are_counted() -> None:
    """T5 calls what its layers' lists hold; both stacks are computed twice."""
    t5 = tiny("t5-small", d_model=64, d_ff=128, d_kv=32, num_heads=2, num_layers=2, num_decoder_layers=2)
    found = run_trial(spec_of(Workload(spec=t5, task="seq2seq-lm"), checkpointing="full"))
    assert (protocol.OK, "", 4) == (found.status, found.reason, found.recomputed_layers)


@pytest.mark.parametrize("checkpointing", ["full", "every-2", "none"])
def test_checkpointing_that_is_not_as_asked_is_noticed(monkeypatch: pytest.MonkeyPatch, checkpointing: str) -> None:
    """Switched off in one layer, or on where it is to be off."""

    def switch(model: nn.Module) -> None:
        layer: Any = checkpointing_layers(model)[0]
        if checkpointing == "none":
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        layer.gradient_checkpointing = checkpointing == "none"

    changed(monkeypatch, switch)
    found = run_trial(spec_of(checkpointing=checkpointing))
    assert protocol.NOT_CHECKPOINTED == found.status
    assert f"checkpointing {checkpointing} is to compute" in found.reason


def test_a_loss_that_is_no_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays out of the JSON, which has no word for it."""
    changed(monkeypatch, lambda model: nn.init.constant_(model.classifier.weight, float("inf")))
    found = run_trial(spec_of())
    assert (protocol.NAN_LOSS, None) == (found.status, found.loss)
    assert found.steps_executed == 0


def test_exceptions_of_the_models_code_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Type and first line; what was measured before is there."""

    def fail(*_: object) -> None:
        raise LookupError("no such thing\nat all")

    changed(monkeypatch, lambda model: model.classifier.register_forward_hook(fail))
    found = run_trial(spec_of())
    assert (protocol.ERROR, "LookupError: no such thing") == (found.status, found.reason)
    assert found.phases["load"]["peak_allocated_bytes"] > 0


@pytest.mark.parametrize(
    ("error", "cpu", "cuda"),
    [
        (MemoryError("std::bad_alloc"), protocol.OOM, protocol.HOST_OOM),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), protocol.OOM, protocol.HOST_OOM),
        (RuntimeError("could not create a primitive"), protocol.OOM, protocol.ERROR),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), protocol.ERROR, protocol.OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), protocol.ERROR, protocol.OOM),
        (torch.AcceleratorError("CUDA error: out of memory"), protocol.ERROR, protocol.HOST_OOM),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), protocol.ERROR, protocol.DEVICE_ERROR),
        (RuntimeError("CUDA error: device-side assert triggered"), protocol.ERROR, protocol.DEVICE_ERROR),
        (AssertionError("Torch not compiled with CUDA enabled"), protocol.ERROR, protocol.DEVICE_ERROR),
        (ValueError("anything else"), protocol.ERROR, protocol.ERROR),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_have_a_status(error: BaseException, cpu: str, cuda: str) -> None:
    """The device's memory, the host's, the device, or the code."""
    assert (cpu, cuda) == (CpuBackend("cpu").status_of(error), CudaBackend("cuda").status_of(error))


def test_an_unknown_device_is_an_error() -> None:
    """In one line, like everything else."""
    found = run_trial(replace(spec_of(), device="tpu"))
    assert (protocol.ERROR, "ValueError: device: got 'tpu'; accepted: cpu, cuda, cuda:N") == (
        found.status,
        found.reason,
    )


def test_a_ceiling_that_the_machine_does_not_have_is_occupied() -> None:
    """Before anything is built."""
    found = run_trial(spec_of(limits={"ceiling_bytes": 1 << 50}))
    assert protocol.OCCUPIED == found.status
    assert "the ceiling is 1024 TiB" in found.reason


class _Short(CpuBackend):
    """A device whose allocator has to free its cache in each look."""

    _looks = 0

    @property
    def allocation_retries(self) -> int:
        """One more."""
        self._looks += 1
        return self._looks


def test_an_allocator_that_asks_again_is_thrashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fit, at a price that nobody wants to pay in each step; times are there all the same."""
    monkeypatch.setattr(trial, "backend_of", _Short)
    found = run_trial(spec_of())
    assert (protocol.THRASHING, 1) == (found.status, found.allocation_retries)
    assert found.step_ms > 0


@pytest.mark.parametrize(
    ("expected", "kinds"),
    [
        (0, [(10, 10, 11), (1, 1, 1)]),
        (0, [(10, 10, 31), (1, 1, 1)]),
        (2, [(10, 10, 31), (1, 1, 4)]),
        (0, [(10,) * 98 + (40, 40)]),
        (6, [(10,) * 94 + (40,) * 6]),
    ],
)
def test_passes_that_jump_are_counted(expected: int, kinds: list[tuple[float, ...]]) -> None:
    """A driver that moves the card's memory to the host's doesn't say so; one pass in twenty may be slow."""
    assert expected == jumping(*kinds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_card_that_is_not_there_is_an_error_of_the_device() -> None:
    """With nothing measured."""
    found = run_trial(replace(spec_of(), device="cuda"))
    assert (protocol.DEVICE_ERROR, {}) == (found.status, found.phases)


def test_peaks_are_the_largest_sums_of_a_phase() -> None:
    """What is alive when a phase begins counts for it; phases in parts are one."""
    recording = Recording(
        sizes=[0, 10, 5, 7, 20],
        categories=[0] * 5,
        events=[1, 2, -2, 3, 4, -4, -3],
        layers=[0] * 7,
        phases={"load/0": 0, "a/forward": 1, "a/backward": 3, "b/forward": 6},
    )
    assert {"load": 10, "a": 37, "b": 17} == live_peaks(recording)


# -- the process -----------------------------------------------------------------------------------------------------


def test_a_process_answers_in_lines() -> None:
    """Its number first, progress, the measurement last; exit code 0."""
    code, lines = in_a_process(spec_of().to_json() + "\n")
    assert 0 == code
    assert "start" == lines[0]["phase"]
    assert lines[0]["pid"] > 0
    assert all("phase" in line for line in lines[:-1])
    assert Measurement.from_json(json.dumps(lines[-1])).ok


def test_a_ceiling_in_host_memory_is_kept() -> None:
    """What doesn't fit fails where it asks for the memory, and the answer says so."""
    wide = replace(BERT, config={**BERT.config, "intermediate_size": 1 << 16})
    spec = spec_of(Workload(spec=wide, task="sequence-classification"), {"ceiling_bytes": 700 * MIB}, seq_len=128)
    code, lines = in_a_process(spec.to_json())
    found = Measurement.from_json(json.dumps(lines[-1]))
    assert (0, protocol.OOM) == (code, found.status)
    assert "allocate" in found.reason
    assert found.process_bytes <= 700 * MIB


@pytest.mark.parametrize("line", ["", "no JSON\n", "{}\n", '{"workload": 1}\n', "[1]\n"])
def test_a_line_that_is_no_request_is_said(line: str) -> None:
    """In JSON as well, with exit code 0: an answer was written."""
    code, lines = in_a_process(line)
    assert (0, protocol.BAD_REQUEST) == (code, lines[-1]["status"])
    assert "not a trial's request" in lines[-1]["reason"]
