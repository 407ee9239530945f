"""Rows of parquet files and of data sets of the ``datasets`` library."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from planner.data.sources import _BATCH_ROWS, DRAWN_ROWS, WHOLE_ROWS, Row, Source, SourceError, Tell, _first_line

SHUFFLED_ROWS = 10_000
"""Rows of the buffer in which a streamed data set is shuffled."""
NO_DATASETS = "no such file; for a data set's folder or hub id: pip install 'vramplan[data]'"


def open_parquet(path: Path, *, seed: int) -> Source:
    """A parquet file; of a large one rows are drawn at random. Raises SourceError."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise SourceError("parquet files need pyarrow: pip install pyarrow") from None
    try:
        with pq.ParquetFile(path) as file:
            total, columns = file.metadata.num_rows, tuple(file.schema_arrow.names)
    except (OSError, pa.ArrowException) as error:
        raise SourceError(_first_line(error)) from error

    def read(source: Source, wanted: Sequence[str] | None, tell: Tell) -> Iterator[Row]:
        places = _drawn(total, seed)
        try:
            with pq.ParquetFile(path) as file:
                batches = file.iter_batches(_BATCH_ROWS, columns=list(wanted) if wanted else None)
                yield from _batch_rows(batches, places, total, tell)
        except (pa.ArrowException, NotImplementedError) as error:
            raise SourceError(_first_line(error)) from error
        source.total = total

    return Source("parquet", total, read, drawn=total > WHOLE_ROWS, columns=columns, note=_note(total))


def open_dataset(name: str, path: Path, *, seed: int) -> Source:
    """A folder that ``datasets`` saved or, where there is none, a data set of the hub. Raises SourceError."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise SourceError(NO_DATASETS) from None
    datasets.utils.logging.set_verbosity_error()
    try:
        found: Any = (
            datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(name, streaming=True)
        )
    except Exception as error:  # whatever a data set's own code, or the network, raises
        what = "" if path.is_dir() else "no such file, and as a data set of the hub: "
        raise SourceError(what + _first_line(error)) from error
    if isinstance(found, dict):
        found = found.get("train", next(iter(found.values())))
    return _of_hub(found, seed) if isinstance(found, datasets.IterableDataset) else _of_folder(found, seed)


def _of_folder(found: Any, seed: int) -> Source:
    total = found.num_rows

    def read(source: Source, wanted: Sequence[str] | None, tell: Tell) -> Iterator[Row]:
        places = _drawn(total, seed)
        table = found.select_columns(list(wanted)) if wanted else found
        table = table.select(places) if places is not None else table
        batches = table.with_format("arrow").iter(_BATCH_ROWS)
        numbers = iter(range(total) if places is None else places)
        for batch in batches:
            for number, values in zip(islice(numbers, batch.num_rows), _plain(batch), strict=True):
                yield _as_row(number + 1, values)
            tell((number + 1) / total)
        source.total = total

    return Source("dataset", total, read, drawn=total > WHOLE_ROWS, columns=found.column_names, note=_note(total))


def _of_hub(found: Any, seed: int) -> Source:
    splits = (found.info.splits or {}) if found.info else {}
    known = splits.get(str(found.split)) if found.split is not None else None
    total = known.num_examples if known else None

    def read(source: Source, wanted: Sequence[str] | None, tell: Tell) -> Iterator[Row]:
        stream = found.shuffle(seed=seed, buffer_size=SHUFFLED_ROWS)
        number = 0
        try:
            for number, values in enumerate(islice(stream, DRAWN_ROWS), start=1):
                yield _as_row(number, dict(values))
                if number % 500 == 0:
                    tell(number / DRAWN_ROWS)
        except Exception as error:  # the network may go away, and a data set's own code may raise anything
            raise SourceError(_first_line(error)) from error
        source.total = total if total is not None or number == DRAWN_ROWS else number
        source.drawn = source.total is None or source.total > number

    note = f"{DRAWN_ROWS:,} rows of the stream, its parts shuffled"
    return Source("hub", total or 0, read, drawn=True, columns=found.column_names or (), note=note)


def _note(total: int) -> str:
    return f"{DRAWN_ROWS:,} rows were drawn at random" if total > WHOLE_ROWS else ""


def _drawn(total: int, seed: int) -> list[int] | None:
    """Rows to look at, counted from 0; None: all of them."""
    return sorted(random.Random(seed).sample(range(total), DRAWN_ROWS)) if total > WHOLE_ROWS else None


def _batch_rows(batches: Any, places: list[int] | None, total: int, tell: Tell) -> Iterator[Row]:
    start, upcoming = 0, 0
    for batch in batches:
        end, numbers = start + batch.num_rows, range(start, start + batch.num_rows)
        if places is not None:
            first = upcoming
            while upcoming < len(places) and places[upcoming] < end:
                upcoming += 1
            numbers = places[first:upcoming]  # type: ignore[assignment]
            batch = batch.take([place - start for place in numbers]) if numbers else batch.slice(0, 0)  # noqa: PLW2901
        for number, values in zip(numbers, _plain(batch), strict=True):
            yield _as_row(number + 1, values)
        start = end
        tell(start / total)


def _as_row(number: int, values: dict[str, Any] | None) -> Row:
    return Row(number=number, values=values, problem="" if values is not None else "not UTF-8", part=number)


def _plain(batch: Any) -> list[dict[str, Any] | None]:
    """Rows as Python values; None for one whose text is no UTF-8, which arrow doesn't check when it reads."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        rows: list[dict[str, Any] | None] = []
        for i in range(batch.num_rows):
            try:
                rows.append(batch.slice(i, 1).to_pylist()[0])
            except UnicodeDecodeError:
                rows.append(None)
        return rows
