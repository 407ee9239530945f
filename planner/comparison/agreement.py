"""How far two runs of a model agree: pure measures over their answers, one for each kind of answer.

The second run is the one that the first is measured against. Shares and probabilities are from 0 to 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-6
"""Cosines closer than this are equal: vectors of one text differ by fp32's rounding from batch to batch."""
NEIGHBOURS = 10
_BLOCK = 1024
Span = Mapping[str, Any]
"""``start`` and ``end`` in characters, and ``label``."""


@dataclass(frozen=True, kw_only=True)
class ScoreAgreement:
    """Of numbers that a model gives texts."""

    scores: int
    """Numbers compared."""
    largest_difference: float
    """Of all, without sign."""
    mean_difference: float
    """As above."""
    median_difference: float
    """As above."""
    spearman: float | None
    """Rank correlation over all; None where one run gave all the same number, or there are fewer than two."""
    kendall: float | None
    """Kendall's tau-b; None as above."""
    queries: int | None = None
    """Queries with two documents or more; this and what follows is None where there are none."""
    mean_query_spearman: float | None = None
    """Rank correlation of a query's documents, mean over queries."""
    worst_query_spearman: float | None = None
    """Of the query with the lowest."""
    mean_query_kendall: float | None = None
    """Kendall's tau-b, mean over queries."""
    worst_query_kendall: float | None = None
    """Of the query with the lowest."""
    top1_agreement: float | None = None
    """Share of queries whose first document is one of those that the second run scores highest."""


@dataclass(frozen=True, kw_only=True)
class LabelAgreement:
    """Of one label for each text."""

    texts: int
    """Texts compared."""
    agreement: float
    """Share of texts with the same label."""
    largest_probability_difference: float
    """Of any label of any text."""
    mean_probability_difference: float
    """Over all labels of all texts."""
    labelled: int = 0
    """Texts whose label the data has, and the model knows."""
    accuracy: float | None = None
    """Share of those that the first run labels so; None where there are none."""
    baseline_accuracy: float | None = None
    """The second run's."""


@dataclass(frozen=True, kw_only=True)
class LabelSetAgreement:
    """Of any number of labels for each text."""

    texts: int
    """Texts compared."""
    agreement: float
    """Share of texts with the same set of labels."""
    by_label: Mapping[str, float]
    """Share of texts where both runs have the label, or neither has."""
    mean_label_agreement: float
    """Of ``by_label``."""
    worst_label_agreement: float
    """Of ``by_label``."""
    largest_probability_difference: float
    """Of any label of any text."""


@dataclass(frozen=True, kw_only=True)
class SpanAgreement:
    """Of labelled spans."""

    texts: int
    """Texts compared."""
    spans: int
    """The first run's."""
    baseline_spans: int
    """The second run's."""
    f1: float
    """Of spans with the same start, end and label, as if the second run's were true; 1 where neither has any."""
    precision: float
    """Share of the first run's spans that the second one has; 1 where there are none."""
    recall: float
    """Share of the second run's spans that the first one has; 1 where there are none."""
    character_agreement: float
    """Share with the same label, of the characters that any of both labels; 1 where there are none."""


@dataclass(frozen=True, kw_only=True)
class VectorAgreement:
    """Of a vector for each text."""

    texts: int
    """Texts compared."""
    mean_cosine: float
    """Of a text's two vectors."""
    worst_cosine: float
    """Of the text with the lowest."""
    top1_agreement: float | None
    """Share of texts whose nearest other text, by cosine, is one of the second run's nearest; None below three."""
    top10_overlap: float | None
    """Mean share of a text's ten nearest that are among the second run's ten nearest; None below twelve texts."""


@dataclass(frozen=True, kw_only=True)
class TextAgreement:
    """Of texts that a model writes."""

    texts: int
    """Texts compared."""
    equal_texts: float
    """Share of texts that are the same to the character."""
    tokens_before_difference: float
    """Share of the second run's tokens that stand before a text's first difference."""
    perplexity: float | None = None
    """The first run's over the sample; None where it could not be measured."""
    baseline_perplexity: float | None = None
    """The second run's."""
    perplexity_ratio: float | None = None
    """The first by the second."""
    perplexity_tokens: int = 0
    """Tokens that both are over."""


Agreement = ScoreAgreement | LabelAgreement | LabelSetAgreement | SpanAgreement | VectorAgreement | TextAgreement
"""Any of them."""


def of_scores(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> ScoreAgreement:
    """Of one or more numbers for each query; a list of one number is a text with no others to be ranked with."""
    pairs = [(np.array(a), np.array(b)) for a, b in zip(ours, theirs, strict=True)]
    flat = np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])
    differences = np.abs(flat[0] - flat[1])
    spearman, kendall = rank_correlations(*flat)
    return ScoreAgreement(
        scores=len(differences),
        largest_difference=float(differences.max()),
        mean_difference=float(differences.mean()),
        median_difference=float(np.median(differences)),
        spearman=spearman,
        kendall=kendall,
        **_of_queries([pair for pair in pairs if len(pair[0]) > 1]),
    )


def _of_queries(pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> dict[str, Any]:
    if not pairs:
        return {}
    found: dict[str, Any] = {"queries": len(pairs)}
    correlations = zip(*(rank_correlations(*pair) for pair in pairs), strict=True)
    for name, values in zip(("spearman", "kendall"), correlations, strict=True):
        known = [value for value in values if value is not None]
        found[f"mean_query_{name}"] = statistics.fmean(known) if known else None
        found[f"worst_query_{name}"] = min(known, default=None)
    found["top1_agreement"] = statistics.fmean(float(b[a.argmax()] == b.max()) for a, b in pairs)
    return found


def rank_correlations(ours: NDArray[Any], theirs: NDArray[Any]) -> tuple[float | None, float | None]:
    """Spearman's and Kendall's; None where they are not defined: fewer than two numbers, or all the same."""
    from scipy import stats

    if len(ours) < 2 or np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return None, None
    return float(stats.spearmanr(ours, theirs).statistic), float(stats.kendalltau(ours, theirs).statistic)


def of_labels(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], truth: Sequence[str | None]
) -> LabelAgreement:
    """Of each text's probability of each label; ``truth``: its label in the data, None where that isn't known."""
    best = [(max(a, key=a.__getitem__), max(b, key=b.__getitem__)) for a, b in zip(ours, theirs, strict=True)]
    differences = _probability_differences(ours, theirs)
    known = [(a == label, b == label) for (a, b), label in zip(best, truth, strict=True) if label is not None]
    return LabelAgreement(
        texts=len(best),
        agreement=statistics.fmean(float(a == b) for a, b in best),
        largest_probability_difference=max(differences),
        mean_probability_difference=statistics.fmean(differences),
        labelled=len(known),
        accuracy=statistics.fmean(float(a) for a, _ in known) if known else None,
        baseline_accuracy=statistics.fmean(float(b) for _, b in known) if known else None,
    )


def of_label_sets(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], threshold: float = 0.5
) -> LabelSetAgreement:
    """Of each text's probability of each label; those above the threshold are its labels."""
    pairs = list(zip(ours, theirs, strict=True))
    same = [{name: (a[name] > threshold) == (b[name] > threshold) for name in b} for a, b in pairs]
    by_label = {name: statistics.fmean(float(row[name]) for row in same) for name in theirs[0]}
    return LabelSetAgreement(
        texts=len(pairs),
        agreement=statistics.fmean(float(all(row.values())) for row in same),
        by_label=by_label,
        mean_label_agreement=statistics.fmean(by_label.values()),
        worst_label_agreement=min(by_label.values()),
        largest_probability_difference=max(_probability_differences(ours, theirs)),
    )


def _probability_differences(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> list[float]:
    return [abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True) for name in b]


def of_spans(ours: Sequence[Sequence[Span]], theirs: Sequence[Sequence[Span]]) -> SpanAgreement:
    """Of each text's spans, which don't overlap within a run."""
    count = baseline_count = common = same = labelled = 0
    for a, b in zip(ours, theirs, strict=True):
        mine, other = ({(span["start"], span["end"], span["label"]) for span in spans} for spans in (a, b))
        count, baseline_count, common = count + len(mine), baseline_count + len(other), common + len(mine & other)
        one, two = _labels_of_characters(a), _labels_of_characters(b)
        labelled += len(one.keys() | two.keys())
        same += len(one.items() & two.items())
    return SpanAgreement(
        texts=len(ours),
        spans=count,
        baseline_spans=baseline_count,
        f1=_share(2 * common, count + baseline_count),
        precision=_share(common, count),
        recall=_share(common, baseline_count),
        character_agreement=_share(same, labelled),
    )


def _labels_of_characters(spans: Sequence[Span]) -> dict[int, str]:
    return {place: span["label"] for span in spans for place in range(span["start"], span["end"])}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def of_vectors(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> VectorAgreement:
    """Of each text's vector; nearest texts are judged by the second run's cosines, where equal ones are as good."""
    a, b, each = _unit(ours), _unit(theirs), cosines(ours, theirs)
    count = len(each)
    return VectorAgreement(
        texts=count,
        mean_cosine=statistics.fmean(each),
        worst_cosine=min(each),
        top1_agreement=neighbour_overlap(a, b, 1) if count > 2 else None,
        top10_overlap=neighbour_overlap(a, b, NEIGHBOURS) if count > NEIGHBOURS + 1 else None,
    )


def cosines(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    """Of each text's two vectors."""
    found: list[float] = np.clip((_unit(ours) * _unit(theirs)).sum(1), -1.0, 1.0).tolist()
    return found


def neighbour_overlap(ours: NDArray[Any], theirs: NDArray[Any], k: int) -> float:
    """Mean share of a row's k nearest other rows that are among its k nearest by the second; rows have length 1."""
    found = 0
    for start in range(0, len(ours), _BLOCK):  # all cosines at once would take the square of the texts
        rows = np.arange(start, min(start + _BLOCK, len(ours)))
        mine, other = ours[rows] @ ours.T, theirs[rows] @ theirs.T
        mine[rows - start, rows] = other[rows - start, rows] = -np.inf  # itself
        chosen = np.argpartition(-mine, k - 1, axis=1)[:, :k]
        least = np.partition(other, -k, axis=1)[:, -k]
        found += int((np.take_along_axis(other, chosen, axis=1) >= least[:, None] - ROUNDING).sum())
    return found / (k * len(ours))


def _unit(vectors: Sequence[Sequence[float]]) -> NDArray[Any]:
    array = np.array(vectors, dtype=np.float64)
    lengths = np.linalg.norm(array, axis=1, keepdims=True)
    return array / np.where(lengths == 0, 1.0, lengths)


def of_texts(
    ours: Sequence[str],
    theirs: Sequence[str],
    tokens: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
    losses: tuple[Sequence[float], Sequence[float]] = ((), ()),
    counts: Sequence[int] = (),
) -> TextAgreement:
    """Of texts and their tokens; ``losses``: mean negative log-likelihood of a token, of the sample's own texts in
    both runs, which have ``counts`` tokens each."""
    before = sum(common_beginning(a, b) for a, b in zip(*tokens, strict=True))
    written = sum(map(len, tokens[1]))
    mine, other = (perplexity(values, counts) for values in losses)
    return TextAgreement(
        texts=len(theirs),
        equal_texts=statistics.fmean(float(a == b) for a, b in zip(ours, theirs, strict=True)),
        tokens_before_difference=_share(before, written),
        perplexity=mine,
        baseline_perplexity=other,
        perplexity_ratio=None if mine is None or other is None else mine / other,
        perplexity_tokens=sum(counts),
    )


def common_beginning(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def perplexity(losses: Sequence[float], counts: Sequence[int]) -> float | None:
    """Of texts whose tokens have these mean losses, over all tokens; None without any, or beyond what a float holds."""
    total = sum(counts)
    if not total:
        return None
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / total
    return math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else None
