"""Samples of rows, and how far a figure of a sample may be from that of the whole."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
Z_95 = 1.96
"""Standard errors to each side of a 95 % interval."""


class Reservoir(Generic[T]):
    """A uniform sample of a stream of unknown length (algorithm R: Vitter 1985, doi:10.1145/3147.3165).

    Holds at most ``rows`` items and, long ones aside, items of ``size`` together: when they grow beyond it, half of
    the sample is let go at random, and what is left is a uniform sample still.
    """

    def __init__(self, rows: int, size: int, size_of: Callable[[T], int], seed: int = 0) -> None:
        self._rows, self._size, self._size_of = rows, size, size_of
        self._random = random.Random(seed)
        self._held = 0
        self.seen = 0
        """Items that came by."""
        self.items: list[T] = []
        """The sample, in no order."""

    def add(self, item: T) -> None:
        """One more item of the stream."""
        self.seen += 1
        if len(self.items) < self._rows:
            self.items.append(item)
            self._held += self._size_of(item)
        elif (place := self._random.randrange(self.seen)) < self._rows:
            self._held += self._size_of(item) - self._size_of(self.items[place])
            self.items[place] = item
        while self._held > self._size and len(self.items) > 1:
            self._rows = (len(self.items) + 1) // 2
            self.items = self._random.sample(self.items, self._rows)
            self._held = sum(map(self._size_of, self.items))


def margin(values: Sequence[float], parts: Sequence[int], *, share: float) -> float:
    """Half of the 95 % interval of the mean of ``values``, each drawn with a part (a block, or the row itself).

    The variance of a ratio of totals of parts, Cochran 1977, Sampling Techniques, 3rd edition, equation 6.13; with
    parts of one row each it is that of a simple random sample (2.20). ``share``: of the whole that was drawn.
    """
    if share >= 1 or not values:
        return 0.0
    totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for value, part in zip(values, parts, strict=True):
        totals[part][0] += value
        totals[part][1] += 1
    n = len(totals)
    if n < 2:
        return math.inf
    mean = sum(values) / len(values)
    squares = sum((value - mean * count) ** 2 for value, count in totals.values())
    variance = (1 - share) / n * squares / (n - 1) / (len(values) / n) ** 2
    return Z_95 * math.sqrt(variance)


def rule_of_three(n: int, *, share: float) -> float:
    """What a share may be at most, with 95 % confidence, when none of a sample of ``n`` had it.

    Hanley and Lippman-Hand 1983, doi:10.1001/jama.1983.03330370053031.
    """
    return 0.0 if share >= 1 else min(1.0, 3 / max(1, n))
