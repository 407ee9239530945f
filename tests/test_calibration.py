"""The margin of a plan: an upper quantile of measured residuals, for a stated risk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import calibration
from planner.calibration import DEFAULT_RISK, kind_of, margin, rows_needed, upper_quantile
from planner.config import TrainingConfig
from planner.errors import InputError
from planner.request import make_request

residual_lists = st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=150).map(sorted)
risks = st.floats(0.0001, 0.5)


def config(**fields: str) -> TrainingConfig:
    """Full fine-tuning with fused attention unless said otherwise."""
    ones = dict.fromkeys(("micro_batch_size", "seq_len", "max_tokens_per_micro_batch"), 1)
    ones |= dict.fromkeys(("gradient_accumulation_steps", "effective_batch_size"), 1)
    return TrainingConfig(**{**ones, "precision": "fp32", **fields})  # type: ignore[arg-type]


@given(residual_lists, risks)
def test_no_larger_share_than_the_risk_lies_above(residuals: list[float], risk: float) -> None:
    """Of the residuals and one more of the same distribution: at most ``risk`` of n + 1, where n is large enough."""
    bound = upper_quantile(residuals, risk)
    above = sum(value > bound for value in residuals) + 1  # the one more may lie above in the worst case
    if len(residuals) >= rows_needed(risk):
        assert above <= math.floor(risk * (len(residuals) + 1) + 1e-6)
    else:
        assert bound == residuals[-1]


@given(residual_lists, risks, risks)
def test_a_smaller_risk_never_needs_a_smaller_margin(residuals: list[float], one: float, other: float) -> None:
    """Monotone in the risk."""
    low, high = sorted((one, other))
    assert upper_quantile(residuals, low) >= upper_quantile(residuals, high)


@pytest.mark.parametrize(("risk", "rows"), [(0.01, 99), (0.1, 9), (0.5, 1), (0.05, 19)])
def test_rows_needed(risk: float, rows: int) -> None:
    """Of n residuals the largest is exceeded by one more with probability 1 / (n + 1)."""
    assert rows == rows_needed(risk)


class TestMargin:
    """Kind first, all kinds where it has too few rows, and never less than the kind showed."""

    @pytest.fixture(autouse=True)
    def known(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """A file of two kinds: twelve small residuals, two large ones."""
        small = [0.001 * n for n in range(12)]
        kinds = {kind_of(config()): small, kind_of(config(method="lora")): [-0.02, 0.06]}
        monkeypatch.setattr(calibration, "_residuals", lambda: kinds)
        calibration._margin.cache_clear()
        yield
        calibration._margin.cache_clear()

    def test_its_own_kind_when_that_has_enough_rows(self) -> None:
        """Rank ceil(13 x 0.9) = 12 of 12."""
        assert 0.011 == margin(config(), 0.1).fraction

    def test_all_kinds_for_a_kind_without_rows(self) -> None:
        """Rank ceil(15 x 0.9) = 14 of 14: the largest of all."""
        assert 0.06 == margin(config(method="qlora"), 0.1).fraction

    def test_never_less_than_the_largest_of_its_kind(self) -> None:
        """All kinds together would give 0.011 or less at this risk."""
        assert 0.06 == margin(config(method="lora"), 0.2).fraction

    def test_residuals_below_zero_make_no_margin_below_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A simulator that always over-predicts needs none."""
        monkeypatch.setattr(calibration, "_residuals", lambda: {kind_of(config()): [-0.1, -0.05]})
        assert 0.0 == margin(config(), 0.5).fraction

    def test_the_reason_says_when_rows_are_too_few(self) -> None:
        """At 1 in 100, fourteen rows don't suffice."""
        assert "for want of more" in margin(config(), 0.01).reason


def test_the_shipped_file_gives_every_kind_a_margin() -> None:
    """Between 0 and 15 % at the default risk, larger or equal at a smaller one."""
    for fields in ({}, {"attention": "eager"}, {"method": "lora"}, {"checkpointing": "full"}):
        fraction = margin(config(**fields), DEFAULT_RISK).fraction
        assert 0 <= fraction <= 0.15
        assert margin(config(**fields), 0.001).fraction >= fraction


@pytest.mark.parametrize("value", ["2", "0", "nan", "one", True])
def test_a_risk_that_is_no_probability_is_refused(value: object) -> None:
    """With what is accepted."""
    with pytest.raises(InputError, match="probability"):
        make_request(model="gpt2", vram="8GB", risk=value)


def test_a_risk_is_read_as_typed() -> None:
    """From the command line it comes as text."""
    assert 0.05 == make_request(model="gpt2", vram="8GB", risk="0.05").risk


def test_a_processors_margin_comes_from_trials_on_one() -> None:
    """Not from cards' residuals: the largest of the trials', whatever the configuration's kind."""
    text = resources.files("planner.profiles").joinpath("cpu_calibration.json").read_text(encoding="utf-8")
    largest = max(json.loads(text)["residuals"].values())
    for checkpointing in ("none", "full"):
        found = margin(config(checkpointing=checkpointing), 0.01, device="cpu")
        assert largest == found.fraction
        assert "trials on a processor, the largest, for want of more" in found.reason
