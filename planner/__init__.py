"""The fastest way to train or run a model in the GPU memory you have.

from planner import plan
p = plan(model="bert-base-uncased", vram="8GB")
p.save("plans/bert")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api import Estimate, estimate, plan
    from planner.comparison.comparing import Comparison, compare
    from planner.config import InferenceConfig, LoraSettings, TrainingConfig
    from planner.errors import InputError, NothingFitsError, PlannerError, RecordingError, TrialError
    from planner.exporting import export
    from planner.plans import Plan
    from planner.request import PlanRequest
    from planner.snapshots import save_snapshot

_HOMES = {
    "plan": "api",
    "estimate": "api",
    "Estimate": "api",
    "compare": "comparison.comparing",
    "Comparison": "comparison.comparing",
    "Plan": "plans",
    "PlanRequest": "request",
    "TrainingConfig": "config",
    "InferenceConfig": "config",
    "LoraSettings": "config",
    "save_snapshot": "snapshots",
    "export": "exporting",
    "PlannerError": "errors",
    "InputError": "errors",
    "NothingFitsError": "errors",
    "TrialError": "errors",
    "RecordingError": "errors",
}

__all__ = [
    "Comparison",
    "Estimate",
    "InferenceConfig",
    "InputError",
    "LoraSettings",
    "NothingFitsError",
    "Plan",
    "PlanRequest",
    "PlannerError",
    "RecordingError",
    "TrainingConfig",
    "TrialError",
    "compare",
    "estimate",
    "export",
    "plan",
    "save_snapshot",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``plan --help`` loads nothing heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(f"planner.{_HOMES[name]}"), name)
