"""What every engine answers: which plans it can't take, by name, and the files that it reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from planner.emit.header import header_lines
from planner.errors import Problem

Document = Mapping[str, Any]
"""The content of plan.json."""
Row = tuple[str, Any, str]
"""Key, value, and what it does to memory; the comment may be empty."""


class Engine:
    """One library or tool that trains; sub-classes override what they need."""

    name: ClassVar[str]
    """As ``--to`` takes it."""
    about: ClassVar[str]
    """What it is, for the help."""
    run: ClassVar[str]
    """The command that runs what was written."""
    accepted: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Field of the plan to the values that the engine can do; fields that are not named may have any."""

    def problems(self, plan: Document) -> list[Problem]:
        """What of a plan the engine can't do, one for each field: nothing is dropped silently."""
        found = []
        for field, words in self.accepted.items():
            value = value_of(plan, field)
            if value not in words:
                message = f"got {value!r}; accepted for {self.name}: {', '.join(words)}; plan with one of these, "
                found.append(Problem(argument=field, message=f"{message}or use the plan's train.py"))
        return found

    def files(self, plan: Document) -> dict[str, str]:
        """File name to text."""
        raise NotImplementedError

    def header(self, plan: Document) -> list[str]:
        """Lines for the top of a file, without comment signs."""
        return header_lines(plan, runs={"then by": f"plan export --to {self.name} PLAN", "run by": self.run})


def value_of(plan: Document, field: str) -> str:
    """A plan's value as ``accepted`` names it: every N of checkpointing is one word."""
    if field in ("task", "long_texts"):
        from planner.tasks import TASK_FACTS

        workload = plan["workload"]
        default = TASK_FACTS[workload["task"]].long_texts[0] if field == "long_texts" else ""
        return str(workload.get(field) or default)
    value = plan["config"].get(field)
    if field == "parallelism":
        return str(value or "none")
    return "every-N" if str(value).startswith("every-") else str(value)


def yaml_text(header: Iterable[str], rows: Iterable[Row]) -> str:
    """A YAML mapping with a comment at the top and beside its lines; JSON's values are YAML's."""
    lines = [f"# {line}".rstrip() for line in header]
    for key, value, comment in rows:
        lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"
