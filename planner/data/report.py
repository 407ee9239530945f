"""``workload["data"]`` of a plan as the rows of the printed report. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from planner.tables import plain_table

BAR_CELLS = 24
Data = Mapping[str, Any]
_WAYS = {"fixed": "fixed batches", "grouped": "similar lengths", "budget": "token budget"}
"""Ways to make micro-batches: of one size in random order, of one size and similar lengths, as the script does it."""


def data_table(data: Data) -> Table:
    """Rows, bad rows, what is cut, padding, steps and time of an epoch."""
    table = plain_table(("", False), ("", False))
    for name, text in _facts(data):
        table.add_row(Text(name), Text(text))
    return table


def lengths_table(data: Data, block: str) -> Table:
    """The share of the texts in each range of lengths, as bars."""
    table = plain_table(("tokens", True), ("texts", True), ("", False))
    for each in data["tokens"]["histogram"]:
        bar = block * round(each["share"] * BAR_CELLS)
        table.add_row(Text(f"up to {each['up_to']:,}"), Text(f"{each['share']:.1%}"), Text(bar))
    return table


def _facts(data: Data) -> Iterator[tuple[str, str]]:
    tokens, cut = data["tokens"], data["cut"]
    yield "rows", _rows(data)
    for each in data["bad_rows"]:
        yield "left out", _lines(each, data["unit"])
    for each in data["enormous_texts"]:
        yield "enormous", f"{_lines(each, data['unit'])}; they are counted"
    yield "tokens of a text", f"{tokens['mean']:,.0f}{_margin(tokens)} on average; {_quantiles(tokens)}"
    if not tokens["exact"]:
        yield "", tokens["counted_by"]
    yield f"longer than {cut['seq_len']:,}", _longer(cut)
    if "answers" in data:
        yield "all of it", _answers(data["answers"])
        return
    for name, option in data["long_texts"].items():
        if len(data["long_texts"]) > 1:
            yield name, _option(option)
    for name, way in _WAYS.items():
        yield f"padding, {way}", _batching(data, name)
    yield "an epoch", _epoch(data)


def _rows(data: Data) -> str:
    rows = "unknown in number" if data["rows"] is None else f"{data['rows']:,} usable"
    looked_at = f"; {data['rows_read']:,} looked at, tokens counted of {data['rows_counted']:,}"
    estimated = f" ({data['rows_are']})" if data["rows_are"] != "counted" else ""
    whole = data["rows"] == data["rows_counted"]
    return f"{rows}{estimated}{'' if whole else looked_at}"


def _lines(each: Mapping[str, Any], unit: str) -> str:
    more = ", ..." if each["rows"] > len(each["lines"]) else ""
    return f"{each['rows']:,}: {each['problem']} ({unit} {', '.join(map(str, each['lines']))}{more})"


def _margin(tokens: Mapping[str, Any]) -> str:
    margin = tokens["mean_margin_95"]
    return f" ± {margin:.1f} (95 %)" if margin else ""


def _quantiles(tokens: Mapping[str, Any]) -> str:
    parts = [f"{count:,} at {share}" for share, count in tokens["quantiles"].items() if share != "100%"]
    return f"{', '.join(parts)}, longest {tokens['quantiles']['100%']:,}"


def _longer(cut: Mapping[str, Any]) -> str:
    error = cut["texts_share_margin_95"]
    if not cut["texts_share"]:
        return "no text" + (f" that was counted; of the others at most {error:.2%} (95 %)" if error else "")
    share = f"{cut['texts_share']:.1%}{f' ± {error:.1%}' if error else ''} of the texts"
    return f"{share}; cutting them loses {cut['tokens_share']:.1%} of all tokens"


def _option(option: Mapping[str, Any]) -> str:
    samples = "" if option["samples"] is None else f"{option['samples']:,} samples, {option['steps']:,} steps"
    parts = [samples, f"loses {option['lost_share']:.1%} of the tokens", _time(option["epoch_s"])]
    return ", ".join(part for part in parts if part)


def _batching(data: Data, name: str) -> str:
    found = data["batching"][name]
    suffix = "" if name == "budget" else f"_{name}"
    text = f"{found['padding']:.1%} of the tokens, {found['micro_batches']:.2f} micro-batches a step"
    time = _time(data[f"epoch_s{suffix}"])
    return f"{text}, {time} an epoch" if time else text


def _epoch(data: Data) -> str:
    if data["steps_per_epoch"] is None:
        return "its steps are unknown, as the number of rows is"
    text = f"{data['samples_per_epoch']:,} samples, {data['steps_per_epoch']:,} steps"
    if data["epoch_s"] is None:
        return text
    return f"{text}, {_time(data['epoch_s'])}"


def _answers(answers: Mapping[str, Any]) -> str:
    """What answering the data takes."""
    inputs = "an unknown number of inputs" if answers["inputs"] is None else f"{answers['inputs']:,} inputs"
    time = f", {_time(answers['seconds'])}" if answers["seconds"] is not None else ""
    return f"{inputs}{time}; {answers['padding']:.1%} of the tokens in its batches are padding"


def _time(seconds: float | None) -> str:
    from planner.data.planning import duration

    return "" if seconds is None else duration(seconds)
