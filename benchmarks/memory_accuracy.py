"""How close predicted peak memory is to what others measured.

    python benchmarks/memory_accuracy.py measurements.csv --out accuracy.csv

Each row that can be reproduced is recorded as its authors ran it (loops.py, setups.py), with today's model code, and
replayed through the allocator; a row's own measure is compared: allocated with allocated, reserved with reserved,
nvidia-smi with reserved and context. Model code changed over the years: ``--match-versions`` records each row with the
release of transformers that it names or implies. ``--calibrate`` writes the distribution of what the card used beyond
the prediction to profiles/calibration.json, from which the planner takes its margin.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import calibrate
from ground_truth import Row, Run, Skipped, load_rows, run_for
from matching import score_matched
from releases import release_of, running_release
from reproduction import Setup
from scores import Score, write_csv
from summary import summary

from planner.hardware import context_bytes


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
        reason="; ".join((*_differences(row, run.setup), *run.setup.notes)),
        predicted_bytes=run.predicted_bytes,
        config=run.setup.config,
        transformers=running_release(),
        like_for_like=not _differences(row, run.setup),
    )


def _differences(row: Row, setup: Setup) -> tuple[str, ...]:
    """What differs from what the source ran: less where this is the release that the row was measured with."""
    return setup.remaining if release_of(row) == running_release() else (*setup.caveats, *setup.remaining)


def _boundary(run: Run) -> Score:
    """Whether the run goes through in what the card reports, its context taken off."""
    context, _ = context_bytes(run.card)
    fits = run.fits_in(run.card.reported_bytes - context)
    right = fits == (run.row.measure == "fits")
    differences = _differences(run.row, run.setup)
    return Score(
        row=run.row,
        status="fits-right" if right else "fits-wrong",
        reason="; ".join((f"predicted to {'fit' if fits else 'run out of memory'}", *differences)),
        predicted_bytes=run.replay.peak_reserved_bytes + context,
        config=run.setup.config,
        transformers=running_release(),
        like_for_like=not differences,
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
    parser.add_argument(
        "--match-versions",
        action="store_true",
        help="record each row with the transformers release that it names or implies (installed in the user's cache)",
    )
    parser.add_argument("--calibrate", action="store_true", help="write profiles/calibration.json")
    options = parser.parse_args(arguments)
    rows = load_rows(options.input)
    if options.sources:
        rows = [row for row in rows if row.source in options.sources.split(",")]
    scores = (score_matched if options.match_versions else score_all)(rows, jobs=options.jobs)
    if options.out:
        write_csv(scores, options.out)
    if options.calibrate:
        calibrate.write(calibration(scores))
    print(summary(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
