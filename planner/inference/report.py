"""Reasons, alternatives and tables of an inference plan, in the rows that people and files read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.config import InferenceConfig
from planner.inference.levers import LEVERS
from planner.inference.question import InferenceQuestion
from planner.inference.search import InferenceTrial
from planner.inference.simulation import PREFIXES_KEPT, InferenceSimulator
from planner.inference.space import InferenceSpace, conflict
from planner.plans import MEMORY_COLUMNS, Reason
from planner.report import LENGTHS, lever_row
from planner.units import format_bytes

STRUCTURE = ("precision", "quantization", "attention", "offload", "kv_cache", "prefill_chunk_tokens")
"""Fields in which configurations differ by more than their batch."""
_RUNG_REASONS = {
    "whole": "",
    "stretched": "nothing fits with whole prompts and the cache on the card; ",
    "offloaded": "nothing fits with all weights on the card; ",
    "quantized": "nothing fits with weights as they are, on the card or in host memory; ",
}
_SHOWN_QUANTIZED = {"cuda": ("int8", "nf4"), "cpu": ("int8-dynamic",)}


def reasons_of(config: InferenceConfig, question: InferenceQuestion, space: InferenceSpace) -> Iterator[Reason]:
    """Why each field of the chosen configuration has its value."""
    for lever in LEVERS:
        value = getattr(config, lever.field)
        options = space.values[lever.field]
        said = lever.explain(str(value), space.context)
        if lever.field == "micro_batch_size":
            said = _batch_reason(config, question, space)
        elif lever.is_last_resort(str(value), space.context):
            said = f"{_RUNG_REASONS[space.rung]}{said}"
        elif len(options) > 1:
            said = f"the fastest that fits of {', '.join(options)}: {said}"
        yield Reason(field=lever.field, value=value, reason=said)
    if config.layers_on_card is not None:
        layers = question.simulator.facts.layers
        reason = f"as many of {layers} as fit; the others come to the card for every batch"
        reason = "all of them" if config.layers_on_card == layers else reason
        yield Reason(field="layers_on_card", value=config.layers_on_card, reason=reason)
    if not config.embedding_on_card:
        reason = "the table of token embeddings waits in host memory: of it only the vectors of a batch's tokens come"
        yield Reason(field="embedding_on_card", value=False, reason=reason)
    each = "prompt and new tokens" if config.max_new_tokens else "tokens"
    reason = f"batch times longest sequence ({each}): shorter texts go in larger batches"
    if space.max_tokens is not None:
        reason = "as asked for"
    yield Reason(field="max_tokens_per_micro_batch", value=config.max_tokens_per_micro_batch, reason=reason)
    reason = "what a batch costs beside its tokens: sorted texts are cut where that saves more padding"
    yield Reason(field="overhead_tokens", value=config.overhead_tokens, reason=reason)
    if config.prefix_tokens:
        yield Reason(
            field="prefix_tokens", value=config.prefix_tokens, reason="as asked for: computed once, and copied"
        )
        reason = f"room for the keys and values of {PREFIXES_KEPT} beginnings; beyond it the least recently used go"
        yield Reason(field="prefix_cache_bytes", value=config.prefix_cache_bytes, reason=reason)
    if config.max_sequences is not None:
        yield Reason(field="max_sequences", value=config.max_sequences, reason="as many as there are at once")


def _batch_reason(config: InferenceConfig, question: InferenceQuestion, space: InferenceSpace) -> str:
    if space.context.micro_batch_size is not None:
        return "as asked for"
    larger = [int(b) for b in space.values["micro_batch_size"] if int(b) > config.micro_batch_size]
    if not larger:
        return "all that there are at once" if config.max_sequences else "larger batches gain no speed"
    if question.simulator.memory_of_budget(_resized(config, min(larger))).fits:
        return "the fastest of those that fit"
    return f"the next larger one that was looked at, {min(larger)}, does not fit"


def _resized(config: InferenceConfig, size: int) -> InferenceConfig:
    tokens = size * (config.seq_len + config.max_new_tokens)
    return config.model_copy(update={"micro_batch_size": size, "max_tokens_per_micro_batch": tokens})


def lever_rows(best: InferenceTrial, space: InferenceSpace, simulator: InferenceSimulator) -> list[dict[str, Any]]:
    """What one change of one lever would buy from the chosen configuration, at its batch."""
    rows, chosen = [], (simulator.memory_of_budget(best.config), simulator.time(best.config))
    for lever in LEVERS:
        if lever.field in ("micro_batch_size", "prefill_chunk_tokens"):
            continue
        value = str(getattr(best.config, lever.field))
        for choice in lever.choices(space.context):
            shown = choice.swept or choice.value in _SHOWN_QUANTIZED[simulator.card.kind]
            config = best.config.model_copy(update=_change(lever.field, choice.value))
            if choice.valid and shown and choice.value != value and not conflict(config):
                changed = (simulator.memory_of_budget(config), simulator.time(simulator.settled(config)))
                rows.append(lever_row(lever.field, f"{value} -> {choice.value}", choice.reason, chosen, changed))
    return rows


def _change(field: str, value: str) -> dict[str, Any]:
    """One value changed; quantized weights are small enough to stay."""
    stays = {"offload": "none", "layers_on_card": None, "embedding_on_card": True}
    return {field: value, **(stays if field == "quantization" or (field, value) == ("offload", "none") else {})}


def memory_rows(config: InferenceConfig, simulator: InferenceSimulator) -> list[dict[str, Any]]:
    """The rows of memory.csv: the chosen structure over batches and lengths, around what was chosen."""
    limit = (simulator.workload.spec.max_seq_len or max(LENGTHS)) - config.max_new_tokens
    lengths = sorted({n for n in LENGTHS if n <= min(limit, 2 * config.seq_len)} | {config.seq_len})
    size = config.micro_batch_size
    sizes = sorted({max(2, size // 2), size, 2 * size})
    if config.max_new_tokens:  # every token is replayed
        lengths = [n for n in lengths if n >= config.seq_len // 4 and n > config.prefix_tokens]
    structure = {name: getattr(config, name) for name in STRUCTURE}
    rows = []
    for seq_len in lengths:
        for micro_batch_size in sizes:
            memory = simulator.memory(
                config.model_copy(update={"micro_batch_size": micro_batch_size, "seq_len": seq_len})
            )
            values = {name: getattr(memory, name) for name in MEMORY_COLUMNS}
            rows.append({**structure, "micro_batch_size": micro_batch_size, "seq_len": seq_len, **values})
    return rows


def bounds_of(config: InferenceConfig, simulator: InferenceSimulator) -> Iterator[Reason]:
    """The longest text that fits in the chosen batch, and the largest batch that fits at the chosen length."""
    size, seq_len = simulator.largest_batch(config), simulator.longest_text(config)
    limit = simulator.workload.spec.max_seq_len
    why = "all positions that the model has" if seq_len == limit else "with as many at once as the batch has"
    yield Reason(field="longest_seq_len", value=seq_len, reason=f"the longest that fits, {why}")
    yield Reason(field="largest_micro_batch_size", value=size, reason=f"the most of {config.seq_len} tokens that fit")


def host_reason(config: InferenceConfig, simulator: InferenceSimulator) -> Iterator[Reason]:
    """Host memory that offloaded weights take."""
    if config.kv_cache == "offloaded":
        reason = "keys and values in pinned host memory, each layer's rounded up to a power of two"
        yield Reason(field="host_bytes", value=simulator.host_bytes(config), reason=reason)
    need = simulator.host_need(config)
    if need is None:
        return
    pages = f", {format_bytes(need.mapped_bytes)} of it pages of the checkpoint's files" if need.mapped_bytes else ""
    reason = f"weights that wait in host memory{pages}; while they are loaded {format_bytes(need.loading_bytes)}; the "
    yield Reason(field="host_bytes", value=need.waiting_bytes, reason=f"{reason}process comes on top")
    if need.disk_bytes:
        reason = f"read from disk for every batch; the offload folder takes at most {format_bytes(need.folder_bytes)}"
        yield Reason(field="disk_bytes", value=need.disk_bytes, reason=reason)
