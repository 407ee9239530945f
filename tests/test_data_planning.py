"""What the user's data decides: lengths, samples, padding, steps and time; and what of it a plan says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from emitted import load_script, minilm, small, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Plan, plan
from planner.config import TrainingConfig
from planner.data.deciding import Decided
from planner.data.epoch import epoch_of_samples
from planner.data.planning import data_of, duration, histogram, lengths_of_data, num_labels_of
from planner.errors import InputError
from planner.models import resolve_model
from planner.progress import NoProgress
from planner.render import render
from planner.request import PlanRequest, make_request

SHORT, LONG = "A short text.", "This is one of many sentences, and it is long. " * 60
TOLD = NoProgress()


def asked(path: Path, task: str, **more: Any) -> PlanRequest:
    """A request for the small real model."""
    return make_request(model=str(minilm()), vram="8GB", data=str(path), task=task, **more)


def decided(path: Path, task: str, **more: Any) -> Decided:
    """What is decided for data, with the small real model's tokenizer."""
    return data_of(asked(path, task, **more), resolve_model(str(minilm())), task, TOLD)


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Nine short texts and a long one, of three labels."""
    texts = [*[SHORT] * 9, LONG]
    return write_jsonl(tmp_path / "labelled.jsonl", [{"text": t, "label": i % 3} for i, t in enumerate(texts)])


# ----- what is decided -----


def test_the_sequence_length_holds_the_longest_text(tmp_path: Path) -> None:
    """No longer than the data needs: the longest text, rounded up to a multiple of 8."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "word " * n} for n in (3, 21)])
    found = decided(path, "masked-lm")
    assert (24, {5, 23}) == (found.seq_len, set(found.flat))
    assert "23 tokens" in found.seq_len_reason


def test_the_model_limits_the_sequence_length(labelled: Path) -> None:
    """Longer texts are told with their share, and with what truncation cuts."""
    found = decided(labelled, "sequence-classification")
    longest = max(found.flat)
    assert (512, 0.1) == (found.seq_len, found.longer)
    assert (longest - 512) / sum(found.flat) == found.lost
    assert (0.0, 0.0) == (found.mean_margin, found.longer_margin)
    assert "10.0%" in found.seq_len_reason


def test_labels_come_from_the_data(labelled: Path) -> None:
    """Three labels need three outputs; asking for fewer is refused, with a line of each label beyond."""
    request = asked(labelled, "sequence-classification")
    assert (3, "labels of the data: 0, 1, 2") == num_labels_of(request, decided(labelled, "sequence-classification"))
    with pytest.raises(InputError, match=r"the data has 3 labels, beyond the first 2: '2' \(line 3\)"):
        decided(labelled, "sequence-classification", num_labels=2)
    assert (
        5
        == num_labels_of(
            asked(labelled, "sequence-classification", num_labels=5), decided(labelled, "sequence-classification")
        )[0]
    )


def test_one_label_is_refused(tmp_path: Path) -> None:
    """There is nothing to tell apart."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": SHORT, "label": 1}] * 3)
    with pytest.raises(InputError, match="nothing to tell apart"):
        decided(path, "sequence-classification")


def test_pairs_are_only_cut(tmp_path: Path) -> None:
    """Segments of two joined texts make no sense: refused, or cut where nothing was asked."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": SHORT, "completion": LONG}] * 3)
    spec = resolve_model("gpt2")
    with pytest.raises(InputError, match="accepted with them: truncate"):
        data_of(asked(path, "causal-lm", long_texts="pack"), spec, "causal-lm", TOLD)
    assert "truncate" == data_of(asked(path, "causal-lm"), spec, "causal-lm", TOLD).long_texts


def test_targets_have_a_length_of_their_own(tmp_path: Path) -> None:
    """A sequence-to-sequence task's target length comes from the data."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": LONG, "summary": "word " * 20}])
    found = decided(path, "seq2seq-lm")
    assert (24, "holds the longest target, 22 tokens") == (found.target_seq_len, found.target_reason)


# ----- what is planned is what the script does -----

ROWS: dict[str, Callable[[list[str]], list[dict[str, Any]]]] = {
    "sequence-classification": lambda texts: [{"text": t, "label": i % 2} for i, t in enumerate(texts)],
    "token-classification": lambda texts: [
        {"tokens": t.split(), "ner_tags": [int(w.istitle()) for w in t.split()]} for t in texts
    ],
    "masked-lm": lambda texts: [{"text": t} for t in texts],
    "embedding": lambda texts: [{"anchor": t[:40], "positive": t} for t in texts],
    "reranking": lambda texts: [{"query": t[:40], "document": t, "label": 1} for t in texts],
    "seq2seq-lm": lambda texts: [{"text": t, "target": t[:40]} for t in texts],
    "causal-lm": lambda texts: [{"text": t} for t in texts],
}
CASES = [
    ("sequence-classification", "truncate", 0.0),
    ("sequence-classification", "segment", 0.1),
    ("token-classification", "segment", 0.0),
    ("masked-lm", "segment", 0.2),
    ("embedding", "truncate", 0.0),
    ("reranking", "truncate", 0.0),
    ("seq2seq-lm", "truncate", 0.0),
    ("causal-lm", "segment", 0.0),
    ("causal-lm", "pack", 0.0),
]


@pytest.mark.parametrize(("task", "long_texts", "overlap"), CASES)
def test_the_script_makes_the_samples_that_were_planned(
    tmp_path: Path,
    rows: list[dict[str, str]],
    tiny: Callable[[str], Path],
    tokenizer: Any,
    task: str,
    long_texts: str,
    overlap: float,
) -> None:
    """Token for token: cut, in segments or packed."""
    model = tiny({"causal-lm": "gpt2", "seq2seq-lm": "t5"}.get(task, "bert"))
    path = write_jsonl(tmp_path / "data.jsonl", ROWS[task]([row["text"] for row in rows[:60]]))
    more = {"long_texts": long_texts, "overlap": overlap, "seq_len": 32, "target_seq_len": None}
    request = make_request(model=str(model), vram="8GB", task=task, data=str(path), **more)
    found = data_of(request, resolve_model(str(model), task=task), task, TOLD)
    document = small(task, model)
    document["workload"] |= {"long_texts": long_texts, "overlap": overlap}
    script = load_script(document, tmp_path)
    arguments = SimpleNamespace(text_column=None, label_column=None, seed=0)
    samples = script.read_samples(script.read_table(path, defaultdict(list)), arguments, tokenizer, defaultdict(list))[
        0
    ]
    made = [tuple(map(len, s["texts"])) if "texts" in s else (len(s["input_ids"]),) for s in samples]
    assert made == found.samples()
    assert [max(sample) for sample in made] == list(lengths_of_data(found).tokens)


# ----- padding -----


def config(micro: int = 4, effective: int = 16, seq_len: int = 128) -> TrainingConfig:
    """A configuration that says how samples are batched."""
    return TrainingConfig(
        micro_batch_size=micro,
        seq_len=seq_len,
        max_tokens_per_micro_batch=micro * seq_len,
        gradient_accumulation_steps=effective // micro,
        effective_batch_size=effective,
        precision="bf16-amp",
    )


def test_padding_by_hand() -> None:
    """Two samples of 8 and 128 tokens: alone no padding, together nearly half."""
    alone = epoch_of_samples([(8,), (128,)], config(micro=1, effective=2), None, seed=0)
    assert (0.0, 2.0) == (alone.fixed.padding, alone.fixed.micro_batches)
    together = epoch_of_samples([(8,), (128,)], config(micro=2, effective=2), None, seed=0)
    assert (120 / 256, 1.0) == (together.fixed.padding, together.fixed.micro_batches)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 128), min_size=32, max_size=300), seed=st.integers(0, 9))
def test_the_token_budget_needs_no_more_micro_batches(lengths: list[int], seed: int) -> None:
    """Never more micro-batches than with one size, and never more padded tokens than the budget in one."""
    found = epoch_of_samples([(length,) for length in lengths], config(), None, seed=seed)
    assert found.budget.micro_batches <= found.grouped.micro_batches == 4
    assert all(0 <= way.padding < 1 for way in (found.fixed, found.grouped, found.budget))


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 10_000), min_size=1, max_size=200))
def test_the_histogram_has_every_text_once(lengths: list[int]) -> None:
    """Shares add up to one, and the last bar ends at the longest."""
    bars = histogram(lengths)
    assert 1.0 == pytest.approx(sum(bar["share"] for bar in bars))
    assert max(lengths) == bars[-1]["up_to"]
    assert sorted(bar["up_to"] for bar in bars) == [bar["up_to"] for bar in bars]


def test_durations_are_short() -> None:
    """Seconds, minutes or hours."""
    assert ["2.0 s", "1:05 min", "2:10 h"] == [duration(s) for s in (2, 65, 7800)]


# ----- contradictions -----


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"data": "a.jsonl", "lengths": "b.txt"}, "lengths"),
        ({"task": "embedding", "long_texts": "segment"}, "long_texts"),
        ({"task": "masked-lm", "long_texts": "pack"}, "long_texts"),
        ({"task": "sequence-classification", "overlap": 0.1}, "overlap"),
        ({"task": "masked-lm", "long_texts": "truncate", "overlap": 0.1}, "overlap"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], argument: str) -> None:
    """Data beside lengths; ways with long texts that the task doesn't have; overlap without segments."""
    with pytest.raises(InputError) as raised:
        make_request(model="bert-base-uncased", vram="8GB", **arguments)
    assert [argument] == [problem.argument for problem in raised.value.problems]


def test_the_models_own_task_is_held_against_long_texts() -> None:
    """Also where the task was not named."""
    with pytest.raises(InputError, match="task sequence-classification; accepted with it: truncate, segment"):
        plan(model="bert-base-uncased", vram="8GB", device="none", long_texts="pack")


# ----- the plan -----


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> Plan:
    """A plan for real texts, some of them long, with a bad row among them."""
    path = tmp_path_factory.mktemp("data") / "docs.jsonl"
    write_jsonl(path, [*rows[:200], {"text": LONG, "label": "asyncio"}, {"text": ""}])
    narrow = {"precision": "fp32", "checkpointing": "none", "offload": "none", "attention": "sdpa", "batch_size": 16}
    return plan(model=str(minilm()), vram="8GB", device="none", task="sequence-classification", data=path, **narrow)


def test_a_plan_holds_what_the_data_decided(planned: Plan) -> None:
    """Samples, steps, time and padding are in plan.json, which stays valid JSON."""
    data = json.loads(json.dumps(planned.to_json(), allow_nan=False))["workload"]["data"]
    assert (201, 202, 13) == (data["rows"], data["rows_read"], data["steps_per_epoch"])
    assert [{"problem": "no column label", "rows": 1, "lines": [202]}] == data["bad_rows"]
    assert data["padding"]["budget"] <= data["padding"]["fixed"]
    assert 0 < data["epoch_s"] < data["epoch_s_fixed"]
    assert data["long_texts"]["segment"]["samples"] > data["long_texts"]["truncate"]["samples"] == 201
    assert ("truncate", 0.0, 4) == tuple(planned.workload[name] for name in ("long_texts", "overlap", "num_labels"))


def test_a_plan_offers_segments_with_their_cost(planned: Plan) -> None:
    """What truncation loses stands beside what keeping the texts costs."""
    [reason] = [reason.reason for reason in planned.reasons if reason.field == "long_texts"]
    assert "truncate loses" in reason
    assert "--long-texts segment keeps them all" in reason


def test_the_report_tells_the_data(planned: Plan, tmp_path: Path) -> None:
    """Rows, bad rows with their lines, padding and the epoch are printed; brackets in names are no markup."""
    from rich.console import Console

    console = Console(width=100, record=True, file=(tmp_path / "out.txt").open("w", encoding="utf-8"))
    render(planned, tmp_path, console)
    text = console.export_text()
    for said in ("Your data: ", "201 usable", "(line 202)", "padding, token budget", "13 steps", "up to 16"):
        assert said in text


def test_without_data_the_plan_says_how_long_texts_are_treated() -> None:
    """``long_texts`` and ``overlap`` are always there."""
    narrow = {"precision": "fp32", "checkpointing": "none", "offload": "none", "attention": "sdpa", "batch_size": 8}
    made = plan(model=str(minilm()), vram="8GB", device="none", task="masked-lm", overlap=0.1, seq_len=64, **narrow)
    assert ("segment", 0.1, None) == tuple(made.workload[name] for name in ("long_texts", "overlap", "data"))


def test_counts_are_bounded_for_any_number_of_rows(tmp_path: Path) -> None:
    """However many rows there are, twenty thousand are counted, and the steps are those of all."""
    path = tmp_path / "many.txt"
    path.write_text("\n".join(f"text number {i}" for i in range(30_000)))
    found = decided(path, "masked-lm")
    assert (30_000, 20_000) == (found.survey.rows, len(list(chain(lengths_of_data(found).tokens))))
    assert 0 < found.mean_margin < 0.1
