"""From a request with ``--data`` to what a plan says and does about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from planner.config import TrainingConfig
from planner.data.deciding import Decided, decide
from planner.data.epoch import Epoch, epoch_of_samples
from planner.data.survey import Bad, Survey, survey
from planner.data.tokens import token_counter
from planner.errors import InputError, Problem
from planner.lengths import FATE, Lengths
from planner.models import ModelSpec
from planner.request import PlanRequest
from planner.tasks import LongTexts, TaskFacts, facts_for
from planner.units import shown

if TYPE_CHECKING:
    from planner.progress import Progress
    from planner.simulation import Simulator

QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
LABELS_NAMED = 8
_TOLD_EVERY_S = 0.2


def data_of(request: PlanRequest, spec: ModelSpec, task: str, progress: Progress) -> Decided:
    """Read and count the data that a request names, and decide what becomes of it.

    Raises InputError: data that can't be used, or that contradicts the request.
    """
    facts = facts_for(task, request.mode)
    progress.phase("loading the tokenizer")
    counter = token_counter(spec)
    found = survey(request, facts, counter, _teller(progress, request.data or ""))
    problems = [*_label_problems(request, found, facts), *_pair_problems(request, found)]
    if problems:
        raise InputError(problems)
    return decide(
        found,
        counter,
        facts,
        spec,
        seq_len=request.seq_len,
        target_seq_len=request.target_seq_len,
        long_texts=request.long_texts,
        overlap=request.overlap,
    )


def _teller(progress: Progress, name: str) -> Callable[[float], None]:
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        if (now := time.monotonic()) - told > _TOLD_EVERY_S:
            told = now
            progress.phase(f"reading {name}: {share:.0%}")

    return tell


def asked_num_labels(request: PlanRequest) -> int | None:
    """What a request says; None where it is silent."""
    return request.num_labels if "num_labels" in request.model_fields_set else None


def _label_problems(request: PlanRequest, found: Survey, facts: TaskFacts) -> Iterator[Problem]:
    asked, count = asked_num_labels(request), len(found.labels)
    if not facts.has_classes:
        return
    if count > 1000 and count > found.usable / 2:
        message = f"column {found.columns.label} holds {count:,} different labels in {found.usable:,} rows; "
        message += "accepted: a column of classes; name it with --label-column, or choose --task regression for numbers"
        yield Problem(argument="label_column", message=message)
    elif count < (1 if facts.labels == "classes" else 2):
        message = f"column {found.columns.label} holds {count} label ({', '.join(found.labels) or 'none'}): there is "
        yield Problem(argument="label_column", message=message + "nothing to tell apart; name another column")
    elif asked is not None and asked < count:
        beyond = list(found.labels.items())[asked:][:LABELS_NAMED]
        named = ", ".join(f"{shown(name)} ({found.unit} {line})" for name, line in beyond)
        message = f"got {asked}; the data has {count} labels, beyond the first {asked}: {named}; ask for {count}"
        yield Problem(argument="num_labels", message=message)


def _pair_problems(request: PlanRequest, found: Survey) -> Iterator[Problem]:
    columns = found.columns.texts
    if len(columns) > 1 and request.long_texts in ("segment", "pack"):
        message = f"got {request.long_texts!r} for texts of {len(columns)} columns ({', '.join(columns)}); accepted "
        yield Problem(argument="long_texts", message=message + "with them: truncate; or name one with --text-column")


def num_labels_of(request: PlanRequest, decided: Decided) -> tuple[int, str]:
    """Outputs of the head of a task with classes, and why."""
    asked, found = asked_num_labels(request), decided.survey
    if asked is not None:
        return asked, "as asked for"
    where = f"{found.read:,} rows that were looked at" if found.drawn else "data"
    some = ", ".join(list(found.labels)[:LABELS_NAMED]) + (", ..." if len(found.labels) > LABELS_NAMED else "")
    return len(found.labels), f"labels of the {where}: {some}"


def lengths_of_data(decided: Decided) -> Lengths:
    """Of the samples that the script makes of the rows that were counted; of several sequences the longest."""
    tokens = tuple(max(sample) for sample in decided.samples())
    reason = (
        f"of {decided.survey.source}: {len(decided.survey.sample):,} rows counted, {decided.longer:.1%} of the texts "
        f"longer than {decided.seq_len} tokens, which {FATE[decided.long_texts]}"
    )
    return Lengths(tokens=tokens, reason=reason)


def reasons_for_data(request: PlanRequest, decided: Decided) -> Iterator[tuple[str, Any, str]]:
    """Field, value and reason of what the data decided."""
    found = decided.survey
    columns = ", ".join(decided.survey.columns.names)
    how = "as asked for" if request.text_column and (request.label_column or not found.columns.label) else "usual names"
    yield "columns", columns, f"{how}; --text-column and --label-column change them"
    yield "tokens", round(decided.mean), f"on average; {decided.counted_by}"
    if decided.target_reason:
        yield "target_seq_len", decided.target_seq_len, decided.target_reason
    if decided.facts.has_classes:
        yield "num_labels", *num_labels_of(request, decided)


def long_texts_reason(decided: Decided, data: Mapping[str, Any]) -> str:
    """What becomes of long texts, and what each other way would cost, in a clause."""
    if not decided.longer:
        return f"no text is longer than {decided.seq_len} tokens" + _at_most(decided)
    error = f" ± {decided.longer_margin:.1%}" if decided.longer_margin else ""
    parts = [f"{decided.longer:.1%}{error} of the texts are longer than {decided.seq_len} tokens"]
    for name, option in data["long_texts"].items():
        flag = "" if name == decided.long_texts else "--long-texts "
        cost = f"{option['samples_ratio']:.2f} times the samples and {option['tokens_ratio']:.2f} times the tokens"
        if option["epoch_s"] is not None:
            cost += f", {duration(option['epoch_s'])} an epoch"
        loses = f"loses {option['lost_share']:.1%} of the tokens" if name == "truncate" else "keeps them all"
        parts.append(f"{flag}{name} {loses}: {cost}")
    return "; ".join(parts)


def _at_most(decided: Decided) -> str:
    return f"; of the rows that were not counted at most {m:.2%} (95 %)" if (m := decided.longer_margin) else ""


def describe_data(decided: Decided, config: TrainingConfig, simulator: Simulator, *, step_ms: float) -> dict[str, Any]:
    """``workload["data"]`` of plan.json. ``step_ms``: of a step of the largest batches, as it was measured if it was.

    Times are simulated for each shape of micro-batch, and scaled as the largest batch's was by its measurement.
    """
    scale = step_ms / simulator.time(config).step_ms
    options: dict[str, Any] = {}
    epochs: dict[str, Epoch] = {}
    for option in (decided.long_texts, *(o for o in decided.options if o != decided.long_texts and decided.longer)):
        epochs[option] = epoch_of_samples(decided.samples(option), config, simulator, seed=simulator.seed)
        options[option] = _option(decided, option, epochs[option], config, scale)
    chosen, epoch = options[decided.long_texts], epochs[decided.long_texts]
    return {
        **describe_rows(decided),
        "long_texts": options,
        "padding": {name: asdict(getattr(epoch, name))["padding"] for name in ("fixed", "grouped", "budget")},
        "batching": asdict(epoch),
        "samples_per_epoch": chosen["samples"],
        "steps_per_epoch": chosen["steps"],
        "epoch_s": chosen["epoch_s"],
        "epoch_s_fixed": _epoch_s(chosen["steps"], epoch.fixed.step_s, scale),
        "epoch_s_grouped": _epoch_s(chosen["steps"], epoch.grouped.step_s, scale),
    }


def describe_rows(decided: Decided) -> dict[str, Any]:
    """What the data is, whatever is done with it."""
    found = decided.survey
    return {
        "source": found.source,
        "format": found.format,
        "text_columns": list(found.columns.texts),
        "label_column": found.columns.label,
        "rows": None if math.isinf(found.rows) else round(found.rows),
        "rows_are": f"an estimate: {found.note}" if found.drawn else "counted",
        "rows_read": found.read,
        "rows_counted": len(found.sample),
        "unit": found.unit,
        "bad_rows": [_bad(each) for each in found.bad],
        "enormous_texts": [_bad(each) for each in found.enormous],
        "labels": len(found.labels) if decided.facts.has_classes else None,
        **_lengths(decided),
    }


def _lengths(decided: Decided) -> dict[str, Any]:
    return {
        "tokens": {
            "counted_by": decided.counted_by,
            "exact": decided.counter.exact,
            "mean": decided.mean,
            "mean_margin_95": _number(decided.mean_margin),
            "quantiles": {f"{share:.0%}": decided.quantile(share) for share in QUANTILES},
            "histogram": histogram(decided.flat),
        },
        "cut": {
            "seq_len": decided.seq_len,
            "texts_share": decided.longer,
            "texts_share_margin_95": _number(decided.longer_margin),
            "tokens_share": decided.lost,
        },
    }


def _option(decided: Decided, option: LongTexts, epoch: Epoch, config: TrainingConfig, scale: float) -> dict[str, Any]:
    made, rows = decided.samples(option), len(decided.lengths)
    kept = [min(count, decided.seq_len) for count in decided.flat]
    ratio = len(made) / rows
    samples = None if math.isinf(decided.survey.rows) else round(decided.survey.rows * ratio)
    steps = None if samples is None else math.ceil(samples / config.effective_batch_size)
    return {
        "samples": samples,
        "samples_ratio": ratio,
        "tokens_ratio": sum(map(sum, made)) / sum(kept),
        "lost_share": decided.lost if option == "truncate" else 0.0,
        "steps": steps,
        "epoch_s": _epoch_s(steps, epoch.budget.step_s, scale),
    }


def _epoch_s(steps: int | None, step_s: float | None, scale: float) -> float | None:
    return None if steps is None or step_s is None else steps * step_s * scale


def _bad(each: Bad) -> dict[str, Any]:
    return {"problem": each.problem, "rows": each.rows, "lines": list(each.lines)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def histogram(lengths: list[int]) -> list[dict[str, Any]]:
    """Share of the sequences up to each power of two tokens, and above the one before it; the longest percent is one.

    Shares add up to 1.
    """
    longest, rare = max(lengths), sorted(lengths)[math.ceil(0.99 * len(lengths)) - 1]
    edges = [2**n for n in range(3, longest.bit_length() + 1) if 2 ** (n - 1) < rare or n == 3]
    edges = [*(edge for edge in edges if edge < longest), longest]
    counts = [sum(low < count <= high for count in lengths) for low, high in pairwise([0, *edges])]
    found = zip(edges, counts, strict=True)
    return [{"up_to": edge, "share": count / len(lengths)} for edge, count in found if count]


def duration(seconds: float) -> str:
    """``1:05 min`` or ``2:10 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    if minutes < 60:
        return f"{int(minutes)}:{int(seconds % 60):02} min"
    return f"{int(minutes // 60):,}:{int(minutes % 60):02} h"
