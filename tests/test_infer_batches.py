"""Which texts share a batch: within budget and rows, cheapest, and the same in simulator and emitted script."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from emitted import VOCABULARY
from hypothesis import given
from hypothesis import strategies as st
from inference_scripts import infer, make_inference_plan

from planner.config import InferenceConfig
from planner.inference.timing import batch_shapes
from planner.parts.serving import budget_batches

WIDTHS = st.lists(st.integers(1, 40), max_size=60)


def cost(widths: list[int], batches: list[list[int]], overhead: int) -> int:
    """Padded tokens, and what batches cost beside them."""
    return sum(len(batch) * max(widths[i] for i in batch) + overhead for batch in batches)


def test_budget_batches() -> None:
    """Widest first, within the tokens, those to come included, and the rows; one that is over it goes alone."""
    assert [[2], [0, 3], [1]] == budget_batches([4, 1, 9, 4], budget=8, rows=4)
    assert [[0], [1], [2]] == budget_batches([3, 2, 2], budget=8, rows=2, more=3)
    assert [[0, 1], [2]] == budget_batches([2, 2, 2], budget=100, rows=2)
    assert [] == budget_batches([], budget=8, rows=1)


def test_a_batch_ends_where_going_on_would_pad_more_than_a_pass_costs() -> None:
    """Two short texts beside a long one are 12 tokens of padding: a batch more is worth it below that."""
    assert [[0], [1, 2]] == budget_batches([9, 3, 3], budget=100, rows=9, overhead=11)
    assert [[0, 1, 2]] == budget_batches([9, 3, 3], budget=100, rows=9, overhead=13)


@given(WIDTHS, st.integers(1, 200), st.integers(1, 20), st.integers(0, 5), st.integers(0, 50))
def test_each_text_once_within_budget_and_rows(
    widths: list[int], budget: int, rows: int, more: int, overhead: int
) -> None:
    """Whatever the overhead; batches follow one another from the widest texts to the shortest."""
    batches = budget_batches(widths, budget, rows, more, overhead)
    assert sorted(range(len(widths))) == sorted(i for batch in batches for i in batch)
    for batch in batches:
        assert len(batch) <= rows
        assert len(batch) == 1 or len(batch) * (widths[batch[0]] + more) <= budget
    inorder = [widths[i] for batch in batches for i in batch]
    assert sorted(inorder, reverse=True) == inorder


@given(WIDTHS, st.integers(1, 200), st.integers(1, 20), st.integers(0, 5), st.integers(1, 50))
def test_never_dearer_than_full_batches(widths: list[int], budget: int, rows: int, more: int, overhead: int) -> None:
    """Padded tokens and overheads of the weighed cut are at most those of batches as full as the budget allows."""
    full, weighed = (budget_batches(widths, budget, rows, more, weight) for weight in (0, overhead))
    assert cost(widths, weighed, overhead) <= cost(widths, full, overhead)


@given(st.lists(st.integers(1, 6), max_size=7), st.integers(6, 20), st.integers(1, 5), st.integers(1, 9))
def test_the_cheapest_cut_where_widths_change(widths: list[int], budget: int, rows: int, overhead: int) -> None:
    """Of all ways to end batches that are full, or where the width changes, tried one by one, none costs less."""
    ordered = sorted(range(len(widths)), key=lambda i: -widths[i])

    def cheapest(start: int) -> int:
        ends = range(start + 1, min(start + rows, len(ordered)) + 1)
        fitting = [e for e in ends if (e - start) * widths[ordered[start]] <= budget]
        allowed = [e for e in fitting if e == fitting[-1] or widths[ordered[e]] != widths[ordered[e - 1]]]
        costs = [(e - start) * widths[ordered[start]] + overhead + cheapest(e) for e in allowed]
        return min(costs, default=0)

    assert cheapest(0) == cost(widths, budget_batches(widths, budget, rows, overhead=overhead), overhead)


def test_thousands_of_texts_are_cut_within_their_cost() -> None:
    """4096 texts of 2000 different lengths: no dearer than full batches, though not every place is looked at."""
    widths = [50 + i * 7919 % 2000 for i in range(4096)]
    full, weighed = (budget_batches(widths, 200_000, 4096, overhead=weight) for weight in (0, 2000))
    assert cost(widths, weighed, 2000) < 0.98 * cost(widths, full, 2000)


# ----- the script's own -----


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model of one layer that writes."""
    import transformers as hf

    folder = tmp_path_factory.mktemp("writer")
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=None, eos_token_id=3, **size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("fields", [{}, {"max_sequences": 3}, {"overhead_tokens": 30}], ids=["full", "rows", "weighed"])
@pytest.mark.parametrize("task", ["embedding", "causal-lm"])
def test_the_script_s_batches_are_the_simulator_s(
    tmp_path: Path, tiny: Any, writer: Path, rows: Any, tokenizer: Any, task: str, fields: dict[str, int]
) -> None:
    """Shapes of a real run's batches, of texts and of prompts, are those that the plan's speed is made of."""
    texts = [{"text": row["text"][: 8 + 5 * i % 90]} for i, row in enumerate(rows[:40])]
    shapes: Counter[tuple[int, int]] = Counter()

    def watch(script: ModuleType) -> None:
        answer = script.answer_batch

        def watched(batch: list[Any], *arguments: Any, **named: Any) -> Any:
            shapes[len(batch), batch[0].width] += 1
            return answer(batch, *arguments, **named)

        script.answer_batch = watched

    plan = make_inference_plan(task, str(tiny("bert") if task == "embedding" else writer), **fields)
    assert 0 == infer(plan, tmp_path, texts, change=watch).code
    lengths = [len(tokenizer(row["text"])["input_ids"]) for row in texts]
    expected = batch_shapes(lengths, InferenceConfig.model_validate(plan["config"]))
    assert expected == shapes
    assert (3 if "max_sequences" in fields else 4) <= max(count for count, _ in shapes)
