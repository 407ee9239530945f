"""The benchmark of the measured search: what it compares. Its measuring is the planner's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from search_quality import MODELS, described, model_folder, question_like, summary, with_any_micro_batch

from planner.config import TrainingConfig

CONFIG = TrainingConfig(
    micro_batch_size=32,
    seq_len=32,
    max_tokens_per_micro_batch=1024,
    gradient_accumulation_steps=1,
    effective_batch_size=32,
    precision="fp32",
)


@pytest.mark.parametrize(("size", "steps"), [(32, 1), (28, 2), (16, 2), (10, 4), (1, 32)])
def test_accelerates_batches_need_not_divide_the_effective_one(size: int, steps: int) -> None:
    """Its helper takes 28 after 32: the effective batch becomes the next multiple, never a smaller one."""
    config = with_any_micro_batch(CONFIG, size)
    assert (size, steps, size * steps) == (
        config.micro_batch_size,
        config.gradient_accumulation_steps,
        config.effective_batch_size,
    )
    assert config.effective_batch_size >= CONFIG.effective_batch_size


@pytest.mark.parametrize(("name", "size"), [("minilm", 72), ("distilbert-2", 48), ("gpt2-4", 72)])
def test_the_grid_is_what_the_request_leaves_open(name: str, size: int, tmp_path: Path) -> None:
    """Two attentions x three (of two layers: two) checkpointings x two optimizers x six micro-batches."""
    assert name in MODELS
    configs = list(question_like(model_folder(name, tmp_path)).space("full").configurations())
    assert size == len(configs) == len({described(config) for config in configs})


def test_the_summary_has_the_worst() -> None:
    """The smallest ratio and the largest share are what the search is held to."""
    rows = [
        {"ratio_to_best": "0.9700", "trials_share": "0.140", "ratio_to_accelerate": "1.2000"},
        {"ratio_to_best": "1.0000", "trials_share": "0.060", "ratio_to_accelerate": "1.1000"},
    ]
    text = summary(rows)
    assert "worst 0.970" in text
    assert "largest 14.0%" in text
    assert "smallest 1.100" in text
