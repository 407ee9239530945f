"""The plan: what was asked, what was chosen and why, saved as a folder that runs as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from planner.budget import Memory
from planner.config import InferenceConfig, TrainingConfig
from planner.emit import render_files
from planner.errors import InputError, Problem
from planner.places import write_whole
from planner.request import PlanRequest
from planner.timing import InferenceTime, Time

if TYPE_CHECKING:
    import accelerate
    import pandas as pd
    import transformers

C = TypeVar("C", TrainingConfig, InferenceConfig, default=TrainingConfig)
SCHEMA_VERSION = 1
MEMORY_COLUMNS = ("peak_allocated_bytes", "peak_reserved_bytes", "total_bytes", "fits")


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why an automatic choice is what it is."""

    field: str
    """The choice."""
    value: Any
    """What was chosen."""
    reason: str
    """Why, in a clause."""


@dataclass(frozen=True, kw_only=True)
class Plan(Generic[C]):
    """A plan for training or for inference. ``save`` writes the folder, ``load`` reads it again."""

    request: PlanRequest
    """What was asked."""
    hardware: Mapping[str, Any]
    """The target card."""
    workload: Mapping[str, Any]
    """Model, task and shapes."""
    config: C
    """The chosen configuration."""
    peak: Memory
    """What it needs (``memory`` in plan.json)."""
    time: Time
    """How long a step takes."""
    reasons: Sequence[Reason]
    """Why each automatic choice is what it is."""
    alternatives: Sequence[Mapping[str, Any]]
    """The next best configurations, with memory, speed, and what is worse about them."""
    levers: Sequence[Mapping[str, Any]]
    """What each lever would change from here."""
    versions: Mapping[str, str]
    """Of the libraries that the prediction depends on."""
    trial_rows: Sequence[Mapping[str, Any]]
    """The rows of trials.csv."""
    memory_rows: Sequence[Mapping[str, Any]]
    """The rows of memory.csv."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """How the configuration was found: ``trials_run``, ``trials_kept`` (measured before), ``interrupted``, and why the
    search ended (``ended``); empty where every step was simulated."""

    @property
    def trials_run(self) -> int:
        """Measured trials that were run for this plan."""
        return int(self.search.get("trials_run", 0))

    @property
    def interrupted(self) -> bool:
        """Whether the search was stopped before it was done: the plan is the best so far."""
        return bool(self.search.get("interrupted", False))

    @property
    def trials(self) -> pd.DataFrame:
        """One row for each configuration looked at (trials.csv)."""
        return _frame(self.trial_rows)

    @property
    def memory(self) -> pd.DataFrame:
        """Memory against micro-batch and sequence length (memory.csv)."""
        return _frame(self.memory_rows)

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json."""
        return {
            "schema_version": SCHEMA_VERSION,
            "request": self.request.model_dump(mode="json"),
            "hardware": dict(self.hardware),
            "workload": dict(self.workload),
            "config": self.config.model_dump(mode="json"),
            "memory": {**asdict(self.peak), "breakdown": dict(self.peak.breakdown)},
            "time": asdict(self.time),
            "reasons": [asdict(reason) for reason in self.reasons],
            "alternatives": [dict(row) for row in self.alternatives],
            "levers": [dict(row) for row in self.levers],
            "versions": dict(self.versions),
            "search": dict(self.search),
        }

    def save(self, folder: str | Path) -> Path:
        """Write the plan's folder, whole or not at all; an earlier plan there is replaced.

        Raises InputError when the folder holds files that are no plan's, OSError when it can't be written.
        """
        target = Path(folder)
        if target.exists() and not (target.is_dir() and _is_replaceable(target)):
            message = f"got {str(folder)!r}; accepted: a new folder, or an earlier plan's; choose another"
            raise InputError([Problem(argument="folder", message=message)])
        write_whole(target, self._write)
        return target

    def _write(self, folder: Path) -> None:
        document = self.to_json()
        (folder / "plan.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        for name, text in render_files(document).items():
            (folder / name).write_text(text, encoding="utf-8")
        self.trials.to_csv(folder / "trials.csv", index=False)
        self.memory.to_csv(folder / "memory.csv", index=False)

    @classmethod
    def load(cls, folder: str | Path) -> Plan[Any]:
        """Read a folder that ``save`` wrote. Raises InputError when it holds no plan of this version."""
        import pandas as pd

        path = Path(folder)
        document = read_document(path)
        rows = {name: pd.read_csv(path / f"{name}.csv", keep_default_na=False) for name in ("trials", "memory")}
        infers = document["request"]["mode"] == "infer"
        config: Any = (InferenceConfig if infers else TrainingConfig).model_validate(document["config"])
        return cls(
            request=PlanRequest.model_validate(document["request"]),
            hardware=document["hardware"],
            workload=document["workload"],
            config=config,
            peak=Memory(**document["memory"]),
            time=(InferenceTime if infers else Time)(**document["time"]),
            reasons=[Reason(**reason) for reason in document["reasons"]],
            alternatives=document["alternatives"],
            levers=document["levers"],
            versions=document["versions"],
            trial_rows=_rows(rows["trials"]),
            memory_rows=_rows(rows["memory"]),
            search=document.get("search", {}),
        )

    def to_training_arguments(self, output_dir: str = "out", **changes: Any) -> transformers.TrainingArguments:
        """The plan as ``transformers.TrainingArguments``; ``changes`` override single arguments.

        Raises InputError for what the Trainer can't do (optimizer offload, every-N checkpointing).
        """
        from planner.emit.trainer import training_arguments

        if not isinstance(self.config, TrainingConfig):
            message = "got 'infer'; accepted for TrainingArguments: a plan of mode 'train'"
            raise InputError([Problem(argument="mode", message=message)])
        task = self.workload["task"]
        return training_arguments(self.config, task=task, output_dir=output_dir, seed=self.request.seed, **changes)

    def to_accelerator(self, **changes: Any) -> accelerate.Accelerator:
        """An ``accelerate.Accelerator`` with the plan's precision; ``changes`` override single arguments."""
        from accelerate import Accelerator

        from planner.emit.trainer import mixed_precision

        training = isinstance(self.config, TrainingConfig)  # at inference weights are in the plan's type themselves
        precision = mixed_precision(self.config.precision) if training else "no"
        return Accelerator(**{"mixed_precision": precision, **changes})


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame([dict(row) for row in rows])
    for column in frame.columns:
        if column.endswith("_bytes"):  # integers, with gaps where nothing was predicted or measured
            frame[column] = pd.to_numeric(frame[column], errors="coerce").astype("Int64")
    return frame


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict(orient="records")]


def read_document(folder: Path) -> dict[str, Any]:
    """The content of a folder's plan.json. Raises InputError when it holds no plan of this version."""
    try:
        document: dict[str, Any] = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        version = document["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"got {str(folder)!r}, which holds no readable plan.json; accepted: a folder that a plan was saved in"
        raise InputError([Problem(argument="folder", message=message)]) from error
    if version != SCHEMA_VERSION:
        message = f"got a plan of schema version {version!r}; accepted: {SCHEMA_VERSION}; make the plan again"
        raise InputError([Problem(argument="folder", message=message)])
    return document


def _is_replaceable(folder: Path) -> bool:
    return (folder / "plan.json").is_file() or not any(folder.iterdir())
