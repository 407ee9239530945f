"""The rows of the user's data that a comparison runs on, and what of them it looks at itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from planner.data.rows import label_name
from planner.data.sources import Row, Source, SourceError, open_source
from planner.errors import InputError, Problem
from planner.tasks import TASK_FACTS, TaskFacts
from planner.units import shown

NAMED_COLUMNS = 12
"""Columns that a message names."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Rows of the data."""

    rows: Sequence[tuple[int, Mapping[str, Any]]]
    """Number of each in the data, from 0 and without empty lines, and its columns."""
    unreadable: int
    """Rows on the way that can't be read."""
    text_column: str | None
    """The columns of texts that were asked for; None: the script looks for the usual ones."""
    query_column: str | None
    """Of a reranking, the column of queries: rows that share one are ranked together."""
    label_column: str | None
    """The column of true labels, or of target texts; None where there is none."""
    has_perplexity: bool
    """Whether the perplexity of its own texts can be measured."""
    note: str
    """How the rows were drawn, where they are not simply the first ones."""

    @property
    def perplexity_columns(self) -> str | None:
        """What the script is to measure the perplexity of; None: it looks for the usual columns."""
        if self.label_column and self.text_column:
            return f"{self.text_column},{self.label_column}"
        return self.text_column

    def write(self, path: Path) -> Path:
        """The rows as a jsonl file, which an emitted script numbers from 0."""
        with path.open("w", encoding="utf-8", errors="replace") as file:
            for _, values in self.rows:
                file.write(f"{json.dumps(values, ensure_ascii=False, default=str)}\n")
        return path


def read_sample_of(
    data: str, document: Mapping[str, Any], text_column: str | None, label_column: str | None, *, most: int
) -> Sample:
    """The first rows of the data; of data too large to be read whole, rows drawn at random.

    Raises InputError: data that can't be read, has no such column, or no row.
    """
    try:
        source = open_source(data)
        rows, unreadable = _take(source, most)
    except SourceError as error:
        raise InputError([Problem(argument="data", message=f"got {shown(data)}: {error}")]) from error
    if not rows:
        which = f"none of whose {unreadable:,} rows can be read" if unreadable else "which has no rows"
        message = f"got {shown(data)}, {which}; accepted: data with at least one text"
        raise InputError([Problem(argument="data", message=message)])
    facts = TASK_FACTS[document["workload"]["task"]]
    columns = list(dict.fromkeys(str(name) for _, values in rows for name in values))
    texts = text_column or document["request"].get("text_column")
    _check(columns, {"text_column": texts, "label_column": label_column})
    targets = facts.labels == "tokens"
    label = label_column or next((name for name in facts.usual_label_columns if name in columns), None)
    return Sample(
        rows=rows,
        unreadable=unreadable,
        # The script wants both columns by name, or neither.
        text_column=texts or (_usual(facts, columns) if targets and label_column else None),
        query_column=(texts or _usual(facts, columns) or "").split(",")[0] if facts.name == "reranking" else None,
        label_column=label if targets or facts.answer == "label" else None,
        has_perplexity=facts.generates and (label is not None or not targets),
        note=source.note if source.drawn else "",
    )


def _take(source: Source, most: int) -> tuple[list[tuple[int, Mapping[str, Any]]], int]:
    unreadable = 0

    def readable(rows: Iterable[Row]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        nonlocal unreadable
        index = 0
        for row in rows:
            if row.values is not None:
                yield index, row.values
            unreadable += bool(row.problem)
            index += row.values is not None or bool(row.problem)

    if not source.drawn:
        return list(islice(readable(source.rows()), most)), unreadable
    found = list(readable(source.rows()))
    kept = sorted(random.Random(0).sample(range(len(found)), min(most, len(found))))
    return [found[i] for i in kept], 0


def _check(columns: Sequence[str], asked: Mapping[str, str | None]) -> None:
    """Raises InputError with the columns that the data doesn't have."""
    have = ", ".join(map(shown, columns[:NAMED_COLUMNS])) + (", ..." if len(columns) > NAMED_COLUMNS else "")
    problems = [
        Problem(argument=argument, message=f"got {shown(names)}, which the data doesn't have; accepted: {have}")
        for argument, names in asked.items()
        if names and not {name.strip() for name in names.split(",")} <= set(columns)
    ]
    if problems:
        raise InputError(problems)


def _usual(facts: TaskFacts, columns: Sequence[str]) -> str | None:
    """The usual columns of an input that the data has."""
    return next((",".join(names) for names in facts.columns_of_input if set(names) <= set(columns)), None)


def truth_of(value: object, names: Sequence[str]) -> str | None:
    """The model's name of a label in the data, which may be that name or its number; None where it is neither."""
    label = label_name(value)
    if label in names:
        return label
    return names[int(label)] if label.isdecimal() and int(label) < len(names) else None
