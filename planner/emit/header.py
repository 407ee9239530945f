"""The comment at the top of an emitted script: what made it, what runs it, what to expect."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from planner.emit.processes import launch_commands
from planner.request import PlanRequest
from planner.units import format_bytes

WIDTH = 107
"""Columns that a comment's text may take: 110 less the comment sign and a space, and one to spare."""


def header_lines(plan: Mapping[str, Any], *, runs: Mapping[str, str] | None = None) -> list[str]:
    """Lines of text (no comment signs): the commands, the predicted memory and time, and the data.

    ``runs``: what runs the file, under names; None: the commands of train.py.
    """
    on_cpu = plan["hardware"].get("kind") == "cpu"
    if runs is None:
        runs = dict(zip(("run by", "or"), launch_commands(plan["config"], on_cpu=on_cpu), strict=True))
    facts = [
        ("made by", plan_command(plan["request"])),
        *runs.items(),
        ("memory", _memory(plan["memory"], plan["hardware"], plan["time"])),
        ("", _memory_parts(plan["memory"], on_cpu=on_cpu)),
        ("time", (_inference_time if "prefill_ms" in plan["time"] else _time)(plan["time"])),
        *([("data", _data(data))] if (data := plan["workload"].get("data")) else []),
    ]
    return [line for name, text in facts for line in _entry(name, text)]


def plan_command(request: Mapping[str, Any]) -> str:
    """The command line whose options are the request's fields; what has its default value is left out."""
    words = ["plan"]
    for name, value in request.items():
        if name in ("vram", "model") or not _is_default(name, value):
            words += _option(name, value)
    return " ".join(words)


def _is_default(name: str, value: object) -> bool:
    field = PlanRequest.model_fields.get(name)
    return value is None or (field is not None and value == field.default)


def _option(name: str, value: object) -> Iterator[str]:
    yield f"--{name.replace('_', '-')}"
    if isinstance(value, (list, tuple)):
        yield shlex.quote(",".join(map(str, value)))
    elif value is not True:
        yield shlex.quote(str(value))


def memory_line(plan: Mapping[str, Any]) -> str:
    """What the plan expects a run to hold, in one line."""
    return f"{_memory(plan['memory'], plan['hardware'], plan['time']).rstrip(':')} by the plan"


def _memory(memory: Mapping[str, Any], hardware: Mapping[str, Any], time: Mapping[str, Any]) -> str:
    total, ceiling = format_bytes(memory["total_bytes"]), format_bytes(memory["ceiling_bytes"])
    how = "measured" if time["source"] == "measured" else "predicted"
    return f"{total} of {ceiling} on {hardware['name']}, {how}:"


def _memory_parts(memory: Mapping[str, Any], *, on_cpu: bool) -> str:
    reserved, context, margin = (
        format_bytes(memory[key]) for key in ("peak_reserved_bytes", "context_bytes", "margin_bytes")
    )
    if on_cpu:
        return f"{reserved} for tensors, {context} for Python and its libraries, {margin} margin"
    return f"{reserved} reserved by PyTorch, {context} CUDA context, {margin} margin"


def _data(data: Mapping[str, Any]) -> str:
    cut, steps = data["cut"], data.get("steps_per_epoch")
    epoch = "" if steps is None else f"; an epoch has {steps:,} steps"
    return f"{data['source']}, {cut['texts_share']:.1%} of its texts longer than {cut['seq_len']} tokens{epoch}"


def _time(time: Mapping[str, Any]) -> str:
    source = str(time["source"])
    return f"{time['step_ms']:,.0f} ms a step, {time['tokens_per_s']:,.0f} tokens/s, {source}"


def _inference_time(time: Mapping[str, Any]) -> str:
    """A full batch; of a generating task its prompts and its new tokens apart."""
    source = str(time["source"])
    if time["prefill_ms"] is None:
        texts, tokens = (f"{time[key]:,.0f}" for key in ("sequences_per_s", "tokens_per_s"))
        return f"{time['step_ms']:,.0f} ms a batch, {texts} texts/s, {tokens} tokens/s, {source}"
    prompts = f"{time['prefill_ms']:,.0f} ms for a batch's prompts ({time['prefill_tokens_per_s']:,.0f} tokens/s)"
    written = f"{time['decode_ms_per_token']:,.1f} ms for each token that follows"
    return f"{prompts}, {written} ({time['decode_tokens_per_s']:,.0f} tokens/s), {source}"


def _entry(name: str, text: str) -> list[str]:
    """``name    text``, wrapped between words, with the text in one column."""
    return textwrap.wrap(
        " ".join(text.split()),
        width=WIDTH,
        initial_indent=f"  {name:<9}",
        subsequent_indent=" " * 11,
        break_long_words=False,
        break_on_hyphens=False,
    )
