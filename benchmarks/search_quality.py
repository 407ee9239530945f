"""How good the plan of a few measured trials is: against every configuration measured, and against halving the batch.

    python benchmarks/search_quality.py --out search_quality.csv

On the CPU as a device, for three small models and two ceilings each. For each model the whole grid (attention x
checkpointing x optimizer x micro-batch) is measured once, one trial a configuration. Then, for each ceiling: a plan
from an empty store of measurements; ``accelerate.utils.find_executable_batch_size`` with defaults that somebody would
start from (fp32, sdpa, nothing computed twice, the whole effective batch); and the three choices (the plan's, the
grid's fastest that fits, accelerate's) measured again, in turns, ``--repeats`` times: the ratios are of medians.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from planner import plan
from planner.cache import folder as cache_folder
from planner.config import TrainingConfig
from planner.measure.environment import trial_environment
from planner.measure.protocol import OUT_OF_MEMORY, DeviceFacts, Measurement, TrialSpec
from planner.measure.runner import TrialRunner
from planner.models import resolve_model
from planner.proving import trial_spec
from planner.question import Question, look_up
from planner.request import make_request
from planner.units import GIB, MIB, format_bytes
from planner.whole_run import measured_run

COLUMNS = (
    *("model", "ceiling_bytes", "grid_size", "grid_fits", "plan_trials", "trials_share", "plan_seconds"),
    *("plan_config", "best_config", "plan_tokens_per_s", "best_tokens_per_s", "ratio_to_best"),
    *("accelerate_micro_batch_size", "accelerate_trials", "accelerate_tokens_per_s", "ratio_to_accelerate"),
)
SHOWN = ("attention", "checkpointing", "optimizer", "micro_batch_size")
EFFECTIVE_BATCH_SIZE = 32
SEQ_LEN = 32
SWEEP = {"precision": "fp32", "attention": "sdpa,eager", "optimizer": "adamw_fused,adamw_foreach"}
"""What the request leaves open, besides checkpointing and the micro-batch. No bf16: on a processor without instructions
for its products a trial takes minutes."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "minilm": ("sentence-transformers/all-MiniLM-L6-v2", {}),
    "distilbert-2": ("distilbert-base-uncased", {"n_layers": 2}),
    "gpt2-4": ("gpt2", {"n_layer": 4, "n_embd": 256, "n_head": 4}),
}
"""Name to a bundled model and what is changed of it."""
SOME_PROCESSOR = DeviceFacts(
    device="cpu",
    name="a processor",
    total_bytes=8 * GIB,
    free_bytes=8 * GIB,
    context_bytes=400 * MIB,
    flops_per_s={"fp32": 5e10, "bf16": 5e10},
    bandwidth_bytes_per_s=1e10,
    operator_us=10.0,
)
"""For what depends on the request alone."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One configuration of the grid, measured."""

    config: TrainingConfig
    measured: Measurement


def main() -> None:
    """Measure, write one row for each model and ceiling, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="search_quality.csv", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch, options.out.open("w", newline="", encoding="utf-8") as file:
        os.environ["VRAMPLAN_CACHE"] = str(Path(scratch) / "cache")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        with TrialRunner(environment=trial_environment("cpu", "")) as runner:
            for name in options.models.split(","):
                for row in compare(name, model_folder(name, Path(scratch)), runner, options.repeats):
                    rows.append(row)
                    writer.writerow(row)
                    file.flush()
                    print(line_of(row), flush=True)
    print(summary(rows))


def model_folder(name: str, scratch: Path) -> str:
    """A folder with the model's configuration: what a user has on disk."""
    base, changes = MODELS[name]
    folder = scratch / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**resolve_model(base).config, **changes}))
    return str(folder)


def compare(name: str, model: str, runner: TrialRunner, repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    wide = question_of(model, runner, vram_bytes=None)
    grid = list(measured_grid(name, wide, runner))
    for ceiling_bytes in ceilings(wide, grid):
        question = question_of(model, runner, vram_bytes=ceiling_bytes)
        fitting = [tried for tried in grid if tried.measured.ok and fits(question, tried)]
        best = max(fitting, key=lambda tried: tried.measured.tokens_per_s or 0.0)
        chosen, trials, seconds = planned(model, ceiling_bytes)
        halved, attempts = batch_halved(question, runner)
        configs = {"plan": chosen, "best": best.config, "accelerate": halved}
        speeds = repeated(question, configs, runner, repeats)
        yield {
            "model": name,
            "ceiling_bytes": ceiling_bytes,
            "grid_size": len(grid),
            "grid_fits": len(fitting),
            "plan_trials": trials,
            "trials_share": f"{trials / len(grid):.3f}",
            "plan_seconds": f"{seconds:.1f}",
            "plan_config": described(chosen),
            "best_config": described(best.config),
            "plan_tokens_per_s": f"{speeds['plan']:.0f}",
            "best_tokens_per_s": f"{speeds['best']:.0f}",
            "ratio_to_best": f"{speeds['plan'] / speeds['best']:.4f}",
            "accelerate_micro_batch_size": halved.micro_batch_size,
            "accelerate_trials": attempts,
            "accelerate_tokens_per_s": f"{speeds['accelerate']:.0f}",
            "ratio_to_accelerate": f"{speeds['plan'] / speeds['accelerate']:.4f}",
        }


def question_of(model: str, runner: TrialRunner, *, vram_bytes: int | None) -> Question:
    """The request as the planner understands it; None: the whole of the machine's memory."""
    return question_like(model, runner.probe("cpu"), vram_bytes=vram_bytes)


def question_like(model: str, facts: DeviceFacts = SOME_PROCESSOR, *, vram_bytes: int | None = None) -> Question:
    """The same on a processor with these facts."""
    vram = vram_bytes or facts.total_bytes // MIB * MIB
    asked = {"seq_len": SEQ_LEN, "batch_size": EFFECTIVE_BATCH_SIZE, "method": "full", **SWEEP}
    return look_up(make_request(model=model, vram=vram, device="cpu", **asked), facts)


def measured_grid(name: str, question: Question, runner: TrialRunner) -> Iterator[Tried]:
    """Every configuration, without a cap."""
    configs = list(question.space("full").configurations())
    for number, config in enumerate(configs, start=1):
        measured = runner.run(uncapped(question, config))
        speed = f"{measured.tokens_per_s:,.0f} tokens/s" if measured.tokens_per_s else measured.reason
        print(f"{name} {number}/{len(configs)} {described(config)}: {measured.status} {speed}", flush=True)
        yield Tried(config=config, measured=measured)


def uncapped(question: Question, config: TrainingConfig) -> TrialSpec:
    """The trial at the longest length alone, with all of the machine's memory."""
    return replace(trial_spec(question, config), ceiling_bytes=None, typical_seq_len=None)


def ceilings(question: Question, grid: Sequence[Tried]) -> tuple[int, int]:
    """A tight and a roomy one: what a quarter and what seven tenths of the grid stay under, in whole 64 MiB."""
    totals = sorted(
        measured_run(question.simulator, tried.config, tried.measured).total_bytes
        for tried in grid
        if tried.measured.ok
    )
    quantiles = (totals[len(totals) // 4], totals[len(totals) * 7 // 10])
    tight, roomy = (-(-total // (64 * MIB)) * 64 * MIB for total in quantiles)
    return tight, roomy


def fits(question: Question, tried: Tried) -> bool:
    """By the planner's own rule: the whole run, by what was measured, with its margin."""
    return measured_run(question.simulator, tried.config, tried.measured).fits


def planned(model: str, ceiling_bytes: int) -> tuple[TrainingConfig, int, float]:
    """The plan's choice, how many trials it ran, and its seconds; recordings are there, measurements are not."""
    for kept in ("measurements", "studies"):
        shutil.rmtree(cache_folder() / kept, ignore_errors=True)
    began = time.perf_counter()
    made = plan(
        model=model, vram=ceiling_bytes, device="cpu", seq_len=SEQ_LEN, batch_size=EFFECTIVE_BATCH_SIZE,
        method="full", **SWEEP,
    )  # fmt: skip
    assert made.time.source == "measured", made.time
    return made.config, made.trials_run, time.perf_counter() - began


def batch_halved(question: Question, runner: TrialRunner) -> tuple[TrainingConfig, int]:
    """What accelerate's helper alone comes to, and its attempts; each attempt is a trial under the same cap."""
    from accelerate.utils import find_executable_batch_size

    space = question.space("full")
    first = {field: options[0] for field, options in space.values.items()}
    start = space.configuration({**first, "precision": "fp32", "micro_batch_size": str(EFFECTIVE_BATCH_SIZE)})
    attempts: list[TrainingConfig] = []

    def attempt(batch_size: int) -> None:
        config = with_any_micro_batch(start, batch_size)
        attempts.append(config)
        measured = runner.run(trial_spec(question, config))
        if measured.status in OUT_OF_MEMORY:
            raise RuntimeError(f"CUDA out of memory. {measured.reason}")  # what the helper looks for
        assert measured.ok, measured

    find_executable_batch_size(attempt, starting_batch_size=EFFECTIVE_BATCH_SIZE)()
    return attempts[-1], len(attempts)


def with_any_micro_batch(config: TrainingConfig, micro_batch_size: int) -> TrainingConfig:
    """Also one that doesn't divide the effective batch, which becomes the next multiple."""
    steps = -(-config.effective_batch_size // micro_batch_size)
    return config.model_copy(
        update={
            "micro_batch_size": micro_batch_size,
            "max_tokens_per_micro_batch": micro_batch_size * config.seq_len,
            "gradient_accumulation_steps": steps,
            "effective_batch_size": steps * micro_batch_size,
        }
    )


def repeated(
    question: Question, configs: dict[str, TrainingConfig], runner: TrialRunner, repeats: int
) -> dict[str, float]:
    """Median tokens a second of each, measured in turns; equal configurations share their measurements."""
    speeds: dict[TrainingConfig, list[float]] = {config: [] for config in configs.values()}
    for turn in range(repeats):
        order = list(speeds) if turn % 2 == 0 else list(speeds)[::-1]
        for config in order:
            measured = runner.run(uncapped(question, config))
            assert measured.tokens_per_s, measured
            speeds[config].append(measured.tokens_per_s)
    return {name: median(speeds[config]) for name, config in configs.items()}


def described(config: TrainingConfig) -> str:
    """The fields that the grid varies."""
    return " ".join(str(getattr(config, name)) for name in SHOWN)


def line_of(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    return (
        f"{row['model']:14} {format_bytes(row['ceiling_bytes']):>9}: {row['ratio_to_best']} of the grid's best with "
        f"{row['plan_trials']} of {row['grid_size']} trials ({row['plan_seconds']} s); "
        f"{row['ratio_to_accelerate']} of accelerate's, which took {row['accelerate_trials']}"
    )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Worst and median ratios and shares."""
    ratios = [float(row["ratio_to_best"]) for row in rows]
    shares = [float(row["trials_share"]) for row in rows]
    gains = [float(row["ratio_to_accelerate"]) for row in rows]
    return (
        f"plan / grid's best: median {median(ratios):.3f}, worst {min(ratios):.3f}\n"
        f"trials / grid: median {median(shares):.1%}, largest {max(shares):.1%}\n"
        f"plan / accelerate: median {median(gains):.3f}, smallest {min(gains):.3f}"
    )


if __name__ == "__main__":
    main()
