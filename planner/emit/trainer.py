"""A configuration in the words of transformers' Trainer and of accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.config import TrainingConfig
from planner.errors import InputError, Problem
from planner.tasks import TASK_FACTS

if TYPE_CHECKING:
    import transformers

_OPTIMIZERS = {
    "adamw_fused": "adamw_torch_fused",
    "adamw_foreach": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}


def mixed_precision(precision: str) -> str:
    """Accelerate's word for an autocast precision: ``no``, ``fp16`` or ``bf16``."""
    return {"fp16-amp": "fp16", "bf16-amp": "bf16"}.get(precision, "no")


def training_arguments(config: TrainingConfig, *, task: str, **changes: Any) -> transformers.TrainingArguments:
    """``TrainingArguments`` that train this configuration. Raises InputError for what the Trainer can't do."""
    import transformers

    problems = list(unsupported(config))
    if problems:
        raise InputError(problems)
    return transformers.TrainingArguments(**{**plain_arguments(config, task=task), **changes})


def plain_arguments(config: TrainingConfig, *, task: str) -> dict[str, Any]:
    """The same as plain values; None where the Trainer's default holds."""
    amp = mixed_precision(config.precision)
    return {
        "per_device_train_batch_size": config.micro_batch_size,
        "per_device_eval_batch_size": config.micro_batch_size,
        **_evaluation(task),
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "bf16": amp == "bf16",
        "fp16": amp == "fp16",
        "tf32": True if config.precision == "tf32" else None,
        "gradient_checkpointing": config.checkpointing == "full",
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if config.checkpointing == "full" else None,
        "optim": _OPTIMIZERS[config.optimizer],
        "train_sampling_strategy": "group_by_length",
    }


def _evaluation(task: str) -> dict[str, Any]:
    """What keeps an evaluation from collecting the logits of all batches on the card (Trainer.evaluation_loop).

    With a class a label they go to the host batch by batch; with an entry for every word of the vocabulary they would
    fill the host instead, so only the loss is kept.
    """
    if TASK_FACTS[task].new_head:
        return {"eval_accumulation_steps": 1}
    return {"prediction_loss_only": True}


def unsupported(config: TrainingConfig) -> list[Problem]:
    """What of a configuration the Trainer can't do."""
    problems = []
    if config.offload != "none":
        message = f"got {config.offload!r}; the Trainer has no such offload without DeepSpeed; use the emitted train.py"
        problems.append(Problem(argument="offload", message=message))
    if config.parallelism == "fsdp2":
        message = (
            "got 'fsdp2'; its arguments hold no FSDP2 settings: launch the emitted train.py, or export to deepspeed"
        )
        problems.append(Problem(argument="parallelism", message=message))
    if config.loss != "standard":
        message = f"got {config.loss!r}; accepted for the Trainer: standard; use the emitted train.py"
        problems.append(Problem(argument="loss", message=message))
    if config.precision == "bf16-master":
        message = "got 'bf16-master'; the Trainer keeps no fp32 copies of bf16 weights; use the emitted train.py"
        problems.append(Problem(argument="precision", message=message))
    if config.checkpointing.startswith("every-"):
        message = f"got {config.checkpointing!r}; accepted for the Trainer: none, full; use the emitted train.py"
        problems.append(Problem(argument="checkpointing", message=message))
    return problems
