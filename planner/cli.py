"""The command ``plan``: parse, call the library, render. Nothing is decided here.

Values go to :func:`planner.request.make_request` as they were typed, so that all problems come at once.
Only click is imported at the top: ``plan --help`` must be quick.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.errors import InputError, PlannerError, Problem

if TYPE_CHECKING:
    from planner.request import PlanRequest

DEBUG_VARIABLE = "VRAMPLAN_DEBUG"
INTERRUPTED = 130
"""Exit code of a run that was stopped with Ctrl-C."""

REQUEST_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("model", "NAME", "Hub id (bert-base-uncased), folder or config.json.  [required]"),
    ("vram", "SIZE", "Memory on the card's label: 8GB = 8GiB = 8192MiB, or bytes.  [required]"),
    (
        "task",
        "TASK",
        "sequence-classification, token-classification, masked-lm, causal-lm or seq2seq-lm.  "
        "[default: from the model's architecture]",
    ),
    ("mode", "MODE", "train.  [default: train]"),
    (
        "method",
        "METHOD",
        "auto, full, lora or qlora; auto trains all weights if that fits, else adapters, else adapters "
        "on a quantized base.  [default: auto]",
    ),
    ("gpu", "NAME", "The card, by loose name (rtx 4060).  [default: a typical card of that size]"),
    ("device", "DEVICE", "auto or none; this version simulates and needs no device.  [default: auto]"),
    ("seq_len", "TOKENS", "Longest sequence.  [default: chosen for the model]"),
    ("target_seq_len", "TOKENS", "Longest target sequence of a sequence-to-sequence task."),
    ("num_labels", "N", "Labels of a classification task.  [default: 2]"),
    ("lengths", "FILE", "Lengths of the data's texts: one token count a line.  [default: assumed, see the plan]"),
    ("batch_size", "N", "Effective batch: sequences for each optimizer step."),
    ("batch_tokens", "TOKENS", "Effective batch in tokens; instead of --batch-size."),
    ("precision", "WORDS", "Restrict to some of fp32, tf32, fp16-amp, bf16-amp, bf16, bf16-master."),
    ("checkpointing", "WORDS", "Restrict to some of none, full, every-2, every-4, ..."),
    ("offload", "WORDS", "Restrict to some of none, optimizer, parameters, activations."),
    ("quantization", "WORDS", "Restrict to some of none, int8, nf4."),
    (
        "optimizer",
        "WORDS",
        "Restrict to some of adamw_fused, adamw_foreach, adamw_8bit, paged_adamw_8bit, adafactor, sgd.",
    ),
    ("attention", "WORDS", "Restrict to some of eager, sdpa, flash2."),
    ("loss", "WORDS", "Restrict to some of standard, fused-linear.  [default: standard]"),
    ("headroom", "SIZE", "Memory to keep free for other uses of the card, such as 500MB.  [default: 0]"),
    ("risk", "P", "Probability, at most, that a run needs more than planned.  [default: 0.01]"),
    ("host_ram", "SIZE", "Host memory that offloading may fill.  [default: what this machine has]"),
    (
        "allocator",
        "SETTINGS",
        "PyTorch's allocator settings, as in PYTORCH_CUDA_ALLOC_CONF.  [default: expandable_segments:True]",
    ),
    ("trials", "N", "Configurations to look at, at most.  [default: as many as the search needs]"),
    ("timeout", "SECONDS", "Time that the search may take.  [default: no limit]"),
    ("seed", "N", "Seed of the search and of the emitted script.  [default: 0]"),
)
"""Name of the PlanRequest field, what the help calls its value, help."""


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = [
        # A restriction may be given twice: the words add up instead of the last one winning silently.
        click.Option([flag(name)], metavar=metavar, help=text, multiple=metavar == "WORDS")
        for name, metavar, text in REQUEST_OPTIONS
    ]
    return [
        *options,
        click.Option(["--trust-remote-code"], is_flag=True, help="Let the model's own code run here."),
        click.Option(["--out"], metavar="DIR", help="The plan's folder.  [default: plans/MODEL-VRAM]"),
        click.Option(["--snapshot"], metavar="FILE", help="Also write the simulated run, for pytorch.org/memory_viz."),
        click.Option(["as_json", "--json"], is_flag=True, help="Print plan.json instead of the report."),
        click.Option(["--quiet"], is_flag=True, help="Print only the folder's path."),
    ]


def flag(argument: str) -> str:
    """The option of an API argument: ``seq_len`` -> ``--seq-len``."""
    return f"--{argument.replace('_', '-')}"


def _make_plan(out: str | None, snapshot: str | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Plan the fastest training of a model in the GPU memory you have, with no GPU at hand.

    Writes a folder with the plan and a script that trains. WORDS are separated by commas.

    Exit codes: 0 a plan was made; 2 bad input; 3 nothing fits; 4 a trial or a device failed; 130 interrupted.
    """
    request = _request(options, out, snapshot)
    folder = Path(out) if out else default_folder(request)
    # a library that loads later may not write between the report's lines
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from planner import plan, save_snapshot

    result = plan(**dict(request))
    try:
        result.save(folder)
    except OSError as error:
        raise InputError([_cannot_write(str(folder), error.strerror or str(error))]) from error
    if snapshot is not None:
        save_snapshot(result, snapshot)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, allow_nan=False))
    elif quiet:
        click.echo(str(folder))
    else:
        from planner.render import render

        render(result, folder)
        if snapshot is not None:
            click.echo(f"Snapshot of the simulated run, to open at pytorch.org/memory_viz: {snapshot}")


command = click.Command(
    "plan",
    callback=_make_plan,
    params=_options(),
    help=_make_plan.__doc__,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
click.version_option(package_name="vramplan", prog_name="vramplan")(command)


def _request(options: dict[str, Any], out: str | None, snapshot: str | None = None) -> PlanRequest:
    """The request, or InputError with its problems and those of what is to be written."""
    from planner.request import make_request

    given = {name: ",".join(v) if isinstance(v, tuple) else v for name, v in options.items() if v not in (None, ())}
    problems = [*_folder_problems(out), *_snapshot_problems(snapshot)]
    try:
        request = make_request(**given)
    except InputError as error:
        raise InputError([*error.problems, *problems]) from None
    if problems := problems or _folder_problems(out or str(default_folder(request))):
        raise InputError(problems)
    return request


def default_folder(request: PlanRequest) -> Path:
    """``plans/bert-base-uncased-8GB``: the model's name and the memory as it was typed, safe in any shell."""
    name = request.model
    if Path(name).exists():
        path = Path(name).resolve()
        name = path.parent.name if path.name == "config.json" else path.name
    memory = str(request.vram) if isinstance(request.vram, str) else f"{request.vram}B"
    words = f"{name.replace('/', '--')}-{memory.replace(' ', '')}"
    return Path("plans") / re.sub(r"[^A-Za-z0-9._-]+", "-", words).lstrip("-.")


def _folder_problems(out: str | None) -> list[Problem]:
    why = "" if out is None else _obstacle(out)
    return [_cannot_write(str(out), why)] if why else []


def _obstacle(out: str) -> str:
    """Why the plan cannot be written there, found out before planning; "" where nothing is in the way."""
    folder = Path(out)
    try:
        if not out.strip():
            return "it is empty"
        if folder.is_dir():
            # A plan's folder is replaced whole: never somebody's other files.
            foreign = any(folder.iterdir()) and not (folder / "plan.json").is_file()
            return "it holds files that are no plan's" if foreign else ""
        return "that is no folder" if folder.exists() else _obstacle_above(folder)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def _obstacle_above(path: Path) -> str:
    """Why nothing can be made there; "" where nothing is in the way. Raises OSError and ValueError."""
    parent = next(p for p in path.absolute().parents if p.exists())
    writable = parent.is_dir() and os.access(parent, os.W_OK)
    return "" if writable else f"{parent} cannot be written to"


def _snapshot_problems(snapshot: str | None) -> list[Problem]:
    """What is in the way of the snapshot's file."""
    if snapshot is None:
        return []
    try:
        path = Path(snapshot)
        why = "it is empty" if not snapshot.strip() else "that is a folder" if path.is_dir() else _obstacle_above(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    message = f"got {snapshot!r}; accepted: a file that can be written; {why}"
    return [Problem(argument="snapshot", message=message)] if why else []


def _cannot_write(out: str, why: str) -> Problem:
    accepted = "accepted: a folder that can be made, or an earlier plan's"
    return Problem(argument="out", message=f"got {out!r}; {accepted}; {why}")


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. The only place where exceptions become messages."""
    try:
        return command.main(list(arguments), prog_name="plan", standalone_mode=False) or 0
    except InputError as error:
        _complain(*(f"{flag(p.argument)}: {p.message}" for p in error.problems))
        return error.exit_code
    except PlannerError as error:
        _complain(str(error))
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted")
        return INTERRUPTED
    except Exception as error:
        return _internal_error(error)


def _internal_error(error: Exception) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    remedy = f"please report it with the command that you ran ({DEBUG_VARIABLE}=1 shows the traceback)"
    _complain(f"internal error: {cause}; {remedy}")
    return 1


def _complain(*lines: str) -> None:
    for line in lines:
        click.echo(line, err=True)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark instead of a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
