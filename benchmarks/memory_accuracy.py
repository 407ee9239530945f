"""How close predicted peak memory is to what others measured.

    python benchmarks/memory_accuracy.py measurements.csv --out accuracy.csv

Each row that can be reproduced is recorded as its authors ran it (loops.py, setups.py), with today's model code, and
replayed through the allocator; a row's own measure is compared: allocated with allocated, reserved with reserved,
nvidia-smi with reserved and context. ``--calibrate`` writes the distribution of what the card used beyond the
prediction to profiles/calibration.json, from which the planner takes its margin.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import calibrate
import numpy as np
from ground_truth import Row, Run, Skipped, load_rows, run_for

from planner.config import TrainingConfig
from planner.hardware import context_bytes

REPORTED = ("bert", "opt350", "gpt2l", "distilbert", "perf", "mila")
"""Sources whose A rows are summarised together."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What became of a row; the fields of the CSV."""

    row: Row
    status: str
    """scored, skipped, fits-right or fits-wrong."""
    reason: str = ""
    """Why it was skipped, or what differs from what the source ran."""
    predicted_bytes: int | None = None
    config: TrainingConfig | None = None
    """What ran, as a configuration's structure."""
    like_for_like: bool = False
    """Loop and model code do what the source's did."""

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1``; None where nothing is compared."""
        if self.status != "scored" or self.predicted_bytes is None or not self.row.measured_bytes:
            return None
        return self.predicted_bytes / self.row.measured_bytes - 1


def score(row: Row) -> Score:
    """Reproduce and compare a row."""
    run = run_for(row)
    if isinstance(run, Skipped):
        return Score(row=row, status="skipped", reason=run.reason)
    if row.measure in ("fits", "ooms"):
        return _boundary(run)
    if row.measured_bytes is None or row.measure == "unknown":
        return Score(row=row, status="skipped", reason="how the peak was read is not stated")
    return Score(
        row=row,
        status="scored",
        reason="; ".join((*run.setup.caveats, *run.setup.notes)),
        predicted_bytes=run.predicted_bytes,
        config=run.setup.config,
        like_for_like=not run.setup.caveats,
    )


def _boundary(run: Run) -> Score:
    """Whether the run goes through in what the card reports, its context taken off."""
    context, _ = context_bytes(run.card)
    fits = run.fits_in(run.card.reported_bytes - context)
    right = fits == (run.row.measure == "fits")
    return Score(
        row=run.row,
        status="fits-right" if right else "fits-wrong",
        reason="; ".join((f"predicted to {'fit' if fits else 'run out of memory'}", *run.setup.caveats)),
        predicted_bytes=run.replay.peak_reserved_bytes + context,
    )


def score_all(rows: Sequence[Row], *, jobs: int) -> list[Score]:
    """Every row's score, in the rows' order; rows that share a recorded model stay in one process."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.source, row["attention"], row["finetune_method"]), []).append(row)
    if jobs == 1:
        done = [_score_group(group) for group in groups.values()]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            done = list(pool.map(_score_group, groups.values()))
    found = {item.row.id: item for group in done for item in group}
    return [found[row.id] for row in rows]


def _score_group(rows: Sequence[Row]) -> list[Score]:
    return [score(row) for row in rows]


def write_csv(scores: Iterable[Score], path: Path) -> None:
    """One line a row of the input."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "predicted_bytes", "measured_bytes", "error", "status", "reason"])
        for item in scores:
            error = "" if item.error is None else f"{item.error:.6f}"
            predicted = "" if item.predicted_bytes is None else item.predicted_bytes
            measured = "" if item.row.measured_bytes is None else item.row.measured_bytes
            writer.writerow([item.row.id, predicted, measured, error, item.status, item.reason])


def summary(scores: Sequence[Score]) -> str:
    """A line a source, then one over the A rows of the reported sources."""
    lines = [f"{'source':<34}{'rows':>5}{'median':>9}{'90 %':>9}{'worst':>9}{'under':>8}"]
    for source in sorted({item.row.source for item in scores}):
        lines += _line(source, [item for item in scores if item.row.source == source])
    reported = [item for item in scores if item.row.source in REPORTED and item.row.quality == "A"]
    lines += _line("A rows of " + " ".join(REPORTED[:3]) + " ...", reported)
    lines += _line("  of these, like for like", [item for item in reported if item.like_for_like])
    return "\n".join([*lines, "", *_boundaries(scores)])


def _line(name: str, scores: Sequence[Score]) -> list[str]:
    errors = np.array([item.error for item in scores if item.error is not None])
    if not len(errors):
        return []
    size = np.abs(errors)
    figures = (np.median(size), np.quantile(size, 0.9), size.max(), np.mean(errors < 0))
    return [
        f"{name:<34}{len(errors):>5}"
        + "".join(f"{value:>{w}.2%}" for value, w in zip(figures, (9, 9, 9, 8), strict=True))
    ]


def _boundaries(scores: Sequence[Score]) -> list[str]:
    counts = {status: sum(item.status == status for item in scores) for status in ("fits-right", "fits-wrong")}
    skipped = sum(item.status == "skipped" for item in scores)
    right, wrong = counts.values()
    return [f"fits or runs out of memory: {right} right, {wrong} wrong; {skipped} of {len(scores)} rows skipped"]


# -- calibration -----------------------------------------------------------------------------------------------------


def calibration(scores: Sequence[Score]) -> dict[str, object]:
    """What runs used beyond the prediction, by kind, over A rows that are like for like."""
    usable = [item for item in scores if item.error is not None and item.row.quality == "A"]
    left_out: dict[str, list[str]] = {}
    for item in usable:
        if not item.like_for_like:
            left_out.setdefault(item.reason, []).append(item.row.id)
    return calibrate.calibration([_residual(item) for item in usable if item.like_for_like], left_out)


def _residual(item: Score) -> calibrate.Residual:
    assert item.error is not None and item.config is not None
    return calibrate.Residual(row_id=item.row.id, config=item.config, beyond=1 / (1 + item.error) - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Score every row of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="rows in the format of ground_truth/measurements.csv")
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--sources", help="only these prefixes of ids, comma-separated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to work in")
    parser.add_argument("--calibrate", action="store_true", help="write profiles/calibration.json")
    options = parser.parse_args(arguments)
    rows = load_rows(options.input)
    if options.sources:
        rows = [row for row in rows if row.source in options.sources.split(",")]
    scores = score_all(rows, jobs=options.jobs)
    if options.out:
        write_csv(scores, options.out)
    if options.calibrate:
        calibrate.write(calibration(scores))
    print(summary(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
