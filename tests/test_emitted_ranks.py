"""Emitted scripts in two real processes (gloo, on the CPU): DDP and FSDP2 train as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emitted import Train, read_log, small
from test_emit import LEVERS, make_plan
from test_emitted_tasks import task_rows, write_jsonl

from planner.config import LoraSettings
from planner.emit import render_training_files
from planner.errors import InputError

DRIVER = """
import importlib.util, json, os, sys
import torch
from accelerate.state import AcceleratorState

for path, arguments, fails in json.load(open(sys.argv[1])):
    spec = importlib.util.spec_from_file_location("emitted", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    calls, collate = [], script.collate

    def scarce(*args):
        calls.append(1)
        if len(calls) == 3:
            torch.empty(2**50)  # a real failure of the allocator, in the second process alone
        return collate(*args)

    if fails and os.environ["RANK"] == "1":
        script.collate = scarce
    sys.argv = [path, *arguments]
    script.main()
    AcceleratorState._reset_state(reset_partial_state=True)
"""
"""Runs scripts one after the other, so that imports are paid for once."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("masked-lm", {}),
    "embedding": ("embedding", {}),
    "adapters": ("sequence-classification", {"method": "lora", "lora": LoraSettings(dropout=0.0)}),
    "bf16": ("masked-lm", LEVERS["bf16-amp"]),
    "scarce": ("masked-lm", {}),
}
SHARED = {"ddp": CASES, "fsdp2": {name: case for name, case in CASES.items() if name != "scarce"}}


def launch(runs: list[Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run scripts in two processes, as torchrun starts them."""
    driver, listed = folder / "driver.py", folder / "runs.json"
    driver.write_text(DRIVER, encoding="utf-8")
    listed.write_text(json.dumps(runs), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run(
        [*torchrun, str(driver), str(listed)],
        env=os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def write_script(folder: Path, task: str, model: Path, **config: Any) -> Path:
    """train.py of nine samples a step, which two processes cannot share evenly."""
    folder.mkdir()
    path = folder / "train.py"
    path.write_text(render_training_files(small(task, model, **{"effective_batch_size": 9} | config))["train.py"])
    return path


@pytest.fixture
def prepared(tmp_path: Path, tiny: Any, rows: list[dict[str, str]]) -> Callable[..., tuple[Path, Path]]:
    """A tiny model without dropout and data for a task."""

    def make(task: str) -> tuple[Path, Path]:
        return tiny("bert"), write_jsonl(tmp_path / f"{task}.jsonl", task_rows(task, rows)[:20])

    return make


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", SHARED)
def test_two_processes_train_as_one(parallelism: str, tmp_path: Path, prepared: Any, train: Train) -> None:
    """The same losses, gradients and evaluations, before and after a resume; one process's lack is shared by all."""
    runs, expected = [], {}
    for name, (task, config) in SHARED[parallelism].items():
        model, data = prepared(task)
        flags = ["--data", str(data), "--eval-data", str(data), "--save-every", "2", "--learning-rate", "0.002"]
        path = write_script(tmp_path / name, task, model, **config, gpus=2, parallelism=parallelism)
        output = ["--output-dir", str(tmp_path / name / "output")]
        runs.append([str(path), [*flags, *output, "--max-steps", "2"], name == "scarce"])
        runs.append([str(path), [*flags, *output, "--max-steps", "4", "--resume"], False])
        plan = small(task, model, **{"effective_batch_size": 9} | config)
        train(plan, *flags, "--max-steps", "2", output=f"one-{name}")
        expected[name] = train(plan, *flags, "--max-steps", "4", "--resume", output=f"one-{name}")
    done = launch(runs, tmp_path)
    assert 0 == done.returncode, done.stderr
    for name, one in expected.items():
        tolerance = 1e-2 if name == "bf16" else 1e-4
        for file in ("log", "eval"):
            theirs = read_log(tmp_path / name / "output", file)
            ours = read_log(one.folder, file)
            for column in {"loss", "grad_norm", "accuracy"} & set(ours[0]):
                assert pytest.approx([row[column] for row in ours], rel=tolerance) == [row[column] for row in theirs]
    if "scarce" in expected:
        assert 1 == done.stdout.count("memory ran out: from now on at most 32 tokens in a micro-batch, not 64")
        assert [32] * 4 == [row["token_budget"] for row in read_log(tmp_path / "scarce" / "output")]


@pytest.mark.slow
def test_a_sharded_checkpoint_is_a_plain_model(tmp_path: Path, prepared: Any) -> None:
    """What FSDP2 leaves is whole: it loads without processes, under its own name; a lack of memory ends the run."""
    from transformers import AutoModelForMaskedLM

    model, data = prepared("masked-lm")
    path = write_script(tmp_path / "sharded", "masked-lm", model, gpus=2, parallelism="fsdp2")
    flags = ["--data", str(data), "--output-dir", str(tmp_path / "output"), "--max-steps", "1"]
    done = launch([[str(path), flags, False], [str(path), [*flags, "--max-steps", "2", "--resume"], True]], tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "output" / "checkpoint-1")
    assert ["BertForMaskedLM"] == loaded.config.architectures
    assert loaded.num_parameters() == AutoModelForMaskedLM.from_pretrained(model).num_parameters()
    assert 0 != done.returncode
    assert "go on with --resume and a smaller --max-tokens-per-micro-batch" in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "adafactor"},
        {"optimizer": "adamw_8bit"},
        {"offload": "optimizer"},
        {"precision": "bf16-master"},
        LEVERS["qlora"],
    ],
)
def test_what_cannot_be_sharded_is_refused(change: dict[str, Any]) -> None:
    """By name, with a reason."""
    with pytest.raises(InputError) as caught:
        render_training_files(make_plan(**change, gpus=4, parallelism="fsdp2", gradient_accumulation_steps=1))
    assert ["parallelism"] == [problem.argument for problem in caught.value.problems]


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_the_files_start_a_process_for_each_card(parallelism: str, tmp_path: Path) -> None:
    """accelerate.yaml and the header's commands have the plan's number of cards."""
    from accelerate.commands.config.config_args import load_config_from_file

    files = render_training_files(make_plan(gpus=4, parallelism=parallelism, gradient_accumulation_steps=1))
    (tmp_path / "accelerate.yaml").write_text(files["accelerate.yaml"])
    settings = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (4, "MULTI_GPU") == (settings.num_processes, settings.distributed_type.value)
    assert "torchrun --nproc_per_node 4 train.py --data FILE" in files["train.py"]
    assert ("fully_shard" in files["train.py"]) == (parallelism == "fsdp2")
