"""What a search on a device knows: the study's trials, whoever ran them, and what was kept from before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import geometric_mean
from typing import Any, Generic

from planner.config import C, passes_of
from planner.expected_gain import Candidate, Evidence, Target
from planner.measure.protocol import ABOUT_THE_CONFIGURATION, BAD_REQUEST, ERROR, OUT_OF_MEMORY, Measurement
from planner.measurements import Measured, MeasurementStore, log_noise, memory_residuals, relevant, time_residuals
from planner.search import SearchSpace
from planner.study import Choice, SharedStudy

_SAME_AGAIN = frozenset({ERROR, BAD_REQUEST})
"""Failures of the code: they would come again. The others say something about the moment: tried once more."""
_ABOUT_IT = ABOUT_THE_CONFIGURATION | OUT_OF_MEMORY
"""What settles a configuration for this search."""


class Knowledge(Generic[C]):
    """Of one search; what others find out meanwhile is in it at the next look."""

    def __init__(
        self,
        space: SearchSpace[C],
        candidates: Sequence[Candidate[C]],
        target: Target,
        store: MeasurementStore[C],
        study: SharedStudy,
        exact_ceiling: Callable[[C], int] | None = None,
    ) -> None:
        self.candidates: dict[C, Candidate[C]] = {candidate.config: candidate for candidate in candidates}
        self._exact_ceiling: Callable[[C], int] | None = exact_ceiling
        self._settled: set[C] = set()
        self.target, self.study = target, study
        self.began = time.time()
        self.choices: dict[C, Choice] = {space.configuration(choice): choice for choice in _choices(space)}
        self._configs: dict[tuple[tuple[str, str], ...], C] = {
            key_of(choice): config for config, choice in self.choices.items()
        }
        self.kept: list[Measured[C]] = relevant(store.rows(), target.workload)
        self.unreadable = store.unreadable
        self._share_kept()

    def config(self, choice: Choice) -> C:
        """The configuration of a choice."""
        return self._configs[key_of(choice)]

    def settle(self, config: C) -> bool:
        """Replace a candidate's ceiling by its exact one, which takes seconds to find; whether that was still to do."""
        if self._exact_ceiling is None or config in self._settled:
            return False
        self._settled.add(config)
        exact = self._exact_ceiling(config)
        self.candidates[config] = replace(self.candidates[config], ceiling_bytes=exact)
        return True

    def row(self, candidate: Candidate[C], measurement: Measurement) -> Measured[C]:
        """What is kept of a candidate's measurement."""
        return Measured(
            workload=self.target.workload,
            config=candidate.config,
            ceiling_bytes=candidate.ceiling_bytes,
            predicted_reserved_bytes=candidate.reserved_bytes,
            predicted_step_ms=candidate.step_ms,
            measurement=measurement,
        )

    def _share_kept(self) -> None:
        """Tell the study what was measured before and holds here, so that every worker has it."""
        known = {(key_of(told.choice), told.measurement.to_json()) for told in self.study.trials() if told.measurement}
        for row in self.kept:
            if row.workload != self.target.workload or row.config not in self.candidates:
                continue
            self.settle(row.config)
            candidate = self.candidates[row.config]
            if not row.answers(candidate.ceiling_bytes):
                continue
            choice = self.choices[row.config]
            if (key_of(choice), row.measurement.to_json()) not in known:
                self.study.add_kept(choice, row.measurement, over_bytes=over_bytes(row.measurement, candidate))

    def _told(self) -> Iterator[tuple[C, Measurement | None, float]]:
        for told in self.study.trials():
            config = self._configs.get(key_of(told.choice))
            if config in self.candidates:
                yield config, told.measurement, told.since

    def results(self) -> dict[C, list[Measurement]]:
        """What was measured of each candidate and holds under this ceiling, in order."""
        found: dict[C, list[Measurement]] = {}
        for config, measurement, _ in self._told():
            if measurement and measurement.status in _ABOUT_IT:
                found.setdefault(config, []).append(measurement)
        return found

    def failures(self) -> dict[C, list[Measurement]]:
        """Trials since this search began that say nothing about their configuration."""
        found: dict[C, list[Measurement]] = {}
        for config, measurement, since in self._told():
            told_before = since < self.began
            if measurement and not told_before and measurement.status not in _ABOUT_IT:
                found.setdefault(config, []).append(measurement)
        return found

    def evidence(self) -> Evidence[C]:
        """All that is known now, from all workers and from before."""
        results = self.results()
        last = {config: measurements[-1] for config, measurements in results.items()}
        broken = {config for config, m in last.items() if not m.ok and m.status not in OUT_OF_MEMORY}
        failures = self.failures()
        broken |= {c for c, failed in failures.items() if len(failed) > 1 or failed[-1].status in _SAME_AGAIN}
        rows = self._all_rows(results)
        context = next(iter(self.candidates.values())).context_bytes if self.candidates else 0
        return Evidence(
            times=time_residuals(rows, self._predict),
            memories=memory_residuals(rows, context, self._predict),
            speeds={config: typical_speed(results[config]) for config, m in last.items() if m.ok},
            failed=[config for config, m in last.items() if m.status in OUT_OF_MEMORY],
            broken=broken,
            pending={config for config, measurement, _ in self._told() if measurement is None},
        )

    def _all_rows(self, results: Mapping[C, Sequence[Measurement]]) -> list[Measured[C]]:
        """Rows kept from before, and the study's that are not among them."""
        kept = {(row.config, row.measurement.to_json()) for row in self.kept}
        return self.kept + [
            self.row(self.candidates[config], measurement)
            for config, measurements in results.items()
            for measurement in measurements
            if (config, measurement.to_json()) not in kept
        ]

    def _predict(self, row: Measured[C]) -> tuple[int, float] | None:
        """What the simulator says now of what a row measured: rates may have been probed again since."""
        candidate = self.candidates.get(row.config) if row.workload == self.target.workload else None
        return (candidate.reserved_bytes, candidate.step_ms) if candidate else None

    def noise(self, config: C) -> float:
        """Standard error of the logarithm of a configuration's speed, from the passes of all its measurements."""
        measured = [m for m in self.results().get(config, ()) if m.ok]
        errors = [log_noise(m, passes_of(config)) for m in measured]
        return math.hypot(*errors) / len(errors) if errors else 0.0


def _choices(space: SearchSpace[Any]) -> Iterator[Choice]:
    for combination in product(*space.values.values()):
        yield dict(zip(space.values, combination, strict=True))


def key_of(choice: Choice) -> tuple[tuple[str, str], ...]:
    """A choice as a key, in any order of its fields."""
    return tuple(sorted(choice.items()))


def typical_speed(measurements: Sequence[Measurement]) -> float:
    """Geometric mean of those that ran."""
    speeds = [m.tokens_per_s for m in measurements if m.ok and m.tokens_per_s]
    if len(speeds) < 2:
        return next(iter(speeds), 0.0)
    return geometric_mean(speeds)


def over_bytes(measurement: Measurement, candidate: Candidate[Any]) -> float:
    """By how much it is over its ceiling, as far as is known; at most zero for what ran."""
    if measurement.process_bytes is None:
        return 0.0
    return float(measurement.process_bytes - candidate.ceiling_bytes)
