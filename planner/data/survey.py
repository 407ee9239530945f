"""What the user's data is: rows, bad rows, labels, and a sample of the texts with their lengths in tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from planner.data.rows import Columns, Sample, Text, pick_columns, read_sample
from planner.data.sampling import Reservoir
from planner.data.sources import Row, Source, SourceError, Tell, open_source
from planner.data.tokens import BATCH, TokenCounter
from planner.errors import InputError, Problem
from planner.request import PlanRequest
from planner.tasks import TaskFacts
from planner.units import shown

SAMPLED_ROWS = 20_000
"""Rows whose tokens are counted."""
SAMPLED_CHARACTERS = 32 * 2**20
"""And characters of them all: minutes of tokenizing otherwise."""
ENORMOUS_CHARACTERS = 10_000_000
"""A longer text is named: it is rarely meant to be one."""
TOKENIZED_CHARACTERS = 1_000_000
"""Of a longer text so many are tokenized; the rest counts in proportion."""
LOOKED_AT_ROWS = 1000
"""Rows that say which columns there are."""
LINES_NAMED = 3
MOST_LABELS = 10_000
"""Different labels from which on they are no classes."""
ENORMOUS = f"a text of more than {ENORMOUS_CHARACTERS:,} characters"


@dataclass(frozen=True, kw_only=True)
class Bad:
    """Rows with the same thing wrong."""

    problem: str
    """What, in a few words."""
    rows: int
    """How many."""
    lines: tuple[int, ...]
    """The first of them."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A usable row of the sample."""

    sample: Sample
    """Its texts, each cut at TOKENIZED_CHARACTERS."""
    cuts: tuple[float, ...]
    """By how much each text is longer than what is kept of it; 1 for one that is whole."""
    number: int
    """Its line or row."""
    part: int
    """The block or row that it was drawn with."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The data, as far as it was looked at."""

    source: str
    """As ``--data`` named it."""
    format: str
    """jsonl, csv, parquet, txt, dataset or hub."""
    unit: str
    """line or row: what bad rows are named by."""
    columns: Columns
    """What was read."""
    read: int
    """Rows looked at, empty lines left out."""
    usable: int
    """Of those, without a problem."""
    rows: float
    """Usable rows in all; an estimate unless every row was looked at. Infinite: not known."""
    drawn: bool
    """Whether not every row was looked at."""
    note: str
    """How rows were drawn, in a clause."""
    bad: tuple[Bad, ...]
    """What was wrong with others, the most frequent first."""
    enormous: tuple[Bad, ...]
    """Texts that are counted, and that are too long to be meant."""
    labels: dict[str, int]
    """Classes, each with the first row that has it."""
    sample: tuple[Drawn, ...]
    """Rows whose texts were counted, in the data's order."""
    tokens: tuple[tuple[int, ...], ...]
    """Of each of these, tokens of each text without special tokens."""

    @property
    def share(self) -> float:
        """Of the usable rows, those whose tokens were counted."""
        return len(self.sample) / self.rows


def survey(request: PlanRequest, facts: TaskFacts, counter: TokenCounter, tell: Tell = lambda share: None) -> Survey:
    """Read the data that a request names. Raises InputError: can't be read, no such column, or no usable row."""
    assert request.data is not None
    try:
        source = open_source(request.data, seed=request.seed)
        columns = _columns(source, request, facts)
        rows = source.rows(columns.names, lambda share: tell(0.7 * share))
        found = _Reading(columns, facts, request.seed).read(rows)
    except SourceError as error:
        raise _refusal(f"got {shown(request.data)}: {error}") from error
    sample = sorted(found.kept.items, key=lambda drawn: drawn.number)
    if not sample:
        raise _refusal(_nothing(request.data, found, source))
    return Survey(
        source=request.data,
        format=source.format,
        unit=source.unit,
        columns=columns,
        read=found.read_rows,
        usable=found.kept.seen,
        rows=found.rows_in_all(source),
        drawn=source.drawn,
        note=source.note if source.drawn else "",
        bad=_named(found.bad),
        enormous=_named({ENORMOUS: found.enormous} if found.enormous else {}),
        labels=found.labels,
        sample=tuple(sample),
        tokens=tuple(_count(sample, counter, lambda share: tell(0.7 + 0.3 * share))),
    )


def _columns(source: Source, request: PlanRequest, facts: TaskFacts) -> Columns:
    readable = (row.values for row in source.rows() if row.values)
    found: dict[str, bool] = {}
    for values in islice(readable, LOOKED_AT_ROWS):
        for name, value in values.items():
            found[str(name)] = found.get(str(name), False) or isinstance(value, str)
    found = {**dict.fromkeys(source.columns, False), **found}
    if not found:  # nothing but bad rows: they are named
        return Columns(texts=("text",), label=None)
    columns, problems = pick_columns(found, facts, request.text_column, request.label_column)
    if problems:
        raise InputError(problems)
    return columns


class _Reading:
    """Rows as they come: what is wrong with them, and a sample of the others."""

    def __init__(self, columns: Columns, facts: TaskFacts, seed: int) -> None:
        self.columns, self.facts = columns, facts
        self.bad: dict[str, list[int]] = defaultdict(list)
        self.enormous: list[int] = []
        self.labels: dict[str, int] = {}
        self.read_rows = self.blank = 0
        self.kept: Reservoir[Drawn] = Reservoir(SAMPLED_ROWS, SAMPLED_CHARACTERS, _characters, seed)

    def read(self, rows: Iterator[Row]) -> _Reading:
        for row in rows:
            if row.values is None and not row.problem:
                self.blank += 1
                continue
            self.read_rows += 1
            try:
                if row.values is None:
                    raise ValueError(row.problem)
                self._add(row, read_sample(row.values, self.columns, self.facts))
            except ValueError as problem:
                self.bad[str(problem)].append(row.number)
        return self

    def _add(self, row: Row, sample: Sample) -> None:
        for name in sample.labels if len(self.labels) <= MOST_LABELS else ():
            self.labels.setdefault(name, row.number)
        lengths = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in sample.texts]
        if max(lengths) > ENORMOUS_CHARACTERS:
            self.enormous.append(row.number)
        cuts = (1.0,) * len(lengths)
        if max(lengths) > TOKENIZED_CHARACTERS:
            cuts = tuple(max(1.0, length / TOKENIZED_CHARACTERS) for length in lengths)
            sample = replace(sample, texts=tuple(map(_beginning, sample.texts, lengths)))
        self.kept.add(Drawn(sample=sample, cuts=cuts, number=row.number, part=row.part))

    def rows_in_all(self, source: Source) -> float:
        """Usable rows of the whole."""
        if not source.drawn:
            return self.kept.seen
        if source.total is None:
            return float("inf")
        return source.total * self.kept.seen / (self.read_rows + self.blank)


def _beginning(text: Text, length: int) -> Text:
    if length <= TOKENIZED_CHARACTERS:
        return text
    return text[:TOKENIZED_CHARACTERS] if isinstance(text, str) else text[: len(text) * TOKENIZED_CHARACTERS // length]


def _characters(drawn: Drawn) -> int:
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in drawn.sample.texts)


def _count(sample: Sequence[Drawn], counter: TokenCounter, tell: Tell) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(sample), BATCH):
        some = sample[start : start + BATCH]
        flat: list[Text] = [text for drawn in some for text in drawn.sample.texts]
        words = [text for text in flat if not isinstance(text, str)]
        counts = iter(counter.counts(words if words and len(words) == len(flat) else flat))
        for drawn in some:
            yield tuple(round(next(counts) * cut) for cut in drawn.cuts)
        tell((start + len(some)) / len(sample))


def _named(bad: dict[str, list[int]]) -> tuple[Bad, ...]:
    found = [Bad(problem=problem, rows=len(n), lines=tuple(n[:LINES_NAMED])) for problem, n in bad.items()]
    return tuple(sorted(found, key=lambda each: -each.rows))


def bad_text(bad: Sequence[Bad], unit: str) -> str:
    """Bad rows in a clause: ``no text: 3 (line 4, 9, 12)``."""
    return "; ".join(
        f"{each.problem}: {each.rows:,} ({unit} {', '.join(map(str, each.lines))}"
        f"{', ...' if each.rows > len(each.lines) else ''})"
        for each in bad
    )


def _nothing(name: str, found: _Reading, source: Source) -> str:
    if not found.read_rows:
        return f"got {shown(name)}, which has no rows; accepted: data with at least one text"
    message = f"got {shown(name)}, where none of {found.read_rows:,} rows can be used: "
    message += bad_text(_named(found.bad), source.unit)
    if source.format == "jsonl" and set(found.bad) == {"no JSON object"}:
        message += "; accepted: one JSON object on each line (a file that is one list has to be written so)"
    return message


def _refusal(message: str) -> InputError:
    return InputError([Problem(argument="data", message=message)])
