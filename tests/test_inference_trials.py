"""Trials of inference on a real device, the CPU: what they measure, and the plans that are made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest

from planner import Plan, plan
from planner.config import InferenceConfig
from planner.errors import TrialError
from planner.expected_gain import WORTH_A_TRIAL, Candidate
from planner.hardware import card_of_device
from planner.inference import proving
from planner.inference.proving import at_planned_lengths, cap_bytes, trial_spec, worth_measuring
from planner.inference.question import look_up
from planner.inference.simulation import InferenceSimulator
from planner.inference.timing import typical_shape
from planner.inference.workload import InferenceWorkload
from planner.measure import protocol
from planner.measure.environment import trial_environment
from planner.measure.protocol import DeviceFacts, Measurement, TrialSpec
from planner.measure.runner import TrialRunner
from planner.measured_search import describe
from planner.measurements import Measured
from planner.models import ModelSpec
from planner.monotone import cannot_fit
from planner.request import make_request
from planner.residuals import structure_of
from planner.units import GIB, MIB

BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
FACTS = DeviceFacts(
    device="cpu",
    name="a processor",
    total_bytes=8 * GIB,
    free_bytes=6 * GIB,
    context_bytes=400 * MIB,
    flops_per_s={"fp32": 5e10, "bf16": 5e9},
    bandwidth_bytes_per_s=1e10,
    operator_us=10.0,
    threads=1,
)
NEW_TOKENS = 6


def workload(values: dict[str, Any], task: str) -> InferenceWorkload:
    """A tiny model at work."""
    spec = ModelSpec(
        model_id="tiny",
        source="file",
        model_type=values["model_type"],
        architecture=values["architectures"][0],
        default_task=task,
        max_seq_len=512,
        config=values,
    )
    return InferenceWorkload(spec=spec, task=task, max_new_tokens=NEW_TOKENS if task == "causal-lm" else 0)


VECTORS, LABELS, WRITING = (
    workload(BERT, "embedding"),
    workload(BERT, "sequence-classification"),
    workload(LLAMA, "causal-lm"),
)


def configuration(
    at: InferenceWorkload, micro_batch_size: int = 4, seq_len: int = 32, **fields: Any
) -> InferenceConfig:
    """fp32 without levers, but for what is named."""
    new = at.max_new_tokens
    return InferenceConfig(
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        max_tokens_per_micro_batch=micro_batch_size * (seq_len + new),
        max_new_tokens=new,
        **{"precision": "fp32", "kv_cache": "dynamic" if new else "none", **fields},
    )


def spec_of(at: InferenceWorkload, limits: dict[str, Any] | None = None, **fields: Any) -> TrialSpec:
    """A short trial on the CPU."""
    values: dict[str, Any] = {"device": "cpu", "timed_s": 0.0} | (limits or {})
    return TrialSpec(workload=at, config=configuration(at, **fields), **values)


@pytest.fixture(scope="module")
def runner() -> Iterator[TrialRunner]:
    """One server for all."""
    with TrialRunner(trial_environment("cpu", "")) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def shared_server(runner: TrialRunner) -> Iterator[None]:
    """Plans' trials run in that server too: one of their own would import torch anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proving, "trial_runner", lambda *_: nullcontext(runner))
        yield


def simulator(at: InferenceWorkload) -> InferenceSimulator:
    """Of a processor."""
    card = card_of_device(FACTS, FACTS.total_bytes)
    return InferenceSimulator(at, card, seq_len=32, ceiling_bytes=FACTS.total_bytes, context=(400 * MIB, "measured"))


# -- what goes there and comes back ----------------------------------------------------------------------------------


def test_a_request_comes_back_as_it_was_sent() -> None:
    """With the workload and the configuration of inference, told apart by their fields."""
    sent = spec_of(WRITING, {"typical_seq_len": 8}, kv_cache="static")
    assert sent == TrialSpec.from_json(sent.to_json())
    row = Measured(
        workload="w",
        config=sent.config,
        ceiling_bytes=None,
        predicted_reserved_bytes=None,
        predicted_step_ms=1.0,
        measurement=Measurement(status=protocol.OK, prefill_ms=3.0, token_ms=(1.0, 2.0)),
    )
    assert row == Measured.from_json(row.to_json())


# -- what is measured ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(runner: TrialRunner) -> Measurement:
    """Labels, with the typical length as well."""
    return runner.run(spec_of(LABELS, {"typical_seq_len": 8}))


def test_a_trial_runs_batches_and_nothing_else(measured: Measurement) -> None:
    """Each figure is there; what only training has is not."""
    assert (protocol.OK, "") == (measured.status, measured.reason)
    assert {"load", "first_batch", "batch", "typical"} == set(measured.phases)
    assert min(len(measured.micro_batch_ms), len(measured.typical_micro_batch_ms)) >= protocol.MIN_PASSES
    assert measured.step_ms == median_low(measured.micro_batch_ms)
    assert measured.tokens_per_s == pytest.approx(1000 * 4 * 32 / measured.step_ms)
    assert ((), None, 0) == (measured.update_ms, measured.loss, measured.allocation_retries)
    assert 2 + len(measured.micro_batch_ms) == measured.steps_executed
    # Linux counts resident pages for each processor apart, and adds them up now and then
    assert measured.context_bytes + measured.peak_reserved_bytes <= measured.process_bytes + MIB


@pytest.mark.parametrize(
    ("at", "fields"),
    [
        (LABELS, {}),
        (VECTORS, {"precision": "bf16", "micro_batch_size": 2}),
        (VECTORS, {"attention": "eager"}),
        (WRITING, {}),
        (WRITING, {"kv_cache": "static", "precision": "bf16"}),
        (WRITING, {"prefill_chunk_tokens": 16}),
    ],
    ids=lambda value: value.task if isinstance(value, InferenceWorkload) else "-".join(map(str, value.values())),
)
def test_live_tensors_are_those_that_were_simulated(
    runner: TrialRunner, at: InferenceWorkload, fields: dict[str, Any]
) -> None:
    """To the byte: the pass that is tried is the one that is recorded on tensors without data."""
    found = runner.run(spec_of(at, **fields))
    assert (protocol.OK, "") == (found.status, found.reason)
    assert simulator(at).memory(configuration(at, **fields)).peak_allocated_bytes == found.peak_allocated_bytes


def test_a_text_is_written_to_its_last_token(runner: TrialRunner) -> None:
    """Reading the prompts and writing are told apart, and make up the batch's time; no text ends early."""
    found = runner.run(spec_of(WRITING))
    assert NEW_TOKENS - 1 == len(found.token_ms)
    assert min(found.prefill_ms, *found.token_ms) > 0
    assert found.prefill_ms + sum(found.token_ms) <= found.step_ms
    assert found.step_ms in found.micro_batch_ms
    assert found.tokens_per_s == pytest.approx(1000 * 4 * NEW_TOKENS / found.step_ms)


@pytest.mark.parametrize(
    ("at", "fields"),
    [
        (LABELS, {"quantization": "int8-dynamic"}),
        (LABELS, {"offload": "disk", "layers_on_card": 1}),
        (WRITING, {"prefix_tokens": 16}),
        (WRITING, {"kv_cache": "quantized"}),
    ],
    ids=["quantized weights", "weights on disk", "shared beginning", "quantized cache"],
)
def test_each_lever_can_be_tried(runner: TrialRunner, at: InferenceWorkload, fields: dict[str, Any]) -> None:
    """It runs; offloaded layers hold nothing after loading."""
    found = runner.run(spec_of(at, **fields))
    assert (protocol.OK, "") == (found.status, found.reason)
    if "offload" in fields:
        whole = simulator(at).memory(configuration(at)).breakdown["parameters"]
        assert found.phases["load"]["peak_allocated_bytes"] < whole


def test_a_batch_that_has_no_room_is_out_of_memory(runner: TrialRunner) -> None:
    """A batch of 64 MiB of numbers in 32 MiB."""
    first = runner.run(spec_of(LABELS))
    ceiling = first.context_bytes + 32 * MIB
    found = runner.run(spec_of(LABELS, {"ceiling_bytes": ceiling}, micro_batch_size=1024, seq_len=64))
    assert protocol.OOM == found.status


# -- what a measurement says of a run --------------------------------------------------------------------------------


def test_speed_is_that_of_the_planned_lengths() -> None:
    """As predicted where both lengths took what was predicted; slower by as much as both were slower."""
    at = simulator(LABELS)
    config = configuration(LABELS)
    predicted = at.time(config)
    typical_ms = 1e3 * at.batch_seconds(config, typical_shape(config, 32))
    for slower in (1.0, 3.0):
        trial = Measurement(
            status=protocol.OK,
            step_ms=slower * predicted.step_ms,
            tokens_per_s=1.0,
            typical_micro_batch_ms=(slower * typical_ms,),
        )
        found = at_planned_lengths(trial, at, config).tokens_per_s
        assert predicted.tokens_per_s / slower == pytest.approx(found)
    failed = Measurement(status=protocol.OOM)
    assert failed is at_planned_lengths(failed, at, config)


def test_short_texts_correct_the_speed_of_short_texts() -> None:
    """The longest batch as predicted and a short one twice as slow: between the two."""
    at = simulator(LABELS)
    config = configuration(LABELS, micro_batch_size=4, seq_len=256)
    at.lengths = replace(at.texts, tokens=[16] * 50 + [256] * 50)
    predicted = at.time(config)
    short_ms = 1e3 * at.batch_seconds(config, typical_shape(config, 16))
    trial = Measurement(
        status=protocol.OK, step_ms=predicted.step_ms, tokens_per_s=1.0, typical_micro_batch_ms=(2 * short_ms,)
    )
    found = at_planned_lengths(trial, at, config).tokens_per_s
    assert predicted.tokens_per_s / 2 < found < predicted.tokens_per_s


def candidate(micro_batch_size: int, tokens_per_s: float, **fields: Any) -> Candidate[InferenceConfig]:
    """Predicted to be so fast."""
    return Candidate(
        config=configuration(LABELS, micro_batch_size=micro_batch_size, **fields),
        reserved_bytes=micro_batch_size * MIB,
        ceiling_bytes=GIB,
        context_bytes=0,
        step_ms=1.0,
        tokens_per_s=tokens_per_s,
    )


def test_a_batch_that_gains_nothing_is_not_worth_a_trial() -> None:
    """Of a structure those stay that are predicted to be faster than the next smaller one that stays."""
    little = 100.0 * (1 + WORTH_A_TRIAL / 2)
    candidates = [
        candidate(16, little),
        candidate(8, 100.0),
        candidate(32, 150.0),
        candidate(16, 10.0, precision="bf16"),
    ]
    chosen, left_out = worth_measuring(candidates)
    assert {(8, "fp32"), (32, "fp32"), (16, "bf16")} == {
        (c.config.micro_batch_size, c.config.precision) for c in chosen
    }
    assert {candidates[0].config: candidates[1]} == left_out


def test_what_measurements_have_in_common() -> None:
    """Batches of a structure, whatever layers stay on the card; what is larger than what did not fit doesn't fit."""
    small, large = (
        configuration(WRITING, 2, offload="disk", layers_on_card=1),
        configuration(WRITING, 8, offload="disk"),
    )
    assert structure_of(small) == structure_of(large)
    assert structure_of(small) != structure_of(configuration(WRITING, 2))
    failed = configuration(WRITING, 4, precision="bf16")
    assert "batch 4 with precision bf16 did not fit" in cannot_fit(configuration(WRITING, 8), [failed])
    assert not cannot_fit(configuration(WRITING, 2), [failed])
    assert not cannot_fit(configuration(WRITING, 8, kv_cache="static"), [failed])


def test_a_configuration_in_a_few_words() -> None:
    """What is as usual is left out."""
    assert "fp32, batch 4" == describe(configuration(WRITING))
    config = configuration(WRITING, kv_cache="static", prefill_chunk_tokens=16, attention="eager", offload="disk")
    assert "fp32, static cache, 16 tokens a pass, eager, offload disk, batch 4" == describe(config)


# -- plans -----------------------------------------------------------------------------------------------------------


def folder(path: Path, values: dict[str, Any]) -> str:
    """With a model's configuration."""
    (path / "config.json").write_text(json.dumps(values))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny classifier's folder."""
    return folder(tmp_path_factory.mktemp("tiny-bert"), BERT)


def asked(model: str, **changes: object) -> dict[str, Any]:
    """A request that leaves the batch open."""
    return {
        "model": model,
        "vram": "2GB",
        "device": "cpu",
        "mode": "infer",
        "seq_len": 32,
        "precision": "fp32",
        **changes,
    }


@pytest.fixture(scope="module")
def made(model: str) -> Plan[InferenceConfig]:
    """A plan of two trials."""
    return plan(**asked(model, trials=2))


def test_a_measured_plan_says_what_was_measured(made: Plan[InferenceConfig]) -> None:
    """Time and memory come from trials, the total is under the ceiling, and trials.csv has both figures."""
    assert "measured" == made.time.source
    assert 1 <= made.trials_run <= 2
    assert made.peak.total_bytes <= made.peak.ceiling_bytes == 2 * GIB
    ran = [row for row in made.trial_rows if row["measured_step_ms"] != ""]
    assert ["fits"] * made.trials_run == [row["status"] for row in ran]
    assert made.time.tokens_per_s >= 0.9 * max(row["measured_tokens_per_s"] for row in ran)
    assert all(row["predicted_peak_allocated_bytes"] == row["measured_peak_allocated_bytes"] for row in ran)
    others = [row for row in made.trial_rows if row["measured_step_ms"] == ""]
    assert others
    assert all(row["status"] == "pruned" and row["reason"] for row in others)


def test_the_next_plan_uses_what_was_measured(model: str, made: Plan[InferenceConfig]) -> None:
    """Nothing is run twice, and what was measured counts; a plan that is saved says so."""
    again = plan(**asked(model, trials=1, headroom="1MB"))
    assert made.trials_run <= again.search["trials_kept"]
    assert "measured" == again.time.source


def test_training_and_inference_keep_their_measurements_apart(model: str) -> None:
    """On one device."""
    question = look_up(make_request(**asked(model)), FACTS)
    assert "infer" == question.store_key["mode"]
    assert trial_spec(question, configuration(LABELS)).ceiling_bytes == cap_bytes(question, configuration(LABELS))


def test_all_trials_failing_is_an_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they failed of."""
    answer = Measurement(status=protocol.SEGFAULT, reason="ended by SIGSEGV")
    monkeypatch.setattr(TrialRunner, "run", lambda *_: answer)
    with pytest.raises(TrialError, match="SIGSEGV"):
        plan(**asked(model, seq_len=40))


def test_an_interrupt_leaves_the_best_so_far(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One trial ran, the second was interrupted: the plan is of the first."""
    run, ran = TrialRunner.run, []

    def interrupted(self: TrialRunner, spec: TrialSpec) -> Measurement:
        if ran:
            raise KeyboardInterrupt
        ran.append(spec.config)
        return run(self, spec)

    monkeypatch.setattr(TrialRunner, "run", interrupted)
    found = plan(**asked(model, seq_len=48))
    assert found.search["interrupted"]
    assert ran == [found.config]
    assert "measured" == found.time.source


@pytest.mark.slow
def test_text_is_planned_by_trials(tmp_path: Path) -> None:
    """Of a generating task reading and writing are measured apart."""
    found = plan(**asked(folder(tmp_path, LLAMA), task="causal-lm", max_new_tokens=4, trials=1))
    time: Any = found.time
    assert "measured" == time.source
    assert 0 < time.prefill_ms < time.step_ms
    assert time.prefill_ms + 3 * time.decode_ms_per_token <= time.step_ms
    assert time.decode_tokens_per_s == pytest.approx(1e3 * found.config.micro_batch_size / time.decode_ms_per_token)
