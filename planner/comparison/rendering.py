"""A comparison on the terminal. Takes plain values and decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.comparison.comparing import Comparison
from planner.render import make_console
from planner.tables import plain_table
from planner.units import format_bytes

_SHARES = ("agreement", "overlap", "accuracy", "f1", "precision", "recall", "equal_texts", "tokens_before_difference")
_LABELS = {
    "scores": "scores compared",
    "texts": "texts compared",
    "f1": "spans, F1 of exact ones",
    "kendall": "Kendall's rank correlation",
    "spearman": "Spearman's rank correlation",
    "mean_query_spearman": "Spearman's, mean of queries",
    "worst_query_spearman": "Spearman's, worst query",
    "mean_query_kendall": "Kendall's, mean of queries",
    "worst_query_kendall": "Kendall's, worst query",
    "top1_agreement": "agreement of the first",
    "top10_overlap": "overlap of the first ten",
    "tokens_before_difference": "tokens before the first difference",
    "labelled": "texts with a true label",
}


def render_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print what changed, what to know about it, and speed and memory of both runs."""
    console = console or make_console()
    console.print(_headline(comparison))
    tables = {"What the plan changed": _agreement(comparison), "Speed and memory": _runs(comparison)}
    for title, table in tables.items():
        console.print(Text(f"\n{title}", style="bold"))
        console.print(Padding(table, (0, 0, 0, 2)))
    for note in comparison.notes:
        console.print(Text(f"\n{note}"))


def _headline(comparison: Comparison) -> Text:
    text = Text()
    text.append(f"{comparison.model}, {comparison.task}: the plan against fp32 on {comparison.device}\n", style="bold")
    text.append(f"the plan: {', '.join(comparison.changes) or 'fp32, nothing quantized'}\n")
    text.append(f"rows: {comparison.rows_compared:,} compared")
    if comparison.rows_left_out:
        text.append(f", {comparison.rows_left_out:,} left out (unreadable, or without an answer)")
    return text


def _agreement(comparison: Comparison) -> Table:
    """A line for each figure; what both runs have of their own stands side by side."""
    table = plain_table(("", False), ("", True))
    for name, shown in figures(comparison):
        table.add_row(Text(name), Text(shown))
    return table


def figures(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """What the task's figures are called, and their values."""
    for field in dataclasses.fields(comparison.agreement):
        value = getattr(comparison.agreement, field.name)
        none_there = isinstance(value, int) and value == field.default  # no true labels, no perplexity
        if value is None or isinstance(value, Mapping) or none_there:
            continue
        yield _LABELS.get(field.name, field.name.replace("_", " ")), _shown(field.name, value)


def _shown(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    # no rounding up: 99.996 % is not all
    return f"{int(value * 10_000) / 10_000:.2%}" if name.endswith(_SHARES) else f"{value:.6g}"


def _runs(comparison: Comparison) -> Table:
    table = plain_table(("", False), ("plan", True), ("fp32", True), ("ratio", True))
    ours, theirs = comparison.plan_run, comparison.baseline_run
    for name in ("rows_per_s", "tokens_per_s", "written_tokens_per_s"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a is not None and b is not None:
            title = {"rows_per_s": "rows/s", "tokens_per_s": "tokens read/s"}.get(name, "tokens written/s")
            table.add_row(title, f"{a:,.1f}", f"{b:,.1f}", _ratio(a, b))
    table.add_row("padding", f"{ours.padding_share:.1%}", f"{theirs.padding_share:.1%}", "")
    peaks = ours.peak_bytes, theirs.peak_bytes
    table.add_row("peak memory", *map(format_bytes, peaks), _ratio(*peaks))
    return table


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}x" if b else ""
