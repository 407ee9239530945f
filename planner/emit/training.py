"""``train.py`` and ``accelerate.yaml`` from a plan: one recipe, with the parts that this plan uses and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from planner.allocator_settings import DEFAULT_ALLOCATOR, parse_allocator
from planner.emit.header import header_lines
from planner.errors import InputError, Problem
from planner.levers.offload import ON_HOST, clash
from planner.levers.precision import WEIGHT_DTYPES, has_masters
from planner.measure.environment import MMAP_THRESHOLD_BYTES


@dataclass(frozen=True, kw_only=True)
class _TaskWords:
    """What the template says and calls for one task."""

    auto_class: str
    """The class of transformers that loads the model with the task's head."""
    peft_task: str
    """``task_type`` of ``peft.LoraConfig``; empty where peft has none for the task."""
    new_modules: tuple[str, ...] = ()
    """Patterns of the modules that have no weights in a pretrained checkpoint: they cannot be quantized."""
    learning_rate: float
    """Usual highest learning rate of full fine-tuning with AdamW."""
    epochs: int
    """Default passes over the data."""
    overlong: str
    """What happens to a text of more than ``seq_len`` tokens."""
    samples_are: str
    """What one sample of the training set is."""
    unusable_rows: str
    """Why a row of the data is left out."""
    items_are: str
    """What the loss is averaged over."""
    logits_unit: str
    """What one number of the logits belongs to."""
    data_needs: str = "A row is a text."
    """What a row of the data holds."""
    text_columns: tuple[str, ...] = ("text", "sentence", "content", "document")
    """Usual names of the texts' column."""
    label_columns: tuple[str, ...] = ()
    """Usual names of the labels' column; empty where texts are their own labels."""


_PIECES = "longer texts become several samples"
_CUT = "longer texts are cut"
_TASKS = {
    "sequence-classification": _TaskWords(
        auto_class="AutoModelForSequenceClassification",
        peft_task="SEQ_CLS",
        new_modules=("classifier", "score", ".*pooler"),
        learning_rate=3e-5,
        epochs=3,
        overlong=_CUT,
        samples_are="texts",
        unusable_rows="unreadable, without text or without label",
        items_are="sequences",
        logits_unit="per sequence and label",
        data_needs="A row is a text and its label.",
        label_columns=("label", "labels", "target", "ner_tags"),
    ),
    "token-classification": _TaskWords(
        auto_class="AutoModelForTokenClassification",
        peft_task="TOKEN_CLS",
        new_modules=("classifier", "score"),
        learning_rate=3e-5,
        epochs=3,
        overlong=_CUT,
        samples_are="sentences",
        unusable_rows="unreadable or without a label for each word",
        items_are="labelled words",
        logits_unit="per token and label",
        data_needs="A row is a list of words and the list of their labels.",
        text_columns=("tokens", "words", "text", "sentence"),
        label_columns=("ner_tags", "labels", "tags", "label"),
    ),
    "masked-lm": _TaskWords(
        auto_class="AutoModelForMaskedLM",
        peft_task="",
        learning_rate=5e-5,
        epochs=1,
        overlong=_PIECES,
        samples_are="pieces of text",
        unusable_rows="unreadable or without text",
        items_are="guessed tokens",
        logits_unit="per token and vocabulary entry",
    ),
    "causal-lm": _TaskWords(
        auto_class="AutoModelForCausalLM",
        peft_task="CAUSAL_LM",
        learning_rate=2e-5,
        epochs=1,
        overlong=_PIECES,
        samples_are="pieces of text",
        unusable_rows="unreadable or without text",
        items_are="predicted tokens",
        logits_unit="per token and vocabulary entry",
    ),
    "seq2seq-lm": _TaskWords(
        auto_class="AutoModelForSeq2SeqLM",
        peft_task="SEQ_2_SEQ_LM",
        learning_rate=1e-4,
        epochs=3,
        overlong=_CUT,
        samples_are="pairs of texts",
        unusable_rows="unreadable, without text or without target",
        items_are="target tokens",
        logits_unit="per target token and vocabulary entry",
        data_needs="A row is a text and its target text.",
        label_columns=("target", "summary", "label", "labels"),
    ),
}
EMITTED_TASKS = tuple(_TASKS)
"""Tasks that a training script can be written for."""

_LEARNING_RATES = {"adafactor": 1e-3, "sgd": 1e-2}
"""Where the optimizer decides and not the task: Adafactor's is relative to the weights, SGD's to the gradients."""
_ADAPTER_LEARNING_RATE = 2e-4
_AMP = {"fp16-amp": "fp16", "bf16-amp": "bf16"}
_TORCH_DTYPE = {"fp16": "float16", "bf16": "bfloat16"}
_ATTENTION = {
    "eager": "keeps a score per pair of tokens: grows with the square",
    "sdpa": "fused kernels keep no scores: grows with the length alone",
    "flash2": "keeps no scores, and no padding within",
}


def render_training_files(plan: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text of the files that train what the plan says, from plan.json's content alone.

    Raises InputError for a task or a combination of levers that no script can be written for.
    """
    context = _context(plan)
    templates = _environment()
    return {file: templates.get_template(f"{file}.j2").render(context) for file in ("train.py", "accelerate.yaml")}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("planner.emit"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


def _context(plan: Mapping[str, Any]) -> dict[str, Any]:
    workload, config, request = plan["workload"], plan["config"], plan["request"]
    _check(workload["task"], config)
    words = _TASKS[workload["task"]]
    trust = bool(request.get("trust_remote_code"))
    return {
        **vars(words),
        "task": workload["task"],
        "names": bool(words.label_columns) and workload["task"] != "seq2seq-lm",
        "collate_options": ", start_token_id" if workload["task"] == "seq2seq-lm" else "",
        **_precision(config),
        **_allocator(plan),
        "config": config,
        "on_cpu": plan["hardware"].get("kind") == "cpu",
        "mmap_threshold_bytes": MMAP_THRESHOLD_BYTES,
        "header": header_lines(plan),
        "about": _about(plan),
        "description": f"Train {_what(workload)}",
        "model": workload["model"].removesuffix("/config.json"),
        "target_seq_len": _target_seq_len(workload, config),
        "seed": request.get("seed") or 0,
        "learning_rate": f"{_learning_rate(words, config):.0e}".replace("e-0", "e-"),
        "every_n": _every_n(config["checkpointing"]),
        "offload": config["offload"] in ON_HOST,
        "layers_on_host": config["offload"] == "parameters",
        "saved_on_host": config["offload"] == "activations",
        "lora": config["method"] != "full",
        "qlora": config["method"] == "qlora",
        "unquantized": list(words.new_modules),
        "int8": config["quantization"] == "int8",
        **_loss(words, config),
        **_masters(config),
        "attention_name": "flash_attention_2" if config["attention"] == "flash2" else config["attention"],
        "attention_comment": _ATTENTION[config["attention"]],
        "trust": ", trust_remote_code=True" if trust else "",
    }


def _check(task: str, config: Mapping[str, Any]) -> None:
    if task not in _TASKS:
        message = f"got {task!r}; accepted for a training script: {', '.join(_TASKS)}"
        raise InputError([Problem(argument="task", message=message)])
    if config.get("loss") == "fused-linear" and task.endswith("classification"):
        message = f"got 'fused-linear' with task {task}; accepted with it: standard"
        raise InputError([Problem(argument="loss", message=message)])
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


def _loss(words: _TaskWords, config: Mapping[str, Any]) -> dict[str, Any]:
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


def _allocator(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What torch's allocator is told; garbage collection also needs the limit that its threshold is a share of."""
    options = parse_allocator(plan["request"].get("allocator") or DEFAULT_ALLOCATOR)
    collects = options.garbage_collection_threshold is not None
    memory = plan["memory"]
    return {
        "allocator": options.text,
        "expandable": options.expandable_segments,
        "limit_bytes": memory["ceiling_bytes"] - memory["context_bytes"] if collects else 0,
    }


def _target_seq_len(workload: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Tokens of the longest target, 0 for tasks without one; a plan that says nothing allows what texts may have."""
    if workload["task"] != "seq2seq-lm":
        return 0
    return int(workload.get("target_seq_len") or config["seq_len"])


def _learning_rate(words: _TaskWords, config: Mapping[str, Any]) -> float:
    usual = words.learning_rate if config["method"] == "full" else _ADAPTER_LEARNING_RATE
    return _LEARNING_RATES.get(config["optimizer"], usual)


def _every_n(checkpointing: str) -> int:
    """0: no checkpointing; 1: every layer; N: layers 0, N, 2N, ..."""
    if checkpointing in ("none", "full"):
        return int(checkpointing == "full")
    match = re.fullmatch(r"every-([1-9][0-9]*)", checkpointing)
    if match is None:
        message = f"got {checkpointing!r}; accepted: none, full, every-N"
        raise InputError([Problem(argument="checkpointing", message=message)])
    return int(match[1])
