"""The exceptions that callers may see, each with the exit code that the command ends with.

PlannerError
├── InputError          2   one or more arguments are wrong; carries every problem found
├── NothingFitsError    3   no configuration stays under the ceiling; carries what would
├── TrialError          4   a trial or a device failed
└── RecordingError      4   the model's step could not be simulated
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a request, in one line: the value got, what is accepted, the remedy."""

    argument: str
    """Name of the API argument (the command line shows it as ``--argument-with-dashes``)."""
    message: str
    """``got '8'; accepted: a number with a unit such as 8GB; add the unit``, no argument name, no newline."""


class PlannerError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


class InputError(PlannerError):
    """One or more arguments are wrong. All problems are reported at once."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{p.argument}: {p.message}" for p in self.problems))


class NothingFitsError(PlannerError):
    """No configuration fits under the ceiling.

    ``message`` names the closest configuration, the smallest VRAM that would do, and the option that would
    make the request fit; ``smallest_vram_bytes`` is the label size in bytes.
    """

    exit_code = 3

    def __init__(self, message: str, *, smallest_vram_bytes: int, closest: object = None) -> None:
        self.smallest_vram_bytes = smallest_vram_bytes
        self.closest = closest
        super().__init__(message)


class TrialError(PlannerError):
    """A trial or a device failed."""

    exit_code = 4


class RecordingError(PlannerError):
    """A model's step could not be recorded; the message names the operator and the remedy."""

    exit_code = 4


def near_match(word: str, accepted: Iterable[str]) -> str | None:
    """The accepted word that was most likely meant, or None: ``adamw`` -> ``adamw_fused``."""
    words = list(accepted)
    starts = [w for w in words if word and w.startswith(word)]
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return next(iter(starts or close), None)
