"""What an emitted infer.py says of texts is what the model says of each of them alone, for every task.

Batches are padded and sorted by length, so sums are made in another order: scores agree within 1e-5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emitted import NO_DROPOUT, SIZES, VOCABULARY, minilm
from inference_scripts import infer, make_inference_plan

from planner.parts.segmentation import cut, strengths_of_text
from planner.parts.serving import shares

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = 1e-5
NAMES = ("O", "B-CALL", "I-CALL", "B-KIND", "I-KIND")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[..., Path]:
    """Folders of two-layer BERTs with a head of so many labels, and large weights: answers differ clearly."""
    import transformers as hf

    def make(kind: str, names: tuple[str, ...]) -> Path:
        folder = root / f"{kind}-{len(names)}"
        if not folder.exists():
            hf.set_seed(0)
            labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
            config = hf.BertConfig(vocab_size=VOCABULARY, initializer_range=0.5, **SIZES, **NO_DROPOUT, **labels)
            getattr(hf, f"BertFor{kind}Classification")(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    root = tmp_path_factory.mktemp("heads")
    return make


def logits_of(kind: str, folder: Path, *texts: str) -> Any:
    """What the model says of one text or pair alone."""
    import torch
    import transformers as hf

    model = getattr(hf, f"AutoModelFor{kind}Classification").from_pretrained(folder)
    words = hf.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**words(*texts, truncation=True, max_length=32, return_tensors="pt")).logits[0]


def test_a_class_for_each_text(tmp_path: Path, heads: Any, rows: Any) -> None:
    """The class, its probability and those of all, in the order of the rows."""
    model = heads("Sequence", ("one", "two", "three"))
    run = infer(make_inference_plan("sequence-classification", str(model)), tmp_path, rows[:12])
    assert list(range(12)) == run.column("index")
    for row, answer in zip(rows, run.answers, strict=False):
        scores = logits_of("Sequence", model, row["text"]).softmax(-1).tolist()
        assert dict(zip(("one", "two", "three"), scores, strict=True)) == pytest.approx(answer["scores"], abs=CLOSE)
        assert (max(scores), max(answer["scores"], key=answer["scores"].get)) == (
            pytest.approx(answer["score"], abs=CLOSE),
            answer["label"],
        )


def test_labels_and_numbers(tmp_path: Path, heads: Any, rows: Any) -> None:
    """multi-label: each label by itself, those above one half named; regression: the model's own number."""
    model, number = heads("Sequence", ("one", "two", "three")), heads("Sequence", ("number",))
    run = infer(make_inference_plan("multi-label-classification", str(model)), tmp_path, rows[:4])
    numbers = infer(make_inference_plan("regression", str(number)), tmp_path, rows[:4], output="numbers.jsonl")
    for row, answer, score in zip(rows, run.answers, numbers.column("score"), strict=False):
        scores = logits_of("Sequence", model, row["text"]).sigmoid().tolist()
        assert pytest.approx(scores, abs=CLOSE) == list(answer["scores"].values())
        assert [name for name, value in answer["scores"].items() if value > 0.5] == answer["labels"]
        assert logits_of("Sequence", number, row["text"]).item() == pytest.approx(score, abs=CLOSE)


def test_documents_of_a_query(tmp_path: Path, heads: Any, rows: Any) -> None:
    """A query and a document get a number; a query and a list of them get the same numbers, and their order."""
    plan = make_inference_plan("reranking", str(heads("Sequence", ("number",))))
    pairs = [{"query": "Which value?", "document": row["text"]} for row in rows[:10]]
    alone = infer(plan, tmp_path, pairs)
    lists = [{"query": "Which value?", "documents": [row["text"] for row in some]} for some in (rows[:7], rows[7:10])]
    run = infer(plan, tmp_path, lists, output="lists.jsonl")
    first, second = run.column("scores")
    assert pytest.approx([*first, *second], abs=CLOSE) == alone.column("score")
    expected = logits_of("Sequence", heads("Sequence", ("number",)), "Which value?", rows[0]["text"]).item()
    assert expected == pytest.approx(first[0], abs=CLOSE)
    assert sorted(first, reverse=True) == [first[i] for i in run.answers[0]["order"]]


def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, rows: Any) -> None:
    """The real MiniLM, with its own pooling: mean of the tokens, of length one."""
    from sentence_transformers import SentenceTransformer

    run = infer(make_inference_plan("embedding", str(minilm())), tmp_path, rows[:16])
    theirs = SentenceTransformer(str(minilm()), device="cpu")
    theirs.max_seq_length = 32
    expected = theirs.encode([row["text"] for row in rows[:16]]).tolist()
    assert [pytest.approx(vector, abs=CLOSE) for vector in expected] == run.column("embedding")


@pytest.mark.parametrize(
    ("settings", "normal"),
    [({"pooling_mode_cls_token": True}, False), ({"pooling_mode": "lasttoken"}, True), ({"pooling_mode": "max"}, True)],
    ids=["cls", "last", "max"],
)
def test_other_poolings_are_the_model_s(
    tmp_path: Path, tiny: Any, rows: Any, settings: dict[str, Any], normal: bool
) -> None:
    """modules.json and 1_Pooling/config.json say how vectors are made, in either of their formats."""
    from sentence_transformers import SentenceTransformer

    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny("bert").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normal else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **settings}))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    run = infer(make_inference_plan("embedding", str(folder)), tmp_path, rows[:6])
    expected = SentenceTransformer(str(folder), device="cpu").encode([row["text"] for row in rows[:6]]).tolist()
    assert [pytest.approx(vector, abs=CLOSE) for vector in expected] == run.column("embedding")


def test_a_pooling_that_is_not_known_is_refused(tmp_path: Path, tiny: Any, rows: Any) -> None:
    """A model whose vectors go through a further layer: one line, and what to use instead."""
    folder = tiny("bert")
    (folder / "modules.json").write_text('[{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "2"}]')
    try:
        run = infer(make_inference_plan("embedding", str(folder)), tmp_path, rows[:2])
    finally:
        (folder / "modules.json").unlink()
    assert 2 == run.code
    assert "Dense: use the sentence-transformers library" in run.err


def test_long_texts_are_the_mean_of_their_segments(tmp_path: Path, heads: Any, rows: Any) -> None:
    """long_texts = segment: a class from the mean of the logits of all parts, cut where planner.parts cuts."""
    import torch
    import transformers as hf

    model = heads("Sequence", ("one", "two", "three"))
    text = " ".join(row["text"] for row in rows[:3])
    workload = {"long_texts": "segment", "overlap": 0.25}
    plan = make_inference_plan("sequence-classification", str(model), workload=workload)
    [answer] = infer(plan, tmp_path, [{"text": text}]).answers
    words = hf.AutoTokenizer.from_pretrained(model)
    encoded = words(text, return_offsets_mapping=True, verbose=False)
    ids, network = encoded["input_ids"], hf.AutoModelForSequenceClassification.from_pretrained(model)
    first = sum(start == end for start, end in encoded["offset_mapping"][:1])
    inside = slice(first, len(ids) - first)
    ranges = cut(strengths_of_text(text, encoded["offset_mapping"][inside]), 32 - 2 * first, 0.25)
    assert 5 < len(ranges)
    with torch.no_grad():
        parts = [
            network(torch.tensor([[*ids[:first], *ids[inside][a:b], *ids[len(ids) - first :]]])).logits[0]
            for a, b in ranges
        ]
    expected = torch.stack(parts).mean(0).softmax(-1).tolist()
    assert pytest.approx(expected, abs=CLOSE) == list(answer["scores"].values())


# ----- words with labels -----


def test_spans_are_those_of_transformers_pipeline(tmp_path: Path, heads: Any, rows: Any) -> None:
    """Characters, labels and scores of texts within the window, as aggregation_strategy="first" has them."""
    import transformers as hf

    model = heads("Token", NAMES)
    texts = [{"text": row["text"][:60]} for row in rows[:12]]
    run = infer(make_inference_plan("token-classification", str(model)), tmp_path, texts)
    theirs = hf.pipeline("token-classification", str(model), aggregation_strategy="first", device="cpu")
    for row, answer in zip(texts, run.answers, strict=True):
        expected = [(e["start"], e["end"], e["entity_group"], e["score"]) for e in theirs(row["text"])]
        found = [(e["start"], e["end"], e["label"], pytest.approx(e["score"], abs=CLOSE)) for e in answer["spans"]]
        assert expected == found
        assert all(row["text"][e["start"] : e["end"]] == e["text"] for e in answer["spans"])
    assert 20 < sum(len(answer["spans"]) for answer in run.answers)


def test_a_list_of_words_has_a_label_for_each(tmp_path: Path, heads: Any) -> None:
    """A word is as the list has it, marks and spaces included; characters count in the words joined by spaces."""
    model = heads("Token", ("X", "Y"))
    words = ["return", "value.", "New York", "(raises)", "an", "error"]
    [answer] = infer(make_inference_plan("token-classification", str(model)), tmp_path, [{"tokens": words}]).answers
    text = " ".join(words)
    starts = {text.index(word) for word in words}
    assert {span["start"] for span in answer["spans"]} <= starts
    assert text == " ".join(span["text"] for span in answer["spans"])


def test_segments_are_stitched_to_spans_of_the_document(tmp_path: Path, heads: Any, rows: Any) -> None:
    """Overlapping segments: every word once, labelled in the segment in which it stands further inside."""
    import torch
    import transformers as hf

    model = heads("Token", ("X", "Y"))
    text = " ".join(row["text"] for row in rows[:3])
    plan = make_inference_plan("token-classification", str(model), workload={"overlap": 0.4})
    [answer] = infer(plan, tmp_path, [{"text": text}]).answers
    assert "".join(text.split()) == "".join("".join(span["text"] for span in answer["spans"]).split())
    words = hf.AutoTokenizer.from_pretrained(model)
    encoded = words(text, return_offsets_mapping=True, verbose=False)
    offsets, ids = encoded["offset_mapping"], encoded["input_ids"]
    assert (0, 0) != offsets[0]  # this tokenizer adds no special tokens
    ranges = cut(strengths_of_text(text, offsets), 32, 0.4)
    network = hf.AutoModelForTokenClassification.from_pretrained(model)
    labels: list[str] = []
    for (a, b), (start, end) in zip(ranges, shares(ranges), strict=True):
        with torch.no_grad():
            best = network(torch.tensor([ids[a:b]])).logits[0].argmax(-1)
        labels += [("X", "Y")[i] for i in best[start - a : end - a]]
    first = {i for i, word in enumerate(encoded.word_ids()) if i == 0 or word != encoded.word_ids()[i - 1]}
    for span in answer["spans"]:
        inside = [i for i in first if span["start"] <= offsets[i][0] < span["end"]]
        assert {span["label"]} == {labels[i] for i in inside}


def test_shares_tile_the_text() -> None:
    """Segments that overlap share in the middle; the first begins and the last ends where the text does."""
    assert [(0, 8), (8, 17), (17, 25)] == shares([(0, 10), (6, 20), (15, 25)])
    assert [(0, 5)] == shares([(0, 5)])


def test_random_heads_are_told(tmp_path: Path, tiny: Any, rows: Any) -> None:
    """A checkpoint without the task's head answers at random: said before it does."""
    run = infer(make_inference_plan("sequence-classification", str(tiny("bert"))), tmp_path, rows[:2])
    assert "lacks bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias" in run.err
    assert math.isclose(1, sum(run.answers[0]["scores"].values()), abs_tol=1e-6)
