"""When nothing fits: the closest configuration, the smallest card that would do, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.config import C, LoraSettings, TrainingConfig
from planner.errors import NothingFitsError
from planner.hardware import all_cards, ceiling_bytes, typical_card
from planner.levers import conflict
from planner.request import PlanRequest
from planner.search import SearchResult, Trial
from planner.simulation import OnCard, Simulator
from planner.space import Space, rungs
from planner.units import GIB, MIB, format_bytes, round_up
from planner.whole_run import whole_run
from planner.workload import Workload


def nothing_fits(request: PlanRequest, simulator: Simulator, space: Space, result: SearchResult) -> NothingFitsError:
    """The error that says what would fit."""
    closest = result.closest(simulator)
    if closest is None:  # offloading was asked for, and the host is too small for any configuration
        return NothingFitsError(f"nothing fits: {result.trials[0].reason}", smallest_vram_bytes=0)
    remedies = [*_remedies(request, simulator, closest), *_with_more_host_memory(simulator, result)]
    tried = f" (tried: {', '.join(dict.fromkeys(t.config.method for t in result.trials))})"
    return too_large(closest, simulator, simulator.workload, space.seq_len, _describe(closest.config), tried, remedies)


def too_large(
    closest: Trial[C],
    simulator: OnCard,
    workload: Workload,
    seq_len: int,
    described: str,
    tried: str,
    remedies: Iterable[str],
) -> NothingFitsError:
    """The error for what needs least and doesn't fit; ``tried`` is said after its need, ``remedies`` a line each."""
    assert closest.known is not None
    smallest = _smallest_label_bytes(closest, simulator)
    over = closest.known.total_bytes - closest.known.ceiling_bytes
    lines = [
        f"nothing fits: {workload.spec.model_id} at {seq_len} tokens in "
        f"{format_bytes(simulator.ceiling_bytes)} ({simulator.card.name})",
        f"closest: {described} needs {format_bytes(closest.known.total_bytes)}, "
        f"{format_bytes(max(over, 0))} too much" + (f"; {closest.reason}" if over <= 0 else "") + tried,
        _would_do(smallest, on_cpu=simulator.card.kind == "cpu"),
        *remedies,
    ]
    return NothingFitsError("\n".join(lines), smallest_vram_bytes=smallest, closest=closest.config)


def _would_do(smallest_bytes: int, *, on_cpu: bool) -> str:
    if on_cpu:
        return f"smallest ceiling that would do: --vram {smallest_bytes // MIB}MB"
    return f"smallest card that would do: --vram {smallest_bytes // GIB}GB"


def _describe(config: TrainingConfig) -> str:
    parts = [config.method, config.precision, f"checkpointing {config.checkpointing}", config.optimizer]
    if config.offload != "none":
        parts.append(f"offload {config.offload}")
    return f"{', '.join(parts)}, micro-batch {config.micro_batch_size}"


def _smallest_label_bytes(closest: Trial[C], simulator: OnCard) -> int:
    """The smallest label whose typical card reports enough, as ``--vram`` alone would take it; else the need."""
    assert closest.known is not None
    need = closest.known.total_bytes
    if simulator.card.kind == "cpu":
        return round_up(need, MIB)
    for label in sorted({card.label_bytes for card in all_cards()}):
        card, _ = typical_card(label)
        if ceiling_bytes(label, card, named=False)[0] >= need:
            return label
    return round_up(need, GIB)


def _remedies(request: PlanRequest, simulator: Simulator, closest: Trial) -> Iterator[str]:
    """Options that would make it fit, each tried."""
    config = closest.config
    further = rungs("auto", device=simulator.card.kind)
    for method in further[further.index(config.method) + 1 :] if request.method != "auto" else ():
        quantization = "nf4" if method == "qlora" else "none"
        changed = config.model_copy(
            update={"method": method, "quantization": quantization, "lora": LoraSettings(), "offload": "none"}
            | ({"parallelism": "ddp"} if method == "qlora" and config.gpus > 1 else {})
        )
        if whole_run(simulator, changed).fits:
            yield f"would fit: --method {method}"
            break
    yield from _more_cards(simulator, config)
    fused = config.model_copy(update={"loss": "fused-linear"})
    possible = request.loss is None and not simulator.recordings.fused_loss_obstacle
    if possible and whole_run(simulator, fused).fits:
        yield "would fit: --loss fused-linear"
    seq_len = simulator.model(config).longest_seq_len(
        config.micro_batch_size,
        simulator.budget.allocator_bytes(config),
        accumulate=config.gradient_accumulation_steps > 1,
        limit=config.seq_len,
        multiple=16,
    )
    while seq_len and not whole_run(simulator, _shortened(config, seq_len)).fits:
        seq_len -= min(seq_len, max(16, round_up(seq_len // 32, 16)))
    if seq_len:
        yield f"would fit: --seq-len {seq_len}"


def _more_cards(simulator: Simulator, config: TrainingConfig) -> Iterator[str]:
    """The smallest doubling of several cards whose shards would be small enough."""
    if config.parallelism != "fsdp2":
        return
    for gpus in (2 * config.gpus, 4 * config.gpus):
        passes = max(1, config.effective_batch_size // (config.micro_batch_size * gpus))
        batch = passes * config.micro_batch_size * gpus
        changed = {"gpus": gpus, "gradient_accumulation_steps": passes, "effective_batch_size": batch}
        if whole_run(simulator, config.model_copy(update=changed)).fits:
            yield f"would fit: --gpus {gpus}"
            return


def _with_more_host_memory(simulator: Simulator, result: SearchResult) -> Iterator[str]:
    """The smallest configuration that only the host has no room for, if its card's memory is enough."""
    left_out = [t.config for t in result.trials if t.memory is None and not conflict(t.config)]
    short = [config for config in left_out if simulator.host_shortage_bytes(config) > 0]
    for config in sorted(short, key=lambda c: (c.offload != "parameters", c.micro_batch_size))[:1]:
        if whole_run(simulator, config).fits:
            need = -(-simulator.host_bytes(config) // GIB)
            yield f"would fit: --method {config.method} --offload {config.offload} --host-ram {need}GB"


def _shortened(config: TrainingConfig, seq_len: int) -> TrainingConfig:
    tokens = config.max_tokens_per_micro_batch // config.seq_len * seq_len
    return config.model_copy(update={"seq_len": seq_len, "max_tokens_per_micro_batch": tokens})
