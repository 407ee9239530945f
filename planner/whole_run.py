"""The peak of a whole run of a configuration: every phase, and an epoch of batches of different lengths.

A search looks at two optimizer steps of the largest batch. What it chooses is then held against the whole run.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner import cache
from planner.budget import PARTS, Budget, Memory
from planner.config import Config, TrainingConfig
from planner.lengths import Lengths, assumed_lengths
from planner.memory.epoch import EpochPeak, epoch_steps, replay_epoch
from planner.memory.life import Life, replay_life

if TYPE_CHECKING:
    from planner.measure.protocol import Measurement
    from planner.simulation import Simulator

ASSUMED_LIMITS = {"patience": 12, "max_events": 500_000}
"""How far an epoch of assumed lengths is replayed."""
GIVEN_LIMITS = {"patience": 24, "max_events": 4_000_000}
"""How far an epoch of the user's own lengths is replayed."""


def whole_run(simulator: Simulator, config: TrainingConfig, *, epoch: bool = True) -> Memory:
    """The largest of all phases, with the peak of each; without ``epoch`` of batches of one shape alone."""
    life, steps = life_of(simulator, config), simulator.memory_of_budget(config)
    phases = {
        name: {"peak_allocated_bytes": peak.allocated_bytes, "peak_reserved_bytes": peak.reserved_bytes}
        for name, peak in life.phases.items()
    }
    varied = epoch_of(simulator, config) if epoch else None
    if varied is not None:
        phases["epoch"] = {
            "peak_allocated_bytes": varied.allocated_bytes,
            "peak_reserved_bytes": varied.reserved_bytes,
        }
    parts = dict(life.breakdown)
    parts["activations"] += parts.pop("inputs")
    phases_bytes = max(p["peak_reserved_bytes"] for p in phases.values())
    return simulator.budget.memory(
        config,
        allocated_bytes=max(steps.peak_allocated_bytes, *(p["peak_allocated_bytes"] for p in phases.values())),
        reserved_bytes=max(steps.peak_reserved_bytes, simulator.corrected_bytes(config, phases_bytes)),
        breakdown={name: parts[name] for name in PARTS},
        phases=phases,
    )


def later_bytes(simulator: Simulator, config: TrainingConfig) -> int:
    """What a whole run reserves beyond the two steps of the largest batch, which is what a trial runs."""
    run, steps = whole_run(simulator, config), simulator.memory(config)
    return max(0, run.peak_reserved_bytes - steps.peak_reserved_bytes)


def measured_run(simulator: Simulator, config: TrainingConfig, measured: Measurement) -> Memory:
    """The whole run by what a trial measured."""
    run, steps = whole_run(simulator, config), simulator.memory(config)
    return run_by_measured(simulator.budget, config, run=run, trial=steps, measured=measured)


def run_by_measured(budget: Budget, config: Config, *, run: Memory, trial: Memory, measured: Measurement) -> Memory:
    """What the simulator says that a run's other phases add to what it says of a trial, on top of what that measured.

    What the process held beyond the allocator is the context.
    """
    assert measured.peak_allocated_bytes is not None and measured.peak_reserved_bytes is not None
    assert measured.process_bytes is not None
    more_allocated = measured.peak_allocated_bytes - trial.peak_allocated_bytes
    more_reserved = measured.peak_reserved_bytes - trial.peak_reserved_bytes
    later = {
        name: {
            "peak_allocated_bytes": max(0, peaks["peak_allocated_bytes"] + more_allocated),
            "peak_reserved_bytes": max(0, peaks["peak_reserved_bytes"] + more_reserved),
        }
        for name, peaks in run.phases.items()
    }
    seen = {name: dict(peaks) for name, peaks in measured.phases.items() if name in run.phases}
    return budget.memory(
        config,
        allocated_bytes=max(run.peak_allocated_bytes + more_allocated, measured.peak_allocated_bytes),
        reserved_bytes=max(run.peak_reserved_bytes + more_reserved, measured.peak_reserved_bytes),
        breakdown=run.breakdown,
        phases={**later, **seen},
        context_bytes=max(0, measured.process_bytes - measured.peak_reserved_bytes),
    )


def life_of(simulator: Simulator, config: TrainingConfig) -> Life:
    """Loading, first step, steady step, evaluation, resume: at the longest length and the largest micro-batch."""

    def replay() -> Life:
        shape = (config.micro_batch_size, config.seq_len)
        return replay_life(simulator.model(config), shape, accumulate=config.gradient_accumulation_steps > 1)

    return cache.remembered("lives", _key(simulator, config), replay)


def epoch_of(simulator: Simulator, config: TrainingConfig) -> EpochPeak | None:
    """An epoch over the lengths that the user gave, or assumed ones; None where every shape would need a recording."""
    if not simulator.model(config).is_polynomial((config.micro_batch_size, config.seq_len)):
        return None
    lengths, limits = lengths_of(simulator, config)
    digest = hashlib.sha256(repr((lengths.tokens, simulator.seed)).encode()).hexdigest()

    def replay() -> EpochPeak:
        targets = simulator.workload.target_seq_len is not None
        sequences = simulator.workload.facts.sequences_per_sample
        steps = epoch_steps(
            lengths.tokens, config, seed=simulator.seed, full_targets=targets, sequences_per_sample=sequences
        )
        return replay_epoch(simulator.model(config), steps, **limits)

    return cache.remembered("epochs", {**_key(simulator, config), "lengths": digest, **limits}, replay)


def lengths_of(simulator: Simulator, config: TrainingConfig) -> tuple[Lengths, dict[str, int]]:
    """The lengths of the epoch, and how far it is replayed."""
    if simulator.lengths is not None:
        return simulator.lengths, GIVEN_LIMITS
    return assumed_lengths(config.seq_len), ASSUMED_LIMITS


def epoch_reason(simulator: Simulator, config: TrainingConfig) -> str:
    """Which lengths the plan holds for, and how far they were replayed, in a clause."""
    lengths, limits = lengths_of(simulator, config)
    varied = epoch_of(simulator, config)
    if varied is None:
        return "its sizes follow no polynomial of batch and length: looked at with every sample at the longest length"
    if varied.whole:
        return f"{lengths.reason}; the whole epoch of {varied.steps} steps was replayed"
    rule = f"reserved memory had not risen for {limits['patience']} steps"
    if varied.steps - varied.last_rise < limits["patience"]:
        rule = f"{limits['max_events']:,} allocations and frees"
    return f"{lengths.reason}; {varied.steps} steps ({varied.micro_batches} micro-batches) were replayed, until {rule}"


def _key(simulator: Simulator, config: TrainingConfig) -> dict[str, Any]:
    """Everything that a replay depends on."""
    recordings = simulator.recordings
    return {
        **recordings.key(config),
        "config": config.model_dump(mode="json"),
        "settings": asdict(simulator.model(config).settings),
    }
