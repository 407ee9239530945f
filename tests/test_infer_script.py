"""The emitted infer.py as text: what it holds, what it leaves out, and that tools accept it."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from inference_scripts import CARD, CPU, make_inference_plan
from test_emit import imported, ruff

from planner.emit import render_inference_files
from planner.errors import InputError
from planner.tasks import GENERATING_TASKS, INFERENCE_TASKS

LAYERS = {"workload": {"layers_name": "model.layers", "layers": 24}}
LEVERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "cpu": {"hardware": CPU},
    "tf32": {"precision": "tf32"},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "flash2": {"precision": "bf16", "attention": "flash2"},
    "eager": {"attention": "eager"},
    "int8": {"precision": "fp16", "quantization": "int8"},
    "nf4": {"precision": "bf16", "quantization": "nf4"},
    "weight-only": {"precision": "bf16", "quantization": "int8-weight-only"},
    "dynamic": {"hardware": CPU, "quantization": "int8-dynamic"},
    "offload": {"offload": "parameters", "layers_on_card": 3, **LAYERS},
    "table": {"offload": "parameters", "layers_on_card": 24, "embedding_on_card": False, **LAYERS},
    "disk": {"offload": "disk", "layers_on_card": 0, **LAYERS},
    "segment": {"workload": {"long_texts": "segment", "overlap": 0.25}},
    "truncate": {"workload": {"long_texts": "truncate"}},
}
CACHES: dict[str, dict[str, Any]] = {
    "static": {"kv_cache": "static"},
    "offloaded": {"kv_cache": "offloaded"},
    "quantized": {"kv_cache": "quantized"},
    "chunks": {"prefill_chunk_tokens": 512},
    "prefix": {"prefix_tokens": 300, "prefix_cache_bytes": 10**9},
    "prefix-chunks": {"prefix_tokens": 300, "prefix_cache_bytes": 10**9, "prefill_chunk_tokens": 128},
}
NOT_WRITTEN = {("seq2seq-lm", "quantized")}
TABLE = [*itertools.product(INFERENCE_TASKS, LEVERS), *itertools.product(GENERATING_TASKS, CACHES)]


def script(task: str = "reranking", lever: str = "fp32", **changes: Any) -> str:
    """The text of infer.py for a plan with this lever, for a card if the lever doesn't say otherwise."""
    settings = {"hardware": CARD, **(LEVERS | CACHES)[lever], **changes}
    return render_inference_files(make_inference_plan(task, **settings))["infer.py"]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of every task and lever."""
    folder = tmp_path_factory.mktemp("rendered")
    for task, lever in set(TABLE) - NOT_WRITTEN:
        (folder / f"{task}_{lever}.py").write_text(script(task, lever), encoding="utf-8")
    return folder


def test_scripts_pass_the_linter(rendered: Path) -> None:
    """Ruff has nothing to say about any script at the line length of this project."""
    rules = ("--select", "E,F,W,I,UP,B,PTH,RUF", "--ignore", "RUF001")  # of other languages' punctuation
    done = ruff("check", "--isolated", "--line-length", "120", *rules, rendered)
    assert 0 == done.returncode, done.stdout


def test_scripts_are_formatted(rendered: Path) -> None:
    """Ruff would format every script as it is."""
    done = ruff("format", "--isolated", "--line-length", "120", "--check", rendered)
    assert 0 == done.returncode, done.stdout


def test_scripts_are_short_and_need_no_planner(rendered: Path) -> None:
    """Every script imports only what an environment for inference has, and is read in one sitting; short functions."""
    allowed = {"psutil", "torch", "accelerate", "tqdm", "transformers", "pyarrow"}
    for path in rendered.iterdir():
        text, (task, lever) = path.read_text(encoding="utf-8"), path.stem.split("_")
        assert (770 if task == "causal-lm" else 710) > len(text.splitlines()), path.name
        if lever not in ("fp32", "prefix-chunks") and task != "reranking":
            continue  # what these hold is in others
        outside = imported(text) - set(sys.stdlib_module_names)
        assert set() == outside - allowed - ({"torchao"} if lever == "weight-only" else set()), path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert 40 >= (node.end_lineno or 0) - node.lineno, (path.name, node.name)


MARKS = {
    "set_float32_matmul_precision": {"tf32"},
    '"dtype": torch.float16': {"fp16", "int8"},
    '"dtype": torch.bfloat16': {"bf16", "flash2", "nf4", "weight-only"},
    "is_flash_attn_2_available": {"flash2"},
    '"eager"': {"eager"},
    "load_in_8bit=True": {"int8"},
    "load_in_4bit=True": {"nf4"},
    "TorchAoConfig": {"weight-only"},
    "quantize_dynamic": {"dynamic"},
    "device_map": {"int8", "nf4", "weight-only", "offload", "table", "disk"},
    "places_of": {"offload", "table", "disk"},
    "offload_folder": {"disk"},
    "look_up_on_host": {"table"},
    "all of them": {"table"},
    "mallopt": {"cpu", "dynamic"},
    "set_per_process_memory_fraction": set(LEVERS) - {"cpu", "dynamic"},
    "SEQ_LEN, 8)": {"fp16", "bf16", "flash2", "int8", "nf4", "weight-only"},
}


@pytest.mark.parametrize("mark", MARKS)
def test_script_holds_only_what_the_plan_uses(mark: str) -> None:
    """A lever leaves its trace in the scripts of the plans that use it, and in no other."""
    assert MARKS[mark] == {lever for lever in LEVERS if mark in script("reranking", lever)}


def test_the_parts_of_other_tasks_are_left_out() -> None:
    """No generation for a reranker, no pooling for a writer, no beginnings where prompts share none."""
    for mark, tasks in {
        ".generate(": set(GENERATING_TASKS),
        "pooling_of": {"embedding"},
        "span_of": {"token-classification"},
        "losses_of_batch": set(GENERATING_TASKS),
    }.items():
        assert tasks == {task for task in INFERENCE_TASKS if mark in script(task)}, mark
    assert {"prefix", "prefix-chunks"} == {lever for lever in CACHES if "PrefixCache" in script("causal-lm", lever)}


def test_constants_and_header_are_the_plan() -> None:
    """The script's numbers are the plan's; the comment at the top says what made it, runs it, and what to expect."""
    sizes = {"max_tokens_per_micro_batch": 480, "micro_batch_size": 4, "max_sequences": 5, "overhead_tokens": 70}
    text = script("causal-lm", seq_len=96, max_new_tokens=24, **sizes)
    for line in (
        "SEQ_LEN = 96 ",
        "MAX_TOKENS_PER_BATCH = 480 ",
        "MAX_SEQUENCES = 5 ",
        "BATCH_OVERHEAD = 70 ",
        "MAX_NEW_TOKENS = 24 ",
    ):
        assert f"\n{line}" in text
    top = text.split("\nimport ")[0]
    assert "plan --model bert-base-uncased --vram 8GB --task causal-lm --mode infer\n" in top
    assert "python infer.py --data FILE --output answers.jsonl" in top
    assert "6.66 GiB of 7.78 GiB on NVIDIA GeForce RTX 3070" in top
    assert "120 ms for a batch's prompts (9,100 tokens/s), 25.2 ms for each token that follows (158" in top
    assert "812 ms a batch, 40 texts/s, 20,170 tokens/s, simulated" in script().split("\nimport ")[0]


def test_nothing_in_a_plan_escapes_the_header() -> None:
    """A line break or a quote in a name stays inside the comment or the string that it belongs to."""
    plan = make_inference_plan("embedding")
    name = 'a"b\\\nimport pty\n"""'
    plan["request"]["model"] = plan["workload"]["model"] = name
    plan["hardware"] = {**CARD, "name": name}
    assert "pty" not in imported(render_inference_files(plan)["infer.py"])


def test_what_can_t_be_written_is_refused_at_once() -> None:
    """All problems in one error, each with its argument: a task, and levers that don't go together."""
    settings = {"hardware": CARD, "quantization": "int8-dynamic", "offload": "disk"}
    with pytest.raises(InputError) as refused:
        render_inference_files(make_inference_plan("embedding", **settings))
    assert ["quantization", "offload", "offload"] == [problem.argument for problem in refused.value.problems]
    with pytest.raises(InputError, match="got 'quantized', which transformers has for models without an encoder"):
        script("seq2seq-lm", "quantized")
    plan = make_inference_plan("embedding")
    plan["workload"]["task"] = "masked-lm"
    with pytest.raises(InputError, match="got 'masked-lm'; accepted for an inference script"):
        render_inference_files(plan)
