"""The tasks that a model can be trained or run for, and what each needs: one entry a task, for every room that asks.

No torch here: the command's help and the checks of a request read this too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

LossKind = Literal["cross-entropy", "binary-cross-entropy", "squared-error", "contrastive"]
LongTexts = Literal["truncate", "segment", "pack"]
Answer = Literal["label", "labels", "number", "word-labels", "vector", "text"]


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What is true of one task, whatever the model."""

    name: str
    """As ``--task`` takes it."""
    mapping: str
    """Attribute of ``transformers.models.auto.modeling_auto`` that names the model class of each family."""
    auto_class: str
    """The class of transformers that loads a checkpoint for the task."""
    peft_task: str
    """``task_type`` of ``peft.LoraConfig``; empty where peft has none."""
    loss: LossKind
    """What is minimised: cross-entropy over classes or tokens, binary cross-entropy for each label, squared error,
    or contrastive: cross-entropy over the other samples of the effective batch."""
    labels: Literal["class", "classes", "number", "word-classes", "tokens", "none"]
    """What a sample's label is: one class, any number of classes, a number, a class for each word, tokens, nothing."""
    text_columns: tuple[int, int]
    """How many texts a sample has, at least and at most (a pair; a pair and a negative)."""
    joined: bool = True
    """Whether a sample's texts make one sequence (with a separator between them) or one sequence each."""
    long_texts: tuple[LongTexts, ...]
    """What may be done with a text that is longer than the window, the default first: cut it, make several samples of
    it, or join texts and cut the stream into full windows."""
    usual_text_columns: tuple[tuple[str, ...], ...]
    """Names that the columns of a sample's texts usually have; the first that the data has are taken."""
    usual_label_columns: tuple[str, ...] = ()
    """Names that the column of its label usually has; empty where it has none."""
    num_labels: int | None = None
    """Outputs of the head, where the task says so; None: as asked for."""
    answer: Answer | None = None
    """What the model says of an input at inference; None where the task is for training alone."""
    input_columns: tuple[int, int] | None = None
    """How many texts an input has at inference, at least and at most; None: as many as a sample."""
    usual_input_columns: tuple[tuple[str, ...], ...] = ()
    """Names that their columns usually have; empty: those of a sample's texts."""

    @property
    def has_classes(self) -> bool:
        """Whether ``--num-labels`` says how many outputs the head has."""
        return self.labels in ("class", "classes", "word-classes")

    @property
    def new_head(self) -> bool:
        """Whether the output layer is a small new one, and not the vocabulary's."""
        return self.labels in ("class", "classes", "number", "word-classes")

    @property
    def generates(self) -> bool:
        """Whether inference writes text, token by token."""
        return self.answer == "text"

    @property
    def columns_of_input(self) -> tuple[tuple[str, ...], ...]:
        """Names that the columns of an input's texts usually have."""
        return self.usual_input_columns or self.usual_text_columns

    @property
    def sequences_per_sample(self) -> int:
        """Rows of a batch that one sample takes: two where its texts are encoded apart."""
        return 1 if self.joined else self.text_columns[0]


_ONE = tuple((name,) for name in ("text", "sentence", "content", "document"))
_PAIRS = (
    ("anchor", "positive", "negative"),
    ("query", "positive", "negative"),
    ("anchor", "positive"),
    ("query", "document"),
    ("query", "passage"),
    ("question", "answer"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("text1", "text2"),
)
_LABELLED = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "answer"), ("text1", "text2"))
_TWO = tuple(names for names in _PAIRS if len(names) == 2)
_LABEL = ("label", "labels", "target", "score")
_CLASSIFIER = {
    "mapping": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "auto_class": "AutoModelForSequenceClassification",
    "peft_task": "SEQ_CLS",
}
_ALL = (
    TaskFacts(
        name="sequence-classification",
        **_CLASSIFIER,  # type: ignore[arg-type]
        loss="cross-entropy",
        labels="class",
        text_columns=(1, 2),
        long_texts=("truncate", "segment"),
        usual_text_columns=(*_ONE, *_LABELLED),
        usual_label_columns=_LABEL,
        answer="label",
    ),
    TaskFacts(
        name="multi-label-classification",
        **_CLASSIFIER,  # type: ignore[arg-type]
        loss="binary-cross-entropy",
        labels="classes",
        text_columns=(1, 2),
        long_texts=("truncate", "segment"),
        usual_text_columns=(*_ONE, *_LABELLED),
        usual_label_columns=_LABEL,
        answer="labels",
    ),
    TaskFacts(
        name="regression",
        **_CLASSIFIER,  # type: ignore[arg-type]
        loss="squared-error",
        labels="number",
        text_columns=(1, 2),
        long_texts=("truncate", "segment"),
        num_labels=1,
        usual_text_columns=(*_ONE, *_LABELLED),
        usual_label_columns=_LABEL,
        answer="number",
    ),
    TaskFacts(
        name="token-classification",
        mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        auto_class="AutoModelForTokenClassification",
        peft_task="TOKEN_CLS",
        loss="cross-entropy",
        labels="word-classes",
        text_columns=(1, 1),
        long_texts=("segment", "truncate"),
        usual_text_columns=(("tokens",), ("words",), ("text",), ("sentence",)),
        usual_label_columns=("ner_tags", "labels", "tags", "label"),
        answer="word-labels",
    ),
    TaskFacts(
        name="masked-lm",
        mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        auto_class="AutoModelForMaskedLM",
        peft_task="",
        loss="cross-entropy",
        labels="none",
        text_columns=(1, 1),
        long_texts=("segment", "truncate"),
        usual_text_columns=_ONE,
    ),
    TaskFacts(
        name="causal-lm",
        mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        auto_class="AutoModelForCausalLM",
        peft_task="CAUSAL_LM",
        loss="cross-entropy",
        labels="none",
        text_columns=(1, 2),  # a text, or a prompt and what follows it
        long_texts=("segment", "pack", "truncate"),
        usual_text_columns=(("prompt", "completion"), ("instruction", "output"), *_ONE),
        answer="text",
        input_columns=(1, 1),
        usual_input_columns=(("prompt",), ("instruction",), ("question",), *_ONE),
    ),
    TaskFacts(
        name="seq2seq-lm",
        mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        auto_class="AutoModelForSeq2SeqLM",
        peft_task="SEQ_2_SEQ_LM",
        loss="cross-entropy",
        labels="tokens",
        text_columns=(1, 1),
        long_texts=("truncate",),
        usual_text_columns=_ONE,
        usual_label_columns=("target", "summary", "label", "labels"),
        answer="text",
    ),
    TaskFacts(
        name="embedding",
        mapping="MODEL_MAPPING_NAMES",
        auto_class="AutoModel",
        peft_task="FEATURE_EXTRACTION",
        loss="contrastive",
        labels="none",
        text_columns=(2, 3),  # a text and one like it; or also one unlike it
        joined=False,
        long_texts=("truncate",),
        usual_text_columns=_PAIRS,
        answer="vector",
        input_columns=(1, 1),
        usual_input_columns=(*_ONE, ("anchor",), ("query",)),
    ),
    TaskFacts(
        name="reranking",
        **_CLASSIFIER,  # type: ignore[arg-type]
        loss="binary-cross-entropy",
        labels="number",
        text_columns=(2, 2),  # a query and a document
        long_texts=("truncate",),
        num_labels=1,
        usual_text_columns=_TWO,
        usual_label_columns=("label", "labels", "relevance", "score"),
        answer="number",
    ),
)
TASK_FACTS: dict[str, TaskFacts] = {facts.name: facts for facts in _ALL}
"""Task to what is true of it."""
INFERENCE_TASKS: tuple[str, ...] = tuple(facts.name for facts in _ALL if facts.answer is not None)
"""Tasks that a model can be run for."""
GENERATING_TASKS: tuple[str, ...] = tuple(facts.name for facts in _ALL if facts.generates)
"""Those of them that write text."""


def facts_for(task: str, mode: str) -> TaskFacts:
    """What is true of a task when a model is trained for it, or run: then a sample is an input without a label.

    A prompt is never cut into several: what is written goes on at its end.
    """
    facts = TASK_FACTS[task]
    if mode == "train":
        return facts
    ways = ("truncate",) if facts.generates else tuple(way for way in facts.long_texts if way != "pack")
    return replace(
        facts,
        labels="none",
        usual_label_columns=(),
        text_columns=facts.input_columns or facts.text_columns,
        joined=True,
        usual_text_columns=facts.columns_of_input,
        long_texts=ways,
    )
