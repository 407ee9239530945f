"""Reasons, alternatives and tables: a search's result in the rows that people and files read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from planner.budget import Memory
from planner.config import C, Config, TrainingConfig
from planner.levers import LEVERS, conflict
from planner.measure.protocol import Measurement
from planner.plans import MEMORY_COLUMNS, Reason
from planner.request import PlanRequest
from planner.search import SearchResult, Trial
from planner.simulation import Simulator
from planner.space import Space, effective_batch_size
from planner.timing import Time
from planner.units import format_bytes

ALTERNATIVES = 3
_SHOWN_UNASKED = ("adamw_8bit",)
"""Values that are not swept and that people ask for first; each costs a recording."""
_LARGE_VOCABULARY = 30_000
"""Entries from which logits are large beside everything else that a token needs."""
_STRUCTURE = (
    *("method", "precision", "checkpointing", "attention", "loss", "quantization", "optimizer", "offload"),
    "parallelism",
)
LENGTHS = tuple(2**n for n in range(5, 17))
"""Lengths of memory.csv, in tokens."""


def reasons_of(config: TrainingConfig, request: PlanRequest, space: Space, result: SearchResult) -> Iterator[Reason]:
    """Why each field of the chosen configuration has its value."""
    effective, why = effective_batch_size(request, config.seq_len)
    yield Reason(field="effective_batch_size", value=effective, reason=why)
    for lever in LEVERS:
        value = getattr(config, lever.field)
        options = space.values[lever.field]
        if lever.field == "micro_batch_size":
            yield Reason(field=lever.field, value=value, reason=_batch_reason(config, result))
        elif lever.field == "method":
            yield Reason(field=lever.field, value=value, reason=_method_reason(config, request, space))
        else:
            said = lever.explain(str(value), space.context)
            fastest = f"the fastest that fits of {', '.join(options)}: " if len(options) > 1 else ""
            if getattr(request, lever.field, None) is None and lever.is_last_resort(str(value), space.context):
                fastest = f"nothing fits without; {fastest}"
            if lever.field == "parallelism" and config.gpus > 1:
                yield Reason(field="gpus", value=config.gpus, reason=_link_reason(config, space))
                said += _without_it(config, result)
            yield Reason(field=lever.field, value=value, reason=fastest + said)
    yield Reason(
        field="gradient_accumulation_steps",
        value=config.gradient_accumulation_steps,
        reason="keeps the effective batch as it is",
    )
    yield Reason(
        field="max_tokens_per_micro_batch",
        value=config.max_tokens_per_micro_batch,
        reason="micro-batch times longest sequence: shorter texts go in larger micro-batches",
    )


def _link_reason(config: TrainingConfig, space: Space) -> str:
    """How the cards are taken to be connected, and what a speed counts."""
    card = space.context.card
    how = "NVLink" if card.nvlink_bytes_per_s else "PCIe, without bridges"
    link = f"{how} at {card.link_bytes_per_s / 1e9:.0f} GB/s in theory"
    reason = f"as asked for; one machine, each card with a process of its own; {link}; tokens a second are all cards'"
    if space.context.sequences_per_sample > 1:  # a tower a card would leave the one with the shorter texts waiting
        reason += "; the two towers share their weights, so their texts are dealt over the cards by length: equal work"
    return reason


def _without_it(config: TrainingConfig, result: SearchResult) -> str:
    """Why the other way to share is not the choice, where the search has looked at it."""
    same = [t for t in result.trials if t.config.method == config.method]
    others = [t for t in same if t.config.parallelism != config.parallelism]
    if not others or any(t.status == "fits" for t in others):
        return ""
    over = [t.memory.total_bytes - t.memory.ceiling_bytes for t in others if t.memory]
    least = f", by at least {format_bytes(min(over))}" if over and min(over) > 0 else ""
    return f"; {others[0].config.parallelism} does not fit{least}"


def _batch_reason(config: TrainingConfig, result: SearchResult) -> str:
    own = structure(config, _STRUCTURE)
    alike = (trial for trial in result.trials if structure(trial.config, _STRUCTURE) == own)
    larger = [trial for trial in alike if trial.config.micro_batch_size > config.micro_batch_size]
    if not larger:
        return "the whole effective batch at once"
    if all(t.status in ("exceeds", "oom") for t in larger):
        return f"the next larger divisor of the effective batch, {_smallest(larger)}, does not fit"
    if any(t.measured for t in result.trials):
        return "the fastest of those that were measured and fit"
    return "the fastest of those that fit"


def _smallest(trials: list[Trial]) -> int:
    return min(t.config.micro_batch_size for t in trials)


def _method_reason(config: TrainingConfig, request: PlanRequest, space: Space) -> str:
    if request.method != "auto":
        return "as asked for"
    given_up = {
        "full": "",
        "lora": "full fine-tuning does not fit; ",
        "qlora": "neither full fine-tuning nor LoRA fits; ",
    }
    lever = next(lever for lever in LEVERS if lever.field == "method")
    return given_up[config.method] + lever.explain(config.method, space.context)


def structure(config: Config, fields: Sequence[str]) -> tuple[Any, ...]:
    """What two configurations that differ by their batch alone have in common."""
    return tuple(getattr(config, name) for name in fields)


def alternatives_of(
    best: Trial[C], result: SearchResult[C], fields: Sequence[str] = _STRUCTURE
) -> list[dict[str, Any]]:
    """The fastest configurations with another structure than the chosen one, one for each structure."""
    seen = {structure(best.config, fields)}
    rows: list[dict[str, Any]] = []
    for trial in result.fitting:
        own = structure(trial.config, fields)
        if own not in seen and len(rows) < ALTERNATIVES:
            seen.add(own)
            rows.append(_alternative(trial, best))
    return rows


def _alternative(trial: Trial[C], best: Trial[C]) -> dict[str, Any]:
    need, best_need, time, best_time = _two_steps(trial), _two_steps(best), trial.best_time, best.best_time
    assert time and best_time
    slower = best_time.tokens_per_s / time.tokens_per_s - 1
    memory = need / best_need - 1
    reason = f"{slower:.0%} slower" if slower >= 0.005 else "as fast"
    reason += f", {abs(memory):.0%} {'more' if memory > 0 else 'less'} memory"
    return {
        **trial.config.model_dump(mode="json"),
        "total_bytes": need,
        "tokens_per_s": time.tokens_per_s,
        "reason": reason,
    }


def _two_steps(trial: Trial[C]) -> int:
    """What two steps of the largest batch need in all: of a measured trial the whole run, which all of them have."""
    memory = trial.run if trial.measured and trial.run else trial.memory
    assert memory
    return memory.total_bytes


def lever_rows(best: Trial, space: Space, simulator: Simulator) -> list[dict[str, Any]]:
    """What one change of one lever would buy from the chosen configuration, at its micro-batch."""
    rows = []
    for lever in LEVERS:
        if lever.field in ("micro_batch_size", "method", "quantization"):
            continue
        chosen = str(getattr(best.config, lever.field))
        for choice in lever.choices(space.context):
            worth_a_look = choice.swept or _is_shown(choice.value, simulator)
            changed = best.config.model_copy(update={lever.field: choice.value})
            if not (choice.valid and worth_a_look) or choice.value == chosen or conflict(changed):
                continue
            if simulator.host_shortage_bytes(changed) <= 0:
                rows.append(_lever_row(lever.field, choice.value, choice.reason, best.config, simulator))
    return rows


def _is_shown(value: str, simulator: Simulator) -> bool:
    """Whether a value that is not swept is worth a recording, to say what it would buy."""
    if value == "fused-linear":
        return simulator.facts.vocab_size >= _LARGE_VOCABULARY and not simulator.recordings.fused_loss_obstacle
    return value in _SHOWN_UNASKED


def _lever_row(field: str, value: str, reason: str, chosen: TrainingConfig, simulator: Simulator) -> dict[str, Any]:
    changed = chosen.model_copy(update={field: value})
    change = f"{getattr(chosen, field)} -> {value}"
    answers = ((simulator.memory_of_budget(config), simulator.time(config)) for config in (chosen, changed))
    return lever_row(field, change, reason, *answers)


def lever_row(
    field: str, change: str, reason: str, chosen: tuple[Memory, Time], changed: tuple[Memory, Time]
) -> dict[str, Any]:
    """What one change of one lever would buy: the row that people read."""
    memory, time = changed
    return {
        "lever": field,
        "change": change,
        "saves_bytes": chosen[0].total_bytes - memory.total_bytes,
        "speed_ratio": time.tokens_per_s / chosen[1].tokens_per_s,
        "reason": reason if memory.fits else f"does not fit; {reason}",
    }


def trial_rows(result: SearchResult[C]) -> list[dict[str, Any]]:
    """The rows of trials.csv: every configuration looked at, best first."""
    order = {"fits": 0, "oom": 1, "error": 2, "exceeds": 3, "pruned": 4}
    others: list[Trial[C]] = [trial for trial in result.trials if trial.status != "fits"]
    ordered: list[Trial[C]] = result.fitting + sorted(others, key=lambda trial: order[trial.status])
    return [
        {**_fields(trial.config), **_predicted_and_measured(trial), "status": trial.status, "reason": trial.reason}
        for trial in ordered
    ]


def _fields(config: Config) -> dict[str, Any]:
    fields = config.model_dump(mode="json")
    if "lora" in fields:
        lora = fields.pop("lora")
        fields["lora_r"] = lora["r"] if lora else ""
    return fields


def _predicted_and_measured(trial: Trial[C]) -> dict[str, Any]:
    # a lower bound that is over the ceiling is no prediction: the reason tells it
    predicted = trial.memory if trial.measured else trial.known  # the whole run of what was measured is its own
    memory, time = predicted if predicted and predicted.breakdown else None, trial.time
    return {
        "predicted_peak_allocated_bytes": memory.peak_allocated_bytes if memory else "",
        "predicted_peak_reserved_bytes": memory.peak_reserved_bytes if memory else "",
        "predicted_total_bytes": memory.total_bytes if memory else "",
        "measured_peak_allocated_bytes": _or_blank(trial.measured, "peak_allocated_bytes"),
        "measured_peak_reserved_bytes": _or_blank(trial.measured, "peak_reserved_bytes"),
        "measured_total_bytes": _or_blank(trial.measured, "process_bytes"),
        "predicted_step_ms": time.step_ms if time else "",
        "measured_step_ms": _or_blank(trial.measured, "step_ms"),
        "predicted_tokens_per_s": time.tokens_per_s if time else "",
        "measured_tokens_per_s": _or_blank(trial.measured, "tokens_per_s"),
    }


def _or_blank(measured: Measurement | None, name: str) -> Any:
    value = getattr(measured, name, None)
    return "" if value is None else value


def memory_rows(config: TrainingConfig, simulator: Simulator) -> list[dict[str, Any]]:
    """The rows of memory.csv: the chosen structure over micro-batches and lengths, around what was chosen."""
    limit = simulator.workload.spec.max_seq_len or max(LENGTHS)
    lengths = sorted({n for n in LENGTHS if n <= min(limit, 2 * config.seq_len)} | {config.seq_len})
    batches = sorted({max(2, config.micro_batch_size // 2), config.micro_batch_size, 2 * config.micro_batch_size})
    rows = []
    for seq_len in lengths:
        for micro_batch_size in batches:
            shaped = config.model_copy(update={"micro_batch_size": micro_batch_size, "seq_len": seq_len})
            memory = simulator.memory(shaped)
            structure = {name: getattr(config, name) for name in _STRUCTURE}
            values = {name: getattr(memory, name) for name in MEMORY_COLUMNS}
            rows.append({**structure, "micro_batch_size": micro_batch_size, "seq_len": seq_len, **values})
    return rows
