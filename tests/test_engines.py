"""A plan for other engines: each file is loaded by the library that reads it, and what can't be said is refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from emitted import minilm, write_jsonl
from test_emit import LEVERS, make_plan

from planner.cli import run
from planner.emit.engines import ENGINES
from planner.errors import InputError
from planner.exporting import export, files_for
from planner.levers.parallelism import ParallelismLever
from planner.tasks import TASK_FACTS

TASKS = tuple(TASK_FACTS)


def plan_for(engine: str, lever: str = "bf16-amp", **workload: Any) -> dict[str, Any]:
    """A plan that the engine is for, with one lever."""
    task = {"sentence-transformers": "embedding", "trainer": "sequence-classification"}.get(engine, "causal-lm")
    task = "sequence-classification" if engine == "deepspeed" else task
    document = make_plan(task, "gpt2", **LEVERS[lever])
    document["workload"] |= {"long_texts": "truncate", **workload}
    return document


def settings(engine: str, **plan: Any) -> dict[str, Any]:
    """The YAML file that the engine reads."""
    [text] = files_for(plan_for(engine, **plan), engine).values()
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@pytest.mark.parametrize(("engine", "lever"), list(itertools.product(ENGINES, LEVERS)))
def test_every_lever_is_written_or_refused_by_name(engine: str, lever: str) -> None:
    """Each combination gives files, or problems that name a field of the plan, its value and what is accepted."""
    document = plan_for(engine, lever)
    try:
        files = files_for(document, engine)
    except InputError as error:
        fields = {"task", "long_texts", "to", *document["config"]}
        for problem in error.problems:
            assert problem.argument in fields
            assert repr(str(document["config"].get(problem.argument))).strip("'")[:6] in problem.message
    else:
        assert files and all(files.values())


def test_several_problems_come_at_once() -> None:
    """A plan that an engine can't take for three reasons is told all three."""
    document = plan_for("trl", "offload")
    document["config"] |= {"checkpointing": "every-2", "loss": "fused-linear"}
    with pytest.raises(InputError) as refused:
        files_for(document, "trl")
    assert {"offload", "checkpointing", "loss"} == {problem.argument for problem in refused.value.problems}


@pytest.mark.parametrize("lever", ["fp32", "bf16-amp", "full", "foreach", "adafactor"])
def test_the_trainer_parses_its_arguments(lever: str, tmp_path: Path) -> None:
    """HfArgumentParser makes TrainingArguments of the file, with the plan's numbers."""
    import transformers as hf

    path = tmp_path / "arguments.json"
    content = json.loads(files_for(plan_for("trainer", lever), "trainer")["training_arguments.json"])
    path.write_text(json.dumps(content | {"use_cpu": True}))  # no GPU here
    [arguments] = hf.HfArgumentParser(hf.TrainingArguments).parse_json_file(str(path))
    assert (8, 4) == (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
    assert (lever == "full") == arguments.gradient_checkpointing
    assert (lever == "bf16-amp") == arguments.bf16


def deepspeed_settings(offload: str, lever: str = "bf16-amp") -> dict[str, Any]:
    """The content of deepspeed.json."""
    document = plan_for("deepspeed", lever)
    document["config"] |= {"offload": offload, "checkpointing": "full"}
    content: dict[str, Any] = json.loads(files_for(document, "deepspeed")["deepspeed.json"])
    return content


@pytest.mark.parametrize(("offload", "stage"), [("none", 0), ("optimizer", 2), ("parameters", 3)])
def test_deepspeed_settings_hold_together(offload: str, stage: int) -> None:
    """Weights on the host are ZeRO-3, the optimizer alone ZeRO-2, as accelerate reads the file."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    config = HfDeepSpeedConfig(deepspeed_settings(offload))
    assert (stage, offload != "none") == (config.get_value("zero_optimization.stage"), config.is_offload())


@pytest.mark.parametrize("lever", ["fp32", "bf16-amp", "fp16-amp"])
@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
def test_deepspeed_parses_its_settings(offload: str, lever: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own parser takes the file once the Trainer has filled in what is auto."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="DS_BUILD_OPS=0 pip install deepspeed")
    content = deepspeed_settings(offload, lever)
    content |= {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4, "train_batch_size": 32}
    content |= {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    config = runtime.DeepSpeedConfig(content)
    assert {"none": 0, "optimizer": 2, "parameters": 3}[offload] == config.zero_optimization_stage


def test_deepspeed_knows_every_key() -> None:
    """The file's keys are those of DeepSpeed 0.19's runtime/zero/config.py and runtime/constants.py."""
    content = deepspeed_settings("parameters")
    zero = {"stage", "offload_optimizer", "offload_param", "stage3_gather_16bit_weights_on_model_save"}
    assert zero == set(content["zero_optimization"])
    assert {"device": "cpu", "pin_memory": True} == content["zero_optimization"]["offload_param"]
    assert {"auto"} == {content[f"train_{name}"] for name in ("micro_batch_size_per_gpu", "batch_size")}


@pytest.mark.parametrize("lever", ["bf16-amp", "lora", "qlora", "full", "eager"])
def test_trl_parses_its_file(lever: str, tmp_path: Path) -> None:
    """TRL's own parser takes every key, and the plan's numbers arrive."""
    trl = pytest.importorskip("trl")
    path = tmp_path / "sft.yaml"
    document = plan_for("trl", lever, long_texts="pack")
    path.write_text(files_for(document, "trl")["sft.yaml"])
    parser = trl.TrlParser([trl.SFTConfig, trl.ModelConfig])
    arguments, model = parser.parse_args_and_config(
        ["--config", str(path), "--use_cpu", "true"], fail_with_unknown_args=True
    )
    assert (512, True) == (arguments.max_length, arguments.packing)
    assert ("lora" in lever) == model.use_peft
    assert (lever == "qlora") == model.load_in_4bit
    assert ("eager" if lever == "eager" else "sdpa") == model.attn_implementation


LLAMA_FACTORY_KEYS = {
    *("model_name_or_path", "flash_attn", "disable_gradient_checkpointing", "use_reentrant_gc"),  # model_args.py
    *("quantization_method", "quantization_bit"),
    *("cutoff_len", "packing"),  # data_args.py
    *("stage", "finetuning_type", "pure_bf16", "lora_rank", "lora_alpha", "lora_dropout", "lora_target"),
}
"""LLaMA-Factory's own fields (src/llamafactory/hparams, main branch of 2026); all others are TrainingArguments'."""
AXOLOTL_KEYS = {
    *("base_model", "sequence_len", "sample_packing", "group_by_length", "micro_batch_size"),
    *("gradient_accumulation_steps", "optimizer", "learning_rate", "lr_scheduler", "warmup_ratio", "num_epochs"),
    *("max_grad_norm", "gradient_checkpointing", "gradient_checkpointing_kwargs", "eager_attention", "sdp_attention"),
    *("flash_attention", "bf16", "fp16", "bfloat16", "tf32", "seed", "output_dir", "adapter", "lora_r", "lora_alpha"),
    *("lora_dropout", "lora_target_linear", "load_in_4bit", "load_in_8bit"),
}
"""Fields of AxolotlInputConfig (src/axolotl/utils/schemas/config.py, training.py and peft.py)."""


@pytest.mark.parametrize("lever", ["bf16-amp", "bf16", "lora", "qlora", "int8"])
def test_llama_factory_knows_every_key(lever: str) -> None:
    """Each key is one of its own fields or of TrainingArguments."""
    import dataclasses

    import transformers as hf

    document = plan_for("llama-factory", lever)
    document["config"]["checkpointing"] = "full"
    content = yaml.safe_load(files_for(document, "llama-factory")["llamafactory.yaml"])
    trainer = {field.name for field in dataclasses.fields(hf.TrainingArguments)} | {"warmup_ratio"}
    assert set() == set(content) - LLAMA_FACTORY_KEYS - trainer
    assert {"qlora": 4, "int8": 8}.get(lever) == content.get("quantization_bit")
    assert (lever == "bf16") == content["pure_bf16"] or lever != "bf16"


@pytest.mark.parametrize("lever", ["bf16-amp", "bf16", "lora", "qlora", "int8", "eager"])
def test_axolotl_knows_every_key(lever: str) -> None:
    """Each key is in its schema, one attention is chosen, and quantization comes with an adapter."""
    document = plan_for("axolotl", lever)
    document["config"]["checkpointing"] = "full"
    content = yaml.safe_load(files_for(document, "axolotl")["axolotl.yaml"])
    assert set() == set(content) - AXOLOTL_KEYS
    assert 1 == sum(name.endswith("_attention") for name in content)
    assert {"qlora": "qlora", "lora": "lora", "int8": "lora"}.get(lever) == content.get("adapter")
    assert (8, 4, 512) == tuple(
        content[name] for name in ("micro_batch_size", "gradient_accumulation_steps", "sequence_len")
    )


def test_memory_relevant_lines_say_so() -> None:
    """A YAML file begins with the command that made it, and says what the micro-batch does."""
    [text] = files_for(plan_for("axolotl", "lora"), "axolotl").values()
    assert "made by  plan --model bert-base-uncased" in text or "made by  plan --model gpt2" in text
    assert "# sequences in one pass; sets the peak of the activations" in text


@pytest.mark.slow
@pytest.mark.parametrize("task", ["embedding", "reranking"])
def test_sentence_transformers_script_trains(task: str, tmp_path: Path, rows: list[dict[str, str]]) -> None:
    """The exported script runs two steps of the real library on a real model."""
    document = make_plan(task, str(minilm()), micro_batch_size=2, effective_batch_size=4, seq_len=32)
    document["config"]["gradient_accumulation_steps"] = 2
    [(name, text)] = files_for(document, "sentence-transformers").items()
    (tmp_path / name).write_text(text)
    pairs = [{"query": row["text"][:40], "document": row["text"]} for row in rows[:8]]
    data = write_jsonl(tmp_path / "pairs.jsonl", [p | ({"label": 1.0} if task == "reranking" else {}) for p in pairs])
    done = subprocess.run(
        [sys.executable, name, "--data", str(data), "--max-steps", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    assert (tmp_path / "output" / "model.safetensors").exists()


def test_fsdp2_is_for_several_cards() -> None:
    """A plan of one card has nothing to shard; one of several gives a script that does."""
    with pytest.raises(InputError, match="got 'none'; accepted for fsdp2: fsdp2"):
        files_for(plan_for("fsdp2"), "fsdp2")
    document = plan_for("fsdp2")
    document["config"] |= {"gpus": 2, "parallelism": "fsdp2", "gradient_accumulation_steps": 2}
    files = files_for(document, "fsdp2")
    assert "fully_shard" in files["train.py"]
    assert 2 == yaml.safe_load(files["accelerate.yaml"])["num_processes"]
    assert ParallelismLever.field in document["config"]


def test_export_writes_a_folder_whole_or_not_at_all(tmp_path: Path) -> None:
    """Into the plan's folder unless told otherwise; again over an earlier one; never over other files."""
    (tmp_path / "plan.json").write_text(json.dumps(plan_for("trainer")))
    folder = export(tmp_path, to="trainer")
    assert [tmp_path / "trainer" / "training_arguments.json"] == list(folder.iterdir())
    assert folder == export(tmp_path / "plan.json", to="trainer")
    with pytest.raises(InputError, match="holds other files"):
        export(tmp_path, to="trainer", out=tmp_path)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line for each problem: an unknown engine, no plan, a plan that it can't take."""
    (tmp_path / "plan.json").write_text(json.dumps(plan_for("trl")))
    assert 2 == run(["export", "--to", "axolotle", str(tmp_path)])
    assert "did you mean axolotl?" in capsys.readouterr().err
    assert 2 == run(["export", "--to", "trl", str(tmp_path / "nothing")])
    assert "no readable plan.json" in capsys.readouterr().err
    assert 2 == run(["export", "--to", "sentence-transformers", str(tmp_path)])
    assert "--task: got 'causal-lm'; accepted for sentence-transformers: embedding" in capsys.readouterr().err
    assert 0 == run(["export", "--to", "trl", str(tmp_path)])
    assert "sft.yaml" in capsys.readouterr().out
