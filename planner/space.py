"""The search space: the configurations that a request leaves open, and why each lever's values are in or out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic

from planner.config import C, LoraSettings, TrainingConfig
from planner.errors import InputError, Problem
from planner.levers import LEVERS, Choice, Context, conflict
from planner.request import PlanRequest
from planner.units import round_up

DEFAULT_EFFECTIVE_BATCH_SIZE = 32
"""Sequences for each optimizer step when the request doesn't say: the usual value of fine-tuning recipes."""
LARGEST_MICRO_BATCH = 512
"""Micro-batches above this gain no speed on any card (matrix products are saturated well below)."""
RUNGS = ("full", "lora", "qlora")
"""The method ladder: each rung gives up more than the one before."""


@dataclass(frozen=True, kw_only=True)
class SpaceOf(Generic[C]):
    """Fields of a kind of configuration with the values that each may take."""

    values: Mapping[str, Sequence[str]]
    """Configuration field to its values, in the levers' order."""

    @property
    def size(self) -> int:
        """Number of configurations."""
        return math.prod(map(len, self.values.values()))

    def configurations(self) -> Iterator[C]:
        """Every configuration."""
        return map(self.configuration, _combinations(self.values))

    def configuration(self, chosen: Mapping[str, str]) -> C:
        """The configuration with these values."""
        raise NotImplementedError

    def smallest(self) -> Iterator[dict[str, str]]:
        """The values of every configuration of the two smallest micro-batches.

        Two sequences before one: they need no less, and where one is a kind apart it isn't recorded unless it must be.
        """
        sizes = sorted(self.values["micro_batch_size"], key=int)[1::-1]
        return _combinations({**self.values, "micro_batch_size": sizes})


def _combinations(values: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    return (dict(zip(values, combination, strict=True)) for combination in product(*values.values()))


@dataclass(frozen=True, kw_only=True)
class Space(SpaceOf[TrainingConfig]):
    """The values that each field of the configuration may take, for one rung of the ladder."""

    context: Context
    """What the choices depended on."""
    seq_len: int
    """Longest sequence, in tokens."""

    def least(self) -> Iterator[dict[str, str]]:
        """The values of every possible configuration than which no other claims to need less memory.

        At the smallest micro-batches. What fits nowhere among these fits nowhere.
        """
        for chosen in self.smallest():
            if self._is_possible(chosen) and not any(map(self._is_possible, self._below(chosen))):
                yield chosen

    def _below(self, chosen: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """What one change of one lever claims to lower the memory to."""
        for lever in LEVERS:
            for better, worse in lever.lowers_memory:
                if chosen.get(lever.field) == worse and better in self.values[lever.field]:
                    yield {**chosen, lever.field: better}

    def _is_possible(self, chosen: Mapping[str, str]) -> bool:
        return not conflict(self.configuration(chosen))

    def configuration(self, chosen: Mapping[str, str]) -> TrainingConfig:
        """The configuration with these values."""
        effective, micro = self.context.effective_batch_size, int(chosen["micro_batch_size"])
        fields = {name: value for name, value in chosen.items() if name != "micro_batch_size"}
        return TrainingConfig.model_validate(
            {
                **fields,
                "micro_batch_size": micro,
                "seq_len": self.seq_len,
                "max_tokens_per_micro_batch": micro * self.seq_len * self.context.sequences_per_sample,
                "gradient_accumulation_steps": effective // (micro * self.context.gpus),
                "effective_batch_size": effective,
                "gpus": self.context.gpus,
                "lora": None if self.context.method == "full" else LoraSettings(),
            }
        )


def rungs(method: str, *, device: str = "cuda") -> tuple[str, ...]:
    """The rungs that a request's method allows, in order; a processor has no quantized base."""
    allowed = RUNGS if method == "auto" else (method,)
    return tuple(rung for rung in allowed if device != "cpu" or rung != "qlora")


def effective_batch_size(request: PlanRequest, seq_len: int) -> tuple[int, str]:
    """Sequences for each optimizer step, and why. Every card has the same number of them."""
    gpus = request.gpus
    if request.batch_size is not None:
        return request.batch_size, "as asked for"
    if request.batch_tokens is not None:
        size = max(gpus, request.batch_tokens // seq_len // gpus * gpus)
        among = f", as many for each of {gpus} cards" if gpus > 1 else ""
        return size, f"{request.batch_tokens} tokens are {size} sequences of {seq_len}{among}"
    usual = "the usual size for fine-tuning"
    size = round_up(DEFAULT_EFFECTIVE_BATCH_SIZE, gpus)
    if size > DEFAULT_EFFECTIVE_BATCH_SIZE:
        usual += f", {DEFAULT_EFFECTIVE_BATCH_SIZE}, rounded up to a multiple of {gpus} cards"
    return size, f"{usual}; --batch-size changes it"


def has_last_resort(request: PlanRequest, context: Context) -> bool:
    """Whether there is something to try when nothing that is swept fits, in what the request leaves open."""
    unnamed = [lever for lever in LEVERS if getattr(request, lever.field, None) is None]
    return any(choice.valid and choice.last_resort for lever in unnamed for choice in lever.choices(context))


def make_space(request: PlanRequest, context: Context, seq_len: int, *, last_resort: bool = False) -> Space:
    """What the request leaves open. Raises InputError when it names a value that can't be used here.

    ``last_resort``: of a lever that has such values, these alone.
    """
    problems: list[Problem] = []
    values: dict[str, Sequence[str]] = {}
    for lever in LEVERS:
        choices = lever.choices(context)
        named = getattr(request, lever.field, None)
        if lever.field in ("method", "micro_batch_size") or named is None:
            last = [choice.value for choice in choices if last_resort and choice.valid and choice.last_resort]
            values[lever.field] = last or [choice.value for choice in choices if choice.valid and choice.swept]
            continue
        if lever.field == "quantization":  # a consequence of the method, which request.py has checked
            open_ones = [choice.value for choice in choices if choice.value in named]
            values[lever.field] = open_ones or [choice.value for choice in choices if choice.swept]
            continue
        problems += refusals(lever.field, named, choices)
        values[lever.field] = list(named)
    if problems:
        raise InputError(problems)
    return Space(context=context, seq_len=seq_len, values=values)


def refusals(argument: str, named: Sequence[str], choices: Sequence[Choice]) -> Iterator[Problem]:
    """What is wrong with the values that a request names for a lever."""
    known = {choice.value: choice for choice in choices}
    valid = ", ".join(choice.value for choice in choices if choice.valid)
    for value in named:
        choice = known.get(value)
        if choice is not None and not choice.valid:
            yield Problem(argument=argument, message=f"got {value!r}: {choice.reason}; accepted here: {valid}")
