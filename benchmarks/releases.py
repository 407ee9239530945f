"""Which release of transformers a row was measured with, and an environment that has it.

An environment is a folder of packages that stands before this one's in ``PYTHONPATH``: transformers of that release
with what it can't share (tokenizers, huggingface_hub, ...). Everything else, torch first of all, is the running
environment's, so the planner's own code runs unchanged on the model code of that time. Environments are made with pip,
once, in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rows import Row

from planner import cache

Version = tuple[int, ...]

_OF_SOURCE: dict[str, tuple[str, str]] = {
    "bert": ("4.41.2", "the table came with SDPA for BERT: #28802 of April 2024, first in 4.41"),
    "gpt2l": ("4.43.4", "the table came with SDPA for GPT-2: #31172 of June 2024; 4.43 for 4.42, which wants numpy 1"),
    "opt350": ("4.46.3", "the table came with SDPA for OPT: #33298 of October 2024, first in 4.46"),
    "distilbert": ("4.46.3", "the table came with SDPA for DistilBERT: #33724 of October 2024, first in 4.46"),
    "albert": ("4.45.2", "the table came with SDPA for ALBERT: #32092 of July 2024, first in 4.45"),
    "mila": ("4.49.0", "milabench's pinned requirements of that time"),
    "perf": ("4.16.2", "the guide is of January 2022"),
}
"""Source to the release that it implies, where its rows name none, and how that is known (numbers are of pull requests
in huggingface/transformers). A table of a pull request was made with its branch: the first release that has it."""

_COMPANIONS: tuple[tuple[Version, Mapping[str, str]], ...] = (
    ((4, 16), {"huggingface-hub": "0.10.1", "sacremoses": "0.1.1"}),  # takes any tokenizers
    ((4, 23), {"tokenizers": "0.13.3", "huggingface-hub": "0.17.3"}),
    ((4, 34), {"tokenizers": "0.14.1", "huggingface-hub": "0.17.3"}),
    ((4, 35), {"tokenizers": "0.15.2", "huggingface-hub": "0.27.1"}),
    ((4, 40), {"tokenizers": "0.19.1", "huggingface-hub": "0.27.1", "peft": "0.11.1"}),
    ((4, 43), {"tokenizers": "0.19.1", "huggingface-hub": "0.27.1", "peft": "0.14.0"}),
    ((4, 45), {"tokenizers": "0.20.3", "huggingface-hub": "0.27.1", "peft": "0.14.0"}),
    ((4, 47), {"tokenizers": "0.21.0", "huggingface-hub": "0.27.1", "peft": "0.14.0"}),
    ((4, 56), {"tokenizers": "0.22.0", "huggingface-hub": "0.35.3", "peft": "0.17.1"}),
)
"""From which release on which versions go with it (dependency_versions_table.py of each)."""
_SHARED_COMPANIONS = {
    "requests": "2.32.3",
    "urllib3": "2.2.3",
    "idna": "3.10",
    "certifi": "2024.8.30",
    "charset-normalizer": "3.4.0",
}
"""What huggingface_hub asked for before 1.0."""


class EnvironmentFailedError(Exception):
    """An environment can't be made; says why in one line."""


def release_of(row: Row) -> str | None:
    """The release that the row names, or that its source implies; None where neither does."""
    named = row["transformers_version"].strip()
    if re.fullmatch(r"\d+\.\d+\.\d+", named):
        return named
    return _OF_SOURCE[row.source][0] if row.source in _OF_SOURCE else None


def running_release() -> str:
    """The release that this process has."""
    return cache.library_versions()["transformers"]


def packages(release: str) -> dict[str, str]:
    """Name to version of what an environment holds. Raises EnvironmentFailedError where none is known."""
    version = tuple(int(part) for part in release.split("."))
    known = [companions for since, companions in _COMPANIONS if since <= version]
    if not known or version >= (5,) or (4, 17) <= version < (4, 23):
        raise EnvironmentFailedError(f"no environment is known for transformers {release} on this Python")
    return {"transformers": release, **known[-1], **_SHARED_COMPANIONS}


def environment(release: str) -> Path:
    """The folder with the release's packages, made if it isn't there. Raises EnvironmentFailedError."""
    pins = [f"{name}=={version}" for name, version in packages(release).items()]
    digest = hashlib.sha256(repr((pins, sys.version_info[:2])).encode()).hexdigest()[:12]
    place = cache.folder() / "environments" / f"transformers-{release}-{digest}"
    if not place.is_dir():
        _install(pins, place)
    return place


def _install(pins: list[str], place: Path) -> None:
    """Whole or not at all: two processes may make the same environment."""
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=place.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(made)]
    try:
        done = subprocess.run([*command, *pins], capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip failed"]
            raise EnvironmentFailedError(f"an environment with {pins[0]} can't be made: {lines[-1]}")
        if not place.is_dir():
            made.replace(place)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def variables(place: Path) -> dict[str, str]:
    """A process's variables, in which the environment's packages come before the running environment's."""
    path = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    # of old releases: no look for the other two frameworks; those are found, and don't go with them
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "USE_TF": "0", "USE_FLAX": "0", "HF_HUB_OFFLINE": "1"}
