"""Reading the user's data: rows, bad rows and samples, whatever is in the file."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emitted import minilm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.data import sources, survey, tables
from planner.data.rows import pick_columns
from planner.data.sampling import Reservoir, margin, rule_of_three
from planner.data.sources import Row, SourceError, open_source
from planner.data.survey import Survey
from planner.data.tokens import Estimate, TokenCounter, token_counter
from planner.errors import InputError
from planner.models import resolve_model
from planner.request import make_request
from planner.tasks import TASK_FACTS

ESTIMATE = Estimate("there is none here")
GOOD = {"text": "a text of some words", "label": "a"}
OTHER = {"text": "another text", "label": "b"}


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    """A file with these lines."""

    def write(*lines: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"\n".join(raw) + b"\n")
        return path

    return write


def surveyed(path: Path | str, task: str = "sequence-classification", **more: Any) -> Survey:
    """What is found in data with estimated tokens."""
    request = make_request(model="any", vram="8GB", data=str(path), task=task, **more)
    return survey.survey(request, TASK_FACTS[task], ESTIMATE)


def bad_rows(found: Survey) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Problem to how many rows, and the first of them."""
    return {bad.problem: (bad.rows, bad.lines) for bad in found.bad}


# ----- bad rows -----


def test_bad_rows_are_counted_and_named_by_line(data: Callable[..., Path]) -> None:
    """Every kind of bad row is told with its lines; the others are read."""
    path = data(
        GOOD,
        b'{"text": "caf\xe9", "label": "a"}',
        {"text": "  ", "label": "a"},
        b"no json",
        b"",
        {"label": "a"},
        {"text": "x"},
        b'{"text": "\\ud800", "label": "a"}',
        b"[" * 100_000,
        OTHER,
    )
    found = surveyed(path)
    expected = {
        "not UTF-8": (2, (2, 8)),
        "no text": (1, (3,)),
        "no JSON object": (2, (4, 9)),
        "no column text": (1, (6,)),
        "no column label": (1, (7,)),
    }
    assert expected == bad_rows(found)
    assert (9, 2, 2) == (found.read, found.usable, found.rows)


def test_only_the_first_lines_of_a_kind_are_named(data: Callable[..., Path]) -> None:
    """Three lines of a kind are named, all are counted."""
    found = surveyed(data(GOOD, OTHER, *[b"?"] * 7))
    assert {"no JSON object": (7, (3, 4, 5))} == bad_rows(found)


@pytest.mark.parametrize(
    ("task", "row", "problem"),
    [
        ("regression", {"text": "x", "label": "much"}, "the label is no number"),
        ("regression", {"text": "x", "label": float("nan")}, "the label is no finite number"),
        ("reranking", {"query": "x", "document": "y", "label": 7}, "the label is not from 0 to 1"),
        ("token-classification", {"tokens": ["a", "b"], "ner_tags": [1]}, "not a label for each word"),
        ("token-classification", {"tokens": [], "ner_tags": []}, "no words"),
        ("multi-label-classification", {"text": "x", "label": 3}, "no list of labels"),
        ("seq2seq-lm", {"text": "x", "target": ""}, "no text"),
    ],
)
def test_labels_are_checked_as_the_task_needs_them(
    data: Callable[..., Path], task: str, row: dict[str, Any], problem: str
) -> None:
    """A label out of range, or not one for each word, makes a row bad."""
    good = {
        "regression": {"text": "x", "label": 1},
        "reranking": {"query": "x", "document": "y", "label": 1},
        "token-classification": {"tokens": ["a", "b"], "ner_tags": [1, 0]},
        "multi-label-classification": {"text": "x", "label": ["a", "b"]},
        "seq2seq-lm": {"text": "x", "target": "y"},
    }
    assert {problem: (1, (2,))} == bad_rows(surveyed(data(good[task], row), task))


def test_an_enormous_document_is_counted_and_named(data: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a very long text the beginning is tokenized; its length counts in proportion."""
    monkeypatch.setattr(survey, "ENORMOUS_CHARACTERS", 10_000)
    monkeypatch.setattr(survey, "TOKENIZED_CHARACTERS", 1000)
    found = surveyed(data(GOOD, {"text": "word" * 5000, "label": "b"}))
    assert (1, (2,)) == (found.enormous[0].rows, found.enormous[0].lines)
    assert [(5,), (5000,)] == list(found.tokens)
    assert 1000 == len(found.sample[1].sample.texts[0])


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line beyond the bound is left out and named; the one after it is read."""
    monkeypatch.setattr(sources, "LARGEST_LINE_BYTES", 100)
    path = tmp_path / "t.txt"
    path.write_text("x" * 1000 + "\nshort\n")
    rows = list(open_source(str(path)).rows())
    assert [(1, None), (2, {"text": "short"})] == [(row.number, row.values) for row in rows]
    assert "more than" in rows[0].problem


def test_csv_rows_with_line_breaks_and_more_fields(tmp_path: Path) -> None:
    """Quoted line breaks make no new row; a row is named by the line that it ends in."""
    path = tmp_path / "t.csv"
    path.write_bytes(b'text,label\n"two\nlines",a\nx,b\ny,b,c\ncaf\xe9,a\n')
    found = surveyed(path)
    assert {"more fields than columns": (1, (5,)), "not UTF-8": (1, (6,))} == bad_rows(found)
    assert ["two\nlines", "x"] == [drawn.sample.texts[0] for drawn in found.sample]


# ----- what can't be read -----


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"[\n1\n]\n", "one JSON object on each line"),
        ("a.parquet", b"no", "Parquet"),
        ("a.docx.xml", b"<a>", "accepted: a file that ends in"),
        ("a.csv", b"", "has no rows"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "can be used"),
    ],
)
def test_data_that_cant_be_used_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    """What can't be read, or has no usable row, is an InputError with the reason."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        surveyed(path)
    [problem] = raised.value.problems
    assert "data" == problem.argument
    assert said in problem.message
    assert "\n" not in problem.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A missing file is named."""
    with pytest.raises(InputError, match="No such file"):
        surveyed(tmp_path / "none.jsonl")


def test_a_missing_column_is_refused_with_those_there_are(data: Callable[..., Path]) -> None:
    """Both columns' problems come at once, with the columns of the data."""
    with pytest.raises(InputError) as raised:
        surveyed(data({"body": 1, "kind": "x"}), "reranking")
    assert ["label_column", "text_column"] == [problem.argument for problem in raised.value.problems]
    assert all("'body', 'kind'" in problem.message for problem in raised.value.problems)


@pytest.mark.parametrize(
    ("task", "found", "texts", "label"),
    [
        ("sequence-classification", {"id": False, "text": True, "label": True}, ("text",), "label"),
        ("sequence-classification", {"label": True, "remark": True}, ("remark",), "label"),
        ("embedding", {"positive": True, "anchor": True}, ("anchor", "positive"), None),
        ("causal-lm", {"text": True, "completion": True, "prompt": True}, ("prompt", "completion"), None),
        ("seq2seq-lm", {"summary": True, "text": True}, ("text",), "summary"),
    ],
)
def test_the_usual_columns_are_taken(
    task: str, found: dict[str, bool], texts: tuple[str, ...], label: str | None
) -> None:
    """The names of planner.tasks, else a column of text for a task with one."""
    columns, problems = pick_columns(found, TASK_FACTS[task], None, None)
    assert (texts, label, []) == (columns.texts, columns.label, problems)


# ----- every format gives the same rows -----


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    """jsonl, csv, parquet and a folder of datasets hold the same texts and labels."""
    import pandas as pd

    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"text {i}, «{i}»", "label": f"l{i % 3}"} for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "a.csv", "a.parquet", "saved"):
        found = surveyed(tmp_path / name)
        texts = [drawn.sample.texts[0] for drawn in found.sample]
        assert ([row["text"] for row in rows], ["l0", "l1", "l2"]) == (texts, sorted(found.labels)), name


def test_large_tables_are_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large parquet file as many rows as asked for are drawn, each with its own number."""
    import pandas as pd

    monkeypatch.setattr(tables, "WHOLE_ROWS", 1000)
    monkeypatch.setattr(tables, "DRAWN_ROWS", 300)
    frame = pd.DataFrame({"text": [f"text {i}" for i in range(1, 10_001)], "label": ["a", "b"] * 5000})
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=700)
    found = surveyed(tmp_path / "a.parquet")
    assert (10_000, 300, True) == (found.rows, found.read, found.drawn)
    assert all(drawn.sample.texts[0] == f"text {drawn.number}" for drawn in found.sample)


def test_large_csv_files_are_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a large csv file is counted, about as many as asked for are looked at, evenly over the file."""
    monkeypatch.setattr(sources, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(sources, "CHECKED_ROWS", 1000)
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"text {i},{i % 2}\n" for i in range(1, 10_001)))
    found = surveyed(path)
    assert (10_000, True) == (found.rows, found.drawn)
    assert 850 < found.read < 1150
    assert all(drawn.sample.texts[0] == f"text {drawn.number - 1}" for drawn in found.sample)
    assert 4500 < sum(drawn.number for drawn in found.sample) / found.read < 5500


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), min_size=1, max_size=40))
def test_any_bytes_are_read_without_a_traceback(lines: list[bytes], tmp_path: Path) -> None:
    """Whatever stands in a file, every row is one that is used or one that is named, or the file is refused."""
    for name in ("t.jsonl", "t.csv", "t.txt"):
        path = tmp_path / name
        path.write_bytes(b"text,label\n" * (name == "t.csv") + b"\n".join(lines))
        try:
            found = surveyed(path, "masked-lm")
        except InputError as error:
            assert "data" == error.problems[0].argument or "column" in error.problems[0].argument
            continue
        assert found.read == found.usable + sum(bad.rows for bad in found.bad)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 400), min_size=30, max_size=300),
    ends=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocks_count_every_line_and_number_them_rightly(
    lengths: list[int], ends: bool, seed: int, tmp_path: Path
) -> None:
    """Of a large file the lines in the blocks come with their own numbers, and all lines are counted."""
    texts = [f"{i} " + "x" * length for i, length in enumerate(lengths, start=1)]
    path = tmp_path / "t.txt"
    path.write_text("\n".join(texts) + "\n" * ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "WHOLE_BYTES", 1)
        patch.setattr(sources, "BLOCKS", 5)
        patch.setattr(sources, "BLOCK_BYTES", 100)
        source = open_source(str(path), seed=seed)
        rows = list(source.rows())
    assert len(texts) == source.total
    assert all(row.values == {"text": texts[row.number - 1].strip()} for row in rows)
    assert len(rows) == len({row.number for row in rows})


# ----- samples -----


@settings(max_examples=100, deadline=None)
@given(count=st.integers(0, 300), rows=st.integers(1, 50), size=st.integers(1, 200), seed=st.integers(0, 9))
def test_a_reservoir_keeps_within_its_bounds(count: int, rows: int, size: int, seed: int) -> None:
    """Never more items than allowed, nor more of their size (one item aside); all of them are from the stream."""
    reservoir: Reservoir[int] = Reservoir(rows, size, lambda item: item % 7, seed)
    for item in range(count):
        reservoir.add(item)
        assert len(reservoir.items) <= rows
        assert sum(i % 7 for i in reservoir.items) <= size or len(reservoir.items) == 1
    assert count == reservoir.seen
    assert len(set(reservoir.items)) == len(reservoir.items)
    if count <= rows and sum(i % 7 for i in range(count)) <= size:
        assert list(range(count)) == reservoir.items


def test_a_reservoir_is_uniform() -> None:
    """Each of twenty items is kept as often as any other, also after the sample was halved."""
    seen: Counter[int] = Counter()
    for seed in range(4000):
        reservoir: Reservoir[int] = Reservoir(8, 60, lambda item: 10 if item < 20 else 0, seed)
        for item in range(20):
            reservoir.add(item)
        seen.update(reservoir.items)
    mean = sum(seen.values()) / 20
    assert all(abs(count - mean) < 5 * mean**0.5 for count in seen.values())


def test_the_interval_of_a_mean_holds_as_often_as_it_says() -> None:
    """Of 400 samples about 95 % have the true mean within their margin, drawn row by row and in blocks."""
    values = [random.Random(i // 10).expovariate(0.1) + random.Random(-i).random() for i in range(5000)]
    true = sum(values) / len(values)
    for block in (1, 10):
        held = 0
        for seed in range(400):
            starts = random.Random(seed).sample(range(0, 5000, block), 400 // block)
            places = [start + i for start in starts for i in range(block)]
            drawn = [values[i] for i in places]
            error = margin(drawn, [i // block for i in places], share=400 / 5000)
            held += abs(sum(drawn) / len(drawn) - true) <= error
        assert 0.9 <= held / 400 <= 0.99, block


def test_what_was_read_whole_has_no_error() -> None:
    """Neither of a mean nor of what was never seen."""
    assert 0.0 == margin([1.0, 2.0], [0, 1], share=1.0)
    assert (0.0, 0.03) == (rule_of_three(100, share=1.0), rule_of_three(100, share=0.5))


# ----- tokens -----


@pytest.fixture(scope="module")
def counter() -> TokenCounter:
    """Of a real tokenizer, saved with truncation at 128 tokens and padding."""
    return token_counter(resolve_model(str(minilm()), task="masked-lm"))


def test_tokens_are_counted_as_the_tokenizer_cuts_them(counter: TokenCounter) -> None:
    """Also beyond the length that the saved tokenizer cuts at, and for words."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(minilm()))
    texts = ["One sentence.", "many words " * 300, "汉字和 words"]
    expected = [len(ids) for ids in tokenizer(texts, truncation=False, verbose=False)["input_ids"]]
    assert expected == [count + counter.specials(1) for count in counter.counts(texts)]
    words = [text.split() for text in texts]
    expected = [len(ids) for ids in tokenizer(words, is_split_into_words=True, verbose=False)["input_ids"]]
    assert expected == [count + counter.specials(1) for count in counter.counts(words)]
    assert counter.exact


def test_an_estimate_says_so_and_why() -> None:
    """Four letters of one byte are a token; an ideograph is one; the reason stands with it."""
    assert [4, 4, 8] == ESTIMATE.counts(["x" * 16, "汉字汉字", "д" * 16])
    assert "estimated" in ESTIMATE.said
    assert "there is none here" in ESTIMATE.said
    spec = resolve_model("bert-base-uncased")
    assert not token_counter(spec).exact


def test_hub_data_that_cant_be_reached_is_refused_in_one_line() -> None:
    """No network: one line, and no retries."""
    pytest.importorskip("datasets")
    with pytest.raises(SourceError, match="as a data set of the hub") as raised:
        open_source("nobody/nothing")
    assert "\n" not in str(raised.value)


def test_rows_of_csv_come_as_they_are_asked_for(tmp_path: Path) -> None:
    """A header names the columns; an empty file has none."""
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text", "n"], ["x", "1"]])
    assert [Row(number=2, values={"text": "x", "n": "1"}, part=1)] == list(open_source(str(path)).rows())
