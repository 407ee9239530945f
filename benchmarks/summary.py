"""The figures of a run of the memory benchmark, as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scores import Score

from planner.calibration import margin

WITH_TRANSFORMERS = ("fms", "opt350", "gpt2l", "distilbert", "mila", "perf", "qwen25")
"""Sources whose A rows are summarised together, with the B rows of bert: all that use transformers' own model code."""


def summary(scores: Sequence[Score]) -> str:
    """A line a source, then the rows that the project answers for, the margin's coverage and the boundaries."""
    lines = [f"{'source':<34}{'rows':>5}{'median':>9}{'90 %':>9}{'worst':>9}{'under':>8}"]
    for source in sorted({item.row.source for item in scores}):
        lines += _line(source, [item for item in scores if item.row.source == source])
    answered = [item for item in scores if answers_for(item)]
    lines += _line("A rows with transformers, bert's B", answered)
    lines += _line("  of these, like for like", [item for item in answered if item.like_for_like])
    lines += _coverage(answered)
    return "\n".join([*lines, "", *_boundaries(scores)])


def answers_for(item: Score) -> bool:
    """Whether a row counts in the figures that the project answers for."""
    source, quality = item.row.source, item.row.quality
    return (source in WITH_TRANSFORMERS and quality == "A") or (source == "bert" and quality == "B")


def margin_of(item: Score) -> float:
    """The share of the prediction that a plan of this configuration would keep free."""
    assert item.config is not None
    return margin(item.config).fraction


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


def _coverage(scores: Sequence[Score]) -> list[str]:
    """How many of these rows needed more than a plan would have kept free, and what that costs."""
    kept = [(item.error, margin_of(item)) for item in scores if item.error is not None and item.config is not None]
    if not kept:
        return []
    # in the six digits of the calibration file: the row that sets a margin isn't above it
    above = sum(round(1 / (1 + error) - 1, 6) > fraction for error, fraction in kept)
    average = float(np.mean([fraction for _, fraction in kept]))
    return [f"above prediction and margin: {above} of {len(kept)} rows ({above / len(kept):.1%}); margin {average:.2%}"]


def _boundaries(scores: Sequence[Score]) -> list[str]:
    counts = {status: sum(item.status == status for item in scores) for status in ("fits-right", "fits-wrong")}
    skipped = sum(item.status == "skipped" for item in scores)
    right, wrong = counts.values()
    return [f"fits or runs out of memory: {right} right, {wrong} wrong; {skipped} of {len(scores)} rows skipped"]
