"""Values of a request that are right one by one and wrong together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from planner import config
from planner.allocator_settings import DEFAULT_ALLOCATOR
from planner.errors import Problem, near_match
from planner.tasks import GENERATING_TASKS, INFERENCE_TASKS, TASK_FACTS, facts_for
from planner.units import compact_bytes, shown

if TYPE_CHECKING:
    from planner.request import PlanRequest

WITH_CLASSES = tuple(name for name, facts in TASK_FACTS.items() if facts.has_classes)
WITH_TARGETS = tuple(name for name, facts in TASK_FACTS.items() if facts.labels == "tokens")
NOT_ON_CPU: dict[str, tuple[tuple[str, ...], str]] = {
    "precision": (("tf32", "fp16-amp"), "both are for GPUs"),
    "offload": (("optimizer", "parameters", "activations"), "everything is in host memory already"),
    "quantization": (("int8", "nf4"), "this version trains on quantized weights on GPUs only"),
    "optimizer": (("adamw_8bit", "paged_adamw_8bit"), "8-bit optimizers are run on GPUs only"),
    "attention": (("flash2",), "the flash_attn package runs on GPUs only"),
}
"""Words that a processor can't run, with the reason."""
INFERENCE_NOT_ON_CPU: dict[str, tuple[tuple[str, ...], str]] = {
    "precision": (("tf32",), "it is a format of GPUs"),
    "offload": (("parameters",), "everything is in host memory already"),
    "attention": (("flash2",), "the flash_attn package runs on GPUs only"),
    "kv_cache": (("offloaded",), "everything is in host memory already"),
}
"""The same at inference."""


WORDS_OF_MODES: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "precision": config.PRECISIONS,
        "offload": config.OFFLOADS,
        "quantization": config.QUANTIZATIONS,
    },
    "infer": {
        "precision": config.INFERENCE_PRECISIONS,
        "offload": config.INFERENCE_OFFLOADS,
        "quantization": config.INFERENCE_QUANTIZATIONS,
    },
}
"""Mode to the words of each field that both modes have, each with its own."""
OF_ONE_MODE: dict[str, tuple[str, ...]] = {
    "train": ("method", "checkpointing", "optimizer", "loss", "gpus", "parallelism", "label_column", "storage"),
    "infer": ("max_new_tokens", "concurrency", "kv_cache", "prefill_chunk", "prefix_tokens"),
}
"""Mode to the arguments that have a meaning in it alone."""
_ONLY_DYNAMIC = "dynamic int8 quantization runs on the CPU only and can't train"


def contradictions(request: PlanRequest) -> list[Problem]:
    """Every contradiction of a request, under the argument to change."""
    return [problem for rule in _RULES for problem in rule(request)]


def _mode_and_the_rest(request: PlanRequest) -> Iterator[Problem]:
    """Words and arguments of the other mode."""
    mode, defaults = request.mode, type(request).model_fields
    for argument, words in WORDS_OF_MODES[mode].items():
        named = getattr(request, argument) or ()
        if wrong := [word for word in named if word not in words]:
            near = [match for word in wrong if (match := near_match(word, words))]
            why = f"; did you mean {', '.join(near)}?" if near else ""
            why = f"; {_ONLY_DYNAMIC}" if mode == "train" and "int8-dynamic" in wrong else why
            got = shown(",".join(wrong))
            message = f"got {got}; accepted: one or more of {', '.join(words)}, with mode {mode}{why}"
            yield Problem(argument=argument, message=message)
    (other,) = OF_ONE_MODE.keys() - {mode}
    for argument in OF_ONE_MODE[other]:
        value = getattr(request, argument)
        if value != defaults[argument].default:
            shown_value = ",".join(value) if isinstance(value, tuple) else value
            message = f"got {shown(shown_value)} with mode {mode}; accepted with mode {other} alone; leave it out"
            yield Problem(argument=argument, message=message)


def _inference(request: PlanRequest) -> Iterator[Problem]:
    """A task that can't be run, and what is for generating tasks alone."""
    if request.mode != "infer":
        return
    if request.task is not None and request.task not in INFERENCE_TASKS:
        message = f"got {request.task!r} with mode infer; accepted with it: {', '.join(INFERENCE_TASKS)}"
        yield Problem(argument="task", message=message)
    elif request.task is not None and request.task not in GENERATING_TASKS:
        for argument in ("max_new_tokens", "kv_cache", "prefill_chunk", "prefix_tokens"):
            value = getattr(request, argument)
            if value:
                shown_value = ",".join(value) if isinstance(value, tuple) else value
                message = f"got {shown_value} with task {request.task}; accepted with: {', '.join(GENERATING_TASKS)}"
                yield Problem(argument=argument, message=f"{message}; leave it out")
    if request.seq_len is not None and request.prefix_tokens >= request.seq_len:
        message = f"got {request.prefix_tokens}; accepted: less than the prompt's {request.seq_len} tokens"
        yield Problem(argument="prefix_tokens", message=message)
    if request.batch_size is not None and request.concurrency is not None and request.batch_size > request.concurrency:
        message = f"got {request.batch_size}; accepted: at most the {request.concurrency} sequences that there are"
        yield Problem(argument="batch_size", message=message)


def _one_batch(request: PlanRequest) -> Iterator[Problem]:
    sequences, tokens, seq_len = request.batch_size, request.batch_tokens, request.seq_len
    if tokens is None:
        return
    if sequences is not None:
        message = f"got {tokens} beside a batch size of {sequences}; accepted: one of the two; leave one out"
        yield Problem(argument="batch_tokens", message=message)
    if seq_len is not None and tokens < seq_len:
        message = f"got {tokens}; accepted: at least one sequence of {seq_len} tokens"
        yield Problem(argument="batch_tokens", message=message)


def _method_and_quantization(request: PlanRequest) -> Iterator[Problem]:
    if request.mode == "infer":
        return
    allowed, method = request.quantization, request.method
    needed = {"full": ("none",), "lora": ("none",), "qlora": ("nf4", "int8")}.get(method)
    if allowed is not None and needed is not None and not set(needed) & set(allowed):
        remedy = {
            "full": "quantized weights cannot be trained: choose method qlora or auto",
            "lora": "adapters on a quantized base are method qlora",
            "qlora": "adapters on a base that is not quantized are method lora",
        }[method]
        got, accepted = shown(",".join(allowed)), ", ".join(needed)
        message = f"got {got} with method {method}; accepted with it: {accepted}; {remedy}"
        yield Problem(argument="quantization", message=message)


def _flash2_and_precision(request: PlanRequest) -> Iterator[Problem]:
    attention, precision = request.attention, request.precision
    if attention == ("flash2",) and precision is not None and set(precision) <= {"fp32", "tf32"}:
        half = ", ".join(word for word in config.PRECISIONS if word not in ("fp32", "tf32"))
        message = f"got flash2 with precision {','.join(precision)}; accepted with it: {half}; or choose sdpa"
        yield Problem(argument="attention", message=message)


def _offload_and_the_rest(request: PlanRequest) -> Iterator[Problem]:
    """An offload that none of the named values goes with; what is not named is left to the search."""
    if request.mode == "infer":
        return
    from planner.levers.offload import clash

    open_ones = {"optimizer": "adamw_fused", "checkpointing": "full", "precision": "fp32"}
    words = {name: getattr(request, name) or (word,) for name, word in open_ones.items()}
    method = "full" if request.method == "auto" else request.method
    for offload in request.offload or ():
        tried = [dict(zip(words, values, strict=True)) for values in itertools.product(*words.values())]
        reasons = [clash(offload, method=method, **values) for values in tried]
        if all(reasons):
            yield Problem(argument="offload", message=f"got {offload!r}: {reasons[0]}; leave one of them out")


def _task_and_shape(request: PlanRequest) -> Iterator[Problem]:
    task, default = request.task, type(request).model_fields["num_labels"].default
    for argument, value, tasks in (
        ("target_seq_len", request.target_seq_len, WITH_TARGETS),
        ("num_labels", request.num_labels if request.num_labels != default else None, WITH_CLASSES),
    ):
        if task is not None and value is not None and task not in tasks:
            message = f"got {value} with task {task}; accepted with: {', '.join(tasks)}; leave it out"
            yield Problem(argument=argument, message=message)


def _data_and_lengths(request: PlanRequest) -> Iterator[Problem]:
    if request.data is not None and request.lengths is not None:
        message = f"got {shown(request.lengths)} beside data {shown(request.data)}, whose lengths are counted"
        yield Problem(argument="lengths", message=f"{message}; accepted: one of the two; leave one out")


def _long_texts(request: PlanRequest) -> Iterator[Problem]:
    if request.task is not None:
        yield from long_text_problems(request, request.task)


def long_text_problems(request: PlanRequest, task: str) -> Iterator[Problem]:
    """What a task can't do with long texts, and an overlap where nothing is cut into segments."""
    accepted, asked = facts_for(task, request.mode).long_texts, request.long_texts
    if asked is not None and asked not in accepted:
        message = f"got {asked!r} with task {task}; accepted with it: {', '.join(accepted)}; choose one of these"
        yield Problem(argument="long_texts", message=message)
    elif request.overlap and (asked or accepted[0]) != "segment":
        remedy = "ask for --long-texts segment, or leave it out" if "segment" in accepted else "leave it out"
        message = f"got {request.overlap:g} with long texts {asked or accepted[0]}; accepted with: segment; {remedy}"
        yield Problem(argument="overlap", message=message)


def _several_cards(request: PlanRequest) -> Iterator[Problem]:
    """What goes with more than one card, and with one alone."""
    gpus = request.gpus
    if gpus == 1:
        if request.parallelism is not None:
            message = f"got {','.join(request.parallelism)} with one card; accepted with --gpus 2 or more; leave it out"
            yield Problem(argument="parallelism", message=message)
        return
    if request.batch_size is not None and request.batch_size % gpus:
        near = sorted({max(gpus, request.batch_size // gpus * gpus), -(-request.batch_size // gpus) * gpus})
        message = f"got {request.batch_size} with {gpus} cards; accepted: multiples of {gpus}, such as "
        yield Problem(argument="batch_size", message=message + " or ".join(map(str, near)))
    if request.device not in ("auto", "none"):
        message = f"got {shown(request.device)} with {gpus} cards; accepted with them: auto, none; several cards are"
        yield Problem(argument="device", message=f"{message} simulated, since trials run on one: leave it out")
    for offload in request.offload or ():
        if request.offload == (offload,) and offload != "none":
            message = f"got {offload!r} with {gpus} cards; accepted with them: none; fsdp2 shares out what it moves"
            yield Problem(argument="offload", message=message)


def _headroom_leaves_something(request: PlanRequest) -> Iterator[Problem]:
    if request.headroom_bytes >= request.vram_bytes:
        ceiling = compact_bytes(request.vram_bytes)
        message = f"got {shown(request.headroom)}; accepted: less than the card's {ceiling}; keep less free"
        yield Problem(argument="headroom", message=message)


def _trials_need_a_device(request: PlanRequest) -> Iterator[Problem]:
    for argument in ("storage", "trial_timeout"):
        value = getattr(request, argument)
        if value is not None and request.device == "none":
            message = (
                f"got {shown(value)} with device none; accepted with: auto, cpu, cuda; without a device no trial runs"
            )
            yield Problem(argument=argument, message=f"{message}: leave it out")


def _processor_and_the_rest(request: PlanRequest) -> Iterator[Problem]:
    """With the processor as the device: what is a GPU's, and restrictions that leave nothing that it can run."""
    if request.device != "cpu":
        if request.mode == "infer" and request.quantization == ("int8-dynamic",):
            message = "got int8-dynamic; accepted with device cpu alone: torch has no such products for GPUs; ask for "
            yield Problem(argument="quantization", message=f"{message}int8 or int8-weight-only")
        return
    for argument, (words, why) in _not_on_cpu(request.mode).items():
        named = getattr(request, argument)
        if named is not None and set(named) <= set(words):
            vocabulary = WORDS_OF_MODES[request.mode].get(argument) or _VOCABULARIES[argument]
            others = ", ".join(word for word in vocabulary if word not in words)
            message = f"got {','.join(named)} with device cpu; accepted with it: {others}; {why}"
            yield Problem(argument=argument, message=message)
    if request.method == "qlora" and request.mode == "train":
        message = f"got qlora with device cpu; accepted with it: auto, full, lora; {NOT_ON_CPU['quantization'][1]}"
        yield Problem(argument="method", message=message)
    for argument, value, why in (
        ("gpu", request.gpu, "the processor is the card"),
        ("host_ram", request.host_ram, "vram is the ceiling of host memory"),
        ("allocator", request.allocator if request.allocator != DEFAULT_ALLOCATOR else None, "it is a GPU's"),
    ):
        if value is not None:
            message = (
                f"got {shown(value)} with device cpu; accepted with: auto, none, cuda; {why}: leave one of them out"
            )
            yield Problem(argument=argument, message=message)


def _not_on_cpu(mode: str) -> dict[str, tuple[tuple[str, ...], str]]:
    return NOT_ON_CPU if mode == "train" else INFERENCE_NOT_ON_CPU


_VOCABULARIES = {
    "optimizer": config.OPTIMIZERS,
    "attention": config.ATTENTIONS,
    "kv_cache": config.KV_CACHES,
}
_RULES: tuple[Callable[[PlanRequest], Iterator[Problem]], ...] = (
    _mode_and_the_rest,
    _inference,
    _one_batch,
    _method_and_quantization,
    _flash2_and_precision,
    _offload_and_the_rest,
    _task_and_shape,
    _data_and_lengths,
    _long_texts,
    _several_cards,
    _headroom_leaves_something,
    _trials_need_a_device,
    _processor_and_the_rest,
)
