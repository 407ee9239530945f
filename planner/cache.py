"""The user's cache: recordings that were made once are read the next time.

A key covers everything that a recording depends on: the model's configuration, the structure, the target's kernels,
the versions of the libraries, and this package's own recording code. An entry that can't be read is made again.

Nothing here stops a plan: what could not be kept is told by ``problems()``, and as a CacheWarning. Entries are pickles,
and reading one can run code: only files of this user are read. Entries that take more than LARGEST_BYTES together are
removed: those of other versions first, older ones first.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

T = TypeVar("T")

LARGEST_BYTES = 2 * 2**30
"""What all entries may take together."""
_SOURCES = (
    *("step.py", "workload.py", "inspection.py", "recordings.py"),
    *("recording", "levers", "memory", "parts", "inference"),
)
_TEMPORARY = ".being-written-"
_ABANDONED_S = 24 * 3600
"""A file that is still being written after this long was left by a process that died."""
_LOOKED_AFTER_EVERY = 256
"""Entries that a process writes between two looks at how much there is; the first look is at its first entry."""


class _State:
    """Of this process."""

    def __init__(self) -> None:
        self.problems: dict[str, None] = {}
        self.written = 0
        self.closed = False


_state = _State()


class CacheWarning(UserWarning):
    """Something could not be kept in the user's cache."""


def folder() -> Path:
    """Where entries lie: VRAMPLAN_CACHE, or the platform's cache folder for users."""
    return Path(os.environ.get("VRAMPLAN_CACHE") or platformdirs.user_cache_dir("vramplan", appauthor=False))


def problems() -> list[str]:
    """Why this process could not keep or read entries, each reason once, in one line."""
    return list(_state.problems)


def close() -> None:
    """Keep nothing from now on: for a process that was interrupted at a point where a recording may have missed it."""
    _state.closed = True


def remembered(kind: str, key: dict[str, Any], make: Callable[[], T]) -> T:
    """The entry for this key, made by ``make`` when there is none that can be read."""
    path = folder() / kind / f"{_version()}-{_digest(key)}.pickle"
    try:
        entry: T = pickle.loads(_read(path))
        return entry
    except Exception:  # a broken pickle can raise anything; whatever is wrong with an entry, it is made again
        pass
    entry = make()
    if not _state.closed:
        _store(path, entry)
    return entry


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, for this user alone, with the folders above it. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_TEMPORARY, delete=False) as file:
        staging = Path(file.name)
        try:
            file.write(content)
            file.close()
            staging.replace(path)
        except BaseException:
            file.close()
            staging.unlink(missing_ok=True)
            raise


def _read(path: Path) -> bytes:
    """Raises OSError where there is no entry of this user's own."""
    with path.open("rb") as file:
        if not _is_own(os.fstat(file.fileno())):
            raise PermissionError(f"{path} belongs to another user")
        return file.read()


def _is_own(status: os.stat_result) -> bool:
    return os.name != "posix" or status.st_uid == os.geteuid()


def _store(path: Path, entry: object) -> None:
    """Whole or not at all; a cache that can't be written is no failure."""
    content = pickle.dumps(entry, protocol=pickle.HIGHEST_PROTOCOL)
    top = path.parent.parent
    try:
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in (top, path.parent):
            if place.exists() and not _is_own(place.stat()):
                _note(place, "it belongs to another user, who could put code there")
                return
        write_whole(path, content)
    except FileExistsError:
        _note(top, "that is no folder")
        return
    except OSError as error:
        _note(top, error.strerror or str(error))
        return
    if _state.written % _LOOKED_AFTER_EVERY == 0:
        shrink(LARGEST_BYTES)
    _state.written += 1


def _note(place: Path, why: str) -> None:
    problem = f"nothing could be kept in {place}: {why}; VRAMPLAN_CACHE names another folder"
    if problem not in _state.problems:
        _state.problems[problem] = None
        warnings.warn(problem, CacheWarning, stacklevel=4)


def shrink(largest_bytes: int) -> None:
    """Remove entries until the rest takes no more than this: other versions' first, then older ones.

    Others may read, write and remove entries meanwhile: one that is gone is made again by whoever needs it.
    """
    found = []
    for path in folder().glob("*/*.pickle"):
        with suppress(OSError):
            status = path.stat()
            found.append((path.name.startswith(_version()), status.st_mtime, status.st_size, path))
    total = sum(size for *_, size, _ in found)
    for *_, size, path in sorted(found):
        if total <= largest_bytes:
            break
        with suppress(OSError):
            path.unlink()
            total -= size
    for path in folder().glob(f"*/{_TEMPORARY}*"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()


@cache
def _version() -> str:
    """What made the entries that can be read, as the beginning of their names."""
    return hashlib.sha256(json.dumps(_made_by(), sort_keys=True).encode()).hexdigest()[:12]


def _digest(key: dict[str, Any]) -> str:
    text = json.dumps({**key, "made_by": _made_by()}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _made_by() -> dict[str, str]:
    """Versions of the libraries, and a digest of the code that records."""
    versions = library_versions()
    digest = hashlib.sha256()
    root = resources.files("planner")
    for name in _SOURCES:
        entry = root / name
        for file in [entry] if entry.is_file() else sorted(entry.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".py"):
                digest.update(file.read_bytes())
    return {**versions, "code": digest.hexdigest()}


def library_versions() -> dict[str, str]:
    """Installed versions of what a plan depends on, without importing it."""
    names = ("vramplan", "torch", "transformers", "accelerate", "peft", "optuna")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
