"""Two jobs that others have reported figures for, as the planner would run them: every lever alone, and all together.

    python benchmarks/reported_jobs.py --out reported_jobs.csv

1. bert-base-uncased, token classification at 512 tokens, 8 texts a step, on an 8 GB and a 12 GB card. Reported
   elsewhere for a combination of mixed precision, accumulation, checkpointing and a frugal optimizer: 56 % less memory
   than plain fp32 for 17 % less speed.
2. LLaMA-7B with LoRA on documents of 8,000 tokens, on 24 GB cards. Reported elsewhere: from 22.3 GB to 14.2 GB at
   equal speed. The model has 2,048 positions (Llama 2: 4,096), so the documents are cut into segments; and beside that
   the same network with 8,192 positions takes each whole.

Everything is simulated. ``plan`` is what the planner's search chooses: the fastest that fits. ``least at ...`` needs
the least memory of all that the search looked at and that is at least that fast. ``against`` is the row that a row's
changes of allocated memory and speed are measured against.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.config import TrainingConfig
from planner.levers import conflict
from planner.models import resolve_model
from planner.question import Question, look_up
from planner.request import make_request
from planner.search import SearchResult, Trial, search, with_micro_batch
from planner.units import GIB
from planner.whole_run import whole_run

FIELDS = (
    *("seq_len", "micro_batch_size", "gradient_accumulation_steps", "precision", "checkpointing", "offload"),
    *("quantization", "optimizer", "attention", "loss", "method"),
)
BYTES = ("peak_allocated_bytes", "peak_reserved_bytes", "total_bytes")
COLUMNS = ("job", "card", "what", *FIELDS, *BYTES, "fits", "step_ms", "tokens_per_s")
COLUMNS = (*COLUMNS, "against", "memory_change", "speed_change")
PLAIN = {"precision": "fp32", "attention": "eager", "optimizer": "adamw_fused"}
BERT = {
    "plain, eager attention": {},
    "plain, sdpa": {"attention": "sdpa"},
    "bf16-amp alone": {"precision": "bf16-amp"},
    "micro-batches of 2 alone": {"micro_batch_size": 2},
    "checkpointing alone": {"checkpointing": "full"},
    "optimizer on the host alone": {"offload": "optimizer"},
    "8-bit optimizer alone": {"optimizer": "adamw_8bit"},
    "amp, micro-batches of 2, checkpointing, 8-bit": {
        "precision": "bf16-amp",
        "micro_batch_size": 2,
        "checkpointing": "full",
        "optimizer": "adamw_8bit",
    },
}
"""What is changed of plain fp32."""
LLAMA = {
    "nothing": {},
    "eager attention instead": {"attention": "eager"},
    "checkpointing alone": {"checkpointing": "full"},
    "fused loss alone": {"loss": "fused-linear"},
    "activations on the host alone": {"offload": "activations"},
    "8-bit optimizer alone": {"optimizer": "adamw_8bit"},
    "checkpointing and fused loss": {"checkpointing": "full", "loss": "fused-linear"},
}
"""What is changed of bf16 weights with fp32 adapters, sdpa, and one segment at a time."""
FROZEN = {"precision": "bf16-amp", "attention": "sdpa", "optimizer": "adamw_fused", "loss": "standard,fused-linear"}
"""What the searches for least memory leave open: checkpointing, the micro-batch, where things are, the loss."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model on one card at one length."""

    name: str
    """What the rows say."""
    gpu: str
    """Name of the card."""
    arguments: Mapping[str, Any]
    """Of the request: model, task, seq_len, batch_size, ..."""
    plain: Mapping[str, Any]
    """The first row's configuration, and what every lever is changed from."""
    levers: Mapping[str, Mapping[str, Any]]
    """Name of a row to what it changes."""
    sweep: Mapping[str, Mapping[str, str]]
    """Name of a search to what it restricts: further fields of the request."""
    against: Sequence[str]
    """Rows that what a search finds is held against."""
    least_speed: float
    """Of such a row's, how much the row with the least memory has to keep."""


def jobs(folder: Path, names: Sequence[str]) -> Iterator[Job]:
    """All of them; `folder` takes a model that isn't bundled."""
    if "bert" in names:
        for gpu in ("RTX 4060 8GB", "RTX 3060 12GB"):
            yield Job(
                name="bert-base token classification",
                gpu=gpu,
                arguments={"model": "bert-base-uncased", "task": "token-classification", "seq_len": 512}
                | {"batch_size": 8, "method": "full"},
                plain=PLAIN | {"micro_batch_size": 8},
                levers=BERT,
                sweep={"": {}, ", 8-bit optimizers too": {"optimizer": "adamw_fused,adamw_8bit,paged_adamw_8bit"}},
                against=("plain, eager attention", "plain, sdpa"),
                least_speed=0.83,
            )
    if "llama" in names:
        model = longer_llama(folder)
        for gpu in ("RTX 4090 24GB", "RTX 3090 24GB"):
            for pieces in (1, 2, 4):  # of a document's 8,000 tokens
                yield Job(
                    name=f"llama-7b lora, documents in {pieces} x {8000 // pieces} tokens",
                    gpu=gpu,
                    arguments={"model": model, "task": "causal-lm", "seq_len": 8000 // pieces}
                    | {"batch_size": 8 * pieces},
                    plain={
                        "precision": "bf16-amp",
                        "attention": "sdpa",
                        "optimizer": "adamw_fused",
                        "micro_batch_size": 1,
                    },
                    levers=LLAMA,
                    sweep={
                        "": {"method": "lora"},
                        ", fused loss and host too": {**FROZEN, "method": "lora", "offload": "none,activations"},
                        ", fused loss and nf4 too": {**FROZEN, "method": "qlora", "offload": "none"},
                    },
                    against=("nothing", "checkpointing alone"),
                    least_speed=0.95,
                )


def longer_llama(folder: Path) -> str:
    """Llama 2's network with 8,192 positions, as a folder: what a checkpoint with stretched positions looks like."""
    config = {**resolve_model("meta-llama/Llama-2-7b-hf").config, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def rows_of(job: Job) -> Iterator[dict[str, Any]]:
    """Every lever, then what each search finds."""
    alone = [lever_row(job, what, changes) for what, changes in job.levers.items()]
    yield from (compared(row, alone[0]) for row in alone)
    for extra, restricted in job.sweep.items():
        question = question_of(job, restricted)
        found = search(question.space(question.request.method), question.simulator)
        found.trials = [every_need(trial, question) for trial in found.trials]
        found.settle(question.simulator)
        for base in [row for row in alone if row["what"] in job.against]:
            for what, trial in chosen(found, base["tokens_per_s"], job.least_speed):
                yield compared(row_of(job, what + extra, question, trial.config), base)


def question_of(job: Job, restricted: Mapping[str, str]) -> Question:
    """The job's request, with its names looked up."""
    vram = job.gpu.rsplit(" ", 1)[-1]
    return look_up(make_request(**{**job.arguments, "vram": vram, "gpu": job.gpu, "device": "none", **restricted}))


def lever_row(job: Job, what: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The plain configuration with some changes, where the planner accepts them."""
    values = {"method": "lora", **job.plain, **changes}
    size = values.pop("micro_batch_size")
    question = question_of(job, {name: values[name] for name in values if name not in job.arguments})
    config = next(question.space(question.request.method).configurations())
    return row_of(job, what, question, with_micro_batch(config, size))


def every_need(trial: Trial, question: Question) -> Trial:
    """A search doesn't look at one text at a time where two fit: it is no faster. But it needs less memory."""
    if trial.status != "pruned" or trial.config.micro_batch_size > 1 or conflict(trial.config):
        return trial
    memory, time = question.simulator.memory_of_budget(trial.config), question.simulator.time(trial.config)
    return replace(trial, memory=memory, time=time, status="fits")


def chosen(found: SearchResult, tokens_per_s: float, least_speed: float) -> Iterator[tuple[str, Trial]]:
    """The plan's choice, and the smallest of those that are fast enough."""
    if found.best is not None:
        yield "plan", found.best
    enough = [t for t in found.fitting if t.time and t.time.tokens_per_s >= least_speed * tokens_per_s]
    if enough:
        least = min(enough, key=lambda t: t.memory.total_bytes if t.memory else 0)
        yield f"least at {least_speed:.0%} of the speed", least


def row_of(job: Job, what: str, question: Question, config: TrainingConfig) -> dict[str, Any]:
    """What a configuration needs, and how long it takes."""
    memory, time = whole_run(question.simulator, config, epoch=False), question.simulator.time(config)
    sizes = {name: getattr(memory, name) for name in BYTES}
    fields = {name: getattr(config, name) for name in FIELDS}
    speed = {"step_ms": round(time.step_ms, 3), "tokens_per_s": round(time.tokens_per_s, 1)}
    return {"job": job.name, "card": job.gpu, "what": what, **fields, **sizes, "fits": memory.fits, **speed}


def compared(row: dict[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its changes of allocated memory and speed against another one."""
    memory = row["peak_allocated_bytes"] / first["peak_allocated_bytes"] - 1
    speed = row["tokens_per_s"] / first["tokens_per_s"] - 1
    return row | {"against": first["what"], "memory_change": round(memory, 4), "speed_change": round(speed, 4)}


def line_of(row: Mapping[str, Any]) -> str:
    """A line of the summary."""
    sizes = " ".join(f"{row[name] / GIB:6.2f}" for name in BYTES)
    config = " ".join(str(row[name]) for name in FIELDS[1:])
    change = f"{row['memory_change']:+5.0%} {row['speed_change']:+5.0%} against {row['against']:22}"
    return f"{row['what'][:50]:50} {sizes} GiB {row['tokens_per_s']:6.0f} tokens/s {change} {config}"


def main() -> None:
    """Simulate, write a row for each configuration, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="bert,llama", help="of bert, llama, separated by commas")
    parser.add_argument("--out", default="reported_jobs.csv", type=Path)
    options = parser.parse_args()
    title = None
    with tempfile.TemporaryDirectory() as folder, options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for job in jobs(Path(folder), options.jobs.split(",")):
            for row in rows_of(job):
                if title != (title := f"{job.name}, {job.gpu}: allocated, reserved, total"):
                    print(title)
                writer.writerow(row)
                file.flush()
                print(line_of(row), flush=True)


if __name__ == "__main__":
    main()
