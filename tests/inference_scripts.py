"""What tests of emitted infer.py scripts share: plans, and a way to run a script here."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from planner.config import InferenceConfig
from planner.emit import render_inference_files
from planner.request import make_request

CPU = {"kind": "cpu", "name": "a CPU"}
GENERATING = {
    "prefill_ms": 120.4,
    "prefill_tokens_per_s": 9_100.0,
    "decode_ms_per_token": 25.25,
    "decode_tokens_per_s": 158.4,
}
"""Times of plans that write text; null in others."""
CARD = {"kind": "cuda", "name": "NVIDIA GeForce RTX 3070", "compute_capability": [8, 6]}


def make_inference_plan(
    task: str,
    model: str = "bert-base-uncased",
    *,
    hardware: dict[str, Any] = CPU,
    workload: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """A plan as plan.json holds it; ``config`` replaces fields of the inference configuration."""
    fields: dict[str, Any] = {
        "micro_batch_size": 4,
        "seq_len": 32,
        "max_tokens_per_micro_batch": 128,
        "precision": "fp32",
    }
    if task in ("causal-lm", "seq2seq-lm"):
        fields |= {"max_new_tokens": 8, "kv_cache": "dynamic", "max_tokens_per_micro_batch": 160}
    settings = InferenceConfig(**(fields | config))
    return {
        "schema_version": 1,
        "request": make_request(model=model, vram="8GB", mode="infer", task=task).model_dump(mode="json"),
        "hardware": hardware,
        "workload": {
            "model": model,
            "task": task,
            "max_new_tokens": settings.max_new_tokens,
            "layers": 2,
            "layers_name": None,
            **(workload or {}),
        },
        "config": settings.model_dump(mode="json"),
        "memory": {
            "peak_reserved_bytes": 6_500_000_000,
            "context_bytes": 450_000_000,
            "margin_bytes": 200_000_000,
            "total_bytes": 7_150_000_000,
            "ceiling_bytes": 8_350_000_000,
        },
        "time": {
            "step_ms": 812.3,
            "tokens_per_s": 20_170.0,
            "sequences_per_s": 40.0,
            **(dict.fromkeys(GENERATING) if not settings.max_new_tokens else GENERATING),
            "source": "simulated",
        },
    }


def write_infer(plan: dict[str, Any], folder: Path) -> Path:
    """The emitted script as a file."""
    path = folder / "infer.py"
    path.write_text(render_inference_files(plan)["infer.py"], encoding="utf-8")
    return path


def load_infer(plan: dict[str, Any], folder: Path) -> ModuleType:
    """The emitted script as a module, from a file that was really written."""
    spec = importlib.util.spec_from_file_location("emitted_infer", write_infer(plan, folder))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What a run of infer.py left behind."""

    code: int
    """Exit code."""
    answers: list[dict[str, Any]]
    """Lines of its output; none where it refused to run."""
    err: str
    """What was printed on standard error."""
    output: Path
    """The file of its answers."""

    def column(self, name: str) -> list[Any]:
        """One field of all answers."""
        return [answer[name] for answer in self.answers]


def as_jsonl(folder: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    """A data file; rows that are texts are lines as they stand."""
    path = folder / "data.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def infer(
    plan: dict[str, Any],
    folder: Path,
    data: Iterable[dict[str, Any] | str] | Path,
    *flags: str,
    output: str = "answers.jsonl",
    stdin: bytes = b"",
    change: Callable[[ModuleType], None] = lambda module: None,
) -> Answered:
    """Run an emitted script's main() in this process; ``change`` may put something else into it before."""
    module = load_infer(plan, folder)
    change(module)
    source = "-" if stdin else str(data if isinstance(data, Path) else as_jsonl(folder, data))
    path, err, code = folder / output, io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    argv = ["infer.py", "--data", source, "--output", str(path), "--quiet", *flags]
    try:
        given = patch.object(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        with given, patch.object(sys, "argv", argv), contextlib.redirect_stderr(err):
            module.main()
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() and code != 2 else []
    return Answered(code=code, answers=[json.loads(line) for line in lines], err=err.getvalue(), output=path)
