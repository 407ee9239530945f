"""``compare()``: what a plan's precision and quantization change, by running it and fp32 on the user's own texts."""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.comparison.agreement import Agreement
from planner.comparison.answering import Run, run_script
from planner.comparison.differences import Pair, agree
from planner.comparison.sample import Sample, read_sample_of
from planner.errors import InputError, Problem, TrialError
from planner.places import snapshot_problems
from planner.plans import read_document
from planner.progress import NoProgress, Progress
from planner.tasks import TASK_FACTS
from planner.units import shown

ROWS = 1000
"""Rows that are compared where no limit is given."""
LABELLED = ("label",)
"""Answers whose accuracy the data's labels tell."""
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan's run of a sample against fp32's of the same: what changed, and what it is worth."""

    plan: str
    """The plan's folder."""
    model: str
    """The model."""
    task: str
    """What it is run for."""
    device: str
    """Where both ran: cpu or cuda."""
    changes: tuple[str, ...]
    """What the plan does to the numbers, a clause each; empty where it runs in fp32 with nothing quantized."""
    notes: tuple[str, ...]
    """What a reader of the figures should know, a clause each."""
    rows_compared: int
    """Rows that both runs answered."""
    rows_left_out: int
    """Rows of the sample that can't be read, or that one of the runs did not answer."""
    agreement: Agreement
    """The figures: which there are follows from the task."""
    plan_run: Run
    """The plan's speed and memory."""
    baseline_run: Run
    """Those of fp32."""
    rows: tuple[dict[str, Any], ...] = field(repr=False)
    """What both said of each row (or document), and how far apart that is."""

    def to_json(self) -> dict[str, Any]:
        """All but the single rows, as plain values."""
        document = asdict(replace(self, rows=()))
        for name in ("plan_run", "baseline_run"):
            del document[name]["answers"]
        del document["rows"]
        return document


def compare(
    plan: str | Path,
    *,
    data: str | Path,
    text_column: str | None = None,
    label_column: str | None = None,
    limit: int | str | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Run a saved inference plan, and the same in fp32 with nothing quantized, on a sample; what changed.

    ``plan``: the folder that it was saved in. ``data``: as for ``plan()``; ``limit``: its first rows that are compared,
    at most (1000). ``label_column``: true labels of a classification, or the texts that a sequence-to-sequence model
    should write. ``device``: cpu or cuda; None: where the plan is for, if that is here. ``out``: a csv file for the
    single rows. Raises InputError for arguments and data that can't be used, TrialError where a run fails.
    """
    progress = progress or NoProgress()
    document, script = _check(str(plan), limit, device, label_column, None if out is None else str(out))
    progress.phase("reading the data")
    sample = read_sample_of(str(data), document, text_column, label_column, most=int(limit or ROWS))
    device = device or _device(document)
    with tempfile.TemporaryDirectory(prefix="vramplan-compare-") as folder:
        runs = _Runs(script, Path(folder), sample, device, progress)
        ours, theirs = runs.both()
        losses = runs.losses()
    progress.phase("comparing")
    pairs = _pairs(sample, ours, theirs, losses)
    rows, agreement = agree(document, pairs, sample)
    if out is not None:
        _write(rows, Path(out))
    found = _Found(sample=sample, runs=(ours, theirs), pairs=pairs, rows=tuple(rows), agreement=agreement)
    return _comparison(str(plan), document, device, found)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What both runs came to."""

    sample: Sample
    runs: tuple[Run, Run]
    pairs: Sequence[Pair]
    rows: tuple[dict[str, Any], ...]
    agreement: Agreement


def _comparison(plan: str, document: Mapping[str, Any], device: str, found: _Found) -> Comparison:
    sample, (ours, theirs) = found.sample, found.runs
    return Comparison(
        plan=plan,
        model=document["workload"]["model"],
        task=document["workload"]["task"],
        device=device,
        changes=changes(document["config"]),
        notes=tuple(_notes(document, device, sample)),
        rows_compared=len(found.pairs),
        rows_left_out=sample.unreadable + len(sample.rows) - len(found.pairs),
        agreement=found.agreement,
        plan_run=ours,
        baseline_run=theirs,
        rows=found.rows,
    )


def _check(
    plan: str, limit: int | str | None, device: str | None, label_column: str | None, out: str | None
) -> tuple[dict[str, Any], Path]:
    """The plan and its script. Raises InputError with all that is wrong."""
    problems = [replace(problem, argument="out") for problem in snapshot_problems(out)]
    if limit is not None and not (str(limit).isdecimal() and int(limit) > 0):
        problems.append(Problem(argument="limit", message=f"got {shown(limit)}; accepted: a whole number from 1"))
    if device not in (None, *DEVICES):
        problems.append(Problem(argument="device", message=f"got {shown(device)}; accepted: {', '.join(DEVICES)}"))
    document: dict[str, Any] = {}
    folder = Path(plan).parent if Path(plan).name == "plan.json" else Path(plan)
    try:
        document = read_document(folder)
    except InputError as error:
        problems += [replace(problem, argument="plan") for problem in error.problems]
    else:
        problems += _of_plan(document, folder, label_column)
    if problems:
        raise InputError(problems)
    return document, folder / "infer.py"


def _of_plan(document: Mapping[str, Any], folder: Path, label_column: str | None) -> list[Problem]:
    if document["request"]["mode"] != "infer":
        message = "got a plan of mode train; accepted: one of plan --mode infer: a training's losses tell of it"
        return [Problem(argument="plan", message=message)]
    problems = []
    if not (folder / "infer.py").is_file():
        message = f"got {shown(str(folder))}, which holds no infer.py; make the plan again"
        problems.append(Problem(argument="plan", message=message))
    facts = TASK_FACTS[document["workload"]["task"]]
    if label_column and not (facts.answer in LABELLED or facts.labels == "tokens"):
        message = f"got {shown(label_column)}; of {facts.name} no labels are read; leave it out"
        problems.append(Problem(argument="label_column", message=message))
    return problems


def _device(document: Mapping[str, Any]) -> str:
    """Where the plan is for, if that is here."""
    from planner.devices import has_cuda_driver

    if document["hardware"].get("kind") == "cpu" or not has_cuda_driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def changes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a configuration does to the numbers that fp32 would not, a clause each."""
    found = {
        "fp16": "weights and arithmetic in fp16",
        "bf16": "weights and arithmetic in bf16",
        "tf32": "products in tf32",
    }
    said = [found.get(config["precision"], "")]
    if config["quantization"] != "none":
        said.append(f"weights of linear layers in {config['quantization']}")
    if config["kv_cache"] == "quantized":
        said.append("keys and values in fp8")
    return tuple(clause for clause in said if clause)


def _notes(document: Mapping[str, Any], device: str, sample: Sample) -> list[str]:
    config, notes = document["config"], []
    if not changes(config):
        notes.append("the plan changes no numbers: what differs is two runs' rounding")
    if device == "cpu" and document["hardware"].get("kind") != "cpu":
        notes.append("run on this machine's processor: the card's kernels round differently, and its speed is another")
    if device == "cpu" and config["precision"] == "tf32":
        notes.append("tf32 changes nothing on a processor")
    if config["kv_cache"] == "quantized":
        notes.append("perplexity is measured with keys and values as they are; the texts, with quantized ones")
    if sample.note:
        notes.append(sample.note)
    return notes


class _Runs:
    """The runs of a comparison: the plan's and the baseline's, of the answers and of the perplexity."""

    def __init__(self, script: Path, folder: Path, sample: Sample, device: str, progress: Progress) -> None:
        self.script, self.folder, self.sample, self.progress = script, folder, sample, progress
        self.device = device
        self.data = sample.write(folder / "sample.jsonl")

    def both(self) -> tuple[Run, Run]:
        """The answers."""
        options = ("--text-column", self.sample.text_column) if self.sample.text_column else ()
        return self._run("", *options), self._run("", *options, "--baseline")

    def losses(self) -> tuple[Run, Run] | None:
        """Mean losses of the sample's own texts; None for a task that writes nothing, or without targets."""
        if not self.sample.has_perplexity:
            return None
        columns = self.sample.perplexity_columns
        options = ("--perplexity", *(("--text-column", columns) if columns else ()))
        return self._run("perplexity: ", *options), self._run("perplexity: ", *options, "--baseline")

    def _run(self, what: str, *options: str) -> Run:
        name = "the fp32 baseline's run" if "--baseline" in options else "the plan's run"
        self.progress.phase(f"{what}{name}, {len(self.sample.rows):,} rows on {self.device}")
        output = self.folder / f"{'-'.join(option.strip('-') for option in options if option.startswith('--'))}.jsonl"
        return run_script(self.script, self.data, output, "--device", self.device, *options, name=f"{what}{name}")


def _pairs(sample: Sample, ours: Run, theirs: Run, losses: tuple[Run, Run] | None) -> list[Pair]:
    """Rows that both answered. Raises TrialError where there is none."""
    pairs = [
        Pair(index=index, values=values, ours=a, theirs=b)
        for (index, values), a, b in zip(sample.rows, ours.answers, theirs.answers, strict=True)
        if "error" not in a and "error" not in b
    ]
    if not pairs:
        first = next(answer["error"] for answer in (*ours.answers, *theirs.answers) if "error" in answer)
        raise TrialError(f"there is nothing to compare: no row has an answer of both runs; the first one: {first}")
    if losses is None:
        return pairs
    by_index = {index: (a, b) for (index, _), a, b in zip(sample.rows, *(run.answers for run in losses), strict=True)}
    return [replace(pair, losses=by_index[pair.index]) for pair in pairs]


def _write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The csv file, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        staging = Path(name)
        try:
            with os.fdopen(handle, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
            staging.chmod(0o644)
            staging.replace(path)
        except BaseException:
            staging.unlink(missing_ok=True)
            raise
    except OSError as error:
        message = f"got {str(path)!r}; accepted: a file that can be written; {error.strerror or error}"
        raise InputError([Problem(argument="out", message=message)]) from error
