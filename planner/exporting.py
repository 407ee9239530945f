"""``export()``: a saved plan in the files that another engine reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.emit.engines import ENGINES
from planner.errors import InputError, Problem, near_match
from planner.places import write_whole
from planner.plans import read_document


def export(plan: str | Path, *, to: str, out: str | Path | None = None) -> Path:
    """Write a plan for another engine; the folder.

    ``plan``: a folder that a plan was saved in, or its plan.json. ``to``: one of ENGINES. ``out``: the folder to
    write, whole or not at all; None: one with the engine's name inside the plan's. Raises InputError for an unknown
    engine, for everything of the plan that the engine can't do, and where the folder holds other files.
    """
    source = Path(plan)
    source = source.parent if source.name == "plan.json" else source
    if to not in ENGINES:
        near = near_match(to, ENGINES)
        remedy = f"; did you mean {near}?" if near else ""
        raise InputError([Problem(argument="to", message=f"got {to!r}; accepted: {', '.join(ENGINES)}{remedy}")])
    files = files_for(read_document(source), to)
    target = Path(out) if out is not None else source / to
    _check(target, set(files))

    def write(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")

    write_whole(target, write)
    return target


def files_for(document: dict[str, Any], to: str) -> dict[str, str]:
    """File name to text, of plan.json's content. Raises InputError for what the engine can't do."""
    engine = ENGINES[to]
    problems = engine.problems(document)
    if problems:
        raise InputError(problems)
    return engine.files(document)


def _check(target: Path, names: set[str]) -> None:
    """An earlier export is replaced; never somebody's other files."""
    if target.exists() and not (target.is_dir() and {entry.name for entry in target.iterdir()} <= names):
        message = f"got {str(target)!r}, which holds other files; accepted: a new folder, or an earlier export's"
        raise InputError([Problem(argument="out", message=message)])
