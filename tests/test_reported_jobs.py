"""The benchmark of reported jobs, on a small model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from reported_jobs import BERT, COLUMNS, PLAIN, Job, jobs, line_of, rows_of

SMALL = Job(
    name="small",
    gpu="RTX 4060 8GB",
    arguments={
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "task": "token-classification",
        "seq_len": 128,
        "batch_size": 8,
        "method": "full",
    },
    plain=PLAIN | {"micro_batch_size": 8},
    levers={name: BERT[name] for name in ("plain, eager attention", "micro-batches of 2 alone")},
    sweep={"": {"precision": "bf16-amp", "attention": "sdpa", "offload": "none", "checkpointing": "none"}},
    against=("plain, eager attention",),
    least_speed=0.83,
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """All rows of the small job."""
    return list(rows_of(SMALL))


def test_levers_are_held_against_the_plain_row(rows: list[dict[str, Any]]) -> None:
    """Smaller micro-batches at the same effective batch need less."""
    plain, smaller = rows[:2]
    assert (8, 1, "fp32", "eager") == tuple(
        plain[n] for n in ("micro_batch_size", "gradient_accumulation_steps", "precision", "attention")
    )
    assert (0, 0) == (plain["memory_change"], plain["speed_change"])
    assert (2, 4) == (smaller["micro_batch_size"], smaller["gradient_accumulation_steps"])
    assert smaller["memory_change"] < -0.15
    assert smaller["memory_change"] == pytest.approx(
        smaller["peak_allocated_bytes"] / plain["peak_allocated_bytes"] - 1, abs=1e-4
    )


def test_the_least_is_fast_enough_and_needs_no_more_than_the_plan(rows: list[dict[str, Any]]) -> None:
    """Both beat the plain configuration in memory, and the plan in speed too."""
    chosen = {row["what"]: row for row in rows[2:]}
    plan, least = chosen["plan"], chosen["least at 83% of the speed"]
    assert least["total_bytes"] <= plan["total_bytes"] < rows[0]["total_bytes"]
    assert least["speed_change"] >= -0.17
    assert plan["speed_change"] >= max(0, least["speed_change"])


def test_every_row_can_be_written_and_shown(rows: list[dict[str, Any]]) -> None:
    """All columns, bytes as integers."""
    for row in rows:
        assert set(COLUMNS) == set(row)
        assert isinstance(row["total_bytes"], int)
        assert f"{row['tokens_per_s']:.0f} tokens/s" in line_of(row)


def test_documents_are_taken_whole_or_in_segments(tmp_path: Path) -> None:
    """At the same number of documents a step, on two cards each."""
    found = list(jobs(tmp_path, ["bert", "llama"]))
    assert {512, 8000, 4000, 2000} == {job.arguments["seq_len"] for job in found}
    documents = [job.arguments["seq_len"] * job.arguments["batch_size"] for job in found if "llama" in job.name]
    assert {8 * 8000} == set(documents)
    assert 8 == len(found)
