"""Runs that are killed: what the emitted script's files look like at every moment, and where a resumed run ends."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from emitted import load_script, small

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "interruptions.py"


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """kill -9 between saves and in the middle of one: only steps after a checkpoint are done again, with one result."""
    spec = importlib.util.spec_from_file_location("interruptions", BENCHMARK)
    assert spec and spec.loader
    interruptions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interruptions)
    *kills, end = interruptions.run(tmp_path / "kills.csv", kills=2, seed=0)
    assert all(0 <= row["steps_lost"] <= interruptions.SAVE_EVERY for row in kills)
    assert 1 == kills[1]["while_saving"]
    assert (interruptions.STEPS, 0.0, 0.0) == (end["steps_done"], end["loss"], end["weight"])


class Words:
    """Stands where a tokenizer is saved."""

    def save_pretrained(self, folder: Path) -> None:
        """Write a file."""
        (folder / "words.txt").write_text("a\n")


def test_a_save_that_fails_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """The new best model may be there already: the resumed run finds it again. Leftovers go with the next save."""
    script = load_script(small("masked-lm", Path("any")), tmp_path)

    def save_model(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(state["weights"])

    state: dict[str, Any] = {"step": 1, "weights": "old"}
    script.save_checkpoint(tmp_path, state, save_model, Words(), True)
    state = {"step": 2, "weights": "new", "cannot be saved": lambda: 0}
    with pytest.raises(Exception, match=r"lambda|pickle"):
        script.save_checkpoint(tmp_path, state, save_model, Words(), True)
    assert "checkpoint-1" == script.last_checkpoint(tmp_path).name
    assert ("old", "new") == tuple((tmp_path / n / "weights").read_text() for n in ("checkpoint-1", "best"))
    del state["cannot be saved"]
    script.save_checkpoint(tmp_path, state, save_model, Words(), False)
    assert {"best", "checkpoint-2", "train.py"} == {p.name for p in tmp_path.iterdir()} - {"__pycache__"}
    assert not (tmp_path / "best" / "training_state.pt").exists()


def test_a_log_goes_on_after_the_last_checkpoint(tmp_path: Path) -> None:
    """Rows of steps that will be done again are dropped, a torn last row as well."""
    script = load_script(small("masked-lm", Path("any")), tmp_path)
    (tmp_path / "log.csv").write_text("step,loss\n1,3.5\n2,3.4\n3,3.3\n4,")
    logs = script.Logs(tmp_path, {"log": ["step", "loss"]}, 2)
    logs.write("log", [3, 3.25])
    with (tmp_path / "log.csv").open(newline="") as file:
        assert [["step", "loss"], ["1", "3.5"], ["2", "3.4"], ["3", "3.25"]] == list(csv.reader(file))
