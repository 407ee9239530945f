"""When nothing fits: the closest configuration, the smallest card that would do, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator

from planner.config import InferenceConfig
from planner.errors import NothingFitsError
from planner.inference.question import InferenceQuestion
from planner.inference.search import InferenceResult
from planner.inference.space import InferenceSpace, conflict
from planner.measured_search import describe
from planner.unfitting import smallest_label_bytes, would_do
from planner.units import GIB, format_bytes


def nothing_fits(question: InferenceQuestion, space: InferenceSpace, result: InferenceResult) -> NothingFitsError:
    """The error that says what would fit."""
    simulator = question.simulator
    closest = result.closest(simulator)
    if closest is None:
        return NothingFitsError(f"nothing fits: {result.trials[0].reason}", smallest_vram_bytes=0)
    assert closest.known is not None
    smallest = smallest_label_bytes(closest, simulator)
    over = closest.known.total_bytes - closest.known.ceiling_bytes
    lines = [
        f"nothing fits: {simulator.workload.spec.model_id} at {question.seq_len} tokens in "
        f"{format_bytes(simulator.ceiling_bytes)} ({simulator.card.name})",
        f"closest: {describe(closest.config)} needs {format_bytes(closest.known.total_bytes)}, "
        f"{format_bytes(max(over, 0))} too much",
        would_do(smallest, on_cpu=simulator.card.kind == "cpu"),
        *_remedies(question, closest.config),
        *_with_more_host_memory(question, result),
    ]
    return NothingFitsError("\n".join(lines), smallest_vram_bytes=smallest, closest=closest.config)


def _remedies(question: InferenceQuestion, closest: InferenceConfig) -> Iterator[str]:
    """Options that would make it fit, each tried."""
    simulator, request = question.simulator, question.request
    words = {"quantization": ("int8", "nf4"), "offload": ("disk",)}
    if simulator.card.kind == "cpu":
        words = {"precision": ("bf16",), "offload": ("disk",)}
    for argument, values in words.items():
        if getattr(request, argument) is not None and argument != "offload":
            continue
        for value in values:
            stays = {"offload": "none", "layers_on_card": None} if argument == "quantization" else {}
            config = simulator.placed(closest.model_copy(update={**stays, "layers_on_card": None, argument: value}))
            if not conflict(config) and _would_fit(question, config):
                yield f"would fit: --{argument} {value}"
                break
    if seq_len := simulator.longest_text(closest):
        yield f"would fit: --seq-len {seq_len}"


def _would_fit(question: InferenceQuestion, config: InferenceConfig) -> bool:
    simulator = question.simulator
    return simulator.host_shortage_bytes(config) <= 0 and simulator.whole_run(config).fits


def _with_more_host_memory(question: InferenceQuestion, result: InferenceResult) -> Iterator[str]:
    """What only the host has no room for, if its card's memory is enough."""
    simulator = question.simulator
    short = [t.config for t in result.trials if simulator.host_shortage_bytes(t.config) > 0]
    for config in short[:1]:
        if simulator.whole_run(config).fits:
            yield f"would fit: --offload {config.offload} --host-ram {-(-simulator.host_bytes(config) // GIB)}GB"
