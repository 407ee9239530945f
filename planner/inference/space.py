"""The search space of inference: rungs of a ladder, each giving up more than the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.config import InferenceConfig
from planner.errors import InputError, Problem
from planner.inference import offload
from planner.inference.levers import LEVERS, InferenceContext
from planner.levers import attention
from planner.request import PlanRequest
from planner.space import SpaceOf, refusals

RUNGS: dict[str, tuple[str, ...]] = {
    "whole": (),
    "stretched": ("kv_cache", "prefill_chunk_tokens"),
    "offloaded": ("offload", "prefill_chunk_tokens"),
    "quantized": ("quantization",),
}
"""Rung to the levers whose last resorts are open on it. Only the last one changes answers beyond rounding."""

INSTEAD = ("offload", "quantization")
"""Levers whose usual values are of no use on a rung that opens their last resorts."""


@dataclass(frozen=True, kw_only=True)
class InferenceSpace(SpaceOf[InferenceConfig]):
    """The values that each field of the configuration may take, for one rung."""

    rung: str
    """One of RUNGS."""
    context: InferenceContext
    """What the choices depended on."""
    max_new_tokens: int = 0
    """Tokens written for each request, at most."""
    max_tokens: int | None = None
    """Tokens of a batch as asked for; None: of its longest sequences."""
    prefix_tokens: int = 0
    """Tokens at the beginning of prompts that requests share."""

    def least(self) -> Iterator[dict[str, str]]:
        """The values of every configuration of the smallest batches."""
        return self.smallest()

    def configuration(self, chosen: Mapping[str, str]) -> InferenceConfig:
        """The configuration with these values; where layers are offloaded, which of them isn't decided here."""
        context, size = self.context, int(chosen["micro_batch_size"])
        each = context.seq_len + self.max_new_tokens
        return InferenceConfig.model_validate(
            {
                **chosen,
                "micro_batch_size": size,
                "prefill_chunk_tokens": int(chosen["prefill_chunk_tokens"]),
                "seq_len": context.seq_len,
                "max_tokens_per_micro_batch": self.max_tokens or size * each,
                "max_sequences": context.max_sequences,
                "max_new_tokens": self.max_new_tokens,
                "prefix_tokens": self.prefix_tokens,
            }
        )


def conflict(config: InferenceConfig) -> str | None:
    """Why a configuration's values don't go together, or None."""
    if config.prefill_chunk_tokens and config.kv_cache in ("quantized", "offloaded"):
        return f"prompts are read in one pass into a cache that is {config.kv_cache}"
    if config.quantization == "int8-dynamic" and config.precision != "fp32":
        return f"int8-dynamic takes and gives fp32, not {config.precision}"
    if config.prefix_tokens and config.kv_cache != "dynamic":
        return f"shared beginnings are kept in a dynamic cache, not in a {config.kv_cache} one"
    if config.offload != "none" and config.kv_cache == "offloaded":
        return "weights and cache would wait for the same link"
    return offload.conflict(config) or attention.conflict(config.attention, config.precision)


def make_space(request: PlanRequest, context: InferenceContext, rung: str, **fixed: int | None) -> InferenceSpace:
    """What the request leaves open on a rung. Raises InputError when it names a value that can't be used here."""
    problems: list[Problem] = []
    values: dict[str, Sequence[str]] = {}
    for lever in LEVERS:
        choices = lever.choices(context)
        named = _named(request, lever.field)
        if named is None:
            last = [c.value for c in choices if c.valid and c.last_resort and lever.field in RUNGS[rung]]
            swept = [c.value for c in choices if c.valid and c.swept]
            values[lever.field] = last if last and lever.field in INSTEAD else [*swept, *last]
            continue
        problems += refusals(_argument(lever.field), named, choices)
        values[lever.field] = list(named)
    if problems:
        raise InputError(problems)
    return InferenceSpace(rung=rung, context=context, values=values, **fixed)  # type: ignore[arg-type]


def _argument(field: str) -> str:
    return "prefill_chunk" if field == "prefill_chunk_tokens" else field


def _named(request: PlanRequest, field: str) -> Sequence[str] | None:
    if field == "micro_batch_size":
        return None
    if field == "prefill_chunk_tokens":
        return None if request.prefill_chunk is None else (str(request.prefill_chunk),)
    named: Sequence[str] | None = getattr(request, field)
    return named


def spaces(request: PlanRequest, context: InferenceContext, **fixed: int | None) -> Iterator[InferenceSpace]:
    """The space of each rung, in order; one that is like an earlier one is left out."""
    seen: list[Mapping[str, Sequence[str]]] = []
    for rung in RUNGS:
        space = make_space(request, context, rung, **fixed)
        if space.values not in seen:
            seen.append(space.values)
            yield space
