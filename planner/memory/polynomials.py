"""Exact sizes as functions of micro-batch ``b`` and sequence length ``s``.

For a fixed structure of a step the sequence of allocations doesn't depend on ``b`` and ``s``; each size does, and
nearly always as one coefficient times one monomial (a tensor's dimensions are ``b``, ``s`` and constants). Three
recordings identify it: the first gives the coefficient, the other two must agree with it exactly. A size that is a
sum of several monomials is solved for from more recordings, in rational arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.units import round_up

Int64s = NDArray[np.int64]
Shape = tuple[int, int]
"""Micro-batch in sequences, sequence length in tokens."""


def monomials(shape: Shape) -> Int64s:
    """The values of every monomial at one shape: the six plain ones, those with a rounded length, and b * b, which is
    what a loss that compares samples needs.

    Attention kernels round rows: 16 (mask rows of the memory-efficient kernel), 32 (its log-sum-exp), 64 (its
    backward tiles), 128 (flash attention's backward accumulators).
    """
    b, s = shape
    values = [1, b, s, b * s, s * s, b * s * s]
    for multiple in (16, 32, 64, 128):
        rounded = round_up(s, multiple)
        values += [rounded, b * rounded, s * rounded, b * s * rounded]
    return np.array([*values, b * b], dtype=np.int64)


N_PLAIN = 6
LARGEST_DENOMINATOR = 16
"""Of fractions that are looked for."""
N_MONOMIALS = len(monomials((1, 1)))


class NotPolynomialError(Exception):
    """Some sizes don't follow any polynomial of the known monomials; ``rows`` are their indices."""

    def __init__(self, rows: Int64s) -> None:
        self.rows = rows
        super().__init__(f"{len(rows)} sizes are no polynomials of micro-batch and sequence length")


@dataclass(frozen=True)
class Polynomials:
    """One polynomial for each row: ``ceil(numerators @ monomials / denominators)``."""

    numerators: Int64s
    """[rows, monomials]"""
    denominators: Int64s
    """[rows]"""

    def at(self, shape: Shape) -> Int64s:
        """The value of every row at a shape, exactly. [rows]"""
        values: Int64s = self.numerators @ monomials(shape)
        return -(-values // self.denominators)


def shapes_needed(shapes: Sequence[Shape], values: Int64s) -> bool:
    """Whether three recordings were not enough: some row is no single monomial."""
    return bool(len(_fit_single(shapes, values)[2]))


def fit(shapes: Sequence[Shape], values: Int64s) -> Polynomials:
    """Polynomials that equal ``values`` [shapes, rows] at every shape.

    At least three shapes; with seven or more, rows that are sums of the six plain monomials are solved for as well
    (six shapes determine them, the others check), and those that are fractions of one, rounded up. Raises
    NotPolynomialError.
    """
    numerators, denominators, left = _fit_single(shapes, values)
    if len(left):
        if len(shapes) <= N_PLAIN:
            raise NotPolynomialError(left)
        numerators[left], wrong = _fit_sums(shapes, values[:, left])
        left = left[wrong]
        numerators[left], denominators[left] = _fit_fractions(shapes, values[:, left], left)
    return Polynomials(numerators, denominators)


def _fit_single(shapes: Sequence[Shape], values: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Rows that are one monomial times one rational coefficient, and the indices of the rows that are not."""
    at = np.stack([monomials(shape) for shape in shapes])
    rows = values.shape[1]
    numerators = np.zeros((rows, N_MONOMIALS), dtype=np.int64)
    denominators = np.ones(rows, dtype=np.int64)
    open_rows = np.flatnonzero(values.any(axis=0))
    for column in range(N_MONOMIALS):
        found = open_rows[
            np.all(values[:, open_rows] * at[0, column] == values[0, open_rows] * at[:, column, None], axis=0)
        ]
        divisor = np.gcd(values[0, found], at[0, column])
        numerators[found, column] = values[0, found] // divisor
        denominators[found] = at[0, column] // divisor
        open_rows = np.setdiff1d(open_rows, found, assume_unique=True)
    return numerators, denominators, open_rows


def _fit_sums(shapes: Sequence[Shape], values: Int64s) -> tuple[Int64s, Int64s]:
    """Sums of plain monomials with integer coefficients, solved at six shapes and checked at all; and the rows that
    are none.

    The solution in floating point is rounded to integers and then verified in integers, so it is exact or refused.
    """
    columns = list(range(N_PLAIN)) if len({b for b, _ in shapes}) > 1 else [0, 2, 4]  # of one batch: 1, s, s * s
    at = np.stack([monomials(shape)[columns] for shape in shapes])
    solution, *_ = np.linalg.lstsq(at.astype(np.float64), values.astype(np.float64), rcond=None)
    coefficients = np.rint(solution).astype(np.int64)
    wrong = np.flatnonzero(np.any(at @ coefficients != values, axis=0))
    numerators = np.zeros((values.shape[1], N_MONOMIALS), dtype=np.int64)
    numerators[:, columns] = coefficients.T
    return numerators, wrong


def _fit_fractions(shapes: Sequence[Shape], values: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
    """One monomial times a fraction with a small denominator, rounded up: workspaces of short sequences.

    The largest value is nearest to the fraction; all are checked. Raises NotPolynomialError.
    """
    at = np.stack([monomials(shape) for shape in shapes])
    numerators = np.zeros((len(rows), N_MONOMIALS), dtype=np.int64)
    denominators = np.ones(len(rows), dtype=np.int64)
    open_rows = np.arange(len(rows))
    for denominator, column in itertools.product(range(2, LARGEST_DENOMINATOR + 1), range(N_MONOMIALS)):
        largest = int(np.argmax(at[:, column]))
        numerator = values[largest, open_rows] * denominator // at[largest, column]
        fits = -(-numerator * at[:, column, None] // denominator) == values[:, open_rows]
        found = open_rows[fits.all(axis=0)]
        numerators[found, column] = numerator[fits.all(axis=0)]
        denominators[found] = denominator
        open_rows = np.setdiff1d(open_rows, found, assume_unique=True)
    if len(open_rows):
        raise NotPolynomialError(rows[open_rows])
    return numerators, denominators
