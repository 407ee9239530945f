"""How far published measurements lay above this simulator's predictions: the margin that a plan keeps free."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

QUANTILE = "0.99"
"""Of the measurements, the share that must be covered."""


@cache
def margin_fraction() -> tuple[float, str]:
    """``(fraction, reason)``: what to add to reserved memory and context, relative to them.

    The largest quantile of any kind of measurement in ``profiles/calibration.json``, which
    ``benchmarks/memory_accuracy.py --calibrate`` writes; never below zero.
    """
    text = resources.files("planner.profiles").joinpath("calibration.json").read_text(encoding="utf-8")
    kinds: dict[str, Any] = json.loads(text)["kinds"]
    rows = sum(kind["n"] for kind in kinds.values())
    fraction = max(0.0, *(kind["quantiles"][QUANTILE] for kind in kinds.values()))
    reason = (
        f"{fraction:.2%}: the 99th percentile of measured over predicted memory in {rows} published measurements "
        "of like configurations"
    )
    return fraction, reason
