"""How the time model's errors are shared between configurations: the variances of planner/residuals.py.

    python benchmarks/residual_spread.py MEASUREMENTS.csv TIMES.csv --out FILE.csv

MEASUREMENTS.csv has the format of ground_truth/measurements.csv, TIMES.csv is what time_accuracy.py made of it. The
logarithms of measured over predicted times are taken as a sum of independent normal terms: of the workload, of its
precision and checkpointing, of its structure at each micro-batch, and of the row alone, around an unknown mean of
each source on each card. Their variances are those of the largest restricted likelihood (Patterson and Thompson,
"Recovery of inter-block information when block sizes are unequal", 1971), each source's for itself in the sum.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

TERMS = ("workload", "levers", "structure", "row")
LEVERS = ("precision", "grad_checkpointing")
STRUCTURE = ("attention", "optimizer", "finetune_method", "offload", "quantization", "seq_len", "grad_accum")


def load(measurements: Path, times: Path) -> dict[str, list[dict[str, str]]]:
    """Predicted rows with their fields, by source and card."""
    with measurements.open(encoding="utf-8") as file:
        fields = {row["id"]: row for row in csv.DictReader(file)}
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    with times.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["status"] == "predicted":
                groups[f"{row['source']} on {row['card']}"].append({**fields[row["id"]], **row})
    return {name: rows for name, rows in groups.items() if len(rows) > 1}


def covariance(rows: Sequence[dict[str, str]], variances: Sequence[float], octaves: float) -> np.ndarray:
    """[rows, rows] of the rows' log errors; ``octaves``: doublings over which a structure's term loses 1/e."""
    size = len(rows)
    total = variances[3] * np.eye(size)
    for i in range(size):
        for j in range(size):
            if rows[i]["model_id"] != rows[j]["model_id"]:
                continue
            total[i, j] += variances[0]
            if any(rows[i][name] != rows[j][name] for name in LEVERS):
                continue
            total[i, j] += variances[1]
            if any(rows[i][name] != rows[j][name] for name in STRUCTURE):
                continue
            apart = abs(math.log2(float(rows[i]["micro_batch"]) / float(rows[j]["micro_batch"])))
            total[i, j] += variances[2] * math.exp(-apart / octaves)
    return total


def minus_log_likelihood(groups: Sequence[Sequence[dict[str, str]]], parameters: np.ndarray) -> float:
    """Restricted: the means are integrated out."""
    total = 0.0
    for rows in groups:
        error = np.array([math.log(float(r["measured_s"]) / float(r["predicted_s"])) for r in rows])
        matrix = covariance(rows, np.exp(parameters[:4]), math.exp(parameters[4]))
        inverse = np.linalg.inv(matrix)
        ones = np.ones(len(rows))
        weight = ones @ inverse @ ones
        mean = ones @ inverse @ error / weight
        total += 0.5 * (np.linalg.slogdet(matrix)[1] + math.log(weight) + (error - mean) @ inverse @ (error - mean))
    return total


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("times", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    groups = list(load(arguments.measurements, arguments.times).values())
    start = np.log([0.05**2, 0.05**2, 0.05**2, 0.02**2, 3.0])
    bounds = [(math.log(1e-8), 0.0)] * 4 + [(math.log(0.5), math.log(64))]
    found = minimize(lambda p: minus_log_likelihood(groups, p), start, method="L-BFGS-B", bounds=bounds)
    rows = sum(map(len, groups))
    with arguments.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("term", "standard_deviation", "rows", "sources"))
        for name, value in zip(TERMS, found.x, strict=False):
            writer.writerow((name, f"{math.exp(value / 2):.4f}", rows, len(groups)))
        writer.writerow(("octaves", f"{math.exp(found.x[4]):.2f}", rows, len(groups)))
    print(arguments.out.read_text(encoding="utf-8"), f"-log likelihood {found.fun:.1f}", sep="")


if __name__ == "__main__":
    main()
