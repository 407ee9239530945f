"""transformers.Trainer's arguments, and DeepSpeed's settings beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from planner.config import TrainingConfig
from planner.emit.engines.base import Document, Engine
from planner.emit.tasks import TASK_WORDS, learning_rate
from planner.emit.trainer import plain_arguments, unsupported
from planner.errors import Problem

_TASKS = (
    "sequence-classification",
    "multi-label-classification",
    "regression",
    "token-classification",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
)


def arguments_of(plan: Document, **changes: Any) -> dict[str, Any]:
    """The plan in the words of ``TrainingArguments``, with the emitted script's schedule."""
    config, task = TrainingConfig.model_validate(plan["config"]), plan["workload"]["task"]
    arguments = {
        "output_dir": "output",
        **plain_arguments(config, task=task),
        "learning_rate": learning_rate(task, plan["config"]),
        "num_train_epochs": TASK_WORDS[task].epochs,
        "warmup_steps": 0.05,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "weight_decay": 0.01,
        "seed": plan["request"].get("seed") or 0,
        **changes,
    }
    return {name: value for name, value in arguments.items() if value is not None}


class Trainer(Engine):
    """``training_arguments.json`` for ``HfArgumentParser.parse_json_file``."""

    name = "trainer"
    about = "arguments of transformers.Trainer"
    run = "your script with HfArgumentParser(TrainingArguments).parse_json_file('training_arguments.json')"
    accepted: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "task": _TASKS,
        "method": ("full",),
        "long_texts": ("truncate",),
        "precision": ("fp32", "tf32", "fp16-amp", "bf16-amp"),  # weights' types are said where the model is loaded
        "attention": ("sdpa",),  # and attention; this is transformers' default
    }

    def problems(self, plan: Document) -> list[Problem]:
        """What the Trainer can't do; adapters and packing belong to the model and the data, not to its arguments."""
        return merged(super().problems(plan), plan)

    def files(self, plan: Document) -> dict[str, str]:
        """The arguments as JSON, which has no comments."""
        return {"training_arguments.json": _json(arguments_of(plan))}


def merged(refused: list[Problem], plan: Document) -> list[Problem]:
    """What an engine on top of the Trainer refuses, and what the Trainer does, each field once."""
    known = {problem.argument for problem in refused}
    more = unsupported(TrainingConfig.model_validate(plan["config"]))
    return [*refused, *(problem for problem in more if problem.argument not in known)]


class DeepSpeed(Engine):
    """ZeRO's settings and the Trainer's arguments that name them."""

    name = "deepspeed"
    about = "ZeRO settings (offload of optimizer or weights, shards) with the Trainer's arguments"
    run = "deepspeed --num_gpus N your script, with training_arguments.json as for trainer"
    accepted: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "task": _TASKS,
        "method": ("full",),
        "long_texts": ("truncate",),
        "attention": ("sdpa",),
        "optimizer": ("adamw_fused", "adamw_foreach"),
        "offload": ("none", "optimizer", "parameters"),
        "checkpointing": ("none", "full"),
        "loss": ("standard",),
        "precision": ("fp32", "tf32", "fp16-amp", "bf16-amp"),
    }

    def files(self, plan: Document) -> dict[str, str]:
        """deepspeed.json leaves to the Trainer what both know: "auto"."""
        quiet = {**plan, "config": {**plan["config"], "offload": "none"}}
        arguments = arguments_of(quiet, deepspeed="deepspeed.json")
        return {"deepspeed.json": _json(zero_settings(plan)), "training_arguments.json": _json(arguments)}


def zero_settings(plan: Document) -> dict[str, Any]:
    """Stage 3 where weights are shared or wait on the host, 2 where gradients and state do, else 0."""
    config = plan["config"]
    weights = config["offload"] == "parameters"
    shards = config.get("parallelism") == "fsdp2"
    stage = 3 if weights or shards else 2 if config["offload"] == "optimizer" else 0
    zero: dict[str, Any] = {"stage": stage}
    if config["offload"] in ("optimizer", "parameters"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if weights:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": config["precision"] == "bf16-amp"},
        "fp16": {"enabled": config["precision"] == "fp16-amp"},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
    }


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
