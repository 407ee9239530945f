"""What one measurement settles about others without running them: more of the same needs more, saving costs time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.config import C, Config, InferenceConfig, passes_of
from planner.inference.levers import LEVERS as INFERENCE_LEVERS
from planner.levers import LEVERS, Lever

ONLY_SAVES = ("checkpointing", "offload")
"""Levers whose every step down in memory is more work for the same arithmetic: recomputation, or transfers."""
_BATCH = ("micro_batch_size", "max_tokens_per_micro_batch", "overhead_tokens")
_NOT_A_LEVER = (*_BATCH, "gradient_accumulation_steps", "effective_batch_size")


def _below(lever: Lever) -> frozenset[tuple[str, str]]:
    """Pairs (less, more) of a lever's values, transitively."""
    pairs = set(lever.lowers_memory)
    while True:
        further = {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs
        if not further:
            return frozenset(pairs)
        pairs |= further


_PAIRS = {lever.field: _below(lever) for lever in LEVERS}
_INFERENCE_PAIRS = {lever.field: _below(lever) for lever in INFERENCE_LEVERS}


def _pairs(config: Config) -> Mapping[str, frozenset[tuple[str, str]]]:
    return _INFERENCE_PAIRS if isinstance(config, InferenceConfig) else _PAIRS


def _only_lower_memory(less: C, more: C, fields: Iterable[str]) -> list[str] | None:
    """The fields in which ``less`` claims to need less than ``more``; None when they differ in any other way."""
    lowered, pairs = [], _pairs(less)
    for name in type(less).model_fields:
        one, other = getattr(less, name), getattr(more, name)
        if name in _NOT_A_LEVER or one == other:
            continue
        if name not in fields or (one, other) not in pairs[name]:
            return None
        lowered.append(name)
    return lowered


def _accumulates_no_less(less: C, more: C) -> bool:
    """Whether gradients that stay from one micro-batch to the next can't make the smaller one need more."""
    return passes_of(less) == 1 or passes_of(more) > 1


def cannot_fit(config: C, failed: Iterable[C]) -> str:
    """Why a configuration needs at least as much memory as one that did not fit; empty where nothing says so."""
    for other in failed:
        if config.micro_batch_size < other.micro_batch_size or not _accumulates_no_less(other, config):
            continue
        lowered = _only_lower_memory(other, config, _pairs(config))
        if lowered is None or config == other:
            continue
        less = ", ".join(f"{name} {getattr(other, name)}" for name in lowered)
        return f"micro-batch {other.micro_batch_size}{f' with {less}' if less else ''} did not fit"
    return ""


def only_saves(less: C, more: C) -> bool:
    """Whether two configurations differ in nothing but what costs time to save memory, which ``more`` goes without."""
    return less.micro_batch_size == more.micro_batch_size and bool(_only_lower_memory(less, more, ONLY_SAVES))


def cannot_be_faster(config: C, measured: Iterable[C]) -> str:
    """Why a lever only costs time: without it the same micro-batch fits, as was measured; empty where it may buy.

    A larger micro-batch of the other structure that ran shows that this one's would.
    """
    for other in measured:
        if config.micro_batch_size > other.micro_batch_size or not _accumulates_no_less(config, other):
            continue
        lowered = _only_lower_memory(config, other, ONLY_SAVES)
        if lowered:
            without = ", ".join(f"{name} {getattr(other, name)}" for name in lowered)
            return f"micro-batch {other.micro_batch_size} fits with {without}: saving memory buys no batch here"
    return ""
