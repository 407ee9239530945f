"""The commands beside ``plan``: their arguments and options. What they do stands in cli.py."""

from __future__ import annotations

from collections.abc import Callable

import click

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every command's context."""


def subcommands(
    worker: Callable[..., int], export: Callable[..., int], compare: Callable[..., int]
) -> list[click.Command]:
    """The commands, each calling the given function, whose docstring is its help."""
    return [
        _command("worker", worker, _worker_parameters(), "Run trials of searches that share a --storage."),
        _command("export", export, _export_parameters(), "Write a plan for another engine."),
        _command("compare", compare, _compare_parameters(), "What a plan's precision changes, on your texts."),
    ]


def _command(name: str, callback: Callable[..., int], params: list[click.Parameter], short: str) -> click.Command:
    return click.Command(
        name, callback=callback, params=params, help=callback.__doc__, short_help=short, context_settings=HELP
    )


def _worker_parameters() -> list[click.Parameter]:
    return [
        click.Option(["--storage"], metavar="URL", help="The searches' --storage.  [required]"),
        click.Option(
            ["--device"], metavar="DEVICE", help="cuda, cuda:1 or cpu; auto: cuda where there is one.  [default: auto]"
        ),
        click.Option(["--timeout"], metavar="SECONDS", help="Start no trial after this.  [default: no limit]"),
        click.Option(["--quiet"], is_flag=True, help="Print nothing."),
    ]


def _export_parameters() -> list[click.Parameter]:
    return [
        click.Argument(["plan"], metavar="PLAN"),
        click.Option(["--to"], metavar="NAME", help="The engine.  [required]"),
        click.Option(["--out"], metavar="DIR", help="Folder to write.  [default: PLAN/NAME]"),
    ]


def _compare_parameters() -> list[click.Parameter]:
    return [
        click.Argument(["plan"], metavar="PLAN"),
        click.Option(["--data"], metavar="FILE", help="Your texts: jsonl, csv, parquet, txt, a data set.  [required]"),
        click.Option(
            ["--text-column"], metavar="NAME", help="Column of the texts; NAME,NAME for pairs.  [default: usual names]"
        ),
        click.Option(
            ["--label-column"],
            metavar="NAME",
            help="Column of true labels, or of the texts to be written.  [default: usual names]",
        ),
        click.Option(["--limit"], metavar="N", help="The first N rows.  [default: 1000]"),
        click.Option(["--device"], metavar="DEVICE", help="cpu or cuda.  [default: the plan's, if it is here]"),
        click.Option(["--out"], metavar="FILE", help="Also write what both say of each row, as csv."),
        click.Option(["as_json", "--json"], is_flag=True, help="Print the figures as JSON."),
        click.Option(["--quiet"], is_flag=True, help="Show no progress."),
    ]
