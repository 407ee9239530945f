"""profiles/calibration.json: by how much runs went beyond the prediction, for each kind of configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.cache import library_versions
from planner.calibration import kind_of
from planner.config import TrainingConfig

CALIBRATION = Path(__file__).resolve().parent.parent / "profiles" / "calibration.json"
QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """One measured row against its prediction."""

    row_id: str
    """For example ``mila-001``."""
    config: TrainingConfig
    """Whose kind the row counts for."""
    beyond: float
    """``measured / predicted - 1``: above zero the run needed more than predicted."""


def calibration(residuals: Sequence[Residual], left_out: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """The file's content; ``left_out`` is why a row doesn't count, to the rows of which that holds."""
    kinds: dict[str, list[Residual]] = {}
    for residual in residuals:
        kinds.setdefault(kind_of(residual.config), []).append(residual)
    return {
        "made_by": "benchmarks/memory_accuracy.py --calibrate; edit nothing here",
        "versions": library_versions(),
        "meaning": "residuals are measured / predicted - 1, by row; above zero the run needed more than predicted",
        "kinds": {kind: _distribution(kinds[kind]) for kind in sorted(kinds)},
        "left_out": {reason: list(rows) for reason, rows in left_out.items()},
    }


def _distribution(residuals: Sequence[Residual]) -> dict[str, object]:
    values = [residual.beyond for residual in residuals]
    return {
        "n": len(values),
        "quantiles": {str(q): round(float(np.quantile(values, q)), 6) for q in QUANTILES},
        "residuals": {residual.row_id: round(residual.beyond, 6) for residual in residuals},
    }


def write(content: Mapping[str, object]) -> None:
    """Replace the shipped file."""
    CALIBRATION.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
