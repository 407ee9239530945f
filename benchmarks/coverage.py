"""Plan many models at several ceilings: which exit code, which choice, how many seconds.

    python benchmarks/coverage.py [MODELS] --out coverage.csv

MODELS is a comma-separated list of hub ids; left out, every bundled model.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from planner import InputError, PlannerError, plan
from planner.models import bundled_models
from planner.units import format_bytes

COLUMNS = (
    "model", "vram", "exit_code", "seconds", "method", "precision", "checkpointing", "offload", "micro_batch_size",
    "seq_len", "total_bytes", "ceiling_bytes", "tokens_per_s", "message",
)  # fmt: skip


def main() -> None:
    """Plan each model at each ceiling and write one row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="?", help="hub ids, separated by commas")
    parser.add_argument("--vram", default="8GB,16GB,24GB", help="ceilings, separated by commas")
    parser.add_argument("--out", default="coverage.csv", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    models = options.models.split(",") if options.models else bundled_models()
    rows = []
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for model in models:
            for vram in options.vram.split(","):
                rows.append(attempt(model, vram))
                writer.writerow(rows[-1])
                file.flush()
                print(summary_line(rows[-1]), flush=True)
    print("exit codes:", dict(Counter(row["exit_code"] for row in rows)))


def attempt(model: str, vram: str) -> dict[str, Any]:
    """One plan, or what stood in its way."""
    began = time.perf_counter()
    row: dict[str, Any] = {"model": model, "vram": vram, "exit_code": 0}
    try:
        made = plan(model=model, vram=vram)
    except InputError as error:
        row |= {"exit_code": error.exit_code, "message": str(error)}
    except PlannerError as error:
        row |= {"exit_code": error.exit_code, "message": str(error).replace("\n", " | ")}
    else:
        assert made.peak.total_bytes <= made.peak.ceiling_bytes
        row |= {name: value for name, value in made.config.model_dump().items() if name in COLUMNS}
        row |= {"total_bytes": made.peak.total_bytes, "ceiling_bytes": made.peak.ceiling_bytes}
        row["tokens_per_s"] = round(made.time.tokens_per_s)
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def summary_line(row: dict[str, Any]) -> str:
    """One line for standard output."""
    head = f"{row['model']:45} {row['vram']:>5} exit {row['exit_code']} {row['seconds']:6.1f} s  "
    if row["exit_code"]:
        return head + row["message"][:150]
    parts = [str(row[name]) for name in ("method", "precision", "checkpointing", "offload", "micro_batch_size")]
    return head + f"{' '.join(parts)} x {row['seq_len']}: {format_bytes(row['total_bytes'])}"


if __name__ == "__main__":
    main()
