"""From a plan to files that run without this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.emit.inference import render_inference_files
from planner.emit.training import EMITTED_TASKS, render_training_files


def render_files(plan: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text of the files that do what a plan says, from plan.json's content alone. Raises InputError."""
    infers = plan["request"].get("mode") == "infer"
    return render_inference_files(plan) if infers else render_training_files(plan)


__all__ = ["EMITTED_TASKS", "render_files", "render_inference_files", "render_training_files"]
