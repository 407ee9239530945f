"""Rows of a file in the format of ground_truth/measurements.csv."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement."""

    id: str
    """For example ``bert-001``."""
    source: str
    """The id's prefix."""
    gpu: str
    """As the source names it."""
    measure: str
    """max_memory_allocated, max_memory_reserved, nvidia_smi_used, fits, ooms or unknown."""
    measured_bytes: int | None
    """The peak; None where only a boundary is known."""
    micro_batch: int | None
    """Sequences; None where it isn't one number."""
    seq_len: int | None
    """Tokens; None where it isn't one number."""
    quality: str
    """A, B or C."""
    fields: Mapping[str, str] = field(repr=False)
    """Every column as it stands in the file."""

    def __getitem__(self, column: str) -> str:
        """A column's text."""
        return self.fields.get(column, "")

    @property
    def throughput(self) -> float | None:
        """``throughput_value`` as a number, in ``throughput_unit``."""
        text = self["throughput_value"]
        return float(text) if re.fullmatch(r"[0-9.]+", text) else None


def load_rows(path: Path) -> list[Row]:
    """Every row of the file, in its order."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(fields) for fields in csv.DictReader(file)]


def _row(fields: dict[str, str]) -> Row:
    return Row(
        id=fields["id"],
        source=fields["id"].rsplit("-", 1)[0],
        gpu=fields["gpu"],
        measure=fields["measure"],
        measured_bytes=whole(fields["peak_bytes"]),
        micro_batch=whole(fields["micro_batch"]),
        seq_len=whole(fields["seq_len"]),
        quality=fields["quality"],
        fields=fields,
    )


def whole(text: str) -> int | None:
    """A number of a column; None where it holds anything else."""
    return int(text) if text.isdecimal() else None
