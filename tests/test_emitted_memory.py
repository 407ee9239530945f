"""Staying inside the ceiling: what an emitted script does when memory really runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emitted import NO_DROPOUT, SIZES, Train, minilm, read_log, small, write_jsonl

from planner.emit import render_training_files

pytestmark = pytest.mark.usefixtures("one_thread")

DRIVER = """
import importlib.util, json, pathlib, re, resource, sys
from accelerate.state import AcceleratorState

for path, arguments, headroom in json.load(open(sys.argv[1])):
    spec = importlib.util.spec_from_file_location("emitted", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    guarded = script.run_guarded

    def limited(*args):
        data = int(re.search(r"VmData:\\\\s+([0-9]+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (data + headroom, resource.RLIM_INFINITY))
        try:
            return guarded(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    script.run_guarded = limited
    sys.argv = [path, *arguments]
    try:
        script.main()
    except SystemExit as stopped:
        print("exit code", stopped.code)
    AcceleratorState._reset_state(reset_partial_state=True)
"""
"""Runs scripts whose steps may take so many bytes more than the process holds: the kernel refuses the rest."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a real vocabulary: logits of 122 kB a token, next to which all else is small."""
    import transformers as hf

    folder = tmp_path_factory.mktemp("wide")
    words = hf.AutoTokenizer.from_pretrained(minilm())
    words.save_pretrained(folder)
    hf.BertForMaskedLM(hf.BertConfig(vocab_size=len(words), **SIZES, **NO_DROPOUT)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_step_that_does_not_fit_is_split(tmp_path: Path, wide: Path, train: Train, rows: Any) -> None:
    """torch runs out of memory for real; the step is made again in halves with the same loss, and it is told."""
    sizes = {"effective_batch_size": 32, "micro_batch_size": 32, "gradient_accumulation_steps": 1}
    plan = small("masked-lm", wide, **sizes, max_tokens_per_micro_batch=1024)
    data = write_jsonl(tmp_path / "data.jsonl", rows[:64])
    flags = ["--data", str(data), "--max-steps", "3", "--learning-rate", "0.002"]
    whole = train(plan, *flags, output="whole")
    runs = []
    for name, headroom in (("halves", 250 * 10**6), ("nothing", 6 * 10**6)):
        path = tmp_path / f"{name}.py"
        path.write_text(render_training_files(plan)["train.py"], encoding="utf-8")
        runs.append([str(path), [*flags, "--output-dir", str(tmp_path / name)], headroom])
    (tmp_path / "driver.py").write_text(DRIVER.replace("\\\\", "\\"), encoding="utf-8")
    (tmp_path / "runs.json").write_text(json.dumps(runs), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "runs.json")],
        env=os.environ | {"ACCELERATE_USE_CPU": "1", "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert 0 == done.returncode, done.stderr
    assert "memory ran out: from now on at most 512 tokens in a micro-batch, not 1024" in done.stdout
    log = read_log(tmp_path / "halves")
    assert [512] * 3 == [row["token_budget"] for row in log]
    for column in ("loss", "grad_norm"):
        assert pytest.approx([row[column] for row in whole.log], rel=1e-4) == [row[column] for row in log]
    assert "memory ran out with one sequence of 32 tokens: plan for shorter ones" in done.stderr
    assert "exit code 3" in done.stdout
    assert not read_log(tmp_path / "nothing")


def test_more_than_the_plan_is_told_and_taken_back(tmp_path: Path, tiny: Any, train: Train, rows: Any) -> None:
    """Steps that fitted but took more than the ceiling are followed by smaller ones: the same losses, and a message.

    The smaller budget is in the checkpoint; a plan's limit of a byte is passed by every step.
    """
    data = write_jsonl(tmp_path / "data.jsonl", rows[:16])
    plan = small("masked-lm", tiny("bert"))
    plan["hardware"] = {"kind": "cpu", "name": "a CPU"}
    flags = ["--data", data, "--learning-rate", "0.005"]
    train(plan, *flags, "--max-steps", "2", output="within")
    within = train(plan, *flags, "--max-steps", "4", "--resume", output="within")
    plan["memory"]["ceiling_bytes"] = plan["memory"]["context_bytes"] + 1
    first = train(plan, *flags, "--max-steps", "2", output="over")
    over = train(plan, *flags, "--max-steps", "4", "--resume", output="over")
    assert "over the plan's memory: from now on at most 32 tokens in a micro-batch" in first.out
    budgets = [row["token_budget"] for row in over.log]
    assert [64, 32] == budgets[:2] and budgets == sorted(budgets, reverse=True)
    assert over.log[-1]["micro_batches"] == 8 > over.log[0]["micro_batches"]
    assert pytest.approx(within.losses, rel=1e-4) == over.losses


def test_a_smaller_budget_can_be_asked_for(tmp_path: Path, tiny: Any, train: Train, rows: Any) -> None:
    """--max-tokens-per-micro-batch: more micro-batches, the same loss."""
    data = write_jsonl(tmp_path / "data.jsonl", rows[:16])
    plan = small("masked-lm", tiny("bert"))
    usual = train(plan, "--data", data, "--max-steps", "1", output="usual")
    run = train(plan, "--data", data, "--max-steps", "1", "--max-tokens-per-micro-batch", "32", output="small")
    assert (32, 8) == (run.log[0]["token_budget"], run.log[0]["micro_batches"])
    assert pytest.approx(usual.losses, rel=1e-5) == run.losses
