"""What became of a row, and the CSV that says so."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rows import Row

from planner.config import TrainingConfig

COLUMNS = (
    *("id", "predicted_bytes", "measured_bytes", "error", "status", "reason"),
    *("transformers", "like_for_like"),
)


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
    transformers: str = ""
    """The release whose model code was recorded."""
    like_for_like: bool = False
    """Loop and model code do what the source's did."""

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1``; None where nothing is compared."""
        if self.status != "scored" or self.predicted_bytes is None or not self.row.measured_bytes:
            return None
        return self.predicted_bytes / self.row.measured_bytes - 1


def write_csv(scores: Iterable[Score], path: Path) -> None:
    """One line a row of the input."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for item in scores:
            error = "" if item.error is None else f"{item.error:.6f}"
            predicted = "" if item.predicted_bytes is None else item.predicted_bytes
            measured = "" if item.row.measured_bytes is None else item.row.measured_bytes
            like = "yes" if item.like_for_like else "no"
            writer.writerow(
                [item.row.id, predicted, measured, error, item.status, item.reason, item.transformers, like]
            )


def read_csv(path: Path, rows: Sequence[Row]) -> list[Score]:
    """What ``write_csv`` wrote of some of these rows, but for ``config``."""
    of_id = {row.id: row for row in rows}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Score(
                row=of_id[line["id"]],
                status=line["status"],
                reason=line["reason"],
                predicted_bytes=int(line["predicted_bytes"]) if line["predicted_bytes"] else None,
                transformers=line["transformers"],
                like_for_like=line["like_for_like"] == "yes",
            )
            for line in csv.DictReader(file)
        ]
