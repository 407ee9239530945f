"""The benchmark that finds how the time model's errors are shared between configurations."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import residual_spread

FIELDS = ("id", "model_id", "grad_accum", "precision", "grad_checkpointing", *residual_spread.STRUCTURE[:-1])


def write(path, columns, rows):
    """A CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="x", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def test_finds_the_variances_that_made_the_errors(tmp_path, monkeypatch):
    """Of 20 sources with 8 structures at 3 micro-batches each: a structure's deviation of 0.2, a row's of 0.05."""
    normal = np.random.default_rng(0)
    rows = []
    for source in range(20):
        device = normal.normal(0, 0.5)
        for structure in range(8):
            off = normal.normal(0, 0.2)
            for micro_batch in (1, 2, 4):
                ratio = math.exp(device + off + normal.normal(0, 0.05))
                rows.append(
                    {"id": f"{len(rows)}", "model_id": "m", "attention": structure, "source": source, "card": "c"}
                    | {"micro_batch": micro_batch, "predicted_s": 1.0, "measured_s": ratio, "status": "predicted"}
                )
    write(tmp_path / "measurements.csv", FIELDS, rows)
    columns = ("id", "source", "card", "micro_batch", "predicted_s", "measured_s", "status")
    write(tmp_path / "times.csv", columns, rows)
    out = tmp_path / "spread.csv"
    files = [str(tmp_path / "measurements.csv"), str(tmp_path / "times.csv"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["residual_spread.py", *files])
    residual_spread.main()
    with out.open(encoding="utf-8") as file:
        found = {row["term"]: float(row["standard_deviation"]) for row in csv.DictReader(file)}
    assert 0.2 == pytest.approx(found["structure"], rel=0.2)
    assert 0.05 == pytest.approx(found["row"], rel=0.4)
    assert found["octaves"] > 8
