"""Whether a replayed peak is that of a fresh recording: at random shapes, for many models and configurations.

    python benchmarks/replay_exactness.py --out replay_exactness.csv --shapes 20 --seed 0 --jobs 2

The replay knows a few small shapes of a shallow model. The fresh recording is of the whole model at the shape itself.
Both run through the same two optimizer steps and the same allocator; allocated and reserved bytes must be equal, or
the row says what differs.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from planner.config import TrainingConfig
from planner.errors import PlannerError
from planner.hardware import find_card
from planner.memory.model import MemoryModel, Peak
from planner.memory.polynomials import Shape
from planner.models import resolve_model
from planner.recording.record import CATEGORY_NAMES, Recording
from planner.simulation import Simulator, cublas_workspace_bytes
from planner.workload import Workload

CARD = "rtx 4090"
MODELS = {
    "bert-base-uncased": "sequence-classification",
    "roberta-base": "token-classification",
    "distilbert-base-uncased": "masked-lm",
    "google/electra-small-discriminator": "sequence-classification",
    "sentence-transformers/all-MiniLM-L6-v2": "sequence-classification",
    "gpt2": "causal-lm",
    "facebook/opt-125m": "causal-lm",
    "Qwen/Qwen2.5-0.5B": "causal-lm",
    "meta-llama/Llama-3.2-1B": "causal-lm",
    "t5-small": "seq2seq-lm",
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp32, eager": {"precision": "fp32", "attention": "eager"},
    "fp32, sdpa": {"precision": "fp32", "attention": "sdpa"},
    "bf16-amp, sdpa": {"precision": "bf16-amp", "attention": "sdpa"},
    "bf16-amp, sdpa, checkpointing": {"precision": "bf16-amp", "attention": "sdpa", "checkpointing": "full"},
    "fp16-amp, eager, foreach": {"precision": "fp16-amp", "attention": "eager", "optimizer": "adamw_foreach"},
    "qlora, sdpa, checkpointing": {
        "precision": "bf16-amp", "attention": "sdpa", "checkpointing": "full", "method": "qlora", "quantization": "nf4",
        "lora": {},
    },
}  # fmt: skip
TARGET_SEQ_LEN = 40
LARGEST_MICRO_BATCH, LONGEST = 24, 512
COLUMNS = (
    "model", "task", "configuration", "micro_batch_size", "seq_len", "accumulate", "status",
    "replayed_allocated_bytes", "fresh_allocated_bytes", "replayed_reserved_bytes", "fresh_reserved_bytes", "reason",
)  # fmt: skip


def main() -> None:
    """Compare each model in each configuration, write a row for each shape, and print how many are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="?", help="some of the models, separated by commas")
    parser.add_argument("--out", default="replay_exactness.csv", type=Path)
    parser.add_argument("--shapes", default=20, type=int, help="random shapes of each model in each configuration")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--jobs", default=2, type=int, help="processes")
    options = parser.parse_args()
    models = options.models.split(",") if options.models else list(MODELS)
    unknown = sorted(set(models) - set(MODELS))
    if unknown:
        parser.error(f"unknown models {', '.join(unknown)}; accepted: {', '.join(MODELS)}")
    rows = []
    context = multiprocessing.get_context("spawn")  # torch's threads don't survive a fork
    with (
        options.out.open("w", newline="") as file,
        ProcessPoolExecutor(options.jobs, mp_context=context) as pool,
    ):
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        work = [
            pool.submit(compare, model, name, options.shapes, options.seed)
            for model in models
            for name in CONFIGURATIONS
        ]
        for done in as_completed(work):
            rows += done.result()
            writer.writerows(done.result())
            file.flush()
            print(unit_line(done.result()), flush=True)
    print(summary(rows))


def compare(model: str, configuration: str, shapes: int, seed: int) -> list[dict[str, Any]]:
    """A row for each random shape; one row alone when the model has no such configuration."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fields = {"model": model, "task": MODELS[model], "configuration": configuration}
    drawn = random_shapes(model, configuration, shapes, seed)
    try:
        return [{**fields, **row} for row in comparisons(model, configuration, drawn)]
    except PlannerError as error:
        return [{**fields, "status": "no such configuration", "reason": str(error).splitlines()[0]}]


def random_shapes(model: str, configuration: str, count: int, seed: int) -> list[tuple[Shape, bool]]:
    """Micro-batches and lengths, and whether there are several micro-batches; the same for the same seed."""
    drawn = random.Random(f"{model} {configuration} {seed}")
    longest = min(LONGEST, resolve_model(model).max_seq_len or LONGEST)
    return [
        ((drawn.randint(1, LARGEST_MICRO_BATCH), drawn.randint(8, longest)), drawn.random() < 0.5) for _ in range(count)
    ]


def comparisons(model: str, configuration: str, shapes: list[tuple[Shape, bool]]) -> Iterator[dict[str, Any]]:
    """Replay and fresh recording at each shape."""
    from planner.recording.kernels import Target
    from planner.recording.source import make_source

    card = find_card(CARD)
    target_seq_len = TARGET_SEQ_LEN if MODELS[model] == "seq2seq-lm" else None
    workload = Workload(spec=resolve_model(model), task=MODELS[model], target_seq_len=target_seq_len)
    simulator = Simulator(workload, card, ceiling_bytes=card.label_bytes)
    config = structure(CONFIGURATIONS[configuration])
    replayed = simulator.model(config)
    # what records like another precision is recorded like it
    recorded = config.model_copy(update={"precision": simulator.recordings.structure(config)["precision"]})
    source = make_source(workload, recorded, Target(compute_capability=card.compute_capability))
    for shape, accumulate in shapes:
        fresh = source.record(shape)
        reference = MemoryModel(
            lambda _: None,
            replayed.update,
            exact=lambda _, fresh=fresh: fresh,  # type: ignore[misc]
            cublas_workspace_bytes=cublas_workspace_bytes(card.compute_capability),
            settings=replayed.settings,
        )
        expected = reference.peak(shape, accumulate=accumulate)
        got = replayed.peak(shape, accumulate=accumulate)
        yield {
            "micro_batch_size": shape[0],
            "seq_len": shape[1],
            "accumulate": accumulate,
            "replayed_allocated_bytes": got.allocated_bytes,
            "fresh_allocated_bytes": expected.allocated_bytes,
            "replayed_reserved_bytes": got.reserved_bytes,
            "fresh_reserved_bytes": expected.reserved_bytes,
            **verdict(got, expected, replayed, fresh, shape),
        }


def structure(fields: dict[str, Any]) -> TrainingConfig:
    """A configuration whose shape is not looked at."""
    shape = {"micro_batch_size": 1, "seq_len": 8, "max_tokens_per_micro_batch": 8}
    batch = {"gradient_accumulation_steps": 1, "effective_batch_size": 1}
    return TrainingConfig.model_validate({**shape, **batch, **fields})


def verdict(got: Peak, expected: Peak, model: MemoryModel, fresh: Recording, shape: Shape) -> dict[str, str]:
    """Equal or not, and what differs."""
    if (got.allocated_bytes, got.reserved_bytes) == (expected.allocated_bytes, expected.reserved_bytes):
        polynomial = model.is_polynomial(shape)
        return {"status": "equal" if polynomial else "recorded", "reason": "" if polynomial else NOT_POLYNOMIAL}
    return {"status": "differs", "reason": difference(model, fresh, shape)}


NOT_POLYNOMIAL = "sizes follow no polynomial of micro-batch and length: each shape is recorded, none replayed"


def difference(model: MemoryModel, fresh: Recording, shape: Shape) -> str:
    """The first thing in which the events or sizes of a replay are not the fresh recording's."""
    step = model.step(shape)
    ours, theirs = step.template, fresh
    if len(ours.events) != len(theirs.events):
        return f"{len(ours.events)} events replayed, {len(theirs.events)} recorded"
    for index, (event, other) in enumerate(zip(ours.events, theirs.events, strict=True)):
        if event != other:
            return f"event {index} of {len(ours.events)}: block {event} replayed, {other} recorded"
    sizes = step.sizes_at(shape).tolist()
    gates = {block: count > threshold for block, count, threshold in theirs.gates}
    recorded = [size if gates.get(block, True) else 0 for block, size in enumerate(theirs.sizes)]
    wrong = [block for block, size in enumerate(sizes) if size != recorded[block]]
    if not wrong:
        return "the same events and sizes, with other categories or gradients"
    first = wrong[0]
    kind = CATEGORY_NAMES[ours.categories[first]]
    return f"{len(wrong)} sizes; first block {first} ({kind}): {sizes[first]} replayed, {recorded[first]} recorded"


def unit_line(rows: list[dict[str, Any]]) -> str:
    """One model in one configuration, in a line."""
    counts = ", ".join(f"{count} {status}" for status, count in Counter(row["status"] for row in rows).items())
    return f"{rows[0]['model']:32} {rows[0]['configuration']:32} {counts}"


def summary(rows: list[dict[str, Any]]) -> str:
    """How many are equal, and the reasons of the others."""
    compared = [row for row in rows if row["status"] != "no such configuration"]
    equal = sum(row["status"] in ("equal", "recorded") for row in compared)
    lines = [f"{equal} of {len(compared)} peaks are equal to the byte, allocated and reserved"]
    for (status, reason), count in Counter((r["status"], r["reason"]) for r in rows if r["reason"]).most_common():
        lines.append(f"  {count} {status}: {reason}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
