"""Which columns a task takes, and whether a row has what it needs: as the emitted script decides it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import Problem
from planner.tasks import TaskFacts
from planner.units import shown

NAMED_COLUMNS = 12
"""Columns that a message names."""
Text = str | list[str]
"""A text, or its words where each has a label."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns that are read."""

    texts: tuple[str, ...]
    """Of a sample's texts, in order."""
    label: str | None
    """Of its label; None where the task has none."""

    @property
    def names(self) -> list[str]:
        """All of them."""
        return list(dict.fromkeys((*self.texts, *([self.label] if self.label else []))))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a usable row has."""

    texts: tuple[Text, ...]
    """Its texts; a sequence-to-sequence target is the last of them."""
    labels: tuple[str, ...]
    """Names of its classes; empty where labels are no classes."""


def pick_columns(
    found: Mapping[str, bool], facts: TaskFacts, text_column: str | None, label_column: str | None
) -> tuple[Columns, list[Problem]]:
    """The columns that were asked for, else the usual ones that the data has.

    ``found``: each column, and whether it holds text. A task with a single text takes a text column of any name.
    """
    problems: list[Problem] = []
    label = None
    if facts.usual_label_columns:
        names = [(name,) for name in facts.usual_label_columns]
        picked = _pick("label_column", label_column, names, found, (1, 1), problems)
        label = picked[0] if picked else None
    usual = list(facts.usual_text_columns)
    if facts.joined and facts.text_columns[0] == 1 and facts.labels != "word-classes":
        usual += [(name,) for name, is_text in found.items() if is_text and name != label]
    texts = _pick("text_column", text_column, usual, found, facts.text_columns, problems)
    return Columns(texts=texts, label=label), problems


def _pick(
    argument: str,
    asked: str | None,
    usual: Sequence[tuple[str, ...]],
    found: Mapping[str, bool],
    count: tuple[int, int],
    problems: list[Problem],
) -> tuple[str, ...]:
    wanted = [tuple(name.strip() for name in asked.split(","))] if asked else []
    if wanted and not count[0] <= len(wanted[0]) <= count[1]:
        allowed = str(count[0]) if count[0] == count[1] else f"{count[0]} to {count[1]}"
        message = f"got {shown(asked)}, {len(wanted[0])} columns; accepted for this task: {allowed}"
        problems.append(Problem(argument=argument, message=message))
        return ()
    for names in wanted or usual:
        if all(name in found for name in names):
            return names
    have = ", ".join(map(shown, list(found)[:NAMED_COLUMNS])) + (", ..." if len(found) > NAMED_COLUMNS else "")
    looked_for = " or ".join(",".join(names) for names in wanted or usual)
    got = f"got {shown(asked)}, which the data doesn't have" if asked else f"the data has no column {looked_for}"
    flag = argument.replace("_", "-")
    message = f"{got}; accepted: one of its columns: {have or 'none'}; name it with --{flag}"
    problems.append(Problem(argument=argument, message=message))
    return ()


def read_sample(values: Mapping[str, Any], columns: Columns, facts: TaskFacts) -> Sample:
    """The texts and labels of a row. Raises ValueError with what is wrong with it, in a few words."""
    for name in columns.names:
        if name not in values:
            raise ValueError(f"no column {name}")
    if facts.labels == "word-classes":
        return _words(values[columns.texts[0]], values[columns.label or ""])
    texts: tuple[Text, ...] = tuple(_text(values[name]) for name in columns.texts)
    label = values[columns.label] if columns.label else None
    if facts.labels == "tokens":
        return Sample(texts=(*texts, _text(label)), labels=())
    if facts.labels == "class":
        name = label_name(label)
        if not name:
            raise ValueError("no label")
        return Sample(texts=texts, labels=(name,))
    if facts.labels == "classes":
        return Sample(texts=texts, labels=_classes(label))
    if facts.labels == "number":
        _check_number(label, from_0_to_1=facts.loss == "binary-cross-entropy")
    return Sample(texts=texts, labels=())


def label_name(value: object) -> str:
    """A label as text: 1, 1.0 and "1" are one class; a missing one is the empty text."""
    if value is None or isinstance(value, (list, dict)) or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8") from None
    return value


def _as_list(value: object) -> list[Any]:
    """A csv file has the words or labels of a row in one text with spaces between."""
    return value.split() if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []


def _words(words: object, labels: object) -> Sample:
    texts, names = [str(word) for word in _as_list(words)], [label_name(label) for label in _as_list(labels)]
    if not texts:
        raise ValueError("no words")
    if len(texts) != len(names) or not all(names):
        raise ValueError("not a label for each word")
    return Sample(texts=(texts,), labels=tuple(names))


def _classes(label: object) -> tuple[str, ...]:
    values = label.replace(";", ",").split(",") if isinstance(label, str) else label
    if not isinstance(values, (list, tuple)):
        raise ValueError("no list of labels")
    return tuple(dict.fromkeys(name for name in map(label_name, values) if name))


def _check_number(label: Any, *, from_0_to_1: bool) -> None:
    try:
        number = float(label)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("the label is no number") from None
    if from_0_to_1 and not 0 <= number <= 1:
        raise ValueError("the label is not from 0 to 1")
    if not math.isfinite(number):
        raise ValueError("the label is no finite number")
