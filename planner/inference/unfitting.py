"""When nothing fits: the closest configuration, the smallest card that would do, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.config import InferenceConfig
from planner.errors import NothingFitsError
from planner.inference.levers import LEVERS
from planner.inference.question import InferenceQuestion
from planner.inference.search import InferenceResult
from planner.inference.space import conflict
from planner.measured_search import describe
from planner.unfitting import too_large
from planner.units import GIB

_TRIED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cuda": {"quantization": ("int8", "nf4"), "offload": ("disk",)},
    "cpu": {"precision": ("bf16",), "offload": ("disk",)},
}
"""Kind of card to the options that may make something fit, and that aren't swept."""


def nothing_fits(question: InferenceQuestion, result: InferenceResult) -> NothingFitsError:
    """The error that says what would fit."""
    simulator = question.simulator
    closest = result.closest(simulator)
    if closest is None:  # the host is too small for any configuration
        return NothingFitsError(f"nothing fits: {result.trials[0].reason}", smallest_vram_bytes=0)
    remedies = [*_remedies(question, closest.config), *_with_more_host_memory(question, result)]
    described = describe(closest.config)
    return too_large(closest, simulator, simulator.workload, question.seq_len, described, "", remedies)


def _remedies(question: InferenceQuestion, closest: InferenceConfig) -> Iterator[str]:
    """Options that would make it fit, each tried; a value that was named already was of no use."""
    simulator, request = question.simulator, question.request
    valid = {lever.field: {c.value for c in lever.choices(question.context) if c.valid} for lever in LEVERS}
    for argument, values in _TRIED[simulator.card.kind].items():
        for value in values:
            named = value in (getattr(request, argument) or ())
            if not named and value in valid[argument] and _would_fit(question, _changed(closest, argument, value)):
                yield f"would fit: --{argument} {value}"
                break
    seq_len = simulator.longest_text(closest)
    if seq_len and _would_fit(question, closest.model_copy(update={"seq_len": seq_len})):
        yield f"would fit: --seq-len {seq_len}"


def _changed(config: InferenceConfig, argument: str, value: str) -> InferenceConfig:
    """With one other value; quantized weights stay where they are."""
    stays = {"offload": "none"} if argument == "quantization" else {}
    return config.model_copy(update={**stays, "layers_on_card": None, "embedding_on_card": True, argument: value})


def _would_fit(question: InferenceQuestion, config: InferenceConfig) -> bool:
    simulator = question.simulator
    if conflict(config):
        return False
    config = simulator.placed(config)
    return simulator.host_shortage_bytes(config) <= 0 and simulator.whole_run(config).fits


def _with_more_host_memory(question: InferenceQuestion, result: InferenceResult) -> Iterator[str]:
    """What only the host has no room for, if its card's memory is enough."""
    simulator = question.simulator
    possible = (trial.config for trial in result.trials if trial.memory is None and not conflict(trial.config))
    config = next((config for config in possible if simulator.host_shortage_bytes(config) > 0), None)
    if config is not None and simulator.whole_run(config).fits:
        cache = config.kv_cache == "offloaded"
        option = "--kv-cache offloaded" if cache else f"--offload {config.offload}"
        yield f"would fit: {option} --host-ram {-(-simulator.host_bytes(config) // GIB)}GB"
