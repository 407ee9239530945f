"""What a trial costs beyond the steps that it times: a process of its own each, against a server that forks.

    python benchmarks/trial_cost.py [MODEL] --out trial_cost.csv

One row for each kind of trial, medians in seconds: start and imports, libraries' own start, the model, warm-up, timed
passes. Then this process over many trials: its resident set, descriptors, children and temporary files.
"""

from __future__ import annotations

import argparse
import csv
import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from planner.config import TrainingConfig
from planner.measure.environment import trial_environment
from planner.measure.protocol import TrialSpec
from planner.measure.runner import TrialRunner
from planner.models import resolve_model
from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One kind of trial. Medians, in seconds."""

    kind: str
    """A process of its own; the server's first, with its start; those after it."""
    trials: int
    """That the medians are of."""
    wall_s: float
    """Whole trial, as its parent sees it."""
    start_s: float
    """Until the trial's own code runs: the process or the fork, and imports."""
    context_s: float
    """What is left of imports, and a small step that has libraries load and start what they need."""
    build_s: float
    """The model, the optimizer, the batch."""
    warm_up_s: float
    """Two optimizer steps, watched, and the checks."""
    timed_s: float
    """Timed passes, from the first on, and the end."""

    @property
    def beyond_s(self) -> float:
        """All but the timed passes."""
        return self.wall_s - self.timed_s


PARTS = ("start_s", "context_s", "build_s", "warm_up_s", "timed_s")
BORDERS = ("libraries", "load", "first_step", "timed")
"""Phases of a trial that begin the parts after the first."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What this process holds after each of many trials."""

    resident_bytes: list[int]
    """Its resident set."""
    descriptors: list[int]
    """Open ones."""
    children: list[int]
    """Processes."""
    files: list[int]
    """In the folder for temporary files."""


def spec_of(model: str) -> TrialSpec:
    """A short trial: eight sequences of 32 tokens."""
    config = TrainingConfig(
        micro_batch_size=8,
        seq_len=32,
        max_tokens_per_micro_batch=256,
        gradient_accumulation_steps=1,
        effective_batch_size=8,
        precision="fp32",
    )
    spec = resolve_model(model)
    workload = Workload(spec=spec, task="sequence-classification")
    return TrialSpec(workload=workload, config=config, device="cpu", timed_s=0.5)


def run(runner: TrialRunner, spec: TrialSpec) -> dict[str, float]:
    """One trial's parts, in seconds. Raises RuntimeError if it failed."""
    measured = runner.run(spec)
    if not measured.ok:
        raise RuntimeError(f"{measured.status}: {measured.reason}")
    borders = [0.0, *(runner.phases_s[phase] for phase in BORDERS), measured.wall_s]
    return dict(zip(PARTS, (b - a for a, b in pairwise(borders)), strict=True)) | {"wall_s": measured.wall_s}


def cost(kind: str, trials: Sequence[dict[str, float]]) -> Cost:
    """Medians of some trials."""
    return Cost(kind=kind, trials=len(trials), **{part: median(t[part] for t in trials) for part in ("wall_s", *PARTS)})


def costs(spec: TrialSpec, runs: int) -> Iterator[Cost]:
    """Of each kind."""
    environment = trial_environment(spec.device, "")
    with TrialRunner(environment, forks=False) as runner:
        yield cost("process of its own", [run(runner, spec) for _ in range(runs)])
    firsts, later = [], []
    for _ in range(runs):
        with TrialRunner(environment) as runner:
            firsts.append(run(runner, spec))
            later += [run(runner, spec) for _ in range(2)]
    yield cost("server, first trial", firsts)
    yield cost("server, later trials", later)


def footprint(spec: TrialSpec, trials: int) -> Footprint:
    """This process after each of some trials; temporary files are its own and the trials'."""
    process, before = psutil.Process(), tempfile.tempdir
    found = Footprint(resident_bytes=[], descriptors=[], children=[], files=[])
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            with TrialRunner(trial_environment(spec.device, "") | {"TMPDIR": folder}) as runner:
                run(runner, spec)  # starts the server
                for _ in range(trials):
                    run(runner, spec)
                    gc.collect()
                    found.resident_bytes.append(process.memory_info().rss)
                    found.descriptors.append(process.num_fds())
                    found.children.append(len(process.children(recursive=True)))
                    found.files.append(sum(1 for _ in Path(folder).iterdir()))
        finally:
            tempfile.tempdir = before
    return found


def main() -> None:
    """Measure, write, and say it in ratios, which hold on other machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--trials", type=int, default=50, help="in a row, watched from outside")
    parser.add_argument("--out", default="trial_cost.csv", type=Path)
    options = parser.parse_args()
    spec = spec_of(options.model)
    found: list[Cost] = []
    for row in costs(spec, options.runs):
        found.append(row)
        parts = ", ".join(f"{part[:-2].replace('_', '-')} {getattr(row, part):.2f}" for part in PARTS)
        ratio = row.beyond_s / found[0].beyond_s
        print(f"{row.kind:22} {ratio:5.2f} x the cost beyond timed passes   ({parts} s)", flush=True)
    held = footprint(replace(spec, timed_s=0.05), options.trials)
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "trials", "wall_s", *PARTS, "first_ten", "last_ten"])
        for row in found:
            writer.writerow([row.kind, row.trials, *(f"{getattr(row, part):.3f}" for part in ("wall_s", *PARTS))])
        for name, values in vars(held).items():
            writer.writerow([name, len(values), *[""] * (1 + len(PARTS)), median(values[:10]), median(values[-10:])])
    for name, values in vars(held).items():
        print(f"{name:22} first ten {median(values[:10]):,.0f}, last ten {median(values[-10:]):,.0f}")


if __name__ == "__main__":
    main()
