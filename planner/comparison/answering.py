"""Runs of an emitted infer.py: in a process of its own, what it answers, how fast it was and what it took."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import InputError, Problem, TrialError
from planner.measure.process import LineProcess

BAD_INPUT = 2
"""Exit code of a script that was given something it can't use."""
_POLL_S = 0.5
_ENDS_WITHIN_S = 60.0
_REPORT = re.compile(
    r"^(?P<rows>\d+) rows \((?P<failed>\d+) without an answer\) in (?P<seconds>[\d.]+) s, "
    r"(?P<rows_per_s>[\d.,]+) rows/s, (?P<tokens_per_s>[\d,]+) tokens/s, (?P<padding>-?[\d.]+)% padding"
    r"(?:, (?P<written>[\d.,]+) tokens/s written)?, peak memory (?P<mib>[\d,]+) MiB$",
    re.MULTILINE,
)
_ABOUT_AN_ARGUMENT = re.compile(r"--(?P<name>[a-z-]+)[^:]*: (?P<message>.+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a script, from its first row to its last: neither start-up nor the model's loading is counted."""

    seconds: float
    """How long that was, to a tenth."""
    rows_per_s: float
    """Rows of the data, with or without an answer."""
    tokens_per_s: float
    """Tokens read, padding left out."""
    written_tokens_per_s: float | None
    """Tokens that the model wrote; None where it writes none."""
    padding_share: float
    """Share of what went through the model that was padding."""
    peak_bytes: int
    """What torch reserved on the card; without a GPU the most that the process held, its start included."""
    answers: Sequence[dict[str, Any]] = field(repr=False)
    """A line of its output for each row, in the data's order."""


def run_script(script: Path, data: Path, output: Path, *options: str, name: str) -> Run:
    """Run infer.py over a file. ``name``: what messages call the run.

    Raises InputError where the script can't use what it is given, TrialError where it fails: both say its last line.
    Whatever ends this call, no process of the run is left.
    """
    command = [sys.executable, str(script), "--data", str(data), "--output", str(output), "--quiet", *options]
    process = _start(command, name)
    try:
        while process.next_line(_POLL_S) != b"":  # until it closes its standard output, on which it writes nothing
            pass
        process.ends_within(_ENDS_WITHIN_S)
    finally:
        code = process.end()
    said = process.words()
    if code:
        raise _failure(code, said, name)
    found = _REPORT.search(said)
    if found is None:
        raise TrialError(f"{name} reported no speed; its last line: {last_line(said)}")
    with output.open(encoding="utf-8") as file:
        answers = [json.loads(line) for line in file]
    return _run(found, answers)


def _start(command: Sequence[str], name: str) -> LineProcess:
    try:
        return LineProcess(command, os.environ)
    except OSError as error:
        raise TrialError(f"{name} could not be started: {error.strerror or error}") from error


def _run(found: re.Match[str], answers: Sequence[dict[str, Any]]) -> Run:
    number = {name: float(text.replace(",", "")) for name, text in found.groupdict().items() if text is not None}
    return Run(
        seconds=number["seconds"],
        rows_per_s=number["rows_per_s"],
        tokens_per_s=number["tokens_per_s"],
        written_tokens_per_s=number.get("written"),
        padding_share=number["padding"] / 100,
        peak_bytes=int(number["mib"]) * 2**20,
        answers=answers,
    )


def _failure(code: int, said: str, name: str) -> Exception:
    """What a run that failed is told as."""
    line = last_line(said)
    if code == BAD_INPUT and (error := re.fullmatch(r"\S+: error: (.+)", line)):
        about = _ABOUT_AN_ARGUMENT.fullmatch(error[1])
        argument = about["name"].replace("-", "_") if about else "data" if "column" in error[1] else "plan"
        return InputError([Problem(argument=argument, message=about["message"] if about else error[1])])
    ended = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    return TrialError(f"{name} failed ({ended}): {line}")


def last_line(said: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
