"""Predicted against measured, on the device that is here: memory, time, and a plan under a cap.

    python benchmarks/gpu_validation.py --out gpu_validation.csv

One command, no network, within eight minutes on a data-centre card: a fixed table of configurations (models x levers x
shapes), each run in a process of its own; then a plan for 8 GB on whatever card this is, capped at that. ``--device
cpu`` runs the same on the processor, with a small table: that is how its logic is tested where there is no GPU.
Needs nothing but the package; what a case needs besides (bitsandbytes) makes that row an error where it is missing.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from planner import PlannerError, plan
from planner.allocator_settings import DEFAULT_ALLOCATOR
from planner.budget import Memory
from planner.config import TrainingConfig
from planner.measure.environment import trial_environment
from planner.measure.protocol import DeviceFacts, Measurement
from planner.measure.runner import TrialRunner
from planner.proving import trial_spec
from planner.question import Question, look_up
from planner.request import make_request
from planner.timing import Time
from planner.units import GIB, format_bytes

COLUMNS = (
    *("id", "device", "model", "task", "method", "precision", "checkpointing", "offload", "quantization", "optimizer"),
    *("attention", "loss", "micro_batch_size", "seq_len", "gradient_accumulation_steps", "status", "reason"),
    *("predicted_peak_allocated_bytes", "measured_peak_allocated_bytes", "allocated_error"),
    *("predicted_peak_reserved_bytes", "measured_peak_reserved_bytes", "reserved_error"),
    *("predicted_process_bytes", "measured_process_bytes", "process_error", "context_bytes", "allocation_retries"),
    *("predicted_step_ms", "measured_step_ms", "step_error", "setup_s", "wall_s"),
)
FIELDS = COLUMNS[4:15]
"""The columns that are fields of a configuration."""
PLAN_S = 150.0
"""Seconds of the limit that are left for the plan."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: a model, a shape, and the levers that differ from the defaults."""

    model: str
    """Hub id of a bundled model."""
    shape: tuple[int, int]
    """Micro-batch in sequences, length in tokens."""
    levers: Mapping[str, str] = field(default_factory=dict)
    """Fields of the request, by name."""
    accumulation: int = 1
    """Micro-batches for each optimizer step."""


def _cases(model: str, *rows: tuple[tuple[int, int], dict[str, str]], accumulation: int = 1) -> Iterator[Case]:
    return (Case(model=model, shape=shape, levers=levers, accumulation=accumulation) for shape, levers in rows)


AMP = {"precision": "bf16-amp"}
CUDA_CASES = (
    *_cases(
        "bert-base-uncased",
        ((8, 512), {"precision": "fp32"}),
        ((8, 512), {"precision": "tf32"}),
        ((16, 512), AMP),
        ((16, 512), {"precision": "fp16-amp"}),
        ((16, 512), AMP | {"attention": "eager"}),
        ((32, 512), AMP | {"checkpointing": "full"}),
        ((32, 512), AMP | {"checkpointing": "every-2"}),
        ((16, 512), AMP | {"optimizer": "adamw_foreach"}),
        ((16, 512), AMP | {"optimizer": "adamw_8bit"}),
        ((16, 512), AMP | {"offload": "optimizer"}),
        ((16, 512), AMP | {"offload": "activations"}),
        ((16, 512), AMP | {"offload": "parameters", "checkpointing": "full"}),
        ((16, 512), {"precision": "bf16"}),
        ((16, 512), {"precision": "bf16-master"}),
        ((1, 128), AMP),
        ((64, 128), AMP),
    ),
    *_cases("bert-base-uncased", ((8, 512), AMP), ((8, 512), {"precision": "fp32"}), accumulation=4),
    *_cases("bert-large-uncased", ((8, 512), AMP), ((8, 384), {"precision": "fp32"})),
    *_cases(
        "gpt2",
        ((4, 1024), AMP),
        ((4, 1024), AMP | {"loss": "fused-linear"}),
        ((8, 1024), AMP | {"checkpointing": "full"}),
        ((4, 1024), {"precision": "fp32"}),
    ),
    *_cases("t5-base", ((8, 512), {"precision": "fp32"}), ((8, 512), AMP)),
    *_cases(
        "meta-llama/Llama-3.2-1B",
        ((2, 2048), AMP),
        ((2, 2048), AMP | {"checkpointing": "full", "loss": "fused-linear"}),
        ((4, 1024), AMP | {"method": "lora"}),
        ((4, 1024), AMP | {"method": "qlora", "quantization": "nf4"}),
        ((4, 1024), {"precision": "bf16", "checkpointing": "full"}),
    ),
)
"""About five seconds each on a data-centre card, most of which is the process and the model's random weights."""
SMALL = "sentence-transformers/all-MiniLM-L6-v2"
CPU_CASES = (
    *_cases(
        SMALL,
        ((4, 64), {"precision": "fp32"}),
        ((4, 64), {"precision": "fp32", "checkpointing": "full"}),
        ((8, 64), AMP),
        ((4, 64), {"precision": "fp32", "method": "lora"}),
    ),
    *_cases(SMALL, ((4, 64), {"precision": "fp32"}), accumulation=2),
)


def main() -> int:
    """Measure the table, make the plan, write one CSV, print a summary; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--vram", help="cap of the plan (default: 8GB; on the CPU 2GB)")
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds that all of it may take")
    parser.add_argument("--out", default="gpu_validation.csv", type=Path)
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    rows = validate(
        options.device,
        CPU_CASES if on_cpu else CUDA_CASES,
        vram=options.vram or ("2GB" if on_cpu else "8GB"),
        planned=SMALL if on_cpu else "bert-base-uncased",
        limit_s=options.limit_s,
    )
    try:
        seen = written(rows, options.out)
    except PlannerError as error:  # no device, or none that can be looked at
        print(error, file=sys.stderr)
        return error.exit_code
    print(summary(seen))
    return 0


def written(rows: Iterable[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows, each in the file and on the terminal as soon as it is there."""
    seen = []
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for row in rows:
            seen.append(row)
            writer.writerow(row)
            file.flush()
            print(line_of(row), flush=True)
    return seen


def validate(
    device: str, cases: Sequence[Case], *, vram: str, planned: str, limit_s: float
) -> Iterator[dict[str, Any]]:
    """A row for each case, then those of the plan; cases that the limit leaves no time for say so."""
    ends = time.monotonic() + limit_s
    with TrialRunner(environment=trial_environment(device, DEFAULT_ALLOCATOR)) as runner:
        facts = runner.probe(device)
        for number, case in enumerate(cases, start=1):
            name = f"case-{number:02}"
            if time.monotonic() > ends - PLAN_S:
                yield {"id": name, "device": facts.name, "model": case.model, "status": "not run", "reason": "limit"}
            else:
                yield {"id": name, **measured_case(case, facts, runner)}
    yield from planned_rows(planned, device, vram, timeout_s=max(30.0, ends - time.monotonic() - 30.0))


def measured_case(case: Case, facts: DeviceFacts, runner: TrialRunner) -> dict[str, Any]:
    """One configuration, predicted and measured."""
    try:
        question, config = configured(case, facts)
        memory, predicted = question.simulator.memory(config), question.simulator.time(config)
        # no cap: what it takes is the question here
        spec = replace(trial_spec(question, config), ceiling_bytes=None)
    except PlannerError as error:
        reason = " | ".join(str(error).splitlines())
        return {"device": facts.name, "model": case.model, "status": "error", "reason": reason}
    about = {"device": facts.name, "model": case.model, "task": question.simulator.workload.task}
    return about | fields_of(config) | compared(memory, predicted, runner.run(spec))


def configured(case: Case, facts: DeviceFacts) -> tuple[Question, TrainingConfig]:
    """The case as a question and its one configuration, planned for all of the device."""
    micro_batch_size, seq_len = case.shape
    request = make_request(
        model=case.model,
        vram=facts.total_bytes // GIB * GIB,
        device=facts.device,
        seq_len=seq_len,
        batch_size=micro_batch_size * case.accumulation,
        **{"method": "full", **case.levers},
    )
    question = look_up(request, facts)
    space = question.space(request.method)
    first = {name: options[0] for name, options in space.values.items()}
    return question, space.configuration({**first, "micro_batch_size": str(micro_batch_size)})


def fields_of(config: TrainingConfig) -> dict[str, Any]:
    """The columns of a configuration."""
    return {name: getattr(config, name) for name in FIELDS}


def compared(memory: Memory, predicted: Time, measured: Measurement) -> dict[str, Any]:
    """The columns of a prediction and what became of it."""
    pairs = {
        "peak_allocated_bytes": (memory.peak_allocated_bytes, measured.peak_allocated_bytes, "allocated_error"),
        "peak_reserved_bytes": (memory.peak_reserved_bytes, measured.peak_reserved_bytes, "reserved_error"),
        "process_bytes": (
            memory.peak_reserved_bytes + memory.context_bytes,
            measured.process_bytes,
            "process_error",
        ),
        "step_ms": (predicted.step_ms, measured.step_ms, "step_error"),
    }
    row: dict[str, Any] = {"status": measured.status, "reason": measured.reason}
    for name, (expected, got, error) in pairs.items():
        row |= {f"predicted_{name}": expected, f"measured_{name}": "" if got is None else got}
        row[error] = f"{expected / got - 1:.6f}" if got else ""
    about_run = ("context_bytes", "allocation_retries", "setup_s", "wall_s")
    return row | {name: getattr(measured, name) for name in about_run}


def planned_rows(model: str, device: str, vram: str, *, timeout_s: float) -> Iterator[dict[str, Any]]:
    """The plan for a cap: its trials, and the plan itself, whose process must stay under the cap."""
    try:
        made = plan(model=model, vram=vram, device=device, timeout=timeout_s)
    except PlannerError as error:
        reason = " | ".join(str(error).splitlines())
        yield {"id": f"plan-{vram}", "device": device, "model": model, "status": "error", "reason": reason}
        return
    about = {"device": made.hardware["name"], "model": model, "task": made.workload["task"]}
    trials = [row for row in made.trial_rows if row["measured_step_ms"] != "" or row["status"] in ("oom", "error")]
    for number, row in enumerate(trials, start=1):
        same = {name: row[name] for name in COLUMNS if name in row}
        yield {**about, **same, "id": f"plan-{vram}-trial-{number:02}"}
    yield {
        **about,
        **fields_of(made.config),
        "id": f"plan-{vram}",
        "status": "under the ceiling" if made.peak.fits else "over the ceiling",
        "reason": f"{made.peak.total_bytes} of {made.peak.ceiling_bytes} bytes, {made.time.source}",
        "measured_step_ms": made.time.step_ms,
        "measured_peak_allocated_bytes": made.peak.peak_allocated_bytes,
        "measured_peak_reserved_bytes": made.peak.peak_reserved_bytes,
        "measured_process_bytes": made.peak.peak_reserved_bytes + made.peak.context_bytes,
        "context_bytes": made.peak.context_bytes,
    }


def line_of(row: Mapping[str, Any]) -> str:
    """A row for the terminal."""
    shape = f"{row.get('micro_batch_size', '')} x {row.get('seq_len', '')}"
    levers = " ".join(str(row.get(name, "")) for name in ("method", "precision", "checkpointing", "offload"))
    measured = row.get("measured_peak_reserved_bytes")
    memory = format_bytes(int(measured)) if measured else "-"
    errors = " ".join(f"{row.get(name) or '-':>9}" for name in ("allocated_error", "reserved_error", "step_error"))
    return f"{row['id']:18} {row['model'][:24]:24} {shape:>9} {levers:38} {row['status']:10} {memory:>9} {errors}"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians, 90th percentiles and worst of the absolute errors; the order of the times; what did not run."""
    cases = [row for row in rows if str(row["id"]).startswith("case")]
    done = [row for row in cases if row["status"] == "ok"]
    lines = [f"{len(done)} of {len(cases)} cases measured; predicted / measured - 1:"]
    for name in ("allocated_error", "reserved_error", "process_error", "step_error"):
        errors = sorted(abs(float(row[name])) for row in done if row[name])
        if errors:
            ninth = errors[math.ceil(0.9 * len(errors)) - 1]
            lines.append(f"  {name:16} median {median(errors):.2%}, 90th {ninth:.2%}, worst {errors[-1]:.2%}")
    right, pairs = ordered_pairs([(float(r["predicted_step_ms"]), float(r["measured_step_ms"])) for r in done])
    lines.append(f"  {right} of {pairs} pairs of step times that differ by 5 % or more are in the right order")
    lines += [f"  {row['id']}: {row['status']}: {row['reason']}" for row in rows if row["status"] in ("error", "oom")]
    lines += [f"{row['id']}: {row['status']}: {row['reason']}" for row in rows if "ceiling" in str(row["status"])]
    return "\n".join(lines)


def ordered_pairs(times: Iterable[tuple[float, float]]) -> tuple[int, int]:
    """Of all pairs whose measured times differ by 5 % or more: those predicted in the same order, and their number."""
    pairs = [(a, b) for a, b in combinations(times, 2) if abs(math.log(a[1] / b[1])) > math.log(1.05)]
    return sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs), len(pairs)


if __name__ == "__main__":
    sys.exit(main())
