"""The report on the terminal: a plan, printed. Takes plain values from the plan and decides nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.tables import plain_table
from planner.units import format_bytes

PLAIN_WIDTH = 100
"""Columns of a report that goes to a file or a pipe."""
ALTERNATIVES_SHOWN = 3
BAR_CELLS = 24
_PHASES = {"resume": "resume from a checkpoint", "epoch": "an epoch of different lengths"}


class Printable(Protocol):
    """What the report needs of a plan (see ``planner.plans.Plan``)."""

    @property
    def request(self) -> Any:
        """The PlanRequest that the plan answers."""

    @property
    def hardware(self) -> Mapping[str, Any]:
        """The target card."""

    @property
    def workload(self) -> Mapping[str, Any]:
        """Model, task and shapes."""

    @property
    def config(self) -> BaseModel:
        """The chosen configuration."""

    @property
    def peak(self) -> Any:
        """Peak memory and its breakdown, in bytes."""

    @property
    def time(self) -> Any:
        """Time of a step and tokens a second."""

    @property
    def reasons(self) -> Sequence[Any]:
        """Field, value and reason of each automatic choice."""

    @property
    def alternatives(self) -> Sequence[Mapping[str, Any]]:
        """The next best configurations."""

    @property
    def levers(self) -> Sequence[Mapping[str, Any]]:
        """What each lever would buy."""

    @property
    def search(self) -> Mapping[str, Any]:
        """Trials run and kept, and why the search ended; empty where every step was simulated."""


def render(plan: Printable, folder: Path, console: Console | None = None) -> None:
    """Print the report: headline, choice with reasons, memory by part, next best, levers, what to run."""
    console = console or make_console()
    console.print(_headline(plan))
    for title, table in _sections(plan, console):
        if table.row_count:
            console.print(Text(f"\n{title}", style="bold"))
            console.print(Padding(table, (0, 0, 0, 2)))
    console.print(Text("\nRun", style="bold"))
    # Commands are for pasting: a line break inside one would break it.
    for comment, line in next_commands(folder, plan.request.mode):
        console.print(Text(f"  # {comment}", style="dim"))
        console.print(Text(f"  {line}"), soft_wrap=True)


def next_commands(folder: Path, mode: str = "train") -> Iterator[tuple[str, str]]:
    """What to run next: a short try, then the whole."""
    if mode == "infer":
        script = f"python {shlex.quote(str(folder / 'infer.py'))} --data FILE --output answers.jsonl"
        yield "the first hundred rows, to see what is answered", f"{script} --limit 100"
        yield "all of them; FILE is jsonl or csv, - reads standard input; --resume goes on after a stop", script
        return
    config_file, script = (shlex.quote(str(folder / name)) for name in ("accelerate.yaml", "train.py"))
    launch = f"accelerate launch --config_file {config_file} {script} --data FILE"
    yield "ten steps, to see that the data is read and the loss falls", f"{launch} --max-steps 10"
    yield "the whole training; FILE is jsonl, csv, parquet or txt", launch


def make_console() -> Console:
    """Standard output; as wide as a plain file's lines where it is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    return console


def _sections(plan: Printable, console: Console) -> Iterator[tuple[str, Table]]:
    yield "Choice", _choice(plan)
    on_cpu = plan.hardware.get("kind") == "cpu"
    block = "█" if console.encoding.startswith("utf") else "#"
    if data := plan.workload.get("data"):
        from planner.data.report import data_table, lengths_table

        yield f"Your data: {data['source']}", data_table(data)
        yield "Its lengths", lengths_table(data, block)
    yield "Memory at the peak", _memory(plan.peak, block, context="Python and libraries" if on_cpu else "CUDA context")
    yield "Memory by phase", phase_table(plan.peak)
    yield "Next best", _alternatives(plan)
    yield "What each lever would buy", _levers(plan.levers)


def _headline(plan: Printable) -> Text:
    workload, memory, time = plan.workload, plan.peak, plan.time
    text = Text()
    text.append(f"{workload['model']}, {workload['task']}, on {plan.hardware['name']}\n", style="bold")
    text.append(f"fits: needs {format_bytes(memory.total_bytes)} of {format_bytes(memory.ceiling_bytes)} ")
    text.append(f"({memory.total_bytes:,} of {memory.ceiling_bytes:,} bytes)\n")
    text.append(f"card: --vram {plan.request.vram} is {plan.request.vram_bytes:,} bytes on the label\n")
    text.append(f"speed: {_speed(plan)} ({time.source})")
    if plan.search:
        text.append(f"\ntrials: {_trials(plan.search)}")
    return text


def _speed(plan: Printable) -> str:
    """Of a step of training, or of a batch of texts."""
    time, workload = plan.time, plan.workload
    if plan.request.mode == "train":
        return f"{time.step_ms:,.0f} ms a step, {time.tokens_per_s:,.0f} tokens/s"
    what = {"reranking": "documents", "causal-lm": "requests"}.get(workload["task"], "texts")
    said = (
        f"{time.sequences_per_s:,.4g} {what}/s, {time.tokens_per_s:,.0f} tokens/s; {time.step_ms:,.0f} ms a full batch"
    )
    if time.prefill_ms is not None:
        said += (
            f"; prefill {time.prefill_ms:,.0f} ms ({time.prefill_tokens_per_s:,.0f} tokens/s), "
            f"then {time.decode_ms_per_token:,.1f} ms a token ({time.decode_tokens_per_s:,.0f} tokens/s)"
        )
    if time.upper_ms is not None:
        said += f"; with the weights' transfers between {time.lower_ms:,.0f} and {time.upper_ms:,.0f} ms a batch"
    return said


def _trials(search: Mapping[str, Any]) -> str:
    kept = f", {search['trials_kept']} kept from before" if search["trials_kept"] else ""
    return f"{search['trials_run']} run{kept}; {search['ended']}"


def _row(table: Table, *cells: str) -> None:
    # Text, not str: brackets in a model's name or a reason are no markup.
    table.add_row(*(Text(cell) for cell in cells))


def _choice(plan: Printable) -> Table:
    """One row for each field of the configuration, then for each choice made outside it."""
    table = plain_table(("", False), ("value", False), ("why", False))
    reasons = {reason.field: reason for reason in plan.reasons}
    values = {name: value for name, value in plan.config.model_dump().items() if value is not None}
    values |= {name: reason.value for name, reason in reasons.items() if name not in values}
    if values.get("gpus") == 1:  # nothing was chosen
        values = {name: value for name, value in values.items() if name not in ("gpus", "parallelism")}
    for name, value in values.items():
        why = reasons[name].reason if name in reasons else ""
        _row(table, _label(name), _shown(value), why)
    return table


def _label(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_label(str(name))} {inner}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _memory(memory: Any, block: str, *, context: str) -> Table:
    table = plain_table(("", False), ("size", True), ("share", True), ("", False))
    parts = {_label(name): size for name, size in memory.breakdown.items()}
    # The allocator holds more than is in use: rounding, cached blocks and fragments.
    parts["held by the allocator beyond that"] = memory.peak_reserved_bytes - sum(parts.values())
    parts |= {context: memory.context_bytes, "safety margin": memory.margin_bytes}
    for name, size in parts.items():
        if size > 0:
            share = size / memory.ceiling_bytes
            _row(table, name, format_bytes(size), f"{share:.1%}", block * round(share * BAR_CELLS))
    share = memory.total_bytes / memory.ceiling_bytes
    bar = block * round(share * BAR_CELLS)
    _row(table, "total", format_bytes(memory.total_bytes), f"{share:.1%}", bar)
    free = memory.ceiling_bytes - memory.total_bytes
    _row(table, "left under the ceiling", format_bytes(free), f"{1 - share:.1%}", "")
    return table


def phase_table(memory: Any) -> Table:
    """What each phase of a run holds at most; the cache that earlier phases left counts as reserved."""
    table = plain_table(("", False), ("allocated", True), ("reserved", True))
    for name, peak in memory.phases.items():
        sizes = (format_bytes(peak[f"peak_{kind}_bytes"]) for kind in ("allocated", "reserved"))
        _row(table, _PHASES.get(name, _label(name)), *sizes)
    return table


def _alternatives(plan: Printable) -> Table:
    table = plain_table(("what differs", False), ("memory", True), ("tokens/s", True), ("why not", False))
    chosen = plan.config.model_dump()
    for other in plan.alternatives[:ALTERNATIVES_SHOWN]:
        differs = [
            f"{_label(name)} {_shown(other[name])}"
            for name, value in chosen.items()
            if name in other and other[name] != value
        ]
        speed = f"{other['tokens_per_s']:,.0f}"
        _row(table, ", ".join(differs), format_bytes(other["total_bytes"]), speed, other["reason"])
    return table


def _levers(levers: Sequence[Mapping[str, Any]]) -> Table:
    table = plain_table(("", False), ("change", False), ("memory", True), ("speed", True), ("effect", False))
    for lever in levers:
        saves = int(lever["saves_bytes"])
        memory = f"{'+' if saves < 0 else '-' if saves else ''}{format_bytes(abs(saves))}"
        _row(table, lever["lever"], lever["change"], memory, f"{lever['speed_ratio']:.2f}x", lever["reason"])
    return table
