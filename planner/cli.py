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
from planner.options import flag, plan_options
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
    _show(result, folder, snapshot, as_json=as_json, quiet=quiet)
    _complain(*result.search.get("problems", ()))
    if not result.interrupted:
        return 0
    _complain(_what_there_is(result, progress.trials_done))
    return INTERRUPTED


def _show(plan: Plan[Any], folder: Path, snapshot: str | None, *, as_json: bool, quiet: bool) -> None:
    """The plan on standard output."""
    if as_json:
        click.echo(json.dumps(plan.to_json(), indent=2, allow_nan=False))
    elif quiet:
        click.echo(str(folder))
    else:
        from planner.render import render

        render(plan, folder)
        if snapshot is not None:
            click.echo(f"Snapshot of the simulated run, to open at pytorch.org/memory_viz: {snapshot}")


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
        from planner.comparison.comparing import compare

        result = compare(plan, data=data, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, allow_nan=False))
    else:
        from planner.comparison.rendering import render_comparison

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
    params=plan_options(),
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
