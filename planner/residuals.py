"""How far measurements lie from predictions, and what one of them says about the others.

The logarithm of measured over predicted (a step's time, its memory) is taken as a sum of independent normal terms, each
shared by fewer configurations than the one before: all of a device; one workload; one precision; one precision with one
checkpointing (at inference with one quantization and cache); one structure, less the further two micro-batches lie
apart; and a measurement's own noise. With that a few measurements correct every prediction, most those that are most
alike: Gaussian process regression (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, section
2.2; 2.7 for a mean that is not known before).

The terms' standard deviations are those of published measurements. How far the simulator is off on this very device is
learnt on top: all variances have one unknown factor, whose prior is that of a variance seen in as many published
sources (inverse gamma, the conjugate one), so the first measurements say whether to believe the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from planner.config import Config, InferenceConfig

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviations of the terms of a log ratio, and where they come from."""

    device: float
    """Of what all of a device's configurations have in common; infinite where nothing is known before measuring."""
    workload: float
    """Of a workload on the device."""
    precision: float
    """Of a precision on the device."""
    levers: float
    """Of a precision with a checkpointing, of one workload."""
    structure: float
    """Of a structure of one workload (everything but the micro-batch)."""
    octaves: float
    """Doublings of the micro-batch over which a structure's term keeps 1/e of its correlation."""
    sources: int
    """How many independent sources these were learnt from: the weight of the prior against measurements."""
    source: str
    """Which."""


CUDA_TIME = Spread(
    device=math.inf,
    workload=0.04,
    precision=0.05,
    levers=0.05,
    structure=0.12,
    octaves=1.55,
    sources=10,
    source="benchmarks/residual_spread.py over the 131 published step times that can be simulated, of 10 sources: "
    "restricted maximum likelihood. They hardly vary precision or checkpointing within a source: 0.05 is the most "
    "that is within 2 of the largest log likelihood, and leaves the structure 0.12",
)
"""Of step times on a CUDA device."""
CPU_TIME = Spread(
    device=math.inf,
    workload=0.04,
    precision=0.2,
    levers=0.1,
    structure=0.15,
    octaves=1.55,
    sources=10,
    source="assumed: no published step times of processors to learn from. A low precision may be emulated, which the "
    "rate of one large product doesn't tell, hence 0.2; twice and 1.25 times of a card's for the others",
)
"""Of step times on a processor."""
CUDA_MEMORY = Spread(
    device=0.0009,
    workload=0.0009,
    precision=0.0,
    levers=0.0,
    structure=0.0024,
    octaves=1.55,
    sources=7,
    source="the 147 residuals of profiles/calibration.json: that of 7 sources' means, and that within them",
)
"""Of reserved memory on a CUDA device."""
CPU_MEMORY = Spread(
    device=0.1,
    workload=0.0,
    precision=0.0,
    levers=0.0,
    structure=0.05,
    octaves=1.55,
    sources=1,
    source="assumed: nobody publishes resident sets of training. A tenth is the bound that the growth of the resident "
    "set is held to, half of it for what differs between structures; one source's weight lets measurements replace it",
)
"""Of a resident set's growth."""


def time_spread(kind: str) -> Spread:
    """For a kind of device, cuda or cpu."""
    return CPU_TIME if kind == "cpu" else CUDA_TIME


def memory_spread(kind: str) -> Spread:
    """For a kind of device, cuda or cpu."""
    return CPU_MEMORY if kind == "cpu" else CUDA_MEMORY


@dataclass(frozen=True, kw_only=True)
class Residual:
    """One measurement against its prediction."""

    config: Config
    """What was measured."""
    workload: str
    """Key of the workload."""
    log_ratio: float
    """Logarithm of measured over predicted."""
    variance: float = 0.0
    """Of the measurement itself."""
    at_least: bool = False
    """Whether the ratio is only known to be larger: it ran out of memory."""


def structure_of(config: Config) -> str:
    """Everything but the micro-batch (and what follows from it and the effective batch), as one word."""
    left_out = {"micro_batch_size", "max_tokens_per_micro_batch", "gradient_accumulation_steps", "effective_batch_size"}
    return config.model_dump_json(exclude=left_out | {"layers_on_card", "embedding_on_card", "overhead_tokens"})


def _levers(config: Config) -> tuple[str, ...]:
    """What a precision's own term is told apart by."""
    if isinstance(config, InferenceConfig):
        return config.precision, config.quantization, config.kv_cache
    return config.precision, config.checkpointing


@dataclass(frozen=True, eq=False)
class _Features:
    """What the kernel looks at, as arrays. [configurations]"""

    workload: NDArray[np.intp]
    precision: NDArray[np.intp]
    levers: NDArray[np.intp]
    structure: NDArray[np.intp]
    octave: Array

    @classmethod
    def of(cls, points: Sequence[tuple[str, Config]]) -> _Features:
        index: dict[tuple[str, ...], int] = {}

        def numbers(keys: list[tuple[str, ...]]) -> NDArray[np.intp]:
            return np.array([index.setdefault(key, len(index)) for key in keys], dtype=np.intp)

        return cls(
            numbers([("workload", w) for w, _ in points]),
            numbers([("precision", c.precision) for _, c in points]),
            numbers([("levers", w, *_levers(c)) for w, c in points]),
            numbers([("structure", w, structure_of(c)) for w, c in points]),
            np.array([math.log2(c.micro_batch_size) for _, c in points], dtype=np.float64),
        )


def _covariance(features: _Features, spread: Spread) -> Array:
    """[configurations, configurations], without the device's term where that is not known before."""

    def same(values: NDArray[np.intp]) -> NDArray[np.bool_]:
        shared: NDArray[np.bool_] = values[:, None] == values[None, :]
        return shared

    apart = np.abs(features.octave[:, None] - features.octave[None, :])
    known = spread.device**2 if math.isfinite(spread.device) else 0.0
    total: Array = (
        known
        + spread.workload**2 * same(features.workload)
        + spread.precision**2 * same(features.precision)
        + spread.levers**2 * same(features.levers)
        + spread.structure**2 * same(features.structure) * np.exp(-apart / spread.octaves)
    )
    return total


@dataclass(frozen=True, eq=False, kw_only=True)
class Beliefs:
    """Log ratios of some configurations: what is believed of each."""

    mean: Array
    """[configurations]"""
    covariance: Array
    """[configurations, configurations] of the ratios, without a new measurement's noise"""
    factor: float
    """What measurements made of all variances: above 1, the simulator is worse here than published."""

    @property
    def standard_deviation(self) -> Array:
        """[configurations]"""
        deviation: Array = np.sqrt(np.maximum(np.diag(self.covariance), 0.0))
        return deviation


def beliefs(
    rows: Sequence[Residual], wanted: Sequence[tuple[str, Config]], spread: Spread, pending: Sequence[int] = ()
) -> Beliefs:
    """What measurements make of the log ratios of ``wanted`` (workload key and configuration).

    ``pending`` are places in ``wanted`` that are being measured: they count as measured at what is believed of them
    ("kriging believer", Ginsbourger et al., "Kriging is well-suited to parallelize optimization", 2010).
    """
    covariance = _covariance(_Features.of([*((r.workload, r.config) for r in rows), *wanted]), spread)
    count = len(rows)
    values = np.array([row.log_ratio for row in rows], dtype=np.float64)
    noise = np.array([max(row.variance, _NUGGET) for row in rows], dtype=np.float64)
    flat = math.isinf(spread.device)
    exact = [i for i, row in enumerate(rows) if not row.at_least]
    for i, row in enumerate(rows):  # one after the other, each on what those before it say
        if not row.at_least:
            continue
        mean, variance, factor = _conditioned(covariance, exact, values, noise, [i], spread.sources, flat=flat)
        site = _site(float(mean[0]), float(variance[0, 0]), row.log_ratio)
        if site is None:
            continue
        values[i], noise[i] = site[0], max(site[1] / factor, _NUGGET)  # it multiplies all variances again below
        exact.append(i)
    places = [count + i for i in range(len(wanted))]
    mean, variance, factor = _conditioned(covariance, exact, values, noise, places, spread.sources, flat=flat)
    if pending:
        values = np.concatenate([values, mean])
        noise = np.concatenate([noise, np.full(len(wanted), _NUGGET)])
        measured = [*exact, *(count + i for i in pending)]
        told = _conditioned(covariance, measured, values, noise, places, spread.sources, flat=flat, factor=factor)
        variance = told[1]
    return Beliefs(mean=mean, covariance=variance, factor=factor)


_NUGGET = 1e-8
"""Least variance of a measurement, 1 in 10,000: two of one configuration would make the matrix singular."""


def _conditioned(
    covariance: Array,
    known: Sequence[int],
    values: Array,
    noise: Array,
    wanted: Sequence[int],
    sources: int,
    *,
    flat: bool,
    factor: float | None = None,
) -> tuple[Array, Array, float]:
    """Mean and covariance of the wanted places given the known ones, and the factor of all variances."""
    own = covariance[np.ix_(wanted, wanted)]
    if not known:
        return np.zeros(len(wanted)), own.copy(), 1.0
    inverse = np.linalg.inv(covariance[np.ix_(known, known)] + np.diag(noise[list(known)]))
    cross = covariance[np.ix_(wanted, known)]
    gain = cross @ inverse
    weight = float(inverse.sum())
    centre = float((inverse @ values[list(known)]).sum()) / weight if flat else 0.0
    off = values[list(known)] - centre
    mean = centre + gain @ off
    variance = own - gain @ cross.T
    if flat:  # the mean itself is only known as well as the measurements tell it
        left = 1 - gain.sum(axis=1)
        variance = variance + np.outer(left, left) / weight
    if factor is None:
        factor = float(sources + off @ inverse @ off) / (sources + len(known) - flat)
    return mean, variance * factor, factor


def _site(mean: float, variance: float, bound: float) -> tuple[float, float] | None:
    """The measurement and its variance that would say as much as "above ``bound``" does of a normal variable.

    None where that is nothing new. Matches the moments of the truncated normal (assumed-density filtering; Minka,
    "Expectation Propagation for approximate Bayesian inference", 2001, section 2).
    """
    deviation = math.sqrt(max(variance, _NUGGET))
    low = (bound - mean) / deviation
    hazard = math.exp(-0.5 * low * low - 0.5 * math.log(2 * math.pi) - float(log_ndtr(-low)))
    shrunk = max(1 - hazard * (hazard - low), 1e-6)  # variance of what is left, relative
    moved = mean + deviation * hazard
    if shrunk > 1 - 1e-6:
        return None
    site = 1 / (1 / (shrunk * deviation**2) - 1 / deviation**2)
    return site * (moved / (shrunk * deviation**2) - mean / deviation**2), site


def chance_below(bound: float, mean: float, standard_deviation: float) -> float:
    """Probability that a normal variable is at most ``bound``."""
    return float(ndtr((bound - mean) / standard_deviation)) if standard_deviation > 0 else float(mean <= bound)
