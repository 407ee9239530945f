"""When nothing fits: the closest configuration, the smallest card that would do, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator

from planner.config import LoraSettings, TrainingConfig
from planner.errors import NothingFitsError
from planner.hardware import all_cards, ceiling_bytes, typical_card
from planner.request import PlanRequest
from planner.search import SearchResult, Trial
from planner.simulation import Simulator
from planner.space import RUNGS, Space
from planner.units import GIB, format_bytes, round_up


def nothing_fits(request: PlanRequest, simulator: Simulator, space: Space, result: SearchResult) -> NothingFitsError:
    """The error that says what would fit."""
    closest = result.closest(simulator)
    if closest is None:  # offloading was asked for, and the host is too small for any configuration
        raise NothingFitsError(f"nothing fits: {result.trials[0].reason}", smallest_vram_bytes=0)
    assert closest.memory is not None
    smallest = _smallest_label_bytes(closest, simulator)
    over = closest.memory.total_bytes - closest.memory.ceiling_bytes
    lines = [
        f"nothing fits: {simulator.workload.spec.model_id} at {space.seq_len} tokens in "
        f"{format_bytes(simulator.ceiling_bytes)} ({simulator.card.name})",
        f"closest: {_describe(closest.config)} needs {format_bytes(closest.memory.total_bytes)}, "
        f"{format_bytes(max(over, 0))} too much"
        + (f"; {closest.reason}" if over <= 0 else "")
        + f" (tried: {', '.join(dict.fromkeys(t.config.method for t in result.trials))})",
        f"smallest card that would do: --vram {smallest // GIB}GB",
        *_remedies(request, simulator, closest),
    ]
    return NothingFitsError("\n".join(lines), smallest_vram_bytes=smallest, closest=closest.config)


def _describe(config: TrainingConfig) -> str:
    parts = [config.method, config.precision, f"checkpointing {config.checkpointing}", config.optimizer]
    if config.offload != "none":
        parts.append(f"offload {config.offload}")
    return f"{', '.join(parts)}, micro-batch {config.micro_batch_size}"


def _smallest_label_bytes(closest: Trial, simulator: Simulator) -> int:
    """The smallest label whose typical card reports enough, as ``--vram`` alone would take it; else the need."""
    assert closest.memory is not None
    need = closest.memory.total_bytes
    for label in sorted({card.label_bytes for card in all_cards()}):
        card, _ = typical_card(label)
        if ceiling_bytes(label, card, named=False)[0] >= need:
            return label
    return round_up(need, GIB)


def _remedies(request: PlanRequest, simulator: Simulator, closest: Trial) -> Iterator[str]:
    """Options that would make it fit, each tried."""
    config = closest.config
    for method in RUNGS[RUNGS.index(config.method) + 1 :] if request.method != "auto" else ():
        quantization = "nf4" if method == "qlora" else "none"
        changed = config.model_copy(
            update={"method": method, "quantization": quantization, "lora": LoraSettings(), "offload": "none"}
        )
        if simulator.memory(changed).fits:
            yield f"would fit: --method {method}"
            break
    seq_len = simulator.model(config).longest_seq_len(
        config.micro_batch_size,
        simulator.budget.allocator_bytes(config),
        accumulate=config.gradient_accumulation_steps > 1,
        limit=config.seq_len,
        multiple=16,
    )
    if seq_len:
        yield f"would fit: --seq-len {seq_len}"
