"""The benchmark that needs a GPU: its logic, on the processor."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu_validation import (  # noqa: E402
    COLUMNS,
    CUDA_CASES,
    Case,
    compared,
    configured,
    measured_case,
    ordered_pairs,
    planned_rows,
    summary,
)

from planner.budget import Memory  # noqa: E402
from planner.measure.environment import trial_environment  # noqa: E402
from planner.measure.protocol import OK, OOM, DeviceFacts, Measurement  # noqa: E402
from planner.measure.runner import TrialRunner  # noqa: E402
from planner.timing import Time  # noqa: E402
from planner.units import GIB, MIB  # noqa: E402

H200 = DeviceFacts(
    device="cuda:0",
    name="NVIDIA H200",
    total_bytes=139 * GIB,
    free_bytes=138 * GIB,
    context_bytes=500 * MIB,
    compute_capability=(9, 0),
    flops_per_s={"fp32": 5e13, "bf16": 7e14},
    bandwidth_bytes_per_s=4e12,
)


@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: f"{case.model}-{case.shape}-{case.levers}")
def test_every_case_of_the_table_can_be_asked_for(case: Case) -> None:
    """Each names a bundled model, levers that go together on a data-centre card, and its own shape."""
    question, config = configured(case, H200)
    assert case.shape == (config.micro_batch_size, config.seq_len)
    assert case.accumulation == config.gradient_accumulation_steps
    asked = {name: value for name, value in case.levers.items() if name != "method"}
    assert asked == {name: getattr(config, name) for name in asked}
    assert "H200" in question.card.name


def test_a_case_is_predicted_and_measured(tmp_path: Path) -> None:
    """On the processor, for real: every column that both sides have is filled, memory within a tenth."""
    tiny = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        **{"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 2},
        **{"vocab_size": 30_000, "max_position_embeddings": 512},
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    case = Case(model=str(tmp_path), shape=(8, 64), levers={"precision": "fp32"})
    with TrialRunner(trial_environment("cpu", "")) as runner:
        row = measured_case(case, runner.probe("cpu"), runner)
    assert OK == row["status"], row["reason"]
    assert set(row) <= set(COLUMNS)
    assert all(row[name] not in ("", None) for name in COLUMNS if name.startswith(("predicted", "measured")))
    assert abs(float(row["allocated_error"])) < 0.001
    assert abs(float(row["reserved_error"])) < 0.10


@pytest.mark.slow
def test_the_plan_under_a_cap_is_measured(tmp_path: Path) -> None:
    """Its last row is the plan, whose process stays under the cap; the rows before it are trials."""
    tiny = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1},
        **{"vocab_size": 1000, "max_position_embeddings": 512},
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    *trials, last = planned_rows(str(tmp_path), "cpu", "2GB", timeout_s=10.0)
    assert trials
    assert "under the ceiling" == last["status"]
    assert last["measured_process_bytes"] <= 2 * GIB


MEMORY = Memory(
    peak_allocated_bytes=1000,
    peak_reserved_bytes=1100,
    context_bytes=100,
    margin_bytes=10,
    total_bytes=1210,
    ceiling_bytes=5000,
    breakdown={},
)
TIME = Time(step_ms=20.0, micro_batch_ms=18.0, update_ms=2.0, tokens_per_s=100.0)


def test_errors_are_predicted_over_measured() -> None:
    """predicted / measured - 1, for what was measured; nothing for what wasn't."""
    ran = Measurement(status=OK, peak_allocated_bytes=1000, peak_reserved_bytes=1000, process_bytes=1200, step_ms=25.0)
    row = compared(MEMORY, TIME, ran)
    errors = [float(row[name]) for name in ("allocated_error", "reserved_error", "process_error", "step_error")]
    assert pytest.approx([0.0, 0.1, 0.0, -0.2]) == errors
    failed = compared(MEMORY, TIME, Measurement(status=OOM, reason="out of memory"))
    assert ("oom", "out of memory", "") == (failed["status"], failed["reason"], failed["reserved_error"])


def test_only_times_that_differ_are_ordered() -> None:
    """Of three pairs one differs by less than 5 %; of the two others one is predicted the right way round."""
    assert (1, 2) == ordered_pairs([(10.0, 100.0), (11.0, 104.0), (10.5, 200.0)])


def test_the_summary_counts_what_did_not_run() -> None:
    """Cases with an error are named with their reason, and don't count as measured."""
    good = {"id": "case-01", "status": "ok", "reason": "", "predicted_step_ms": 1.0, "measured_step_ms": 1.0}
    good |= dict.fromkeys(("allocated_error", "reserved_error", "process_error", "step_error"), "0.010000")
    bad = {"id": "case-02", "status": "error", "reason": "no bitsandbytes", "reserved_error": ""}
    text = summary([good, bad])
    assert "1 of 2 cases measured" in text
    assert "allocated_error  median 1.00%" in text
    assert "case-02: error: no bitsandbytes" in text


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    """One line that names the device, and no traceback."""
    out = tmp_path / "rows.csv"
    command = [sys.executable, str(BENCHMARKS / "gpu_validation.py"), "--device", "cuda:7", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 4 == ended.returncode
    assert "Traceback" not in ended.stderr
    assert "cuda:7" in ended.stderr
    assert [] == list(csv.DictReader(out.open())) if out.exists() else True
