"""From a plan to files that run without this package."""

from planner.emit.training import EMITTED_TASKS, render_training_files

__all__ = ["EMITTED_TASKS", "render_training_files"]
