"""A request proved on a device: the processor, on which every trial here really runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from planner import InputError, Plan, plan
from planner.api import worker
from planner.devices import find_device
from planner.errors import TrialError
from planner.measure.protocol import OK, DeviceFacts, Measurement
from planner.proving import cap_bytes, trial_spec
from planner.question import look_up
from planner.request import PlanRequest, make_request
from planner.units import GIB, MIB
from planner.whole_run import measured_run, whole_run

TINY_BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model's configuration."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    (folder / "config.json").write_text(json.dumps(TINY_BERT))
    return str(folder)


def asked(model: str, **changes: object) -> dict[str, object]:
    """Arguments of a request that leaves four micro-batches open."""
    small = {"seq_len": 32, "batch_size": 8, "method": "full", "precision": "fp32", "checkpointing": "none"}
    return {"model": model, "vram": "2GB", "device": "cpu", **small, **changes}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A journal of this module's own."""
    return str(tmp_path_factory.mktemp("studies") / "trials.journal")


@pytest.fixture(scope="module")
def measured(model: str, storage: str) -> Iterator[Plan]:
    """A plan of two trials."""
    yield plan(**asked(model, trials=2, storage=storage))


def test_a_measured_plan_says_what_was_measured(measured: Plan) -> None:
    """Time and memory come from trials, the total is under the ceiling, and trials.csv has both figures."""
    assert "measured" == measured.time.source
    assert 1 <= measured.trials_run <= 2
    assert measured.peak.total_bytes <= measured.peak.ceiling_bytes == 2 * GIB
    ran = [row for row in measured.trial_rows if row["measured_step_ms"] != ""]
    assert ["fits"] * measured.trials_run == [row["status"] for row in ran]
    fastest = max(row["measured_tokens_per_s"] for row in ran)
    assert measured.time.tokens_per_s >= 0.9 * fastest  # a smaller one may go first within the noise
    assert all(row["predicted_step_ms"] > 0 for row in ran)


def test_what_was_not_run_says_why(measured: Plan) -> None:
    """Of four micro-batches two were run at most; the others have a reason, none is passed off as measured."""
    others = [row for row in measured.trial_rows if row["measured_step_ms"] == ""]
    assert 4 - measured.trials_run == len(others)
    assert all(row["status"] in ("pruned", "exceeds") and row["reason"] for row in others)


def test_a_measured_plan_is_written_for_the_processor(measured: Plan, tmp_path: Path) -> None:
    """The script's launcher uses no GPU, malloc is set as in the trials, and the plan can be loaded again."""
    folder = measured.save(tmp_path / "plan")
    assert "use_cpu: true" in (folder / "accelerate.yaml").read_text()
    script = (folder / "train.py").read_text()
    assert "mallopt(-3, 65536)" in script
    assert "PYTORCH_CUDA_ALLOC_CONF" not in script
    loaded = Plan.load(folder)
    assert dict(measured.search) == dict(loaded.search)
    assert measured.time == loaded.time


def test_the_next_plan_uses_what_was_measured(model: str, measured: Plan) -> None:
    """Another study of the same request begins with what is kept."""
    again = plan(**asked(model, trials=1))
    assert again.trials_run <= 1
    assert measured.trials_run <= again.search["trials_kept"]
    assert "measured" == again.time.source


def test_a_worker_joins_a_search(model: str, storage: str, measured: Plan) -> None:
    """The study's other micro-batches are run by whoever comes, as far as they are worth it; nothing twice."""
    ran = worker(storage=storage, device="cpu", timeout=60)
    assert 0 <= ran <= 4 - measured.trials_run
    assert 0 == worker(storage=storage, device="cpu", timeout=60)


def test_a_trial_may_take_what_the_ceiling_leaves(model: str) -> None:
    """Its cap leaves out the margin and what later phases add: what runs within it makes a plan that fits."""
    question = look_up(make_request(**asked(model)), FACTS)
    config = next(question.space("full").configurations())
    cap = cap_bytes(question, config)
    assert cap == trial_spec(question, config).ceiling_bytes
    assert cap < question.simulator.ceiling_bytes
    just_within = Measurement(
        status=OK,
        peak_allocated_bytes=cap - 401 * MIB,
        peak_reserved_bytes=cap - 400 * MIB,
        context_bytes=400 * MIB,
        process_bytes=cap,
    )
    assert measured_run(question.simulator, config, just_within).fits
    more = replace(just_within, peak_reserved_bytes=cap - 390 * MIB, process_bytes=cap + 40 * MIB)
    assert not measured_run(question.simulator, config, more).fits


def test_what_a_trial_measured_as_predicted_needs_what_was_predicted(model: str) -> None:
    """Measured steps that equal the simulated ones leave the whole run's figures as they were."""
    question = look_up(make_request(**asked(model)), FACTS)
    config = next(question.space("full").configurations())
    steps, run = question.simulator.memory(config), whole_run(question.simulator, config)
    same = Measurement(
        status=OK,
        peak_allocated_bytes=steps.peak_allocated_bytes,
        peak_reserved_bytes=steps.peak_reserved_bytes,
        process_bytes=steps.peak_reserved_bytes + steps.context_bytes,
    )
    assert run == measured_run(question.simulator, config, same)


def test_others_memory_is_not_the_plans(model: str) -> None:
    """On a device of which others hold most, the ceiling is what is free (a BERT on a shared GTX 1080)."""
    question = look_up(make_request(**asked(model)), replace(FACTS, free_bytes=GIB))
    reason = next(r for r in question.reasons if r.field == "ceiling_bytes")
    assert GIB == question.simulator.ceiling_bytes == reason.value
    assert "others hold 7 GiB" in reason.reason


# -- which device ----------------------------------------------------------------------------------------------------


def never(device: str) -> DeviceFacts:
    """A probe that must not be called."""
    raise AssertionError(f"{device} was looked at")


def request(**changes: object) -> PlanRequest:
    """BERT in 8 GB, and more."""
    return make_request(**{"model": "bert-base-uncased", "vram": "8GB", **changes})


def test_no_device_is_looked_at_where_none_is_wanted() -> None:
    """device none simulates, whatever there is."""
    facts, reason = find_device(request(device="none"), never)
    assert facts is None
    assert ("device", "none") == (reason.field, reason.value)


def test_what_is_free_of_the_processors_memory_is_looked_at_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates are remembered, but not what is free, of which there is no more than the machine has available."""
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path))
    facts, _ = find_device(request(device="cpu"), lambda _: FACTS)
    assert facts is not None
    assert facts.free_bytes <= min(FACTS.total_bytes, psutil.virtual_memory().total)
    again, _ = find_device(request(device="cpu"), never)
    assert again is not None
    assert FACTS.flops_per_s == again.flops_per_s


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_refused() -> None:
    """One line with what is accepted here; auto goes on without."""
    with pytest.raises(InputError, match=r"device: got 'cuda', and no CUDA driver is here; accepted here: cpu, none"):
        find_device(request(device="cuda"), never)
    facts, reason = find_device(request(), never)
    assert facts is None
    assert "no CUDA device here: every step is simulated" == reason.reason


CARD = replace(
    FACTS,
    device="cuda:0",
    name="NVIDIA GeForce RTX 4090",
    total_bytes=24_000 * MIB,
    free_bytes=23_000 * MIB,
    compute_capability=(8, 9),
)


def test_auto_simulates_a_card_that_is_not_the_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names another card, or more memory than this one has, plans for that; naming both is refused."""
    monkeypatch.setattr("planner.devices.has_cuda_driver", lambda: True)
    assert CARD == find_device(request(), lambda _: CARD)[0]
    other, reason = find_device(request(gpu="RTX 3070"), lambda _: CARD)
    assert other is None
    assert "the request is about RTX 3070" in reason.reason
    assert find_device(request(vram="48GB"), lambda _: CARD)[0] is None
    with pytest.raises(InputError, match="device: got 'cuda': the request is about RTX 3070"):
        find_device(request(gpu="RTX 3070", device="cuda"), lambda _: CARD)


def test_a_driver_without_a_usable_card_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto simulates and says why (a container has the driver's library and no card); cuda, asked for, fails."""
    monkeypatch.setattr("planner.devices.has_cuda_driver", lambda: True)

    def broken(device: str) -> DeviceFacts:
        raise TrialError(f"device {device} could not be probed: no CUDA GPUs are available")

    facts, reason = find_device(request(), broken)
    assert facts is None
    assert "every step is simulated: device cuda could not be probed: no CUDA GPUs are available" == reason.reason
    with pytest.raises(TrialError):
        find_device(request(device="cuda"), broken)
