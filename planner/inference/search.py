"""The search of inference: one rung of the ladder after the other, until something fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from planner.config import InferenceConfig
from planner.inference.question import InferenceQuestion
from planner.inference.simulation import InferenceSimulator
from planner.inference.space import InferenceSpace, conflict
from planner.search import SearchResult, Trial, explore
from planner.units import format_bytes

InferenceTrial = Trial[InferenceConfig]
InferenceResult = SearchResult[InferenceConfig]


def evaluate(config: InferenceConfig, simulator: InferenceSimulator) -> InferenceTrial:
    """Memory and time of one configuration; where layers are offloaded, with as many on the card as fit."""
    if clash := conflict(config):
        return Trial(config=config, memory=None, time=None, status="pruned", reason=clash)
    config = simulator.placed(simulator.with_prefixes(config))
    if config.micro_batch_size == 1 and config.max_sequences != 1 and _fits(_two(config), simulator):
        reason = "two sequences at once fit, and are never slower"
        return Trial(config=config, memory=None, time=None, status="pruned", reason=reason)
    if (short := simulator.host_shortage_bytes(config)) > 0:
        reason = f"needs {format_bytes(short)} of host memory more than there is"
        return Trial(config=config, memory=None, time=None, status="exceeds", reason=reason)
    least = simulator.at_least(config)
    memory = least or simulator.memory_of_budget(config)
    if memory.fits:
        config = simulator.settled(config)
        return Trial(config=config, memory=memory, time=simulator.time(config), status="fits", reason="")
    over = format_bytes(memory.total_bytes - memory.ceiling_bytes)
    reason = f"{'at least ' if least else ''}{over} over the ceiling"
    return Trial(config=config, memory=memory, time=None, status="exceeds", reason=reason)


Prove = Callable[[InferenceSpace, InferenceResult, int], InferenceResult]
"""Runs a rung's best configurations on a device, given how many trials were run before."""


def _two(config: InferenceConfig) -> InferenceConfig:
    tokens = 2 * config.max_tokens_per_micro_batch
    return config.model_copy(update={"micro_batch_size": 2, "max_tokens_per_micro_batch": tokens})


def _fits(config: InferenceConfig, simulator: InferenceSimulator) -> bool:
    return simulator.at_least(config) is None and simulator.memory_of_budget(config).fits


def search_ladder(
    question: InferenceQuestion, tell: Callable[[str], None], prove: Prove | None = None, **limits: Any
) -> tuple[InferenceSpace, InferenceResult]:
    """Search each rung until something fits; all rungs' trials are kept. ``limits`` are those of ``explore``."""
    everything: InferenceResult = SearchResult()
    simulator = question.simulator
    look = partial(evaluate, simulator=simulator)
    for space in question.spaces():
        tell(f"simulating, {space.rung}")
        found = explore(space, look, simulator.budget, **limits)
        if prove is not None:
            found = prove(space, found, everything.run)
        if not found.measured:
            found.settle(simulator)
        everything.add(found)
        if found.best is not None or found.interrupted:
            break
    return space, everything
