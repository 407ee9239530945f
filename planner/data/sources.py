"""Rows of a file or a data set, one after the other: never more than a block of them in memory."""

from __future__ import annotations

import csv
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, TextIO

LARGEST_LINE_BYTES = 64 * 2**20
"""A longer line is left out: a file without line ends must not fill the memory."""
WHOLE_BYTES = 64 * 2**20
"""Up to this size a jsonl or txt file is read row by row; of a larger one, blocks."""
WHOLE_ROWS = 200_000
"""Up to so many rows a parquet file or a saved data set is read whole; of a larger one, rows drawn at random."""
DRAWN_ROWS = 20_000
"""Rows that are drawn of those."""
BLOCKS, BLOCK_BYTES = 256, 128 * 2**10
"""Of a large file: blocks, evenly spread, and bytes of each."""
CHECKED_ROWS = 100_000
"""Rows that are drawn of a large csv file, about."""
_CHUNK_BYTES = 2**20
_BATCH_ROWS = 4096
_TOLD_EVERY = 5000
_SUFFIXES = (".jsonl", ".csv", ".parquet", ".txt")

Tell = Callable[[float], Any]
"""Called now and then with the share that is done, from 0 to 1."""


class SourceError(Exception):
    """The data can't be read; the message is a clause, with a remedy where there is one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: its columns, or what is wrong with it."""

    number: int
    """Line of the file or row of the table, counted from 1."""
    values: Mapping[str, Any] | None
    """Column to value; None for a row that can't be read, and for an empty line."""
    problem: str = ""
    """Why it can't be read, in a few words; empty for an empty line."""
    part: int = 0
    """Number of the block that it was drawn with; of a row that was drawn alone its own."""


@dataclass
class Source:
    """Something that rows come out of. ``total`` is known once all of them came."""

    format: str
    """jsonl, csv, parquet, txt, dataset or hub."""
    size: int
    """Bytes of a file, rows of a table; 0 where neither is known."""
    read: Callable[[Source, Sequence[str] | None, Tell], Iterator[Row]]
    """Makes the rows; of these columns alone where they are named."""
    drawn: bool = False
    """Whether ``rows`` gives only some of the rows."""
    total: int | None = None
    """Rows in all, empty lines counted; None: not known."""
    columns: Sequence[str] = ()
    """Columns that a table is declared to have."""
    note: str = ""
    """How the rows were drawn, in a clause."""
    unit: str = field(init=False)
    """What a row's number counts."""

    def __post_init__(self) -> None:
        self.unit = "line" if self.format in ("jsonl", "csv", "txt") else "row"

    def rows(self, columns: Sequence[str] | None = None, tell: Tell = lambda share: None) -> Iterator[Row]:
        """Every row, or a sample of them. Raises SourceError when reading fails."""
        try:
            yield from self.read(self, columns, tell)
        except (OSError, EOFError) as error:
            raise SourceError(getattr(error, "strerror", None) or _first_line(error)) from error


def open_source(name: str, *, seed: int = 0) -> Source:
    """What ``--data`` names: a file by its ending, a folder that ``datasets`` saved, else a data set of the hub.

    Raises SourceError.
    """
    path = Path(name).expanduser()
    if path.is_dir() or (not path.exists() and _could_be_hub(name)):
        from planner.data.tables import open_dataset

        return open_dataset(name, path, seed=seed)
    if path.suffix not in _SUFFIXES:
        what = "" if path.exists() else "no such file; "
        raise SourceError(f"{what}accepted: a file that ends in {', '.join(_SUFFIXES)}, or a data set")
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise SourceError(error.strerror or _first_line(error)) from error
    if path.suffix == ".parquet":
        from planner.data.tables import open_parquet

        return open_parquet(path, seed=seed)
    if path.suffix == ".csv":
        note = "rows were drawn at random" if size > WHOLE_BYTES else ""
        read = partial(_csv_rows, path, seed=seed)
        return Source("csv", size, lambda source, _, tell: read(source, tell), drawn=size > WHOLE_BYTES, note=note)
    form = path.suffix[1:]
    if size <= WHOLE_BYTES:
        return Source(form, size, lambda source, _, tell: _line_rows(path, source, tell))
    note = f"{BLOCKS} evenly spread blocks were read"
    return Source(form, size, lambda source, _, tell: _block_rows(path, source, tell, seed=seed), drawn=True, note=note)


def _could_be_hub(name: str) -> bool:
    parts = name.split("/")
    return Path(name).suffix not in _SUFFIXES and len(parts) <= 2 and all(parts) and not name.startswith((".", "~"))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- lines -----------------------------------------------------------------------------------------------------------


def _next_line(file: BinaryIO) -> tuple[bytes, int]:
    """A line, cut at its longest, and its length in bytes; empty at the end."""
    line = file.readline(LARGEST_LINE_BYTES)
    length = len(line)
    if length == LARGEST_LINE_BYTES and not line.endswith(b"\n"):
        while rest := file.readline(_CHUNK_BYTES):
            length += len(rest)
            if rest.endswith(b"\n"):
                break
    return line, length


def _row(form: str, number: int, line: bytes, length: int, part: int) -> Row:
    if length > LARGEST_LINE_BYTES:
        return Row(number=number, values=None, problem=f"a line of more than {LARGEST_LINE_BYTES >> 20} MiB", part=part)
    problem = ""
    values: Any = None
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        if text:
            values = {"text": text} if form == "txt" else json.loads(text)
        if values is not None and not isinstance(values, dict):
            values, problem = None, "no JSON object"
        if values and b"\\ud" in line.lower():  # half of a surrogate pair, escaped, is no character
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeError:
        values, problem = None, "not UTF-8"
    except (ValueError, RecursionError):
        values, problem = None, "no JSON object"
    return Row(number=number, values=values or None, problem=problem, part=part)


def _line_rows(path: Path, source: Source, tell: Tell) -> Iterator[Row]:
    number = done = 0
    with path.open("rb") as file:
        while (found := _next_line(file))[1]:
            number, done = number + 1, done + found[1]
            if number % _TOLD_EVERY == 0:
                tell(done / source.size)
            yield _row(source.format, number, *found, part=number)
    source.total = number


def _block_rows(path: Path, source: Source, tell: Tell, *, seed: int) -> Iterator[Row]:
    """Rows that begin in one of the blocks. Line ends in between are only counted, at the disk's speed.

    The blocks stand at even distances from a random start (a systematic sample), so that any row's beginning is as
    likely to be in one.
    """
    stride = source.size // BLOCKS
    first = random.Random(seed).randrange(1, stride)
    number, position = 0, 0
    with path.open("rb") as file:
        for block in range(BLOCKS):
            start = first + block * stride
            end = min(start + min(BLOCK_BYTES, stride), source.size)
            if start - 1 >= position:  # else one row reaches over this block's beginning
                number += _line_ends(file, start - 1 - position)
                number, position = number + 1, start - 1 + _next_line(file)[1]
            while position < end and (found := _next_line(file))[1]:
                number, position = number + 1, position + found[1]
                yield _row(source.format, number, *found, part=block)
            tell(end / source.size)
        number += _line_ends(file, source.size - position)
        file.seek(-1, 2)
        source.total = number + (position < source.size and file.read(1) != b"\n")


def _line_ends(file: BinaryIO, size: int) -> int:
    count = 0
    while size > 0 and (chunk := file.read(min(size, _CHUNK_BYTES))):
        count, size = count + chunk.count(b"\n"), size - len(chunk)
    return count


# -- csv -------------------------------------------------------------------------------------------------------------


def _csv_rows(path: Path, source: Source, tell: Tell, *, seed: int) -> Iterator[Row]:
    """Rows of a csv file, named by the line in which they end. A large one is gone through for its row ends alone.

    Its rows are drawn each with the same probability: where a block of bytes begins no row can be told, as a quoted
    field may hold line breaks.
    """
    csv.field_size_limit(LARGEST_LINE_BYTES)
    chance, draw, count = _chance(path, source), random.Random(seed), 0
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        table = csv.reader(_bounded(file))
        header = _header(table)
        source.columns = tuple(header)
        while True:
            try:
                fields = next(table)
            except StopIteration:
                break
            except csv.Error as error:
                yield Row(number=table.line_num, values=None, problem=str(error), part=count)
                continue
            count += bool(fields)
            if not fields or (chance < 1 and draw.random() >= chance):
                continue
            if count % _TOLD_EVERY == 0 or chance < 1:
                tell(os.lseek(file.fileno(), 0, os.SEEK_CUR) / source.size)
            yield _csv_row(header, fields, table.line_num, count)
    source.total = count


def _chance(path: Path, source: Source) -> float:
    """With which a row is drawn: 1 for all of a small file. Where rows have many lines, fewer are drawn."""
    if not source.drawn:
        return 1.0
    with path.open("rb") as file:
        chunk = file.read(_CHUNK_BYTES)
    lines = source.size * max(1, chunk.count(b"\n")) / len(chunk)
    return min(1.0, CHECKED_ROWS / lines)


def _header(table: Iterator[list[str]]) -> list[str]:
    try:
        return next((fields for fields in table if fields), [])
    except csv.Error as error:
        raise SourceError(f"its first line is no header ({error})") from error


def _csv_row(header: list[str], fields: list[str], number: int, part: int) -> Row:
    problem = "more fields than columns" if len(fields) > len(header) else ""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:
        problem = "not UTF-8"
    values = dict(zip_longest(header, fields)) if not problem else None
    return Row(number=number, values=values, problem=problem, part=part)


def _bounded(file: TextIO) -> Iterator[str]:
    return iter(lambda: file.readline(LARGEST_LINE_BYTES), "")
