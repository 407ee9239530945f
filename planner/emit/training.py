"""``train.py`` and ``accelerate.yaml`` from a plan: one recipe, with the parts that this plan uses and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from planner.config import TrainingConfig
from planner.emit.header import header_lines, memory_line
from planner.emit.tasks import TASK_WORDS, TaskWords, learning_rate
from planner.emit.templating import platform_context, template
from planner.errors import InputError, Problem
from planner.levers import parallelism
from planner.levers.offload import ON_HOST, clash
from planner.levers.precision import WEIGHT_DTYPES, has_masters, width_multiple
from planner.tasks import TASK_FACTS, TaskFacts

EMITTED_TASKS = tuple(TASK_WORDS)
"""Tasks that a training script can be written for."""

_LOSSES = {
    "cross-entropy": "cross_entropy",
    "binary-cross-entropy": "binary_cross_entropy",
    "squared-error": "squared_error",
    "contrastive": "contrastive_loss",
}
"""Kind of loss to the function of planner/parts/losses.py."""
_MEASURES = {
    "sequence-classification": "({0}.argmax(-1) == {1}).sum()",
    "token-classification": "({0}.argmax(-1) == {1}).sum()",
    "multi-label-classification": "(({0} > 0) == ({1} > 0.5)).sum()",
    "reranking": "(({0} > 0) == ({1} > 0.5)).sum()",
    "regression": "({0} - {1}).abs().sum()",
}
"""Task to what is summed for its metric, of logits and labels."""
_OVERLONG = {
    "truncate": "longer texts are cut",
    "segment": "longer texts become several samples",
    "pack": "texts are joined and cut into full samples",
}
_AMP = {"fp16-amp": "fp16", "bf16-amp": "bf16"}
_TORCH_DTYPE = {"fp16": "float16", "bf16": "bfloat16"}


def render_training_files(plan: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text of the files that train what the plan says, from plan.json's content alone.

    Raises InputError for a task or a combination of levers that no script can be written for.
    """
    context = _context(plan)
    return {file: template(f"{file}.j2").render(context) for file in ("train.py", "accelerate.yaml")}


def _context(plan: Mapping[str, Any]) -> dict[str, Any]:
    workload, config, request = plan["workload"], plan["config"], plan["request"]
    _check(workload["task"], config)
    task, words = workload["task"], TASK_WORDS[workload["task"]]
    return {
        **_task(workload, request),
        **_precision(config),
        **platform_context(plan),
        **_sharing(config),
        "config": config,
        "multiple": width_multiple(config["precision"]),
        "memory_text": memory_line(plan),
        "header": header_lines(plan),
        "about": _about(plan),
        "description": f"Train {_what(workload)}",
        "model": workload["model"].removesuffix("/config.json"),
        "target_seq_len": _target_seq_len(workload, config),
        "seed": request.get("seed") or 0,
        "learning_rate": f"{learning_rate(task, config):.0e}".replace("e-0", "e-"),
        "every_n": _every_n(config["checkpointing"]),
        "offload": config["offload"] in ON_HOST,
        "layers_on_host": config["offload"] == "parameters",
        "saved_on_host": config["offload"] == "activations",
        "lora": config["method"] != "full",
        "qlora": config["method"] == "qlora",
        "unquantized": list(words.new_modules),
        "int8": config["quantization"] == "int8",
        **_fused_loss(words, config),
        **_masters(config),
    }


def _task(workload: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """What the script says and does for the task and its texts."""
    task, facts, words = workload["task"], TASK_FACTS[workload["task"]], TASK_WORDS[workload["task"]]
    long_texts = workload.get("long_texts") or facts.long_texts[0]
    return {
        **vars(words),
        "task": task,
        "auto_class": facts.auto_class,
        "peft_task": facts.peft_task,
        "labels": facts.labels,
        "names": facts.has_classes,
        "embeds": facts.loss == "contrastive",
        "loss_name": _LOSSES[facts.loss],
        "text_columns": _text_columns(facts, segments=long_texts == "segment"),
        "label_columns": facts.usual_label_columns,
        "given_columns": {name: request.get(name) for name in ("text_column", "label_column")},
        "segments": long_texts == "segment",
        "packs": long_texts == "pack",
        "weighted": long_texts == "segment" and words.reader == "classification",
        "overlap": workload.get("overlap") or 0.0,
        "overlong": _OVERLONG[long_texts],
        "measure": partial(str.format, _MEASURES.get(task, "")),
        "collate_options": ", start_token_id" if task == "seq2seq-lm" else "",
    }


def _sharing(config: Mapping[str, Any]) -> dict[str, Any]:
    """How several cards work together; plans of before them are of one."""
    return {"gpus": config.get("gpus") or 1, "sharded": config.get("parallelism") == "fsdp2"}


def _text_columns(facts: TaskFacts, *, segments: bool) -> tuple[tuple[str, ...], ...]:
    """A pair of texts with a label isn't cut into segments: a script that cuts looks for single columns."""
    single = segments and facts.new_head
    return tuple(names for names in facts.usual_text_columns if not single or len(names) == 1)


def _check(task: str, config: Mapping[str, Any]) -> None:
    if task not in TASK_FACTS:
        message = f"got {task!r}; accepted for a training script: {', '.join(TASK_FACTS)}"
        raise InputError([Problem(argument="task", message=message)])
    facts = TASK_FACTS[task]
    if config.get("loss") == "fused-linear" and (facts.new_head or facts.loss == "contrastive"):
        message = f"got 'fused-linear' with task {task}; accepted with it: standard"
        raise InputError([Problem(argument="loss", message=message)])
    shared = parallelism.conflict(TrainingConfig.model_validate(config))
    if shared:
        raise InputError([Problem(argument="parallelism", message=f"got {config['parallelism']!r}: {shared}")])
    others = {name: config[name] for name in ("optimizer", "checkpointing", "method", "precision")}
    reason = clash(config["offload"], **others)
    if reason:
        raise InputError([Problem(argument="offload", message=f"got {config['offload']!r}: {reason}")])


def _about(plan: Mapping[str, Any]) -> str:
    """The script's first line; a name of several lines may not leave the comment."""
    workload, config = plan["workload"], plan["config"]
    how = {"full": "Train", "lora": "Train LoRA adapters for", "qlora": "Train LoRA adapters on a quantized base of"}
    return " ".join(f"{how[config['method']]} {_what(workload)}".split())


def _what(workload: Mapping[str, Any]) -> str:
    return f"{workload['model']}: {workload['task'].replace('-', ' ')}."


def _precision(config: Mapping[str, Any]) -> dict[str, Any]:
    """The dtypes of weights and arithmetic, and what they cost."""
    precision, frozen = config["precision"], config["method"] != "full"
    amp = _AMP.get(precision, "")
    half = precision.split("-")[0] if precision in (*WEIGHT_DTYPES, *_AMP) else ""
    weights = half if precision in WEIGHT_DTYPES or frozen else ""
    return {
        "amp": amp,
        "half": bool(half),
        "weight_dtype": _TORCH_DTYPE.get(weights, "float32"),
        "compute_dtype": _TORCH_DTYPE.get(half, "float32"),
        "weight_comment": _weight_comment(config["method"], weights),
        "amp_comment": f"{amp} activations: half the bytes of fp32",
        "adamw_state": f"state: {'4' if weights and not frozen else '8'} bytes a parameter",
    }


def _weight_comment(method: str, weights: str) -> str:
    size = "2 bytes" if weights else "4 bytes"
    if method == "full":
        return f"{size} a parameter, and as much for its gradient"
    return f"{size} a frozen weight{' not quantized' if method == 'qlora' else ''}"


def _fused_loss(words: TaskWords, config: Mapping[str, Any]) -> dict[str, Any]:
    """The loss that multiplies by the output layer's weight itself, and the type that it does so in."""
    amp, precision = _AMP.get(config["precision"], ""), config["precision"]
    half = f'torch.{_TORCH_DTYPE[amp]} if amp == "{amp}" else torch.float32' if amp else ""
    plain = "torch.bfloat16" if precision in WEIGHT_DTYPES else "torch.float32"
    return {
        "fused": config.get("loss") == "fused-linear",
        "product_dtype": half or plain,
        "fused_unit": f"4 bytes {words.logits_unit}",
    }


_MASTERED = {
    "adamw_fused": ("torch.optim.AdamW(weights, fused=True)", "state: 8"),
    "adamw_foreach": ("torch.optim.AdamW(weights, foreach=True)", "state: 8"),
    "adamw_8bit": ("bitsandbytes.optim.AdamW8bit(weights)", "state: 2"),
    "paged_adamw_8bit": ("bitsandbytes.optim.PagedAdamW8bit(weights)", "state, in host memory when need be: 2"),
    "adafactor": ("torch.optim.Adafactor(weights, foreach=False)", "state: a row and a column for each matrix"),
    "sgd": ("torch.optim.SGD(weights)", "no state"),
}
"""Optimizer to the call that makes it for one fp32 copy, and what it keeps a parameter. The rate is set each step."""


def _masters(config: Mapping[str, Any]) -> dict[str, Any]:
    """fp32 copies on the card; the optimizer in host memory has copies of its own."""
    call, state = _MASTERED[config["optimizer"]]
    masters = has_masters(config["precision"], config["method"]) and config["offload"] not in ON_HOST
    return {"masters": masters, "optimizer_call": call, "optimizer_state": state}


def _target_seq_len(workload: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Tokens of the longest target, 0 for tasks without one; a plan that says nothing allows what texts may have."""
    if workload["task"] != "seq2seq-lm":
        return 0
    return int(workload.get("target_seq_len") or config["seq_len"])


def _every_n(checkpointing: str) -> int:
    """0: no checkpointing; 1: every layer; N: layers 0, N, 2N, ..."""
    if checkpointing in ("none", "full"):
        return int(checkpointing == "full")
    match = re.fullmatch(r"every-([1-9][0-9]*)", checkpointing)
    if match is None:
        message = f"got {checkpointing!r}; accepted: none, full, every-N"
        raise InputError([Problem(argument="checkpointing", message=message)])
    return int(match[1])
