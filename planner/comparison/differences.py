"""Two answers to the same row, side by side: the rows of a comparison, and the measure that fits the task's answers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.comparison import agreement
from planner.comparison.agreement import Agreement
from planner.comparison.sample import Sample, truth_of
from planner.tasks import TASK_FACTS

Rows = list[dict[str, Any]]
"""Rows of the csv file: plain values."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What two runs answered to one row, each as a line of the script's output."""

    index: int
    """The row's number in the data."""
    values: Mapping[str, Any]
    """Its columns."""
    ours: Mapping[str, Any]
    """The plan's answer."""
    theirs: Mapping[str, Any]
    """The baseline's."""
    losses: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
    """Both answers of the runs that measure the perplexity, if there were such."""


def agree(document: Mapping[str, Any], pairs: Sequence[Pair], sample: Sample) -> tuple[Rows, Agreement]:
    """Rows and figures of the task's answers."""
    answer = TASK_FACTS[document["workload"]["task"]].answer or ""
    if answer == "text":
        return _texts(pairs, _tokenizer(document))
    return _BY_ANSWER[answer](pairs, sample)


def _numbers(pairs: Sequence[Pair], sample: Sample) -> tuple[Rows, Agreement]:
    """Documents of one query are ranked together, whether they came as a list or in rows of their own."""
    rows: Rows = []
    queries: dict[object, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for pair in pairs:
        scores = [answer.get("scores", [answer.get("score")]) for answer in (pair.ours, pair.theirs)]
        query = pair.values.get(sample.query_column) if sample.query_column and "score" in pair.ours else None
        mine, other = queries[query if isinstance(query, str) else pair.index]
        for document, (a, b) in enumerate(zip(*scores, strict=True)):
            place = {"document": document} if sample.query_column is not None else {}
            rows.append({"index": pair.index, **place, "score": a, "baseline_score": b, "difference": a - b})
            mine.append(a)
            other.append(b)
    return rows, agreement.of_scores(*zip(*queries.values(), strict=True))


def _labels(pairs: Sequence[Pair], sample: Sample) -> tuple[Rows, Agreement]:
    names = list(pairs[0].theirs["scores"])
    column = sample.label_column
    truth = [truth_of(pair.values.get(column), names) if column else None for pair in pairs]
    rows = []
    for pair, label in zip(pairs, truth, strict=True):
        row = {"index": pair.index, "label": pair.ours["label"], "baseline_label": pair.theirs["label"]}
        known = {"true_label": label} if column else {}
        rows.append({**row, **known, "largest_probability_difference": _largest(pair)})
    return rows, agreement.of_labels(*_scores(pairs), truth)


def _label_sets(pairs: Sequence[Pair], sample: Sample) -> tuple[Rows, Agreement]:
    rows = [
        {
            "index": pair.index,
            "labels": json.dumps(pair.ours["labels"], ensure_ascii=False),
            "baseline_labels": json.dumps(pair.theirs["labels"], ensure_ascii=False),
            "largest_probability_difference": _largest(pair),
        }
        for pair in pairs
    ]
    return rows, agreement.of_label_sets(*_scores(pairs))


def _scores(pairs: Sequence[Pair]) -> tuple[list[Mapping[str, float]], list[Mapping[str, float]]]:
    return [pair.ours["scores"] for pair in pairs], [pair.theirs["scores"] for pair in pairs]


def _largest(pair: Pair) -> float:
    return max(abs(float(pair.ours["scores"][name] - score)) for name, score in pair.theirs["scores"].items())


def _spans(pairs: Sequence[Pair], sample: Sample) -> tuple[Rows, Agreement]:
    rows = []
    for pair in pairs:
        one = agreement.of_spans([pair.ours["spans"]], [pair.theirs["spans"]])
        counts = {"spans": one.spans, "baseline_spans": one.baseline_spans}
        rows.append({"index": pair.index, **counts, "f1": one.f1, "character_agreement": one.character_agreement})
    return rows, agreement.of_spans([pair.ours["spans"] for pair in pairs], [pair.theirs["spans"] for pair in pairs])


def _vectors(pairs: Sequence[Pair], sample: Sample) -> tuple[Rows, Agreement]:
    vectors = [pair.ours["embedding"] for pair in pairs], [pair.theirs["embedding"] for pair in pairs]
    cosines = agreement.cosines(*vectors)
    rows = [{"index": pair.index, "cosine": cosine} for pair, cosine in zip(pairs, cosines, strict=True)]
    return rows, agreement.of_vectors(*vectors)


def _texts(pairs: Sequence[Pair], tokens_of: Callable[[list[str]], list[list[int]]]) -> tuple[Rows, Agreement]:
    texts = [pair.ours["text"] for pair in pairs], [pair.theirs["text"] for pair in pairs]
    tokens = tokens_of(texts[0]), tokens_of(texts[1])
    rows = []
    for pair, a, b in zip(pairs, *tokens, strict=True):
        row = {"index": pair.index, "text": pair.ours["text"], "baseline_text": pair.theirs["text"]}
        row |= {"tokens_before_difference": agreement.common_beginning(a, b), "baseline_tokens": len(b)}
        if pair.losses:
            row |= {"loss": pair.losses[0].get("loss"), "baseline_loss": pair.losses[1].get("loss")}
        rows.append(row)
    known = [pair.losses for pair in pairs if pair.losses and all("loss" in answer for answer in pair.losses)]
    losses = [a["loss"] for a, _ in known], [b["loss"] for _, b in known]
    return rows, agreement.of_texts(*texts, tokens, losses, [a["tokens"] for a, _ in known])


def _tokenizer(document: Mapping[str, Any]) -> Callable[[list[str]], list[list[int]]]:
    """What the model's tokenizer makes of texts, without special tokens."""
    from transformers import AutoTokenizer

    source = document["workload"]["model"].removesuffix("/config.json")
    trust = bool(document["request"].get("trust_remote_code"))
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    return lambda texts: list(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])


_BY_ANSWER: dict[str, Callable[[Sequence[Pair], Sample], tuple[Rows, Agreement]]] = {
    "number": _numbers,
    "label": _labels,
    "labels": _label_sets,
    "word-labels": _spans,
    "vector": _vectors,
}
