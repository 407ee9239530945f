"""The memory benchmark: rows in, errors and a summary out, on recordings that are made for real."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import ground_truth
import loading
import loops
import memory_accuracy
import setups
from rows import Row, load_rows

from planner.memory.allocator import AllocatorSettings, replay_events
from planner.recording.record import ACTIVATIONS, OUTSIDE_LAYERS, PARAMETERS, Op, Recording

COLUMNS = [
    *("id", "source", "source_kind", "model_id", "model_class/task", "gpu", "vram_gb", "measure", "peak_bytes"),
    *("micro_batch", "seq_len", "grad_accum", "precision", "attention", "grad_checkpointing", "optimizer"),
    *("finetune_method", "quantization", "kind", "throughput_value", "transformers_version", "notes", "quality"),
]
TABLE = {
    "model_id": "distilbert-base-uncased",
    "gpu": "RTX 2060 (8GB)",
    "vram_gb": "8",
    "measure": "max_memory_allocated",
    "micro_batch": "8",
    "seq_len": "256",
    "precision": "pure-fp16 (weights .half())",
    "attention": "eager",
    "kind": "train",
    "quality": "A",
}


def write_rows(path: Path, *rows: dict[str, str]) -> Path:
    """A measurements file with these rows, each on top of the DistilBERT table's values."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({**TABLE, **row} for row in rows)
    return path


def row_of(tmp_path: Path, **fields: str) -> Row:
    """One row, read back from a file."""
    return load_rows(write_rows(tmp_path / "rows.csv", {"id": "distilbert-013", **fields}))[0]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings of this module's tests are made once, and kept out of the user's cache."""
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path_factory.getbasetemp() / "ground-truth-cache"))


def test_rows_keep_blank_and_inexact_fields_apart_from_numbers(tmp_path: Path) -> None:
    """A length such as ``<=768`` is no number, and an empty peak is none either."""
    row = row_of(tmp_path, seq_len="<=768 (dynamic padding)", peak_bytes="")
    assert (None, None, 8) == (row.seq_len, row.measured_bytes, row.micro_batch)
    assert "distilbert" == row.source
    assert "<=768 (dynamic padding)" == row["seq_len"]


def test_published_peak_of_distilbert_is_reproduced(tmp_path: Path) -> None:
    """983.45 MB were measured for 8 x 256 in fp16 with eager attention (transformers' documentation)."""
    run = ground_truth.run_for(row_of(tmp_path, peak_bytes="983450000"))
    assert isinstance(run, ground_truth.Run)
    assert 983450000 == pytest.approx(run.predicted_bytes, rel=0.01)


def test_fitted_run_equals_one_recorded_at_the_rows_own_shape(tmp_path: Path) -> None:
    """The polynomials give the sizes that a recording at 8 x 256 has, event for event."""
    row = row_of(tmp_path)
    run = ground_truth.run_for(row)
    setup = setups.setup_of(row)
    assert isinstance(run, ground_truth.Run)
    assert isinstance(setup, setups.Setup)
    assert run.fitted
    direct = ground_truth._without_closed_gates(ground_truth._record(setup, setup.shape))
    direct = loading.after_checkpoint(direct, ground_truth._checkpoint(setup))
    assert direct.events == run.recording.events
    assert direct.sizes == run.recording.sizes


def test_peak_of_the_tables_is_that_after_the_cache_was_emptied(tmp_path: Path) -> None:
    """At 1 x 128 loading takes more than any iteration: checkpoint in fp32 and model in fp16 beside each other."""
    run = ground_truth.run_for(row_of(tmp_path, micro_batch="1", seq_len="128"))
    assert isinstance(run, ground_truth.Run)
    checkpoint = ground_truth._checkpoint(run.setup)
    assert 67_000_000 * 4 == pytest.approx(sum(checkpoint), rel=0.001)
    whole_run = replay_events(run.recording.events, np.array(run.recording.sizes), AllocatorSettings())
    assert 1.5 * sum(checkpoint) < whole_run.peak_allocated_bytes
    assert 399_629_000 == pytest.approx(run.predicted_bytes, rel=0.005)  # measured with SDPA


def test_checkpoint_is_there_while_the_model_is_loaded() -> None:
    """Its blocks come first and go when the model's own are there; everything else is as before."""
    recording = Recording(
        sizes=[0, 10, 20],
        categories=[0, PARAMETERS, ACTIVATIONS],
        events=[1, 2, -2],
        layers=[OUTSIDE_LAYERS, 0, 0],
        phases={"load": 0, "iteration_0": 1, "end": 3},
        gradients=[(2, 2)],
        gates=[(2, 5, 4)],
        ops=[Op("aten.mm", 1, (1,), "elementwise", 1, False)],
    )
    after = loading.after_checkpoint(recording, [40, 80])
    assert [1, 2, 3, -1, -2, 4, -4] == after.events
    assert [0, 40, 80, 10, 20] == after.sizes
    assert {"load": 0, "iteration_0": 5, "end": 7} == after.phases
    assert ([(6, 4)], [(4, 5, 4)]) == (after.gradients, after.gates)
    assert 5 == after.ops[0].position
    assert len(after.events) == len(after.layers)


def test_gradients_are_there_while_the_next_forward_runs_only_where_the_script_leaves_them(tmp_path: Path) -> None:
    """The tables' script zeroes before the forward pass: the second iteration starts by dropping gradients."""
    run = ground_truth.run_for(row_of(tmp_path))
    assert isinstance(run, ground_truth.Run)
    begin = run.recording.phases[loops.ITERATION.format(1)]
    gradients = {block for index, block in run.recording.gradients if index < begin}
    dropped = [-event for event in run.recording.events[begin : begin + len(gradients)]]
    assert gradients == set(dropped)


def test_operators_of_an_iteration_are_those_of_one_forward_and_backward(tmp_path: Path) -> None:
    """Six layers of six linear layers, two of the head: as many products forward, twice that backward."""
    run = ground_truth.run_for(row_of(tmp_path))
    assert isinstance(run, ground_truth.Run)
    linear = [op for op in run.iteration_ops if op.name in ("aten.addmm", "aten.mm")]
    assert 38 == sum(not op.in_backward for op in linear)
    assert 2 * 38 == sum(op.in_backward for op in linear)
    assert 8 == run.sequences
    assert 8 * 256 == run.tokens


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quality": "C"}, "quality C"),
        ({"kind": "inference"}, "inference"),
        ({"id": "litgpt-001"}, "LitGPT"),
        ({"id": "nobody-001"}, "no loop is known"),
        ({"seq_len": "<=512"}, "not one number"),
        ({"gpu": "Abacus 9000", "vram_gb": ""}, "Abacus 9000"),
    ],
)
def test_rows_that_cannot_be_reproduced_are_skipped_with_the_reason(
    tmp_path: Path, fields: dict[str, str], words: str
) -> None:
    """Nothing is guessed: what is missing is said."""
    score = memory_accuracy.score(row_of(tmp_path, **fields))
    assert "skipped" == score.status
    assert words in score.reason
    assert score.error is None


@pytest.mark.parametrize(
    ("measure", "micro_batch", "status"),
    [("fits", "8", "fits-right"), ("ooms", "8", "fits-wrong"), ("ooms", "512", "fits-right")],
)
def test_boundaries_are_right_or_wrong(tmp_path: Path, measure: str, micro_batch: str, status: str) -> None:
    """8 x 256 takes 1 GB and 512 x 256 about 60 GB on a card of 8 GB."""
    row = row_of(tmp_path, measure=measure, micro_batch=micro_batch)
    assert status == memory_accuracy.score(row).status


def test_command_writes_every_row_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The CSV has the contract's columns and one line a row; the summary tells the source's figures."""
    path = write_rows(
        tmp_path / "rows.csv",
        {"id": "distilbert-013", "peak_bytes": "983450000"},
        {"id": "litgpt-001", "peak_bytes": "1"},
    )
    assert 0 == memory_accuracy.main([str(path), "--out", str(tmp_path / "out.csv"), "--jobs", "1"])
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        scored, skipped = csv.DictReader(file)
    assert ["id", "predicted_bytes", "measured_bytes", "error", "status", "reason"] == list(scored)[:6]
    assert ["transformers", "like_for_like"] == list(scored)[6:]
    assert (transformers.__version__, "yes") == (scored["transformers"], scored["like_for_like"])
    assert ("scored", "skipped") == (scored["status"], skipped["status"])
    assert int(scored["predicted_bytes"]) / 983450000 - 1 == pytest.approx(float(scored["error"]), abs=1e-6)
    assert "1 of 2 rows skipped" in capsys.readouterr().out


def test_sources_select_rows(tmp_path: Path) -> None:
    """Rows of other sources are not looked at."""
    path = write_rows(tmp_path / "rows.csv", {"id": "litgpt-001"}, {"id": "tune-001"})
    memory_accuracy.main([str(path), "--out", str(tmp_path / "out.csv"), "--sources", "tune", "--jobs", "1"])
    assert ["tune-001"] == [line.split(",")[0] for line in (tmp_path / "out.csv").read_text().splitlines()[1:]]


def test_calibration_takes_what_runs_needed_beyond_the_prediction_from_like_rows_only(tmp_path: Path) -> None:
    """110 measured for 100 predicted is a tenth beyond; a row with other model code stays out."""
    rows = [row_of(tmp_path, peak_bytes=text, id=f"distilbert-{text}") for text in ("110", "100", "300")]
    config = setups.setup_of(rows[0]).config
    scores = [
        memory_accuracy.Score(
            row=row, status="scored", predicted_bytes=100, like_for_like=like, reason=reason, config=config
        )
        for row, like, reason in zip(rows, (True, True, False), ("", "", "other code"), strict=True)
    ]
    document = json.loads(json.dumps(memory_accuracy.calibration(scores)))
    kind = document["kinds"]["full, eager attention, not checkpointed"]
    assert 2 == kind["n"]
    assert {"distilbert-110": 0.1, "distilbert-100": 0.0} == kind["residuals"]
    assert 0.05 == pytest.approx(kind["quantiles"]["0.5"])
    assert {"other code": ["distilbert-300"]} == document["left_out"]
