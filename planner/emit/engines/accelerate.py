"""The loop that the planner writes by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from planner.emit.engines.base import Document, Engine
from planner.emit.training import render_training_files


class Accelerate(Engine):
    """``train.py`` and its launch settings."""

    name = "accelerate"
    about = "the plan's own train.py, an Accelerate loop"
    run = "accelerate launch --config_file accelerate.yaml train.py --data FILE"

    def files(self, plan: Document) -> dict[str, str]:
        """The plan's own files."""
        return render_training_files(plan)


class FSDP2(Accelerate):
    """The same script, which cuts weights, gradients and state into shards itself."""

    name = "fsdp2"
    about = "train.py on several cards, with weights, gradients and state in shards"
    accepted: ClassVar[Mapping[str, tuple[str, ...]]] = {"parallelism": ("fsdp2",)}
