"""``infer.py`` from a plan: one recipe, with the parts that this plan uses and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.emit.header import header_lines
from planner.emit.tasks import TASK_WORDS
from planner.emit.templating import platform_context, template
from planner.errors import InputError, Problem
from planner.inference.timing import window_texts
from planner.levers.precision import width_multiple
from planner.tasks import INFERENCE_TASKS, TASK_FACTS, TaskFacts

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
_ANSWERS = {
    "label": '"label", its "score" and the "scores" of all',
    "labels": '"labels" (those above one half) and the "scores" of all',
    "number": '"score": what the model says',
    "word-labels": '"spans": start and end (in characters), text, label and score of each',
    "vector": '"embedding"',
    "text": '"text", what the model writes, and its "tokens"',
}
_RANKED = '"score": what the model says; of a list of documents their "scores" and "order", the best one first'
_DATA_NEEDS = {
    "label": "A row is a text (or two).",
    "labels": "A row is a text (or two).",
    "number": "A row is a text (or two).",
    "word-labels": "A row is a text, or a list of words.",
    "vector": "A row is a text.",
    "text": "A row is a text.",
}
_OVERLONG = {
    "truncate": "longer texts are cut",
    "segment": "longer texts are answered in parts",
    "generate": "of longer texts the end is taken",
}
_LISTS = (("query", "documents"), ("query", "passages"), ("query", "texts"))
"""Usual columns of a query with a list of documents."""


def render_inference_files(plan: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text of the files that run what the plan says, from plan.json's content alone.

    Raises InputError for a task or a combination of levers that no script can be written for.
    """
    return {"infer.py": template("infer.py.j2").render(_context(plan))}


def _context(plan: Mapping[str, Any]) -> dict[str, Any]:
    workload, config, request = plan["workload"], plan["config"], plan["request"]
    _check(plan)
    return {
        **_task(workload, request, config),
        **_levers(workload, config),
        **platform_context(plan),
        "config": config,
        "multiple": width_multiple(config["precision"]),
        "header": header_lines(plan, runs={"run by": "python infer.py --data FILE --output answers.jsonl"}),
        "about": " ".join(f"Run {_what(workload)}".split()),
        "description": f"Run {_what(workload)}",
        "model": workload["model"].removesuffix("/config.json"),
        "seed": request.get("seed") or 0,
    }


def _check(plan: Mapping[str, Any]) -> None:
    """All that can't be written for. Raises InputError."""
    task, config, problems = plan["workload"]["task"], plan["config"], []
    if task not in INFERENCE_TASKS:
        message = f"got {task!r}; accepted for an inference script: {', '.join(INFERENCE_TASKS)}"
        problems.append(Problem(argument="task", message=message))
    on_cpu = plan["hardware"].get("kind") == "cpu"
    if config["quantization"] == "int8-dynamic" and not on_cpu:
        message = (
            "got 'int8-dynamic', which runs on processors alone; accepted on a GPU: none, int8, nf4, int8-weight-only"
        )
        problems.append(Problem(argument="quantization", message=message))
    if config["offload"] != "none" and not plan["workload"].get("layers_name"):
        message = (
            f"got {config['offload']!r}; the model has no layers that repeat, which alone can wait; accepted: none"
        )
        problems.append(Problem(argument="offload", message=message))
    if config["kv_cache"] == "quantized" and task == "seq2seq-lm":
        message = "got 'quantized', which transformers has for models without an encoder; accepted: dynamic, static"
        problems.append(Problem(argument="kv_cache", message=message))
    if config["offload"] != "none" and config["quantization"] != "none":
        stay = f"weights in {config['quantization']} stay where they are"
        message = f"got {config['offload']!r}; {stay}; accepted with them: none"
        problems.append(Problem(argument="offload", message=message))
    if problems:
        raise InputError(problems)


def _what(workload: Mapping[str, Any]) -> str:
    return f"{workload['model']}: {workload['task'].replace('-', ' ')}."


def _task(workload: Mapping[str, Any], request: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What the script says and does for the task and its texts."""
    facts = TASK_FACTS[workload["task"]]
    long_texts = workload.get("long_texts") or facts.long_texts[0]
    segments = long_texts == "segment" and not facts.generates
    answer = facts.answer or ""
    return {
        "task": facts.name,
        "auto_class": facts.auto_class,
        "answer": answer,
        "answer_is": _RANKED if facts.name == "reranking" else _ANSWERS[answer],
        "data_needs": _data_needs(facts),
        "generates": facts.generates,
        "embeds": answer == "vector",
        "segments": segments,
        "overlap": workload.get("overlap") or 0.0,
        "overlong": _OVERLONG["generate" if facts.generates else "segment" if segments else "truncate"],
        "text_columns": _text_columns(facts, segments=segments),
        "column_counts": _column_counts(facts, segments=segments),
        "given_column": request.get("text_column"),
        "window": window_texts(config["micro_batch_size"], writes=facts.generates),
        "target_columns": facts.usual_label_columns,
    }


def _data_needs(facts: TaskFacts) -> list[str]:
    """Lines that say what a row is."""
    if facts.name == "reranking":
        return ["A row is a query and a document, or a query and a list of documents."]
    if facts.name == "causal-lm":
        return [
            'A row is a prompt, or the "messages" of a chat, for the tokenizer\'s chat template. A text in column',
            '"prefix" stands before the prompt. One in column "system" goes with the prompt into the chat template,',
            "as the system's message; before the prompt where the tokenizer has no template.",
        ]
    if facts.name == "seq2seq-lm":
        return ["A row is a text; with --perplexity a text, and what should be written of it."]
    return [_DATA_NEEDS[facts.answer or ""]]


def _text_columns(facts: TaskFacts, *, segments: bool) -> tuple[tuple[str, ...], ...]:
    """A pair of texts isn't cut into segments: a script that cuts looks for single columns."""
    names = facts.columns_of_input
    if facts.name == "reranking":
        return (*_LISTS, *names)
    if facts.name == "causal-lm":
        return (*names, ("messages",))
    return tuple(some for some in names if not segments or len(some) == 1)


def _column_counts(facts: TaskFacts, *, segments: bool) -> tuple[int, ...]:
    least, most = facts.input_columns or facts.text_columns
    return (1,) if segments else tuple(range(least, most + 1))


def _levers(workload: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """How the weights are stored and where they wait."""
    quantization, dtype = config["quantization"], _DTYPES.get(config["precision"], "float32")
    return {
        "weight_dtype": dtype,
        "weight_comment": f"{'4' if dtype == 'float32' else '2'} bytes a parameter"
        + (" that is not quantized" if quantization != "none" else ""),
        "bitsandbytes": quantization in ("int8", "nf4"),
        "torchao": quantization == "int8-weight-only",
        "unquantized": list(TASK_WORDS[workload["task"]].new_modules),
        "whole_modules": [name.removeprefix(".*") for name in TASK_WORDS[workload["task"]].new_modules],
        "prefixes": config["prefix_tokens"] > 0 and config["kv_cache"] == "dynamic" and workload["task"] == "causal-lm",
        "offload": config["offload"] != "none",
        "on_disk": config["offload"] == "disk",
        "table_waits": config["offload"] != "none" and not config.get("embedding_on_card", True),
        "layers_name": workload.get("layers_name"),
        "layer_count": workload.get("layers"),
    }
