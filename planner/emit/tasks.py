"""What an emitted script says and calls for each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.tasks import TASK_FACTS


@dataclass(frozen=True, kw_only=True)
class TaskWords:
    """The words of one task."""

    new_modules: tuple[str, ...] = ()
    """Patterns of the modules that have no weights in a pretrained checkpoint: they cannot be quantized."""
    learning_rate: float
    """Usual highest learning rate of full fine-tuning with AdamW."""
    epochs: int
    """Default passes over the data."""
    samples_are: str
    """What one sample of the training set is."""
    items_are: str
    """What the loss is averaged over."""
    logits_unit: str = ""
    """What one number of the logits belongs to."""
    data_needs: str = "A row is a text."
    """What a row of the data holds."""
    reader: str
    """The template with ``read_samples``."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Columns of eval.csv beside the loss, with what they are."""
    problem_type: str = ""
    """What transformers is told of the labels, so that the saved model is used rightly."""


_HEAD = ("classifier", "score", ".*pooler")
TASK_WORDS: dict[str, TaskWords] = {
    "sequence-classification": TaskWords(
        new_modules=_HEAD,
        learning_rate=3e-5,
        epochs=3,
        samples_are="texts",
        items_are="sequences",
        logits_unit="per sequence and label",
        data_needs="A row is a text (or two) and its label.",
        reader="classification",
        metrics={"accuracy": "share of right labels"},
        problem_type="single_label_classification",
    ),
    "multi-label-classification": TaskWords(
        new_modules=_HEAD,
        learning_rate=3e-5,
        epochs=3,
        samples_are="texts",
        items_are="labels of all sequences",
        logits_unit="per sequence and label",
        data_needs='A row is a text (or two) and its labels: a list, or "a,b" in one text.',
        reader="classification",
        metrics={"accuracy": "share of right yes or no answers"},
        problem_type="multi_label_classification",
    ),
    "regression": TaskWords(
        new_modules=_HEAD,
        learning_rate=3e-5,
        epochs=3,
        samples_are="texts",
        items_are="sequences",
        logits_unit="per sequence",
        data_needs="A row is a text (or two) and a number, which is best about as large as one.",
        reader="classification",
        metrics={"mean_absolute_error": "mean absolute error"},
        problem_type="regression",
    ),
    "token-classification": TaskWords(
        new_modules=("classifier", "score"),
        learning_rate=3e-5,
        epochs=3,
        samples_are="sentences",
        items_are="labelled words",
        logits_unit="per token and label",
        data_needs="A row is a list of words and the list of their labels.",
        reader="token-classification",
        metrics={"accuracy": "share of right labels"},
    ),
    "masked-lm": TaskWords(
        learning_rate=5e-5,
        epochs=1,
        samples_are="pieces of text",
        items_are="guessed tokens",
        logits_unit="per token and vocabulary entry",
        reader="masked-lm",
    ),
    "causal-lm": TaskWords(
        learning_rate=2e-5,
        epochs=1,
        samples_are="pieces of text",
        items_are="predicted tokens",
        logits_unit="per token and vocabulary entry",
        data_needs="A row is a text, or a prompt and its completion.",
        reader="causal-lm",
    ),
    "seq2seq-lm": TaskWords(
        learning_rate=1e-4,
        epochs=3,
        samples_are="pairs of texts",
        items_are="target tokens",
        logits_unit="per target token and vocabulary entry",
        data_needs="A row is a text and its target text.",
        reader="seq2seq-lm",
    ),
    "embedding": TaskWords(
        learning_rate=2e-5,
        epochs=1,
        samples_are="pairs of texts",
        items_are="pairs",
        data_needs="A row is a text, one that belongs to it and, if you have one, one that does not.",
        reader="embedding",
        metrics={"accuracy": "share of texts whose partner is the nearest"},
    ),
    "reranking": TaskWords(
        new_modules=_HEAD,
        learning_rate=2e-5,
        epochs=1,
        samples_are="pairs of texts",
        items_are="pairs",
        logits_unit="per pair",
        data_needs="A row is a query, a document and how well it answers, from 0 to 1.",
        reader="classification",
        metrics={"accuracy": "share of pairs on the right side of one half"},
        problem_type="multi_label_classification",  # transformers' word for the same loss
    ),
}
assert TASK_WORDS.keys() == TASK_FACTS.keys()

_LEARNING_RATES = {"adafactor": 1e-3, "sgd": 1e-2}
"""Where the optimizer decides and not the task: Adafactor's is relative to the weights, SGD's to the gradients."""
_ADAPTER_LEARNING_RATE = 2e-4


def learning_rate(task: str, config: Mapping[str, Any]) -> float:
    """The usual highest learning rate of a configuration (``config`` of plan.json)."""
    usual = TASK_WORDS[task].learning_rate if config["method"] == "full" else _ADAPTER_LEARNING_RATE
    return _LEARNING_RATES.get(config["optimizer"], usual)
