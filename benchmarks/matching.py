"""Score each row with the release of transformers that it was measured with: one process for each family of rows.

The process is memory_accuracy.py itself on those rows alone, in the environment of their release (releases.py).
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from releases import EnvironmentFailedError, environment, release_of, running_release, variables
from rows import Row
from scores import Score, read_csv
from setups import Setup, setup_of

from planner.config import TrainingConfig
from planner.errors import InputError

_SCRIPT = Path(__file__).with_name("memory_accuracy.py")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows that are scored in one process."""

    release: str | None
    """The transformers release; None is the running one."""
    rows: tuple[Row, ...]


def parts_of(rows: Sequence[Row]) -> list[Part]:
    """Rows that share a release and a recorded model, the larger parts first."""
    groups: dict[tuple[str | None, str, str, str], list[Row]] = {}
    for row in rows:
        release = release_of(row)
        if release == running_release():
            release = None
        groups.setdefault((release, row.source, row["attention"], row["finetune_method"]), []).append(row)
    parts = [Part(release=key[0], rows=tuple(group)) for key, group in groups.items()]
    return sorted(parts, key=lambda part: -len(part.rows))


def score_matched(rows: Sequence[Row], *, jobs: int) -> list[Score]:
    """Every row's score, in the rows' order."""
    found: dict[str, Score] = {}
    configs: dict[str, TrainingConfig] = {}
    for row in rows:
        setup = _setup_of(row)
        if isinstance(setup, str):
            found[row.id] = Score(row=row, status="skipped", reason=setup)
        else:
            configs[row.id] = setup.config
    with ThreadPoolExecutor(jobs) as pool:
        done = pool.map(_score_part, parts_of([row for row in rows if row.id in configs]))
    found |= {item.row.id: replace(item, config=configs[item.row.id]) for part in done for item in part}
    return [found[row.id] for row in rows]


def _setup_of(row: Row) -> Setup | str:
    try:
        return setup_of(row)
    except InputError as error:
        return str(error).splitlines()[0]


def _score_part(part: Part) -> list[Score]:
    """In the part's environment; with the running one, and saying so, where that can't be made."""
    try:
        place = environment(part.release) if part.release else None
    except EnvironmentFailedError as failure:
        scores = _score_in(None, part.rows)
        reasons = ["; ".join(filter(None, (item.reason, str(failure)))) for item in scores]
        return [replace(item, reason=reason, like_for_like=False) for item, reason in zip(scores, reasons, strict=True)]
    return _score_in(place, part.rows)


def _score_in(place: Path | None, rows: Sequence[Row]) -> list[Score]:
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "rows.csv", Path(folder) / "scores.csv"
        _write_rows(rows, given)
        command = [sys.executable, str(_SCRIPT), str(given), "--out", str(found), "--jobs", "1"]
        done = subprocess.run(
            command, env=variables(place) if place else None, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return [Score(row=row, status="skipped", reason=f"its process failed: {last}") for row in rows]
        return read_csv(found, rows)


def _write_rows(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0].fields))
        writer.writeheader()
        writer.writerows(row.fields for row in rows)
