"""The command ``plan`` and those beside it: parse, call the library, render. Nothing is decided here.

Values go to :func:`planner.request.make_request` as they were typed, so that all problems come at once.
Only click is imported at the top: ``plan --help`` must be quick.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.errors import InputError, PlannerError, Problem
from planner.interrupts import INTERRUPTS
from planner.places import cannot_write, folder_problems, snapshot_problems
from planner.subcommands import HELP, subcommands

if TYPE_CHECKING:
    from planner.plans import Plan
    from planner.request import PlanRequest

DEBUG_VARIABLE = "VRAMPLAN_DEBUG"
GIVEN = click.core.ParameterSource.COMMANDLINE
INTERRUPTED = 130
"""Exit code of a run that was stopped with Ctrl-C."""
NOTHING_TO_RUN = "no search there has trials left for this device (for one that begins later, start again)"

REQUEST_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("model", "NAME", "Hub id (bert-base-uncased), folder or config.json.  [required]"),
    ("vram", "SIZE", "Memory on the card's label: 8GB = 8GiB = 8192MiB, or bytes.  [required]"),
    (
        "task",
        "TASK",
        "sequence-classification, multi-label-classification, regression, token-classification, masked-lm, causal-lm, "
        "seq2seq-lm, embedding or reranking.  [default: from the model's architecture]",
    ),
    ("mode", "MODE", "train, or infer: run the model.  [default: train]"),
    (
        "method",
        "METHOD",
        "auto, full, lora or qlora; auto trains all weights if that fits, else adapters, else adapters "
        "on a quantized base.  [default: auto]",
    ),
    ("gpu", "NAME", "The card, by loose name (rtx 4060).  [default: a typical card of that size]"),
    (
        "device",
        "DEVICE",
        "Where trials run: cuda, cuda:1 or cpu; none: everything is simulated; auto: cuda where there is one, "
        "else none.  [default: auto]",
    ),
    ("seq_len", "TOKENS", "Longest sequence.  [default: chosen for the model]"),
    ("target_seq_len", "TOKENS", "Longest target sequence of a sequence-to-sequence task."),
    ("num_labels", "N", "Labels of a classification task.  [default: 2]"),
    ("lengths", "FILE", "Lengths of the data's texts: one token count a line.  [default: assumed, see the plan]"),
    ("data", "PATH", "Plan for this data: jsonl, csv, parquet, txt, a datasets folder or a hub dataset."),
    ("text_column", "NAME", "Column of the texts; NAME,NAME for pairs.  [default: the usual names]"),
    ("label_column", "NAME", "Column of the labels.  [default: the usual names]"),
    (
        "long_texts",
        "HOW",
        "Texts longer than the sequence: truncate; segment them between sentences; pack texts into full sequences.  "
        "[default: as the task usually has it]",
    ),
    ("overlap", "SHARE", "Share of a segment that the next one repeats, such as 0.1.  [default: 0]"),
    ("batch_size", "N", "Effective batch: sequences for each optimizer step; to infer, sequences of one batch."),
    ("batch_tokens", "TOKENS", "Effective batch in tokens; to infer, tokens of one batch; instead of --batch-size."),
    (
        "precision",
        "WORDS",
        "Restrict to some of fp32, tf32, fp16-amp, bf16-amp, bf16, bf16-master; to infer to some of fp32, tf32, fp16, "
        "bf16.",
    ),
    ("checkpointing", "WORDS", "Restrict to some of none, full, every-2, every-4, ..."),
    (
        "offload",
        "WORDS",
        "Restrict to some of none, optimizer, parameters, activations; to infer to some of none, parameters, disk.",
    ),
    (
        "quantization",
        "WORDS",
        "Restrict to some of none, int8, nf4; to infer also int8-weight-only, and on the CPU int8-dynamic.",
    ),
    (
        "optimizer",
        "WORDS",
        "Restrict to some of adamw_fused, adamw_foreach, adamw_8bit, paged_adamw_8bit, adafactor, sgd.",
    ),
    ("attention", "WORDS", "Restrict to some of eager, sdpa, flash2."),
    ("loss", "WORDS", "Restrict to some of standard, fused-linear.  [default: standard]"),
    ("gpus", "N", "Cards of this kind that train together.  [default: 1]"),
    ("parallelism", "WORDS", "Restrict several cards to some of ddp, fsdp2."),
    ("max_new_tokens", "TOKENS", "To infer: tokens written for each request, at most.  [default: a usual number]"),
    (
        "concurrency",
        "N",
        "To infer: sequences there are at once (a query's documents, requests).  [default: as many as fit]",
    ),
    ("kv_cache", "WORDS", "To infer: restrict to some of dynamic, static, quantized, offloaded."),
    ("prefill_chunk", "TOKENS", "To infer: tokens of a prompt in one pass.  [default: all, if that fits]"),
    ("prefix_tokens", "TOKENS", "To infer: tokens at the beginning of prompts that requests share.  [default: 0]"),
    ("headroom", "SIZE", "Memory to keep free for other uses of the card, such as 500MB.  [default: 0]"),
    ("risk", "P", "Probability, at most, that a run needs more than planned.  [default: 0.01]"),
    ("host_ram", "SIZE", "Host memory that offloading may fill.  [default: what this machine has]"),
    (
        "allocator",
        "SETTINGS",
        "PyTorch's allocator settings, as in PYTORCH_CUDA_ALLOC_CONF.  [default: expandable_segments:True]",
    ),
    (
        "trials",
        "N",
        "Measured trials, at most; without a device configurations to look at.  [default: as many as the search needs]",
    ),
    ("timeout", "SECONDS", "Time for the measured trials; without a device for the search.  [default: no limit]"),
    ("trial_timeout", "SECONDS", "Time for one measured trial.  [default: what the planner allows]"),
    (
        "storage",
        "URL",
        "Where trials are kept, and shared with plan worker: a journal's file or a database's URL.  "
        "[default: a file in the user's cache]",
    ),
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


class _InterruptedError(Exception):
    """Somebody stopped the command before there was anything to show."""


def _ends_well(function: Callable[..., int]) -> Callable[..., int]:
    """A command that tells what its cache could not keep, and is stopped with one line."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> int:
        try:
            return function(*arguments, **options)
        except KeyboardInterrupt:
            # click would begin a line of its own
            raise _InterruptedError from None
        finally:
            if "planner.cache" in sys.modules:
                _complain(*sys.modules["planner.cache"].problems())

    return call


@_ends_well
def _make_plan(out: str | None, snapshot: str | None, as_json: bool, quiet: bool, **options: Any) -> int:
    """Plan the fastest training of a model in the GPU memory you have, with no GPU at hand; or running it.

    Writes a folder with the plan and a script that trains, or with --mode infer one that answers. WORDS are separated
    by commas.

    Exit codes: 0 a plan was made; 2 bad input; 3 nothing fits; 4 a trial or a device failed; 130 interrupted.
    """
    request = _request(options, out, snapshot)
    folder = Path(out) if out else default_folder(request)
    _quieten()
    from planner.progress import showing

    with showing(quiet=quiet) as progress:
        progress.phase("loading libraries")
        from planner import plan, save_snapshot

        # what was left out stays left out: the data may decide it
        given = {name: value for name, value in request if name in request.model_fields_set}
        result = plan(progress=progress, **given)
    try:
        result.save(folder)
    except OSError as error:
        raise InputError([cannot_write(str(folder), error.strerror or str(error))]) from error
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
    _complain(*result.search.get("problems", ()))
    if not result.interrupted:
        return 0
    _complain(_what_there_is(result, progress.trials_done))
    return INTERRUPTED


def _what_there_is(plan: Plan, trials: int) -> str:
    """What an interrupted search came to."""
    when = f"after {_counted(trials)}" if trials else "before a trial had ended"
    what = "the best so far" if plan.time.source == "measured" else "simulated, not measured"
    return f"interrupted {when}: the plan is {what}"


def _counted(trials: int) -> str:
    return "1 trial" if trials == 1 else f"{trials} trials"


@_ends_well
def _work(quiet: bool, **options: Any) -> int:
    """Run trials of searches that go on elsewhere: on another GPU, or on another host.

    The searches are the ones that keep their trials in the same storage. Ends when there is nothing left to run.
    """
    from planner.request import make_worker_request

    request = make_worker_request(**options)
    _quieten()
    from planner.progress import showing

    with showing(quiet=quiet) as progress:
        progress.phase("loading libraries")
        from planner.api import worker

        count = worker(progress=progress, **dict(request))
    if INTERRUPTS.came:
        _complain(f"interrupted after {_counted(progress.trials_done)}")
        return INTERRUPTED
    if not quiet:
        why = "" if count else f": {NOTHING_TO_RUN}"
        click.echo(f"ran {_counted(count)}{why}")
    return 0


def _export(plan: str, to: str | None, out: str | None) -> int:
    """Write a saved plan for another engine: the files that it reads, or why it can't take the plan.

    PLAN is the plan's folder. Names: accelerate, trainer, deepspeed, fsdp2, trl, sentence-transformers,
    llama-factory, axolotl.
    """
    from planner.exporting import export

    try:
        folder = export(plan, to=to or "", out=out)
    except OSError as error:
        raise InputError([cannot_write(str(out or plan), error.strerror or str(error))]) from error
    for file in sorted(folder.iterdir()):
        click.echo(str(file))
    return 0


@_ends_well
def _compare(plan: str, data: str | None, as_json: bool, quiet: bool, **options: Any) -> int:
    """Run a plan for inference and the same in fp32 on your texts, and show what its precision changed.

    PLAN is the plan's folder. Both runs are of its infer.py, one after the other, on the device at hand.

    Exit codes: 0 both ran; 2 bad input; 4 a run failed; 130 interrupted.
    """
    if data is None:
        raise InputError([Problem(argument="data", message="is required: the texts to compare both on")])
    _quieten()
    from planner.progress import showing

    with showing(quiet=quiet or as_json) as progress:
        from planner.comparing import compare

        result = compare(plan, data=data, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, allow_nan=False))
    else:
        from planner.render_comparison import render_comparison

        render_comparison(result)
    return 0


def _quieten() -> None:
    """A library that loads later may not write between the report's lines, nor tell twice what is told at the end."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):  # CUDA libraries without CUDA, enums
        logging.getLogger(name).setLevel(logging.ERROR)
    from planner.cache import CacheWarning

    warnings.filterwarnings("ignore", category=CacheWarning)


class _Commands(click.Group):
    """``plan`` with its options, or ``plan`` and the name of another command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = str(args[0])
        if name in self.commands and not any(ctx.get_parameter_source(p.name) == GIVEN for p in self.params if p.name):
            return super().resolve_command(ctx, args)
        others = ", ".join(self.commands)
        if name in self.commands:
            raise click.UsageError(f"got options before {name!r}; accepted: plan {name} and its own options")
        accepted = f"options such as --model {shlex.quote(name)}, or one of the commands {others}"
        raise click.UsageError(f"got {name!r}; accepted: {accepted}")


command = _Commands(
    "plan",
    commands=subcommands(worker=_work, export=_export, compare=_compare),
    invoke_without_command=True,
    callback=lambda **options: None if click.get_current_context().invoked_subcommand else _make_plan(**options),
    params=_options(),
    help=_make_plan.__doc__,
    context_settings=HELP,
)
click.version_option(package_name="vramplan", prog_name="vramplan")(command)


def _request(options: dict[str, Any], out: str | None, snapshot: str | None = None) -> PlanRequest:
    """The request, or InputError with its problems and those of what is to be written."""
    from planner.request import make_request

    given = {name: ",".join(v) if isinstance(v, tuple) else v for name, v in options.items() if v not in (None, ())}
    problems = [*folder_problems(out), *snapshot_problems(snapshot)]
    try:
        request = make_request(**given)
    except InputError as error:
        raise InputError([*error.problems, *problems]) from None
    if problems := problems or folder_problems(out or str(default_folder(request))):
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
    except (KeyboardInterrupt, click.Abort, _InterruptedError):
        # a terminal shows what was typed, ^C, on the line of the message
        _complain("\ninterrupted" if sys.stderr.isatty() else "interrupted")
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
    INTERRUPTS.arrange()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
