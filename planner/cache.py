"""The user's cache: recordings that were made once are read the next time.

A key covers everything that a recording depends on: the model's configuration, the structure, the target's kernels,
the versions of the libraries, and this package's own recording code. An entry that can't be read is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

T = TypeVar("T")

_SOURCES = ("step.py", "workload.py", "inspection.py", "recordings.py", "recording", "levers", "memory")


def folder() -> Path:
    """Where entries lie: VRAMPLAN_CACHE, or the platform's cache folder for users."""
    return Path(os.environ.get("VRAMPLAN_CACHE") or platformdirs.user_cache_dir("vramplan", appauthor=False))


def remembered(kind: str, key: dict[str, Any], make: Callable[[], T]) -> T:
    """The entry for this key, made by ``make`` when there is none that can be read."""
    path = folder() / kind / f"{_digest(key)}.pickle"
    try:
        entry: T = pickle.loads(path.read_bytes())
        return entry
    except Exception:  # a broken pickle can raise anything; whatever is wrong with an entry, it is made again
        pass
    entry = make()
    _store(path, entry)
    return entry


def _store(path: Path, entry: object) -> None:
    """Whole or not at all; a cache that can't be written is no failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            pickle.dump(entry, file, protocol=pickle.HIGHEST_PROTOCOL)
        Path(file.name).replace(path)
    except OSError:
        return


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
