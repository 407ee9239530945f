"""The user's data at inference: what it is, and how long answering it takes."""

from __future__ import annotations

from typing import Any

from planner.config import InferenceConfig
from planner.data.deciding import Decided
from planner.data.planning import describe_rows
from planner.inference.timing import batch_shapes
from planner.timing import InferenceTime


def describe_data(decided: Decided, config: InferenceConfig, time: InferenceTime) -> dict[str, Any]:
    """``workload["data"]`` of plan.json: of all rows, by the speed at the lengths of those that were counted."""
    rows = describe_rows(decided)
    tokens = [length for sample in decided.samples() for length in sample]
    per_row = len(tokens) / len(decided.survey.sample)
    inputs = None if rows["rows"] is None else round(rows["rows"] * per_row)
    held = sum(count * size * width for (size, width), count in batch_shapes(tokens, config).items())
    return {
        **rows,
        "answers": {
            "inputs": inputs,
            "seconds": None if inputs is None else inputs / time.sequences_per_s,
            "padding": 1 - sum(tokens) / held,
        },
    }
