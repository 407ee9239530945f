"""Sizes solved for exactly, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.memory.model import Variant
from planner.memory.polynomials import N_MONOMIALS, N_PLAIN, NotPolynomialError, fit, monomials, shapes_needed

VARIANTS = [Variant(single, aligned) for single in (False, True) for aligned in (False, True)]
variants = st.sampled_from(VARIANTS)
GIB = 2**30


def unseen(variant: Variant) -> list[tuple[int, int]]:
    """Shapes of the variant that are not recorded, up to very large ones."""
    lengths = (16, 512, 8192, 65_536) if variant.aligned else (7, 513, 4095, 65_535)
    batches = (1,) * 4 if variant.single else (2, 9, 128, 512)
    return list(zip(batches, lengths, strict=True))


def values_at(shapes: list[tuple[int, int]], coefficients: np.ndarray) -> np.ndarray:
    """[shapes, rows] from coefficients [rows, monomials]."""
    return np.stack([coefficients @ monomials(shape)[: coefficients.shape[1]] for shape in shapes])


def test_monomials_of_a_shape() -> None:
    """1, b, s, bs, s^2, bs^2, then the same with the length rounded up to 16, 32, 64 and 128, and b^2."""
    values = monomials((3, 100)).tolist()
    assert [1, 3, 100, 300, 10_000, 30_000] == values[:N_PLAIN]
    assert [112, 336, 11_200, 33_600] == values[6:10]
    assert [128, 384, 12_800, 38_400] == values[10:14] == values[14:18] == values[18:22]
    assert [9] == values[22:]
    assert N_MONOMIALS == len(values)


@given(variants, st.lists(st.tuples(st.integers(0, N_MONOMIALS - 1), st.integers(1, GIB)), min_size=1, max_size=9))
def test_single_monomials_are_recovered_from_three_recordings(variant: Variant, terms: list[tuple[int, int]]) -> None:
    """Whatever the monomial and the coefficient, values at unseen shapes are exact."""
    coefficients = np.zeros((len(terms), N_MONOMIALS), dtype=np.int64)
    for row, (column, coefficient) in enumerate(terms):
        coefficients[row, column] = coefficient
    shapes = list(variant.shapes()[:3])
    values = values_at(shapes, coefficients)
    assert not shapes_needed(shapes, values)
    found = fit(shapes, values)
    for shape in unseen(variant):
        assert (coefficients @ monomials(shape)).tolist() == found.at(shape).tolist()


@settings(deadline=None)
@given(variants, st.lists(st.tuples(*[st.integers(0, 2**20)] * N_PLAIN), min_size=1, max_size=5))
def test_sums_of_monomials_are_recovered_from_all_recordings(variant: Variant, rows: list[tuple[int, ...]]) -> None:
    """Sums of the six plain monomials with whole coefficients, exact at unseen shapes."""
    coefficients = np.array(rows, dtype=np.int64)
    shapes = list(variant.shapes())
    found = fit(shapes, values_at(shapes, coefficients))
    for shape in unseen(variant):
        assert (coefficients @ monomials(shape)[:N_PLAIN]).tolist() == found.at(shape).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_fractions_of_a_monomial_round_up(variant: Variant) -> None:
    """A kernel's workspace of 3/8 of the token count, or of a third of it, is that at every shape."""
    shapes = list(variant.shapes()[:3])
    values = np.array([[3 * b * s // 8, 7 * b * s // 10] for b, s in shapes])
    found = fit(shapes, values)
    for b, s in unseen(variant):
        assert [-(-3 * b * s // 8), -(-7 * b * s // 10)] == found.at((b, s)).tolist()


def test_zero_is_a_size() -> None:
    """Empty blocks stay empty."""
    shapes = list(VARIANTS[0].shapes()[:3])
    assert [0] == fit(shapes, np.zeros((3, 1), dtype=np.int64)).at((9, 999)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_no_polynomial_is_refused_by_name(variant: Variant) -> None:
    """The error tells which rows it is about: windows and square roots of the length."""
    shapes = list(variant.shapes())
    values = np.array([[4 * s, min(s, 100), 4 * b, int(s**0.5)] for b, s in shapes])
    assert shapes_needed(shapes[:3], values[:3])
    with pytest.raises(NotPolynomialError) as refused:
        fit(shapes, values)
    assert [1, 3] == refused.value.rows.tolist()


def test_three_recordings_are_too_few_for_a_sum() -> None:
    """It is refused, not guessed; a single monomial beside it doesn't help."""
    shapes = list(VARIANTS[0].shapes()[:3])
    values = np.array([[4 * s, b * s + 17 * s] for b, s in shapes])
    assert shapes_needed(shapes, values)
    with pytest.raises(NotPolynomialError) as refused:
        fit(shapes, values)
    assert [1] == refused.value.rows.tolist()


def test_one_deviating_recording_is_enough_to_refuse() -> None:
    """Every recording is checked, the last one too."""
    shapes = list(VARIANTS[0].shapes())
    values = np.array([[b * s + 17 * s] for b, s in shapes])
    values[-1, 0] += 1
    with pytest.raises(NotPolynomialError, match="1 sizes are no polynomials"):
        fit(shapes, values)


@pytest.mark.parametrize("shape", [(512, 4096), (4096, 512), (1, 1_000_000)])
def test_large_shapes_are_exact(shape: tuple[int, int]) -> None:
    """Attention scores of a large batch are far above 2^53, where floating point would round."""
    b, s = shape
    shapes = [(10, 80), (15, 240), (25, 400)]
    values = np.array([[144 * b * s * s + 0] for b, s in shapes])
    assert [144 * b * s * s] == fit(shapes, values).at(shape).tolist()
    odd = 2**40 + 1
    values = np.array([[odd * b] for b, _ in shapes])
    assert [odd * b] == fit(shapes, values).at(shape).tolist()
