"""How long the samples of a data set are: read from a file, or assumed. Lengths are in tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError, Problem
from planner.tasks import LongTexts
from planner.units import shown

ASSUMED_SAMPLES = 4096
"""Samples of the assumed data set."""
SHORTEST_SHARE = 8
"""The shortest assumed sample is this many times shorter than the longest."""
LONGEST_LENGTH = 10_000_000
"""Bound of a length in a file."""
ACCEPTED = f"a text or csv file with one whole number of tokens from 1 to {LONGEST_LENGTH} on each line"
BAD_LINES_SHOWN = 3
FATE: dict[LongTexts, str] = {
    "truncate": "are cut",
    "segment": "become several samples",
    "pack": "are joined with the others",
}
"""What becomes of texts that are too long, in a clause."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of the samples that a training script would make of a data set."""

    tokens: tuple[int, ...]
    """Of each sample, in the data's order."""
    reason: str
    """Where they come from, in a clause."""


def assumed_lengths(seq_len: int) -> Lengths:
    """Every length between an eighth of the longest and the longest is as likely; multiples of 16.

    Even spread is the hardest on a cache of blocks: no length comes often enough for its blocks to be there again.
    """
    shortest = max(1, seq_len // SHORTEST_SHARE)
    drawn = random.Random(0)
    tokens = [min(seq_len, -(-drawn.randint(shortest, seq_len) // 16) * 16) for _ in range(ASSUMED_SAMPLES)]
    reason = (
        f"assumed: every length from {shortest} to {seq_len} tokens is as likely, and the longest comes first; "
        "--lengths FILE plans for your own"
    )
    return Lengths(tokens=(seq_len, *tokens[1:]), reason=reason)


def given_lengths(counts: Sequence[int], *, seq_len: int, long_texts: LongTexts) -> Lengths:
    """Lengths of the samples made of texts with these token counts.

    A longer text is cut to ``seq_len`` tokens (truncate) or becomes several samples (segment), or all texts are joined
    and cut into full windows (pack), as the emitted script has it.
    """
    if long_texts == "pack":
        tokens = _pieces(sum(counts), seq_len)
    elif long_texts == "segment":
        tokens = [length for count in counts for length in _pieces(count, seq_len)]
    else:
        tokens = [min(count, seq_len) for count in counts]
    longer = sum(count > seq_len for count in counts)
    reason = f"as given: {len(counts)} texts, {longer} of them longer than {seq_len} tokens, which {FATE[long_texts]}"
    return Lengths(tokens=tuple(tokens), reason=reason)


def _pieces(count: int, seq_len: int) -> list[int]:
    rest = count % seq_len
    return [seq_len] * (count // seq_len) + ([rest] if rest else [])


def read_counts(file: str) -> list[int]:
    """Token counts from a file with one a line; a first line that is no number is a header.

    Raises InputError for a file that can't be read or has lines that are no lengths.
    """
    path = Path(file).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise InputError(
            [Problem(argument="lengths", message=f"got {shown(file)}; accepted: {ACCEPTED}; {why}")]
        ) from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if numbered and _length(numbered[0][1]) is None and any(c.isalpha() for c in numbered[0][1]):
        del numbered[0]
    bad = [(number, text) for number, text in numbered if _length(text) is None]
    if bad or not numbered:
        raise InputError([Problem(argument="lengths", message=_bad_lines(path, bad, len(numbered)))])
    return [count for _, text in numbered if (count := _length(text)) is not None]


def _length(text: str) -> int | None:
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(LONGEST_LENGTH)):
        return None
    return int(text) if 1 <= int(text) <= LONGEST_LENGTH else None


def _bad_lines(path: Path, bad: Sequence[tuple[int, str]], lines: int) -> str:
    if not bad:
        return f"got {shown(str(path))}, which has no lengths; accepted: {ACCEPTED}"
    some = ", ".join(f"line {number} is {shown(text)}" for number, text in bad[:BAD_LINES_SHOWN])
    more = ", ..." if len(bad) > BAD_LINES_SHOWN else ""
    return (
        f"got {shown(str(path))}, where {len(bad)} of {lines} lines are no lengths ({some}{more}); accepted: {ACCEPTED}"
    )
