"""What a plan's precision changes: the measures, and comparisons of runs."""

from __future__ import annotations

import csv
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emitted import minilm, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_scripts import make_inference_plan
from scipy import stats

from planner import InputError, TrialError, cli, compare
from planner.comparison import agreement
from planner.comparison.sample import truth_of
from planner.emit import render_files

FINITE = st.floats(-1e6, 1e6, allow_nan=False, width=32)
SCRIPT = """
import json, pathlib, sys, time
folder, arguments = pathlib.Path(__file__).parent, sys.argv[1:]
name = ("perplexity-" if "--perplexity" in arguments else "") + ("baseline" if "--baseline" in arguments else "plan")
says = json.loads((folder / "answers.json").read_text())[name]
(folder / f"{name}.arguments").write_text(json.dumps(arguments))
if isinstance(says, dict):
    print(says["says"], file=sys.stderr, flush=True)
    time.sleep(says.get("seconds", 0))
    sys.exit(says["code"])
rows = pathlib.Path(arguments[arguments.index("--data") + 1]).read_text().splitlines()
with open(arguments[arguments.index("--output") + 1], "w") as file:
    for index, answer in enumerate(says[: len(rows)]):
        print(json.dumps({"index": index, **answer}), file=file)
said = ["1,250.5 rows/s", "3,000 tokens/s", "12.5% padding", "peak memory 1,024 MiB"]
print(", ".join([f"{len(rows)} rows (0 without an answer) in 2.0 s", *said]), file=sys.stderr)
"""
"""An infer.py that answers what it is told."""


def plan_folder(
    folder: Path, task: str, answers: dict[str, Any] | None = None, model: str = "m", **config: Any
) -> Path:
    """A saved plan: with its emitted script, or with one that answers what it is told."""
    folder.mkdir()
    document = make_inference_plan(task, model, **config)
    (folder / "plan.json").write_text(json.dumps(document))
    if answers is None:
        for name, text in render_files(document).items():
            (folder / name).write_text(text)
    else:
        (folder / "infer.py").write_text(SCRIPT)
        (folder / "answers.json").write_text(json.dumps(answers))
    return folder


def told(folder: Path, task: str, ours: Any, theirs: Any, **config: Any) -> Path:
    """A plan whose two runs answer so."""
    return plan_folder(folder / "plan", task, {"plan": ours, "baseline": theirs}, **config)


def texts(folder: Path, count: int, **columns: Sequence[Any]) -> Path:
    """So many rows with a text."""
    rows = [{"text": f"text {i}", **{name: values[i] for name, values in columns.items()}} for i in range(count)]
    return write_jsonl(folder / "data.jsonl", rows)


# -- measures --------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(FINITE, min_size=1, max_size=5), min_size=1, max_size=6))
def test_equal_scores_agree(scores: list[list[float]]) -> None:
    """No difference; ranks correlate fully wherever that is defined; the first document is the same."""
    found = agreement.of_scores(scores, scores)
    assert (0.0, 0.0, 0.0) == (found.largest_difference, found.mean_difference, found.median_difference)
    for value in (found.spearman, found.kendall, found.worst_query_spearman, found.mean_query_kendall):
        assert value is None or value == pytest.approx(1.0)
    assert found.top1_agreement in (1.0, None)
    assert sum(map(len, scores)) == found.scores


@given(st.lists(st.tuples(FINITE, FINITE), min_size=2, max_size=20))
def test_scores_have_scipys_rank_correlation(pairs: list[tuple[float, float]]) -> None:
    """Over all scores; None where one side is constant."""
    ours, theirs = map(list, zip(*pairs, strict=True))
    found = agreement.of_scores([[x] for x in ours], [[x] for x in theirs])
    assert max(abs(a - b) for a, b in pairs) == pytest.approx(found.largest_difference)
    if len(set(ours)) == 1 or len(set(theirs)) == 1:
        assert (None, None) == (found.spearman, found.kendall)
    else:
        assert stats.spearmanr(ours, theirs).statistic == pytest.approx(found.spearman)
        assert stats.kendalltau(ours, theirs).statistic == pytest.approx(found.kendall)
    assert found.queries is None


def test_queries_are_ranked_apart() -> None:
    """Mean and worst of queries, and how often the first document is one of the best."""
    found = agreement.of_scores([[1, 2, 3], [9, 8, 7], [5]], [[1, 2, 3], [7, 8, 9], [6]])
    assert (2, 0.0, -1.0, 0.5) == (
        found.queries,
        found.mean_query_spearman,
        found.worst_query_spearman,
        found.top1_agreement,
    )
    tied = agreement.of_scores([[1, 2]], [[3, 3]])
    assert (1.0, None) == (tied.top1_agreement, tied.mean_query_kendall)


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_neighbours_are_those_of_a_full_search(count: int, k: int, seed: int) -> None:
    """Also where a text stands twice: equal neighbours are as good."""
    k = min(k, count - 1)
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(2, count, 4))
    vectors[:, -1] = vectors[:, 0]
    ours, theirs = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    found = 0
    for i in range(count):
        others = [j for j in range(count) if j != i]
        mine = sorted(others, key=lambda j: -(ours[i] @ ours[j]))[:k]
        least = sorted((theirs[i] @ theirs[j] for j in others), reverse=True)[k - 1]
        found += sum(theirs[i] @ theirs[j] >= least - agreement.ROUNDING for j in mine)
    assert found / (k * count) == pytest.approx(agreement.neighbour_overlap(ours, theirs, k))
    assert 1.0 == agreement.neighbour_overlap(ours, ours, k)


def test_vectors_agree_by_their_cosines() -> None:
    """Length doesn't matter; few texts have no neighbours to speak of."""
    found = agreement.of_vectors([[1, 0], [0, 2]], [[3, 0], [1, 1]])
    assert ((1 + math.sqrt(0.5)) / 2, math.sqrt(0.5)) == pytest.approx((found.mean_cosine, found.worst_cosine))
    assert (None, None) == (found.top1_agreement, found.top10_overlap)


def test_spans_agree_where_both_ends_and_the_label_do() -> None:
    """F1 of exact spans, and labels of the characters that any of both labels."""
    one, two = (
        [{"start": s, "end": e, "label": x} for s, e, x in spans]
        for spans in ([(0, 4, "A"), (6, 8, "B")], [(0, 4, "A"), (6, 9, "B")])
    )
    found = agreement.of_spans([one, []], [two, []])
    assert (2, 2, 0.5, 0.5, 0.5, 6 / 7) == (
        *(found.spans, found.baseline_spans, found.f1, found.precision, found.recall),
        found.character_agreement,
    )
    assert 1.0 == agreement.of_spans([[]], [[]]).f1


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20), st.integers(1, 99)), min_size=1, max_size=9))
def test_perplexity_is_over_all_tokens(texts: list[tuple[float, float, int]]) -> None:
    """A long text counts by its tokens; the ratio is that of both."""
    ours, theirs, counts = map(list, zip(*texts, strict=True))
    tokens = [[1, 2, 3]], [[1, 2, 4]]
    found = agreement.of_texts(["a"], ["b"], tokens, (ours, theirs), counts)
    expected = math.exp(np.average(ours, weights=counts))
    assert expected == pytest.approx(found.perplexity)
    assert expected / math.exp(np.average(theirs, weights=counts)) == pytest.approx(found.perplexity_ratio)
    assert (0.0, 2 / 3) == (found.equal_texts, found.tokens_before_difference)
    assert agreement.of_texts(["a"], ["a"], ([[]], [[]])).perplexity is None


def test_labels_of_the_data_are_names_or_numbers() -> None:
    """The model's names, or their places; others are not known."""
    assert ["bad", "good", None, None] == [truth_of(value, ["bad", "good"]) for value in ("bad", 1.0, 2, "fine")]


# -- comparisons -----------------------------------------------------------------------------------------------------


def test_classes_are_held_against_the_datas_labels(tmp_path: Path) -> None:
    """Agreement, the largest difference of a probability, the accuracy of both; rows without an answer are left out."""
    says = [
        {"label": "a" if p > 0.5 else "b", "score": max(p, 1 - p), "scores": {"a": p, "b": 1 - p}}
        for p in (0.9, 0.6, 0.2)
    ]
    other = [*says[:1], {"label": "b", "score": 0.7, "scores": {"a": 0.3, "b": 0.7}}, says[2]]
    plan = told(
        tmp_path,
        "sequence-classification",
        [*says, {"error": "no text"}],
        [*other, {"error": "no text"}],
        precision="bf16",
    )
    found = compare(plan, data=texts(tmp_path, 4, label=["a", 0, "b", "a"]), out=tmp_path / "rows.csv", device="cpu")
    assert (3, 1, ("weights and arithmetic in bf16",)) == (found.rows_compared, found.rows_left_out, found.changes)
    label = found.agreement
    assert isinstance(label, agreement.LabelAgreement)
    assert (2 / 3, 0.3, 3, 1.0, 2 / 3) == pytest.approx(
        (label.agreement, label.largest_probability_difference, label.labelled, label.accuracy, label.baseline_accuracy)
    )
    assert (1250.5, 3000.0, 0.125, 2**30) == (
        found.plan_run.rows_per_s,
        found.plan_run.tokens_per_s,
        found.plan_run.padding_share,
        found.plan_run.peak_bytes,
    )
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [("0", "a", "a"), ("1", "a", "b"), ("2", "b", "b")] == [
            (row["index"], row["label"], row["baseline_label"]) for row in csv.DictReader(file)
        ]


def test_sets_of_labels_agree_label_by_label(tmp_path: Path) -> None:
    """Each label's share of texts where both have it or neither."""
    ours = [{"labels": ["a"], "scores": {"a": 0.9, "b": 0.1}}, {"labels": ["b"], "scores": {"a": 0.1, "b": 0.6}}]
    theirs = [ours[0], {"labels": [], "scores": {"a": 0.1, "b": 0.4}}]
    found = compare(told(tmp_path, "multi-label-classification", ours, theirs), data=texts(tmp_path, 2)).agreement
    assert isinstance(found, agreement.LabelSetAgreement)
    assert (0.5, {"a": 1.0, "b": 0.5}) == (found.agreement, found.by_label)


def test_rows_of_one_query_are_ranked_together(tmp_path: Path) -> None:
    """As a list of documents is."""
    rows = [{"query": f"q{i // 3}", "document": f"d{i}"} for i in range(6)]
    ours, theirs = ([{"score": float(x)} for x in scores] for scores in ((1, 2, 3, 3, 2, 1), (1, 2, 3, 1, 2, 3)))
    plan = told(tmp_path, "reranking", ours, theirs)
    found = compare(plan, data=write_jsonl(tmp_path / "data.jsonl", rows))
    assert isinstance(found.agreement, agreement.ScoreAgreement)
    assert (2, 0.0, 0.5) == (
        found.agreement.queries,
        found.agreement.mean_query_kendall,
        found.agreement.top1_agreement,
    )
    assert ["the plan changes no numbers: what differs is two runs' rounding"] == list(found.notes)


def test_texts_are_compared_by_tokens_and_perplexity(tmp_path: Path) -> None:
    """Tokens are the model's tokenizer's; a loss that one of the runs lacks is left out."""
    ours = [{"text": "hello world again", "tokens": 3}, {"text": "yes", "tokens": 1}]
    theirs = [{"text": "hello world there", "tokens": 3}, {"text": "yes", "tokens": 1}]
    losses = [{"loss": 2.0, "tokens": 5}, {"loss": 1.0, "tokens": 1}], [{"loss": 1.5, "tokens": 5}, {"error": "no"}]
    answers = dict(
        zip(("plan", "baseline", "perplexity-plan", "perplexity-baseline"), (ours, theirs, *losses), strict=True)
    )
    plan = plan_folder(tmp_path / "plan", "causal-lm", answers, str(minilm()), kv_cache="quantized")
    found = compare(plan, data=texts(tmp_path, 2))
    assert isinstance(found.agreement, agreement.TextAgreement)
    assert (0.5, 0.75, math.exp(2), math.exp(0.5), 5) == pytest.approx(
        (
            *(found.agreement.equal_texts, found.agreement.tokens_before_difference, found.agreement.perplexity),
            *(found.agreement.perplexity_ratio, found.agreement.perplexity_tokens),
        )
    )
    assert ("keys and values in fp8",) == found.changes


def test_targets_are_named_for_the_perplexity(tmp_path: Path) -> None:
    """A sequence-to-sequence model's, whose texts the answers come from alone; without targets there is none."""
    said = [{"text": "yes", "tokens": 1}]
    loss = [{"loss": 1.0, "tokens": 2}]
    answers = {"plan": said, "baseline": said, "perplexity-plan": loss, "perplexity-baseline": loss}
    plan = plan_folder(tmp_path / "plan", "seq2seq-lm", answers, str(minilm()))
    compare(plan, data=texts(tmp_path, 1, gist=["x"]), label_column="gist")
    given = {name: json.loads((plan / f"{name}.arguments").read_text()) for name in answers}
    assert ["text", "text,gist"] == [given[n][given[n].index("--text-column") + 1] for n in ("plan", "perplexity-plan")]
    found = compare(plan, data=texts(tmp_path, 1)).agreement
    assert isinstance(found, agreement.TextAgreement)
    assert found.perplexity is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": "0"}, "limit: got '0'; accepted: a whole number from 1"),
        ({"device": "tpu"}, "device: got 'tpu'; accepted: cpu, cuda"),
        ({"label_column": "label"}, "label_column: got 'label'; of embedding no labels are read; leave it out"),
        ({"text_column": "body"}, "text_column: got 'body', which the data doesn't have; accepted: 'text'"),
        ({"data": "missing.jsonl"}, "data: got 'missing.jsonl': No such file"),
        ({"plan": "nowhere"}, "plan: got 'nowhere', which holds no readable plan.json"),
        ({"out": "."}, "out: got '.'; accepted: a file that can be written; that is a folder"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, str], message: str
) -> None:
    """With what is accepted, and before anything runs."""
    monkeypatch.chdir(tmp_path)
    plan = told(tmp_path, "embedding", [], [])
    with pytest.raises(InputError) as caught:
        compare(**{"plan": plan, "data": str(texts(tmp_path, 1)), **arguments})  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert not (plan / "plan.arguments").exists()


def test_options_are_the_arguments() -> None:
    """plan compare has an option for each argument of compare(), --json and --quiet."""
    got = {parameter.name for parameter in cli.command.commands["compare"].params}  # type: ignore[attr-defined]
    assert set(inspect.signature(compare).parameters) - {"progress"} == got - {"as_json", "quiet"}


def test_a_trainings_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with exit code 2; so is data without rows."""
    plan = told(tmp_path, "embedding", [], [])
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    assert 2 == cli.run(["compare", str(plan), "--data", str(empty), "--quiet"])
    assert "which has no rows" in capsys.readouterr().err
    document = json.loads((plan / "plan.json").read_text())
    document["request"]["mode"] = "train"
    (plan / "plan.json").write_text(json.dumps(document))
    assert 2 == cli.run(["compare", str(plan), "--data", str(empty), "--quiet"])
    assert capsys.readouterr().err.startswith("--plan: got a plan of mode train; accepted:")
    assert 2 == cli.run(["compare", str(plan)])
    assert capsys.readouterr().err.startswith("--data: is required")


def test_a_failing_run_is_told_by_its_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 4 and nothing written; 2 where the script can't use what it is given."""
    failing = {"says": "Traceback:\nRuntimeError: no memory", "code": 1}
    plan = told(tmp_path, "embedding", [{"embedding": [1.0]}], failing)
    out, data = tmp_path / "rows.csv", texts(tmp_path, 1)
    assert 4 == cli.run(["compare", str(plan), "--data", str(data), "--out", str(out), "--quiet"])
    assert "the fp32 baseline's run failed (exit code 1): RuntimeError: no memory\n" == capsys.readouterr().err
    assert not out.exists()
    refusing = {"says": "infer.py: error: --device cuda: torch finds no GPU; accepted here: cpu", "code": 2}
    (plan / "answers.json").write_text(json.dumps({"plan": refusing}))
    assert 2 == cli.run(["compare", str(plan), "--data", str(data), "--quiet"])
    assert "--device: torch finds no GPU; accepted here: cpu\n" == capsys.readouterr().err


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    """With what the first row lacks."""
    plan = told(tmp_path, "embedding", [{"error": "no text"}], [{"error": "no text"}])
    with pytest.raises(TrialError, match=r"no row has an answer of both runs; the first one: no text"):
        compare(plan, data=texts(tmp_path, 1))


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_ends_both(tmp_path: Path) -> None:
    """Exit code 130, no process and no temporary folder left, no csv file."""
    plan = told(tmp_path, "embedding", {"says": "running", "code": 0, "seconds": 60}, [])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = ["compare", str(plan), "--data", str(texts(tmp_path, 1)), "--out", str(tmp_path / "rows.csv")]
    started = subprocess.Popen(
        [sys.executable, "-m", "planner.cli", *arguments, "--quiet"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (plan / "plan.arguments").exists():
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    assert "interrupted\n" == started.communicate(timeout=60)[1]
    assert 130 == started.returncode
    assert [] == [*temporary.iterdir(), *tmp_path.glob("*.csv")]


def test_the_report_says_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures, speed and memory of both; --json has the same."""
    plan = told(tmp_path, "embedding", [{"embedding": [1.0, 0.0]}], [{"embedding": [1.0, 1.0]}], precision="fp16")
    arguments = ["compare", str(plan), "--data", str(texts(tmp_path, 1)), "--device", "cpu"]
    assert 0 == cli.run(arguments)
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "the plan: weights and arithmetic in fp16",
        "worst cosine 0.707107",
        "1,250.5 1,250.5 1.00x",
        "1 GiB",
    ):
        assert words in out
    assert 0 == cli.run([*arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert math.sqrt(0.5) == pytest.approx(document["agreement"]["worst_cosine"])
    assert 2**30 == document["baseline_run"]["peak_bytes"]


@pytest.mark.slow
def test_a_real_plan_against_fp32(tmp_path: Path, tiny: Any) -> None:
    """A reranker in bf16 by its emitted script: figures are those of the model in both types, run here unbatched."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model, folder = (
        AutoModelForSequenceClassification.from_pretrained(tiny("bert"), num_labels=1).eval(),
        tmp_path / "m",
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny("bert"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = ["handler", "formatter", "queue", "decimal", "archive", "task", "future", "logger", "record", "level"]
    rows = [
        {"query": words[i], "documents": [f"{word} of a {words[i - j]}" for j, word in enumerate(words)]}
        for i in range(3)
    ]
    pairs = [tokenizer(row["query"], text, return_tensors="pt") for row in rows for text in row["documents"]]
    with torch.inference_mode():
        wide = [model(**inputs).logits.item() for inputs in pairs]
        narrow = [model.bfloat16()(**inputs).logits.item() for inputs in pairs]
    plan = plan_folder(tmp_path / "plan", "reranking", model=str(folder), precision="bf16")
    found = compare(plan, data=write_jsonl(tmp_path / "data.jsonl", rows), device="cpu")
    theirs = [row["baseline_score"] for row in found.rows]
    assert wide == pytest.approx(theirs, abs=1e-5)
    # bf16's rounding depends on the batch: 8 bits of each number
    assert narrow == pytest.approx([row["score"] for row in found.rows], abs=0.02)
    figures = found.agreement
    assert isinstance(figures, agreement.ScoreAgreement)
    differences = [abs(row["difference"]) for row in found.rows]
    assert (max(differences), 30, 3) == (figures.largest_difference, figures.scores, figures.queries)
    assert 0 < figures.largest_difference < 0.02
    assert all(run.peak_bytes > 2**27 and run.tokens_per_s > 0 for run in (found.plan_run, found.baseline_run))
