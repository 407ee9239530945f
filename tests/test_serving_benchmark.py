"""The benchmark of the emitted infer.py: its methods answer alike, and its rows say how fast and how exact."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from emitted import minilm
from inference_scripts import make_inference_plan

from planner.emit import render_files

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import serving


def test_each_text_stands_in_one_query() -> None:
    """With the first words of one of its texts as the query."""
    rows = serving.queries(["one two", "three", "four"], 2)
    assert [["one two", "three"], ["four"]] == [row["documents"] for row in rows]
    assert all(row["query"] in row["documents"] for row in rows)
    assert ["one two", "three", "four"] == [document for _, document in serving.pairs_of(rows)]


def test_padding_is_what_batches_add() -> None:
    """To the longest of each, or to a given width."""
    assert 1 - 12 / 16 == pytest.approx(serving.fixed_padding([2, 4, 3, 3], 2) + 1 / 4 - 1 / 7)
    assert 1 - 12 / 40 == serving.fixed_padding([2, 4, 3, 3], 2, 10)


def test_answers_in_another_order_are_seen() -> None:
    """Nearer to a neighbour's than to their own."""
    truth = np.array([0.1, 0.5, 0.9])
    assert serving.in_order(truth + 1e-6, truth)
    assert not serving.in_order(truth[::-1], truth)


@pytest.mark.slow
def test_the_script_is_measured_beside_the_others(tmp_path: Path) -> None:
    """Few texts: a row for each method, equal to the unbatched run within rounding, in order, under the ceiling."""
    texts = [
        f"{name} {getattr(str, name).__doc__}"[:90] for name in ("lower", "title", "split", "strip", "zfill", "join")
    ]
    document = make_inference_plan("embedding", str(minilm()), seq_len=64, max_tokens_per_micro_batch=128)
    for name, text in render_files(document).items():
        (tmp_path / name).write_text(text)
    options = SimpleNamespace(short=2, rounds=1)
    rows = list(serving.measure("embedding", [{"text": text} for text in texts], tmp_path, document, options))
    assert ["emitted", "fixed", "max length", "sentence-transformers"] == list(dict.fromkeys(r["method"] for r in rows))
    assert all(set(serving.COLUMNS) == row.keys() for row in rows)
    assert all(row["largest_difference"] < 1e-5 and row["in_order"] and row["tokens_per_s"] > 0 for row in rows)
    assert rows[0]["peak_bytes"] < rows[0]["ceiling_bytes"]
    assert 1.0 == rows[0]["speed_to_emitted"]
    assert serving.line_of(rows[0]).startswith("embedding")
