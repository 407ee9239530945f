"""Where a plan's files are to go: what is in the way, found out before any planning, and writing a folder whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from planner.errors import Problem


def folder_problems(out: str | None) -> list[Problem]:
    """What is in the way of the plan's folder."""
    why = "" if out is None else _obstacle(out)
    return [cannot_write(str(out), why)] if why else []


def _obstacle(out: str) -> str:
    """Why the plan cannot be written there, found out before planning; "" where nothing is in the way."""
    folder = Path(out)
    try:
        if not out.strip():
            return "it is empty"
        if folder.is_dir():
            # A plan's folder is replaced whole: never somebody's other files.
            foreign = any(folder.iterdir()) and not (folder / "plan.json").is_file()
            return "it holds files that are no plan's" if foreign else _obstacle_above(folder)
        return "that is no folder" if folder.exists() else _obstacle_above(folder)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def _obstacle_above(path: Path) -> str:
    """Why nothing can be made there; "" where nothing is in the way. Raises OSError and ValueError."""
    parent = next(p for p in path.absolute().parents if p.exists())
    writable = parent.is_dir() and os.access(parent, os.W_OK)
    return "" if writable else f"{parent} cannot be written to"


def snapshot_problems(snapshot: str | None) -> list[Problem]:
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


def cannot_write(out: str, why: str) -> Problem:
    """The problem of a folder that a plan can't be written to."""
    accepted = "accepted: a folder that can be made, or an earlier plan's"
    return Problem(argument="out", message=f"got {out!r}; {accepted}; {why}")


def write_whole(target: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a folder, which is then put in ``target``'s place; whole or not at all. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(staging)
        staging.chmod(0o755)
        _swap(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _swap(staging: Path, target: Path) -> None:
    """Put ``staging`` in ``target``'s place; the old folder goes only when the new one is there."""
    if not target.exists():
        staging.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    target.rename(old / "plan")
    try:
        staging.rename(target)
    except OSError:
        (old / "plan").rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
