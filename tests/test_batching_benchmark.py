"""The benchmark of batchings: texts, padding, and training in turns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from emitted import minilm
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import batching
from batching import BATCHINGS, padding, rows_of, sentences, strings_of, tokenized


@pytest.fixture(scope="module")
def ids() -> list[list[int]]:
    """Tokens of the documentation of two modules, many times over."""
    texts = [text for module in (batching, sys.modules["argparse"]) for text in strings_of(Path(str(module.__file__)))]
    return tokenized(texts * 3, AutoTokenizer.from_pretrained(minilm()))


def test_documentation_is_found_in_source(tmp_path: Path) -> None:
    """Of the module, classes and functions; a file that can't be parsed has none."""
    path = tmp_path / "module.py"
    path.write_text('"""One."""\nclass A:\n    """Two."""\n    async def f(self):\n        """Three."""\n')
    assert ["One.", "Two.", "Three."] == list(strings_of(path))
    path.write_text("def :")
    assert [] == list(strings_of(path))


def test_sentences_end_at_full_stops() -> None:
    """Those of 8 to 24 words."""
    text = "Too short. " + "This one here has just as many words as needed (it ends here.) " + "Short again."
    assert ["This one here has just as many words as needed (it ends here.)"] == list(sentences([" ", text]))


@pytest.mark.parametrize("name", list(BATCHINGS))
def test_every_batching_trains_on_every_text(ids: list[list[int]], name: str) -> None:
    """In micro-batches under the budget; the budget's last step is filled up."""
    lengths = list(map(len, ids))
    steps = list(BATCHINGS[name](lengths))
    assert set(range(len(ids))) == {i for step in steps for part in step for i in part}
    assert all(len(part) * max(lengths[i] for i in part) <= 8 * 512 for step in steps for part in step)
    assert -(-len(ids) // 32) == len(steps)


def test_similar_lengths_leave_little_padding(ids: list[list[int]]) -> None:
    """Far less than random order; and the budget makes far fewer micro-batches than a fixed size."""
    lengths = list(map(len, ids))
    fixed, grouped, budget = (padding(list(make(lengths)), lengths) for make in BATCHINGS.values())
    assert budget["padding_share"] < 0.5 * fixed["padding_share"]
    assert grouped["padding_share"] < 0.5 * fixed["padding_share"]
    assert budget["micro_batches"] < 0.6 * grouped["micro_batches"]


def test_a_row_for_each_batching(ids: list[list[int]]) -> None:
    """A tiny model, trained for real; speeds are relative to the first row's."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    rows = list(rows_of("some", ids, 40, BertForSequenceClassification(config)))
    assert list(BATCHINGS) == [row["batching"] for row in rows]
    assert all(set(batching.COLUMNS) == set(row) for row in rows)
    assert 0 == rows[0]["speed_change"]
    assert all(row["seconds"] > 0 < row["tokens_per_s"] for row in rows)
