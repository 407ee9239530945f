"""The emitted files as text: what they hold, what they leave out, and that tools accept them."""

from __future__ import annotations

import ast
import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner import levers
from planner.config import LoraSettings, TrainingConfig
from planner.emit import EMITTED_TASKS, render_training_files
from planner.emit.header import plan_command
from planner.errors import InputError
from planner.request import make_request

LORA = LoraSettings()
LEVERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"precision": "tf32"},
    "fp16-amp": {"precision": "fp16-amp"},
    "bf16-amp": {"precision": "bf16-amp"},
    "bf16": {"precision": "bf16"},
    "full": {"checkpointing": "full"},
    "every-2": {"checkpointing": "every-2", "precision": "fp16-amp"},
    "foreach": {"optimizer": "adamw_foreach"},
    "8bit": {"optimizer": "adamw_8bit", "precision": "bf16"},
    "paged": {"optimizer": "paged_adamw_8bit"},
    "master": {"precision": "bf16-master"},
    "master-sgd": {"precision": "bf16-master", "optimizer": "sgd"},
    "flash2": {"attention": "flash2", "precision": "bf16-amp"},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "offload": {"offload": "optimizer", "precision": "fp16-amp"},
    "parameters": {"offload": "parameters", "checkpointing": "full"},
    "parameters-amp": {"offload": "parameters", "checkpointing": "full", "precision": "bf16-amp"},
    "parameters-bf16": {"offload": "parameters", "checkpointing": "full", "precision": "bf16"},
    "activations": {"offload": "activations"},
    "activations-half": {"offload": "activations", "checkpointing": "every-2", "precision": "bf16-amp"},
    "eager": {"attention": "eager"},
    "fsdp2": {"parallelism": "fsdp2", "gpus": 4, "gradient_accumulation_steps": 1},
    "fsdp2-amp": {"parallelism": "fsdp2", "gpus": 4, "gradient_accumulation_steps": 1, "precision": "bf16-amp"},
    "lora": {"method": "lora", "lora": LORA, "precision": "bf16", "checkpointing": "full"},
    "qlora": {"method": "qlora", "quantization": "nf4", "lora": LORA, "precision": "bf16"},
    "int8": {"method": "qlora", "quantization": "int8", "lora": LORA, "precision": "bf16-amp", "checkpointing": "full"},
    "qlora-amp": {
        "method": "qlora",
        "quantization": "nf4",
        "lora": LORA,
        "precision": "fp16-amp",
        "optimizer": "adamw_8bit",
        "checkpointing": "every-4",
    },
}
FUSED = {
    "fused": {"loss": "fused-linear"},
    "fused-amp": {"loss": "fused-linear", "precision": "bf16-amp"},
    "fused-lora": {"loss": "fused-linear", "method": "lora", "lora": LORA, "precision": "fp16-amp"},
    "fused-master": {"loss": "fused-linear", "precision": "bf16-master"},
}
"""For tasks over a vocabulary."""
LANGUAGE_TASKS = tuple(task for task in EMITTED_TASKS if task.endswith("-lm"))
TABLE = [*itertools.product(EMITTED_TASKS, LEVERS), *itertools.product(LANGUAGE_TASKS, FUSED)]
LEVERS_AND_LOSSES = LEVERS | FUSED


def make_plan(task: str = "sequence-classification", model: str = "bert-base-uncased", **config: Any) -> dict:
    """A plan as plan.json holds it; ``config`` replaces fields of the training configuration."""
    fields: dict[str, Any] = {
        "micro_batch_size": 8,
        "seq_len": 512,
        "max_tokens_per_micro_batch": 4096,
        "gradient_accumulation_steps": 4,
        "effective_batch_size": 32,
        "precision": "fp32",
    }
    return {
        "schema_version": 1,
        "request": make_request(model=model, vram="8GB").model_dump(mode="json"),
        "hardware": {"name": "NVIDIA GeForce RTX 3070", "compute_capability": [8, 6]},
        "workload": {
            "model": model,
            "task": task,
            "target_seq_len": 128 if task == "seq2seq-lm" else None,
        },
        "config": TrainingConfig(**(fields | config)).model_dump(mode="json"),
        "memory": {
            "peak_reserved_bytes": 6_500_000_000,
            "context_bytes": 450_000_000,
            "margin_bytes": 200_000_000,
            "total_bytes": 7_150_000_000,
            "ceiling_bytes": 8_350_000_000,
        },
        "time": {"step_ms": 812.3, "tokens_per_s": 20_170.0, "source": "simulated"},
    }


def script(task: str = "sequence-classification", **config: Any) -> str:
    """The text of train.py for a plan with this configuration."""
    return render_training_files(make_plan(task, **config))["train.py"]


ALLOCATORS = {
    "fixed": "expandable_segments:False",
    "collecting": "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:4]",
}


def script_with(settings: str) -> str:
    """The text of train.py for a plan with these allocator settings."""
    plan = make_plan()
    plan["request"]["allocator"] = settings
    return render_training_files(plan)["train.py"]


def imported(text: str) -> set[str]:
    """The packages that a script imports anywhere in its text."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    return names


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of every task and lever."""
    folder = tmp_path_factory.mktemp("rendered")
    for name, settings in ALLOCATORS.items():
        (folder / f"allocator-{name}.py").write_text(script_with(settings), encoding="utf-8")
    for task, lever in TABLE:
        (folder / f"{task}_{lever}.py").write_text(script(task, **LEVERS_AND_LOSSES[lever]), encoding="utf-8")
    return folder


def ruff(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ruff as the tests' Python has it."""
    command = [sys.executable, "-m", "ruff", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("task", "lever"), TABLE)
def test_script_is_python_that_needs_no_planner(task: str, lever: str) -> None:
    """Every script parses, and imports only what a training environment has."""
    allowed = {"pandas", "psutil", "torch", "accelerate", "tqdm", "transformers", "peft", "bitsandbytes", "datasets"}
    outside = imported(script(task, **LEVERS_AND_LOSSES[lever])) - set(sys.stdlib_module_names)
    assert set() == outside - allowed
    assert {"accelerate", "torch", "transformers"} <= outside


def test_scripts_pass_the_linter(rendered: Path) -> None:
    """Ruff has nothing to say about any script at the line length of this project."""
    rules = ("--select", "E,F,W,I,UP,B,PTH,RUF", "--ignore", "RUF001")  # of other languages' punctuation
    done = ruff("check", "--isolated", "--line-length", "120", *rules, rendered)
    assert 0 == done.returncode, done.stdout


def test_scripts_are_formatted(rendered: Path) -> None:
    """Ruff would format every script as it is."""
    done = ruff("format", "--isolated", "--line-length", "120", "--check", rendered)
    assert 0 == done.returncode, done.stdout


@pytest.mark.parametrize("task", EMITTED_TASKS)
def test_plain_script_is_short(task: str) -> None:
    """A plan without levers gives a script that is read in one sitting."""
    assert 900 > len(script(task).splitlines())


ON_HOST = {"parameters", "parameters-amp", "parameters-bf16"}
SAVED_ON_HOST = {"activations", "activations-half"}
MARKS = {
    "keep_layers_on_host": ON_HOST,
    "AutocastKwargs": {"parameters-amp"},
    "HostActivations": SAVED_ON_HOST,
    "prepare(optimizer, device_placement=[False])": {"offload"} | ON_HOST,
    "peft": {"lora", "qlora", "int8", "qlora-amp"},
    "BitsAndBytesConfig": {"qlora", "int8", "qlora-amp"},
    "load_in_8bit=True": {"int8"},
    "load_in_4bit=True": {"qlora", "qlora-amp"},
    "import bitsandbytes": {"8bit", "paged", "qlora-amp"},
    "PagedAdamW8bit": {"paged"},
    "MasterWeights": {"master", "master-sgd"},
    "is_flash_attn_2_available": {"flash2"},
    'attn_implementation="flash_attention_2"': {"flash2"},
    "checkpoint_activations": {"full", "every-2", "lora", "int8", "qlora-amp", "activations-half"} | ON_HOST,
    "GradientCheckpointingLayer": {"every-2", "qlora-amp", "activations-half", "fsdp2", "fsdp2-amp"} | ON_HOST,
    "HostAdamW": {"offload"} | ON_HOST,
    "fused=True": {"fp32", "tf32", "fp16-amp", "bf16-amp", "bf16", "full", "every-2", "offload", "eager"}
    | {"lora", "qlora", "int8", "flash2", "master", "fsdp2", "fsdp2-amp"}
    | ON_HOST
    | SAVED_ON_HOST,
    "foreach=True": {"foreach"},
    "Adafactor": {"adafactor"},
    "SGD": {"sgd", "master-sgd"},
    "scaler": {"fp16-amp", "every-2", "offload", "qlora-amp"},
    "set_float32_matmul_precision": {"tf32"},
    'attn_implementation="eager"': {"eager"},
    "fully_shard": {"fsdp2", "fsdp2-amp"},
    "MixedPrecisionPolicy": {"fsdp2-amp"},
    "SEQ_LEN, 8)": set(LEVERS)
    - {"fp32", "tf32", "full", "foreach", "adafactor", "sgd", "eager", "paged", "parameters", "activations", "fsdp2"},
}


@pytest.mark.parametrize("mark", MARKS)
def test_script_holds_only_what_the_plan_uses(mark: str) -> None:
    """A lever leaves its trace in the scripts of the plans that use it, and in no other."""
    assert MARKS[mark] == {lever for lever, config in LEVERS.items() if mark in script(**config)}


def test_constants_are_the_plan() -> None:
    """The script's constants are the plan's numbers."""
    config = {"seq_len": 96, "max_tokens_per_micro_batch": 480, "effective_batch_size": 20}
    names = ast.parse(script("seq2seq-lm", **config)).body
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in names
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id[0] != "D"
    }
    assert "bert-base-uncased" == values["MODEL"]
    assert 96 == values["SEQ_LEN"]
    assert 128 == values["TARGET_SEQ_LEN"]
    assert 480 == values["MAX_TOKENS_PER_MICRO_BATCH"]
    assert 20 == values["EFFECTIVE_BATCH_SIZE"]


def test_header_tells_commands_memory_and_time() -> None:
    """The comment at the top says what made the script, what runs it, and what to expect."""
    top = script().split("\nimport ")[0]
    assert "plan --model bert-base-uncased --vram 8GB\n" in top
    assert "accelerate launch --config_file accelerate.yaml train.py --data FILE" in top
    assert "6.66 GiB of 7.78 GiB on NVIDIA GeForce RTX 3070" in top
    assert "812 ms a step, 20,170 tokens/s, simulated" in top


def test_command_repeats_the_request() -> None:
    """Options come back as they were given; what has its default value is left out."""
    request = make_request(
        model="my model",
        vram="8GB",
        precision="fp32,bf16-amp",
        seq_len=256,
        seed=0,
        method="auto",
        trust_remote_code=True,
    )
    expected = "plan --model 'my model' --vram 8GB --seq-len 256 --precision fp32,bf16-amp --trust-remote-code"
    assert expected == plan_command(request.model_dump(mode="json"))


def bare_statements(text: str, name: str) -> str:
    """A class of a Python text without its documentation and annotations."""
    tree = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            lines = [(line, isinstance(line, ast.AnnAssign)) for line in node.body]
            node.body = [ast.Assign([line.target], line.value, lineno=0) if says else line for line, says in lines]
    return ast.unparse(tree)


@pytest.mark.parametrize(
    ("name", "module", "config"),
    [
        ("LinearCrossEntropy", "fused_loss", {"loss": "fused-linear"}),
        ("MasterWeights", "master_weights", {"precision": "bf16-master"}),
    ],
)
def test_scripts_do_what_was_simulated(name: str, module: str, config: dict[str, Any]) -> None:
    """A class that the script brings along is the one that was recorded, statement for statement."""
    recorded = (Path(levers.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    assert bare_statements(recorded, name) == bare_statements(script("causal-lm", **config), name)


@pytest.mark.parametrize("task", LANGUAGE_TASKS)
def test_a_fused_loss_leaves_no_logits(task: str) -> None:
    """The model returns hidden states, and the loss gets the output layer beside them, also in evaluations."""
    text = script(task, **FUSED["fused"])
    assert 2 == text.count("mean_loss(model(**inputs).logits, targets[0], items, ")
    assert "F.cross_entropy" not in text
    assert "LinearCrossEntropy" not in script(task)


def test_nothing_in_a_plan_escapes_the_header() -> None:
    """A line break or a quote in a name stays inside the comment or the string that it belongs to."""
    plan = make_plan()
    name = 'a"b\\\nimport pty\n"""'
    plan["request"]["model"] = plan["hardware"]["name"] = plan["workload"]["model"] = name
    text = render_training_files(plan)["train.py"]
    assert "pty" not in imported(text)
    values = [node.value for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    assert name == ast.literal_eval(values[0])


def test_local_config_file_names_its_folder() -> None:
    """A plan for some/folder/config.json trains the model that lies in the folder."""
    text = render_training_files(make_plan(model="some/folder/config.json"))["train.py"]
    assert 'MODEL = "some/folder"\n' in text


DEFAULT = "expandable_segments:True"


@pytest.mark.parametrize(
    ("expected", "environment", "release"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": DEFAULT}, {}, "6.8.0-generic"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "mine"}, {"PYTORCH_CUDA_ALLOC_CONF": "mine"}, "6.8.0-generic"),
        ({"PYTORCH_ALLOC_CONF": "mine"}, {"PYTORCH_ALLOC_CONF": "mine"}, "6.8.0-generic"),
        ({}, {}, "5.15.90.1-microsoft-standard-WSL2"),
    ],
)
def test_the_allocator_is_set_before_torch_loads(
    expected: dict[str, str], environment: dict[str, str], release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plan assumes, under the name that torch 2.4 to 2.14 read; the user's setting wins; not under WSL."""
    before_torch = script().split("import pandas as pd")[0]
    assert "import torch" not in before_torch
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "release", lambda: release)
    # restored at the end, whatever the script sets
    monkeypatch.setattr(os, "environ", os.environ.copy())
    exec(compile(before_torch, "train.py", "exec"), {"__name__": "train"})
    assert expected == {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}


def test_what_was_asked_of_the_allocator_is_set_everywhere() -> None:
    """Nothing but expandable segments depends on the platform."""
    text = script_with(ALLOCATORS["fixed"])
    assert 'os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")' in text
    assert "import platform" not in text


@pytest.mark.parametrize("settings", [*ALLOCATORS.values(), DEFAULT])
def test_the_process_is_held_to_the_plan(settings: str) -> None:
    """Ceiling less context, 8,350,000,000 - 450,000,000 bytes, also on a larger card; a CPU has no such limit."""
    text = script_with(settings)
    assert "LIMIT_BYTES = 7900000000 " in text and "min(LIMIT_BYTES / memory, 0.999)" in text
    plan = make_plan()
    plan["hardware"] = {"kind": "cpu", "name": "a CPU"}
    assert "set_per_process_memory_fraction" not in render_training_files(plan)["train.py"]


def test_remote_code_is_allowed_only_on_request() -> None:
    """``trust_remote_code`` stands in the script of a request that has it."""
    plan = make_plan()
    assert "trust_remote_code" not in render_training_files(plan)["train.py"]
    plan["request"]["trust_remote_code"] = True
    assert 2 == render_training_files(plan)["train.py"].count("trust_remote_code=True")


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("task", {"task": "image-classification"}),
        ("offload", {"offload": "optimizer", "optimizer": "adafactor"}),
        ("checkpointing", {"checkpointing": "every-0"}),
        ("loss", {"loss": "fused-linear"}),
    ],
)
def test_what_no_script_can_do_is_refused(argument: str, change: dict[str, str]) -> None:
    """Tasks and combinations without a script are an input error that names the argument."""
    with pytest.raises(InputError) as caught:
        script(**change)
    assert [argument] == [problem.argument for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("lever", "expected"), [("fp32", "no"), ("fp16-amp", "fp16"), ("bf16-amp", "bf16"), ("bf16", "no")]
)
def test_accelerate_reads_its_settings(tmp_path: Path, lever: str, expected: str) -> None:
    """accelerate.yaml is what ``accelerate launch`` reads: one process, the plan's mixed precision."""
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "accelerate.yaml"
    path.write_text(render_training_files(make_plan(**LEVERS[lever]))["accelerate.yaml"])
    settings = load_config_from_file(str(path))
    assert expected == settings.mixed_precision
    assert 1 == settings.num_processes
    assert "NO" == settings.distributed_type.value


def test_rendering_needs_no_torch() -> None:
    """The emit room imports neither torch nor transformers."""
    code = "import planner.emit, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode
