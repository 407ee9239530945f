"""The speed benchmark: what is compared with what, in which unit, and what is said of it."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import ground_truth
import qwen
import time_accuracy
from qwen import expected_tokens, for_time
from rows import Row, load_rows
from time_accuracy import Case, Ratios
from transformers.initialization import no_init_weights

from planner.levers import LEVERS
from planner.timing import achievable

COLUMNS = [
    *("id", "model_id", "gpu", "vram_gb", "micro_batch", "seq_len", "grad_accum", "precision", "attention"),
    *("grad_checkpointing", "optimizer", "finetune_method", "quantization", "kind", "throughput_value"),
    *("throughput_unit", "measure", "peak_bytes", "notes", "model_class/task", "quality"),
]
TABLE = {
    "id": "distilbert-001",
    "model_id": "distilbert-base-uncased",
    "gpu": "RTX 2060 (8GB)",
    "vram_gb": "8",
    "micro_batch": "8",
    "seq_len": "256",
    "grad_accum": "1",
    "precision": "pure-fp16 (weights .half())",
    "attention": "eager",
    "optimizer": "none (forward + backward)",
    "kind": "train",
    "throughput_value": "0.042",
    "throughput_unit": "s/batch",
    "quality": "A",
}
SWIFT = {
    "id": "swift-001",
    "model_id": "Qwen/Qwen-7B-Chat",
    "gpu": "A100-80GB",
    "vram_gb": "80",
    "micro_batch": "1",
    "seq_len": "<=2048",
    "grad_accum": "16",
    "precision": "bf16-amp (bf16 weights)",
    "attention": "flash2",
    "grad_checkpointing": "y",
    "optimizer": "",
    "finetune_method": "lora; r8; c_attn",
    "quantization": "none",
    "throughput_value": "4.31",
    "throughput_unit": "samples/s",
    "quality": "B",
}


def write_rows(path: Path, *rows: dict[str, str]) -> Path:
    """A measurements file with these rows, each on top of the DistilBERT table's values."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({**TABLE, **row} for row in rows)
    return path


@pytest.fixture
def read(tmp_path: Path):
    """Rows from their columns."""

    def rows(*columns: dict[str, str]) -> list[Row]:
        return load_rows(write_rows(tmp_path / "rows.csv", *columns))

    return rows


# -- ratios ------------------------------------------------------------------------------------------------------------


def test_ratio_is_off_by_what_one_prediction_is_off_against_the_other():
    """Both twice as slow as measured: nothing is off; one of them alone: the ratio is twice what it should be."""
    assert Ratios.of_times([[(2.0, 1.0), (6.0, 3.0)]]).errors == (0.0,)
    assert Ratios.of_times([[(6.0, 3.0), (1.0, 1.0)]]).errors == (1.0,)


def test_only_pairs_that_clearly_differ_have_an_order():
    """10.5 s against 10 s says nothing; 12 s against 10 s does."""
    near, far = (10.0, 10.5), (9.0, 10.0)
    assert Ratios.of_times([[near, far]]).ordered == ()
    assert Ratios.of_times([[(11.0, 12.0), far]]).ordered == (True,)
    assert Ratios.of_times([[(8.0, 12.0), far]]).ordered == (False,)


def test_rows_of_different_groups_are_never_compared():
    """Three rows of one group make three pairs, and one of another none."""
    ratios = Ratios.of_times([[(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], [(9.0, 1.0)]])
    assert (0.0, 0.0, 0.0) == pytest.approx(ratios.errors)
    assert len(ratios.ordered) == 3


def test_rows_for_times_in_the_data_are_compared_at_one_bound(read):
    """max_length decides which samples there are; a fixed length doesn't part rows."""
    first, second, longer = read(SWIFT, {**SWIFT, "id": "swift-002"}, {**SWIFT, "id": "swift-003", "seq_len": "<=4096"})
    groups = [Case(row=for_time(row), run=None, measured_s=1.0).group for row in (first, second, longer)]
    assert groups[0] == groups[1] != groups[2]
    short, long = (Case(row=row, run=None, measured_s=1.0) for row in read({}, {"seq_len": "512"}))
    assert short.group == long.group


# -- units -------------------------------------------------------------------------------------------------------------


def test_speeds_become_seconds_of_an_optimizer_step(read):
    """The same step in the units of four sources: 8 sequences of 256 tokens in 0.042 s."""
    units = {
        "s/batch": "0.042",
        "samples/s": str(8 / 0.042),
        "tokens/s": str(8 * 256 / 0.042),
        "s/it (per optimizer step of 8 micro-batches)": "0.042",
        "ms/token": "5",
    }
    cases, skipped = time_accuracy.read_cases(
        read(*({"throughput_unit": unit, "throughput_value": value} for unit, value in units.items()))
    )
    assert [0.042] * 4 == pytest.approx([case.measured_s for case in cases])
    assert ["speed in 'ms/token'"] == [row.reason for row in skipped]


def test_accumulated_micro_batches_count_as_one_step(read):
    """Four sequences a second, two at a time, two micro-batches: a second."""
    columns = {"micro_batch": "2", "grad_accum": "2", "throughput_unit": "samples/s", "throughput_value": "4"}
    (case,), _ = time_accuracy.read_cases(read(columns))
    assert case.measured_s == 1.0
    single = replace(case, run=replace(case.run, row=read({"micro_batch": "2"})[0]))
    assert case.predicted_s(achievable()) > 1.5 * single.predicted_s(achievable())


# -- results -----------------------------------------------------------------------------------------------------------


def test_ratios_of_each_source_and_of_all_end_summary_and_csv(tmp_path, read, monkeypatch):
    """Each reported source that has rows, then all of them together."""
    monkeypatch.setattr(time_accuracy, "REPORTED", ("distilbert", "perf"))
    cases, skipped = time_accuracy.read_cases(
        read({}, {"id": "distilbert-002", "micro_batch": "16", "throughput_value": "0.084"}, {"kind": "inference"})
    )
    time_accuracy.write_csv(tmp_path / "out.csv", cases, skipped, achievable())
    with (tmp_path / "out.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert ["predicted", "predicted", "skipped", "ratios", "ratios"] == [row["status"] for row in rows]
    assert [("distilbert", "1", "1"), ("all reported", "1", "1")] == [
        (row["id"], row["pairs"], row["clear_pairs"]) for row in rows[-2:]
    ]
    lines = list(time_accuracy.summary(cases, len(skipped), achievable()))
    assert ["distilbert", "all reported"] == [line[:20].strip() for line in lines[-2:]]
    assert "100.0%" in lines[-1]


# -- Qwen and ms-swift -------------------------------------------------------------------------------------------------


def test_an_average_batch_is_as_long_as_its_longest_sample():
    """A single sample has the data's mean where nothing is dropped; padding grows with the batch, up to the bound."""
    assert expected_tokens(200_000, 1) == pytest.approx(3234, rel=0.01)
    lengths = [expected_tokens(2048, batch) for batch in (1, 2, 4, 8)]
    assert lengths == sorted(set(lengths))
    assert 2048 > lengths[-1]


def test_only_bounds_are_replaced_by_an_average_length(read):
    """A length of its own stays, and a row of another source is left as it is."""
    bound, own, other = read(SWIFT, {**SWIFT, "id": "qwen-001", "seq_len": "512"}, {"seq_len": "512"})
    assert for_time(bound).seq_len == expected_tokens(2048, 1)
    assert for_time(own).seq_len == 512
    assert for_time(other) is other


def test_memory_of_these_sources_is_not_looked_at(read):
    """Qwen doesn't say how it was read; an average length says nothing of ms-swift's peak."""
    for row in read({**SWIFT, "id": "qwen-001", "seq_len": "512", "measure": "unknown"}, SWIFT):
        assert isinstance(ground_truth.run_for(row), ground_truth.Skipped)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization": "gptq-int4"}, "auto_gptq"),
        ({"model_id": "openbuddy-zephyr-7b-chat (ms-swift model name)"}, "tokenizer"),
    ],
)
def test_rows_that_cannot_be_compared_say_why(read, changes, reason):
    """Nothing is recorded for them."""
    (row,) = read({**SWIFT, **changes})
    found = ground_truth.run_for(for_time(row))
    assert isinstance(found, ground_truth.Skipped)
    assert reason in found.reason


@pytest.mark.parametrize(("method", "published"), [("lora; r8; c_attn", 4.19), ("lora; r8; all linear", 17.89)])
def test_adapters_are_those_that_the_source_counts(read, method, published):
    """ms-swift prints its trainable parameters in millions, for 32 layers; two are enough to compare."""
    (row,) = read({**SWIFT, "finetune_method": method})
    setup = qwen.setup_of(for_time(row))
    workload = qwen.qwen(hidden=4096, layers=2, heads=32, intermediate=11008, vocabulary=1000)
    with no_init_weights():
        model = workload.build_model(attention="sdpa", dtype=torch.bfloat16)
        for lever in LEVERS:
            model = lever.change_model(model, setup.config)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert published == pytest.approx(trained * 16 / 1e6, abs=0.005)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "inference"}, "generation"),
        ({"throughput_unit": "tokens/day"}, "tokens/day"),
        ({"notes": "fused rope triton kernels"}, "fused kernels"),
    ],
)
def test_what_is_no_step_of_known_speed_is_left_out_unrecorded(
    tmp_path: Path, fields: dict[str, str], said: str
) -> None:
    """With the reason in the CSV."""
    cases, skipped = time_accuracy.read_cases(load_rows(write_rows(tmp_path / "rows.csv", fields)))
    assert not cases
    assert [said in item.reason for item in skipped] == [True]
