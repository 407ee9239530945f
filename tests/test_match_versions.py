"""Rows recorded with the transformers release of their time: which one, in what environment, and what comes back."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import matching
import memory_accuracy
import older_releases
import releases
from rows import Row, load_rows
from scores import Score, read_csv, write_csv
from summary import summary

FIELDS = {
    "id": "distilbert-002",
    "model_id": "distilbert-base-uncased",
    "gpu": "RTX 2060 (8GB)",
    "vram_gb": "8",
    "measure": "max_memory_allocated",
    "peak_bytes": "399629000",
    "micro_batch": "1",
    "seq_len": "128",
    "grad_accum": "",
    "precision": "pure-fp16 (weights .half())",
    "attention": "sdpa",
    "finetune_method": "full",
    "model_class/task": "DistilBertForMaskedLM",
    "kind": "train",
    "transformers_version": "",
    "notes": "",
    "quality": "A",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments and recordings stay out of the user's cache."""
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path / "cache"))


def rows_of(path: Path, *rows: dict[str, str]) -> list[Row]:
    """Rows of a file, each on top of one of the DistilBERT table's."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(FIELDS))
        writer.writeheader()
        writer.writerows({**FIELDS, **row} for row in rows)
    return load_rows(path)


@pytest.mark.parametrize(
    ("source", "named", "release"),
    [
        ("fms", "4.48.1", "4.48.1"),
        ("gpt2l", "4.45.2", "4.45.2"),
        ("gpt2l", "", "4.43.4"),
        ("perf", "~4.16-4.2x (doc dated Jan 2022)", "4.16.2"),
        ("litgpt", "", None),
    ],
)
def test_a_row_names_its_release_or_its_source_implies_one(
    tmp_path: Path, source: str, named: str, release: str | None
) -> None:
    """An exact version in the row comes first; a vague one says no more than the source does."""
    (row,) = rows_of(tmp_path / "rows.csv", {"id": f"{source}-001", "transformers_version": named})
    assert release == releases.release_of(row)


def test_an_environment_holds_what_goes_with_its_release_and_leaves_torch_alone() -> None:
    """Everything is pinned; what planner and torch were built against isn't shadowed."""
    held = releases.packages("4.46.3")
    assert ("4.46.3", "0.20.3") == (held["transformers"], held["tokenizers"])
    assert not {"torch", "numpy", "pandas", "vramplan"} & set(held)
    assert "sacremoses" in releases.packages("4.16.2")
    assert "peft" in releases.packages("4.48.1")


@pytest.mark.parametrize("release", ["4.15.0", "4.20.1", "5.1.0"])
def test_releases_that_cannot_be_had_here_are_refused_by_name(release: str) -> None:
    """Too old for this Python's wheels, or of the running kind."""
    with pytest.raises(releases.EnvironmentFailedError, match=release):
        releases.environment(release)


def test_an_environments_packages_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before what PYTHONPATH had."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert os.pathsep.join([str(tmp_path), "elsewhere"]) == releases.variables(tmp_path)["PYTHONPATH"]


def test_rows_of_one_release_and_model_share_a_process(tmp_path: Path) -> None:
    """The running release needs no environment; the largest part comes first."""
    rows = rows_of(
        tmp_path / "rows.csv",
        {"id": "mila-001", "transformers_version": transformers.__version__},
        {"id": "distilbert-001", "attention": "eager"},
        {"id": "distilbert-002"},
        {"id": "distilbert-004"},
    )
    parts = matching.parts_of(rows)
    assert [
        ("4.46.3", ["distilbert-002", "distilbert-004"]),
        (None, ["mila-001"]),
        ("4.46.3", ["distilbert-001"]),
    ] == [(part.release, [row.id for row in part.rows]) for part in parts]


def test_scores_come_back_from_another_process_as_they_were(tmp_path: Path) -> None:
    """What the CSV says of a row is the whole of its score, but for the configuration."""
    rows = rows_of(tmp_path / "rows.csv", {"id": "distilbert-001"}, {"id": "distilbert-002"})
    scores = [
        Score(
            row=rows[0], status="scored", reason="a, b", predicted_bytes=5, transformers="4.46.3", like_for_like=True
        ),
        Score(row=rows[1], status="skipped", reason="none"),
    ]
    write_csv(scores, tmp_path / "scores.csv")
    assert scores == read_csv(tmp_path / "scores.csv", rows)


def test_rows_without_a_loop_are_skipped_without_a_process(tmp_path: Path) -> None:
    """The order is the input's."""
    rows = rows_of(tmp_path / "rows.csv", {"id": "litgpt-002"}, {"id": "litgpt-001"})
    scores = matching.score_matched(rows, jobs=1)
    assert [("litgpt-002", "skipped"), ("litgpt-001", "skipped")] == [(item.row.id, item.status) for item in scores]


def test_summary_says_what_the_project_answers_for(tmp_path: Path) -> None:
    """A rows of the sources with transformers and bert's B rows; C rows and others' code don't count."""
    rows = rows_of(
        tmp_path / "rows.csv",
        {"id": "bert-001", "quality": "B", "peak_bytes": "100"},
        {"id": "perf-001", "peak_bytes": "100"},
        {"id": "perf-002", "quality": "B", "peak_bytes": "100"},
        {"id": "albert-001", "quality": "B", "peak_bytes": "100"},
    )
    errors = (102, 96, 150, 150)
    scores = [
        Score(row=row, status="scored", predicted_bytes=found, like_for_like=True)
        for row, found in zip(rows, errors, strict=True)
    ]
    (line,) = [line for line in summary(scores).splitlines() if line.startswith("A rows with transformers")]
    assert ["2", "3.00%", "3.80%", "4.00%", "50.00%"] == line.split()[-5:]


# -- older model code ------------------------------------------------------------------------------------------------


class Doubling(nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not linear, so that its input is kept."""
        self.calls += 1
        return (x * self.weight).square()


class OldStack(nn.Module):
    """A stack of 4.x: it knows of checkpointing, its layers don't."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.layers = nn.ModuleList([Doubling(), Doubling()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_of_old_stacks_checkpoint_themselves() -> None:
    """Each runs again in the backward pass, and the gradients are the same."""
    stack = OldStack().train()
    plain = torch.autograd.grad(stack(torch.arange(3.0)).sum(), list(stack.parameters()))
    older_releases._convert_layers(stack)
    older_releases._enable(stack, {"use_reentrant": False})
    found = torch.autograd.grad(stack(torch.arange(3.0)).sum(), list(stack.parameters()))
    torch.testing.assert_close(plain, found)
    assert [3, 3] == [layer.calls for layer in stack.layers]
    assert ["Doubling", "Doubling"] == [type(layer).__name__ for layer in stack.layers]


def test_what_is_asked_of_a_mask_without_data_is_so() -> None:
    """Real tensors answer for themselves; a number on the host fills a tensor on the card."""
    mask = torch.zeros(2, 3, device="meta")
    with older_releases.AllTrue():
        assert torch.all(mask == 1)
        assert not torch.all(torch.zeros(3) == 1)
        assert (2, 3) == mask.masked_fill(mask == 0, torch.tensor(-1.0)).shape


# -- the whole of it -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_an_environment_todays_code_is_recorded_and_that_is_said(tmp_path: Path) -> None:
    """4.20 has no wheels for this Python."""
    rows = rows_of(tmp_path / "rows.csv", {"transformers_version": "4.20.1"})
    (score,) = matching.score_matched(rows, jobs=1)
    assert ("scored", transformers.__version__) == (score.status, score.transformers)
    assert "no environment is known for transformers 4.20.1" in score.reason
    assert not score.like_for_like


@pytest.mark.slow
def test_a_row_of_2024_is_reproduced_with_the_code_of_2024(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DistilBERT in 4.46: within 0.3 % of the 399.629 MB that were measured."""
    rows_of(tmp_path / "rows.csv", {})
    try:
        releases.environment("4.46.3")
    except releases.EnvironmentFailedError as failure:
        pytest.skip(str(failure))
    out = tmp_path / "out.csv"
    memory_accuracy.main([str(tmp_path / "rows.csv"), "--match-versions", "--out", str(out), "--jobs", "1"])
    with out.open(newline="", encoding="utf-8") as file:
        (line,) = csv.DictReader(file)
    assert ("4.46.3", "yes") == (line["transformers"], line["like_for_like"])
    assert abs(float(line["error"])) < 0.003
    assert "like for like" in capsys.readouterr().out
