"""How long a plan takes: from an empty cache, again, and for --help, beside importing torch and transformers.

    python benchmarks/planning_speed.py [MODEL] --out planning_speed.csv

Each is a process of its own; the ratio to the imports holds when a machine is faster or slower.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

IMPORTS = "import torch, transformers; from transformers.models.bert import BertForSequenceClassification"


def main() -> None:
    """Measure and write one row for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bert-base-uncased")
    parser.add_argument("--vram", default="8GB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", default="planning_speed.csv", type=Path)
    options = parser.parse_args()
    plan = [sys.executable, "-m", "planner.cli", "--vram", options.vram, "--model", options.model, "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        imports = seconds([sys.executable, "-c", IMPORTS], folder, options.runs)
        cold = seconds(plan, folder, options.runs, fresh_cache=True)
        warm = seconds(plan, folder, options.runs)
        about = seconds([sys.executable, "-m", "planner.cli", "--help"], folder, options.runs)
    rows = [("imports", imports), ("first plan", cold), ("second plan", warm), ("--help", about)]
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "median_s", "ratio_to_imports"])
        for what, value in rows:
            writer.writerow([what, f"{value:.2f}", f"{value / imports:.2f}"])
            print(f"{what:12} {value:7.2f} s  {value / imports:6.2f} x the imports")


def seconds(command: Sequence[str], folder: str, runs: int, *, fresh_cache: bool = False) -> float:
    """Median wall-clock time of a command."""
    times = []
    for run in range(runs):
        cache = f"{folder}/cache-{run}" if fresh_cache else f"{folder}/cache-0"
        environment = os.environ | {"VRAMPLAN_CACHE": cache, "HF_HUB_OFFLINE": "1"}
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return median(times)


if __name__ == "__main__":
    main()
