"""Which configuration is worth the next trial: predictions, corrected by what was measured, against the best so far.

The gain of a trial is what it is expected to add to the best measured speed, relative to it: expected improvement
(Jones, Schonlau and Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998) of a log-normal
speed, times the probability that the configuration fits (Gardner et al., "Bayesian Optimization with Inequality
Constraints", 2014) where the same without what only saves memory does not: that one would be no slower. All are closed
forms of the beliefs in planner/residuals.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic

import numpy as np
from scipy.special import ndtr

from planner.config import C
from planner.monotone import cannot_be_faster, cannot_fit, only_saves
from planner.residuals import Array, Beliefs, Residual, beliefs, chance_below, memory_spread, time_spread

WORTH_A_TRIAL = 0.02
"""Expected gain, relative to the best measured speed, below which no further trial is run."""
DRAWS = 1000
"""Joint draws that the gain of all that is left is averaged over: its standard error is a thirtieth of a deviation."""
NEVER_FITS = 0.00135
"""Chance of fitting below which a configuration is not run: three standard deviations over what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Candidate(Generic[C]):
    """A configuration that could be measured, and what the simulator predicts for it, uncorrected."""

    config: C
    """The configuration."""
    reserved_bytes: int
    """Most that the allocator holds, without context and margin."""
    ceiling_bytes: int
    """What its trial's process may take."""
    context_bytes: int
    """Of that, what lies outside of the allocator."""
    step_ms: float
    """An optimizer step."""
    tokens_per_s: float
    """Tokens of the step's sequences a second."""

    @property
    def log_room(self) -> float:
        """Logarithm of what the allocator may hold over what is predicted."""
        room_bytes = self.ceiling_bytes - self.context_bytes
        return math.log(room_bytes / max(self.reserved_bytes, 1)) if room_bytes > 0 else -math.inf


@dataclass(frozen=True, kw_only=True)
class Evidence(Generic[C]):
    """What is known from measuring, whoever did it."""

    times: Sequence[Residual] = ()
    """Log ratios of step times, of any workload on this device."""
    memories: Sequence[Residual] = ()
    """Log ratios of reserved memory, of any workload on this device."""
    speeds: dict[C, float] = field(default_factory=dict)
    """Tokens a second of what fits under this ceiling."""
    failed: Collection[C] = ()
    """What does not fit under this ceiling."""
    broken: Collection[C] = ()
    """What can't be used for another reason, or failed too often to be tried again."""
    pending: Collection[C] = ()
    """What others are measuring now."""

    @property
    def best(self) -> float:
        """The largest of the speeds; 0 before any."""
        return max(self.speeds.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Outlook(Generic[C]):
    """What is expected of a candidate."""

    candidate: Candidate[C]
    """Which."""
    gain: float
    """Expected gain over the best measured speed, relative; infinite before anything that fits was measured."""
    value: float
    """What candidates are ordered by: the gain, or before anything fits the expected speed."""
    chance: float
    """Probability of fitting."""
    tokens_per_s: float
    """Median of the speed that is believed."""
    closed: str = ""
    """Why it is not to be run, whatever it might gain; empty where it may be."""


@dataclass(frozen=True, kw_only=True)
class Prospects(Generic[C]):
    """What is expected of all that could be measured."""

    outlooks: Sequence[Outlook[C]]
    """Every candidate that neither was nor is being measured: those that may be run first, the best of them first."""
    gain: float
    """Expected gain of the best of all that may be run, if all were: what going on can bring; infinite before
    anything that fits was measured, 0 where nothing is left."""

    @property
    def next(self) -> Outlook[C] | None:
        """The first that may be run, where going on is worth it."""
        first = next(iter(self.outlooks), None)
        return first if first and not first.closed and self.gain >= WORTH_A_TRIAL else None


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is being planned: what the candidates' beliefs depend on beside the evidence."""

    workload: str
    """Key of the workload."""
    kind: str
    """Of the device: cuda or cpu."""


def prospects(candidates: Sequence[Candidate[C]], evidence: Evidence[C], target: Target) -> Prospects[C]:
    """What measuring on is expected to bring."""
    points = [(target.workload, candidate.config) for candidate in candidates]
    pending = [i for i, candidate in enumerate(candidates) if candidate.config in evidence.pending]
    times = beliefs(evidence.times, points, time_spread(target.kind), pending)
    memories = beliefs(evidence.memories, points, memory_spread(target.kind))
    chances = [_chance(candidate, i, memories, evidence) for i, candidate in enumerate(candidates)]
    rivals = _rivals(tuple(candidates))
    found = []
    for i, candidate in enumerate(candidates):
        if not _settled(candidate.config, evidence):
            # what needs less fits wherever its rival does: the two events are nested
            useful = max(chances[i] - max((chances[j] for j in rivals[i]), default=0.0), 0.0)
            found.append((_outlook(candidate, i, times, memories, evidence, chances[i], useful), i))
    found.sort(key=lambda pair: (bool(pair[0].closed), -pair[0].value, pair[0].candidate.reserved_bytes))
    places = [i for outlook, i in found if not outlook.closed]
    gain = math.inf if places and not evidence.best else 0.0
    if places and evidence.best:
        gain = _gain_of_all(candidates, places, rivals, times, memories, evidence)
    return Prospects(outlooks=[outlook for outlook, _ in found], gain=gain)


@lru_cache(maxsize=4)
def _rivals(candidates: tuple[Candidate[Any], ...]) -> tuple[tuple[int, ...], ...]:
    """For each candidate the others that are no slower if they fit: the same without what only saves memory."""
    return tuple(
        tuple(j for j, other in enumerate(candidates) if only_saves(candidate.config, other.config))
        for candidate in candidates
    )


def _chance(candidate: Candidate[C], place: int, memories: Beliefs, evidence: Evidence[C]) -> float:
    """Probability that a candidate fits and can be used."""
    if candidate.config in evidence.speeds:
        return 1.0
    if candidate.config in evidence.broken or candidate.config in evidence.failed:
        return 0.0
    if cannot_fit(candidate.config, evidence.failed):
        return 0.0
    mean, deviation = float(memories.mean[place]), float(memories.standard_deviation[place])
    return chance_below(candidate.log_room, mean, deviation)


def _gain_of_all(
    candidates: Sequence[Candidate[C]],
    places: Sequence[int],
    rivals: Sequence[Sequence[int]],
    times: Beliefs,
    memories: Beliefs,
    evidence: Evidence[C],
) -> float:
    """Expectation of the largest gain, over joint draws: the maximum of correlated variables has no closed form."""
    normal = np.random.default_rng(0)
    everything = range(len(candidates))
    slower = _draws(times, places, normal)
    fits = _draws(memories, everything, normal) <= np.array([candidate.log_room for candidate in candidates])
    for i, candidate in enumerate(candidates):
        if (known := _known_to_fit(candidate, evidence)) is not None:
            fits[:, i] = known
    speeds = np.log([candidates[i].tokens_per_s for i in places]) - slower
    useful = np.stack([fits[:, i] & ~fits[:, list(rivals[i])].any(axis=1) for i in places], axis=1)
    gains = np.where(useful, np.expm1(speeds - math.log(evidence.best)), 0.0)
    return float(np.maximum(gains.max(axis=1), 0.0).mean())


def _known_to_fit(candidate: Candidate[C], evidence: Evidence[C]) -> bool | None:
    """What was measured of it; None where it wasn't."""
    if candidate.config in evidence.speeds:
        return True
    return False if candidate.config in evidence.failed or candidate.config in evidence.broken else None


def _draws(known: Beliefs, places: Sequence[int], normal: np.random.Generator) -> Array:
    """[DRAWS, places] of log ratios."""
    values, vectors = np.linalg.eigh(known.covariance[np.ix_(places, places)])
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    drawn: Array = known.mean[list(places)] + normal.standard_normal((DRAWS, len(places))) @ root.T
    return drawn


def _settled(config: C, evidence: Evidence[C]) -> bool:
    return any(config in known for known in (evidence.speeds, evidence.failed, evidence.broken, evidence.pending))


def _outlook(
    candidate: Candidate[C],
    place: int,
    times: Beliefs,
    memories: Beliefs,
    evidence: Evidence[C],
    chance: float,
    useful: float,
) -> Outlook[C]:
    slower, spread = float(times.mean[place]), float(times.standard_deviation[place])
    log_speed = math.log(candidate.tokens_per_s) - slower
    if evidence.best:
        gain = useful * expected_improvement(log_speed - math.log(evidence.best), spread)
        value = gain
    else:
        gain, value = math.inf, useful * math.exp(log_speed + spread**2 / 2)
    closed = cannot_fit(candidate.config, evidence.failed) or cannot_be_faster(candidate.config, evidence.speeds)
    if not closed and chance < NEVER_FITS:
        over = math.exp(float(memories.mean[place]) - candidate.log_room)
        closed = f"needs {over:.2f} times what is left for it, by far more than predictions are off"
    return Outlook(
        candidate=candidate,
        gain=gain,
        value=value,
        chance=chance,
        tokens_per_s=math.exp(log_speed),
        closed=closed,
    )


def expected_improvement(log_ratio: float, standard_deviation: float) -> float:
    """Expectation of ``max(ratio - 1, 0)`` where the ratio's logarithm is normal with this mean and deviation."""
    if standard_deviation <= 0:
        return max(math.expm1(log_ratio), 0.0)
    d = log_ratio / standard_deviation
    grown = math.exp(log_ratio + standard_deviation**2 / 2) * float(ndtr(d + standard_deviation))
    return max(grown - float(ndtr(d)), 0.0)
