"""Write the generated parts of README.md: ``python tests/readme.py [help] [plan]`` (default: both)."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import click

from planner.cli import command

README = Path(__file__).resolve().parent.parent / "README.md"
WIDTH = 90
SAMPLE = ["--vram", "8GB", "--model", "bert-base-uncased"]
"""The command whose output the README shows."""


def help_text() -> str:
    """``plan --help`` on a terminal of the README's width."""
    with click.Context(command, info_name="plan", terminal_width=WIDTH, **command.context_settings) as context:
        return command.get_help(context)


def sample_plan() -> str:
    """What the sample command prints when its output goes to a file."""
    script = Path(sysconfig.get_path("scripts")) / "plan"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([script, *SAMPLE], cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def generated(text: str, name: str) -> str:
    """The block between the markers of that name, without its fence."""
    match = re.search(rf"<!-- {name} -->\n```text\n(.*?)```\n<!-- /{name} -->", text, re.DOTALL)
    if match is None:
        raise ValueError(f"README.md has no generated part called {name}")
    return match[1]


def with_generated(text: str, name: str, block: str) -> str:
    """The README with that part replaced; spaces at line ends go."""
    generated(text, name)
    lines = "\n".join(line.rstrip() for line in block.strip().splitlines())
    pattern = rf"(<!-- {name} -->\n```text\n).*?(```\n<!-- /{name} -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{lines}\n{m[2]}", text, flags=re.DOTALL)


def main() -> None:
    """Rewrite the parts that are named."""
    makers = {"help": help_text, "plan": sample_plan}
    text = README.read_text()
    for name in sys.argv[1:] or makers:
        text = with_generated(text, name, makers[name]())
    README.write_text(text)


if __name__ == "__main__":
    main()
