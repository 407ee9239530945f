"""How far published measurements lay above this simulator's predictions: the margin that a plan keeps free.

``profiles/calibration.json`` holds, for each kind of configuration, the residuals ``measured / predicted - 1`` that
``benchmarks/memory_accuracy.py --calibrate`` found. The margin is their upper quantile for a given risk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from planner.config import Config, InferenceConfig

DEFAULT_RISK = 0.01
"""At most 1 plan in 100 runs out of memory."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    """What to add to reserved memory and context, relative to them."""

    fraction: float
    """Never below zero."""
    reason: str
    """Which measurements it comes from, in a clause."""


def kind_of(config: Config) -> str:
    """The kind of a configuration: which mechanisms of the simulator its prediction rests on."""
    attention = "eager" if config.attention == "eager" else "fused"
    if isinstance(config, InferenceConfig):
        return f"inference, {attention} attention"
    checkpointing = "not checkpointed" if config.checkpointing == "none" else "checkpointed"
    return f"{config.method}, {attention} attention, {checkpointing}"


def margin(config: Config, risk: float = DEFAULT_RISK, *, device: str = "cuda") -> Margin:
    """The margin for a configuration, so that a run needs more with a probability of at most ``risk``.

    The residuals of its own kind decide where there are enough of them for the risk, else those of all kinds; but
    never less than the largest that its own kind showed. ``device`` cpu: residuals of trials on processors, of all
    kinds of training, or of inference.
    """
    if device == "cpu":
        return _cpu_margin("inference" if isinstance(config, InferenceConfig) else "residuals", risk)
    return _margin(kind_of(config), risk)


@cache
def _cpu_margin(field: str, risk: float) -> Margin:
    """Of a process's resident set; ``benchmarks/cpu_memory.py --calibrate`` wrote the residuals of both modes."""
    text = resources.files("planner.profiles").joinpath("cpu_calibration.json").read_text(encoding="utf-8")
    residuals = sorted(json.loads(text)[field].values())
    fraction = max(0.0, upper_quantile(residuals, risk))
    short = "" if len(residuals) >= rows_needed(risk) else ", the largest, for want of more"
    whose = f"{len(residuals)} trials on a processor"
    return Margin(
        fraction=fraction,
        reason=f"{fraction:.2%}: at most {risk:.3g} of runs need more, by the residuals of {whose}{short}",
    )


@cache
def _margin(kind: str, risk: float) -> Margin:
    residuals = _residuals()
    own = residuals.get(kind, ())
    everything = sorted(value for values in residuals.values() for value in values)
    enough = len(own) >= rows_needed(risk)
    fraction = upper_quantile(own if enough else everything, risk)
    if not enough and own:
        fraction = max(fraction, own[-1])
    whose = f"{len(own)} published measurements of its kind ({kind})" if enough else f"all {len(everything)} published"
    if not enough and own:
        whose += f" measurements, and the largest of the {len(own)} of its kind ({kind})"
    elif not enough:
        whose += f" measurements; none is of its kind ({kind})"
    short = "" if len(everything) >= rows_needed(risk) else ", the largest, for want of more"
    reason = f"{max(0.0, fraction):.2%}: at most {risk:.3g} of runs need more, by the residuals of {whose}{short}"
    return Margin(fraction=max(0.0, fraction), reason=reason)


def rows_needed(risk: float) -> int:
    """Residuals from which a quantile for this risk can be told: of fewer, the largest is exceeded more often."""
    return math.ceil(1 / risk - 1e-9) - 1


def upper_quantile(residuals: Sequence[float], risk: float) -> float:
    """The smallest of the sorted residuals that one more of the same distribution exceeds with at most ``risk``.

    The order statistic of rank ``ceil((n + 1) (1 - risk))``, the one-sided bound of split conformal prediction
    (Lei et al., "Distribution-Free Predictive Inference for Regression", 2018, section 2); the largest when there are
    too few. It holds for exchangeable residuals: rows of one source are more alike than that.
    """
    if not residuals:
        return 0.0
    rank = math.ceil((len(residuals) + 1) * (1 - risk) - 1e-9)
    return residuals[min(rank, len(residuals)) - 1]


@cache
def _residuals() -> Mapping[str, Sequence[float]]:
    """Kind to its residuals, sorted."""
    text = resources.files("planner.profiles").joinpath("calibration.json").read_text(encoding="utf-8")
    return {kind: sorted(entry["residuals"].values()) for kind, entry in json.loads(text)["kinds"].items()}
