"""sentence-transformers: a siamese encoder with gradient caching, or a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from planner.emit.engines.base import Document, Engine
from planner.emit.engines.trainer import arguments_of
from planner.emit.templating import template
from planner.errors import Problem


class SentenceTransformers(Engine):
    """A script with the library's trainer."""

    name = "sentence-transformers"
    about = "a script with sentence-transformers' trainer, for embedding and reranking"
    run = "python train_sentence_transformers.py --data FILE"
    accepted: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "task": ("embedding", "reranking"),
        "method": ("full",),
        "offload": ("none",),
        "loss": ("standard",),
        "checkpointing": ("none", "full"),
        "precision": ("fp32", "tf32", "fp16-amp", "bf16-amp", "bf16"),
        "parallelism": ("none", "ddp"),
    }

    def problems(self, plan: Document) -> list[Problem]:
        """Gradient caching computes twice by itself; the library's loss refuses checkpointing beside it."""
        found = super().problems(plan)
        config = plan["config"]
        cached = config["gradient_accumulation_steps"] > 1 and plan["workload"]["task"] == "embedding"
        if cached and config["checkpointing"] != "none":
            message = f"got {config['checkpointing']!r} with gradient caching; accepted for {self.name}: none"
            found.append(Problem(argument="checkpointing", message=message))
        return found

    def files(self, plan: Document) -> dict[str, str]:
        """One script; the micro-batch is the loss's where the whole batch is compared."""
        task, config = plan["workload"]["task"], plan["config"]
        arguments = arguments_of(plan)
        arguments.pop("prediction_loss_only", None)
        arguments.pop("eval_accumulation_steps", None)
        if task == "embedding":
            arguments["per_device_train_batch_size"] = config["effective_batch_size"] // (config.get("gpus") or 1)
            arguments["gradient_accumulation_steps"] = 1
        context = {
            "header": self.header(plan),
            "task": task,
            "config": config,
            "model": plan["workload"]["model"],
            "arguments": arguments,
            "columns": plan["request"].get("text_column") or "",
            "label_column": plan["request"].get("label_column") or "",
        }
        return {"train_sentence_transformers.py": template("sentence_transformers.py.j2").render(context)}
