"""What was measured on this machine: kept in the user's cache, and what it says about predictions.

One file of JSON lines for each device with its versions, only ever appended to: a line is one ``write`` to a file that
is opened for appending, under an advisory lock, so planners that run at once lose nothing. A line that can't be read is
skipped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from planner import cache
from planner.config import C, Config, passes_of, read_config
from planner.measure.protocol import ABOUT_THE_CONFIGURATION, OUT_OF_MEMORY, DeviceFacts, Measurement
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.residuals import Residual

try:
    import fcntl
except ImportError:  # Windows: what is left is that appending is one write
    fcntl = None  # type: ignore[assignment]

_VERSIONS = ("vramplan", "torch", "transformers")
_OTHER_ROWS = 400
"""Of other workloads, the newest that corrections look at: their cost grows with the cube of the rows."""


def digest(key: object) -> str:
    """A short name of anything that JSON holds."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]


def device_key(facts: DeviceFacts) -> dict[str, Any]:
    """What has to be the same for measurements to hold: the device, its kind, what drives it and the versions."""
    installed = cache.library_versions()
    return {
        "device": facts.name,
        "total_bytes": facts.total_bytes,
        "kind": "cpu" if facts.device == "cpu" else "cuda",
        "threads": facts.threads,
        "driver": facts.driver,
        "versions": {name: installed[name] for name in _VERSIONS},
    }


def workload_key(workload: Workload) -> str:
    """What is trained, as one word: the model's whole configuration and the task."""
    return digest(asdict(workload))


@dataclass(frozen=True, kw_only=True)
class Measured(Generic[C]):
    """One measurement that is kept."""

    workload: str
    """Key of the workload."""
    config: C
    """What was run."""
    ceiling_bytes: int | None
    """Under which ceiling; None: all of the device."""
    predicted_reserved_bytes: int | None
    """What the simulator said then, uncorrected; None where it wasn't asked."""
    predicted_step_ms: float | None
    """What the simulator said then, uncorrected; None where it wasn't asked."""
    measurement: Measurement
    """What came out."""
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """Time of day, UTC."""

    def to_json(self) -> str:
        """One line of JSON."""
        document = asdict(self)
        document["config"] = self.config.model_dump(mode="json")
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str | bytes) -> Measured[Any]:
        """From ``to_json``'s line. Raises ValueError for anything else."""
        try:
            values = json.loads(text)
            config = read_config(values.pop("config"))
            measurement = Measurement.from_json(json.dumps(values.pop("measurement")))
            return Measured(config=config, measurement=measurement, **values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError("not a kept measurement") from error

    def answers(self, ceiling_bytes: int) -> bool:
        """Whether it says what would come out under this ceiling.

        What fits does so wherever it has room; what ran out of memory does under any lower ceiling.
        """
        if self.measurement.status in OUT_OF_MEMORY:
            return self.ceiling_bytes is None or ceiling_bytes <= self.ceiling_bytes
        if self.measurement.ok:
            return self.measurement.process_bytes is not None and self.measurement.process_bytes <= ceiling_bytes
        return True


class MeasurementStore(Generic[C]):
    """The measurements of one device with its versions, of training or of inference."""

    def __init__(self, key: Mapping[str, Any], folder: Path | None = None) -> None:
        self.key = dict(key)
        self.path = (folder or cache.folder() / "measurements") / f"{digest(self.key)}.jsonl"
        self.unreadable = 0
        """Lines that ``rows`` skipped the last time."""

    def rows(self) -> list[Measured[C]]:
        """Everything that can be read, oldest first; empty where there is nothing."""
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return []
        rows, self.unreadable = [], 0
        for line in filter(None, lines):
            try:
                rows.append(Measured.from_json(line))
            except ValueError:
                self.unreadable += 1
        return rows

    def append(self, row: Measured[C]) -> str:
        """Keep a measurement, if it says something about its configuration. Why it could not be kept; else empty."""
        if row.measurement.status not in ABOUT_THE_CONFIGURATION:
            return ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append_line(self.path, row.to_json().encode())
        except OSError as error:
            reason = error.strerror or type(error).__name__
            return f"{self.path.parent} can't be written ({reason}): measurements are not kept for the next plan"
        return ""


def _append_line(path: Path, line: bytes) -> None:
    """Whole or not at all: what a full disk left of the line is taken back."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(file).st_size
        cut_off = size > 0 and not _ends_with_newline(file, size)  # by a process that was killed while it wrote
        data = (b"\n" if cut_off else b"") + line + b"\n"
        if os.write(file, data) < len(data):
            os.ftruncate(file, size)
            raise OSError(28, os.strerror(28))
    finally:
        os.close(file)


def _ends_with_newline(file: int, size: int) -> bool:
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) == b"\n"


# -- what measurements say about predictions -------------------------------------------------------------------------


def log_noise(measurement: Measurement, accumulation: int) -> float:
    """Standard error of a step time's logarithm, from the spread of its timed passes; 0 where too few were timed.

    Of a median: 1.2533 standard deviations over the root of the count; those from the median absolute deviation,
    times 1.4826 (both hold for normal errors; Huber, "Robust Statistics", 1981, sections 1.1 and 5.1).
    """
    if not measurement.step_ms:
        return 0.0
    micro, update = _error_of_median(measurement.micro_batch_ms), _error_of_median(measurement.update_ms)
    return math.hypot(accumulation * micro, update) / measurement.step_ms


def _error_of_median(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))


Predict = Callable[[Measured[Any]], "tuple[int, float] | None"]
"""Reserved bytes and milliseconds of a step as the simulator says them now of what a row measured; None: nothing."""


def time_residuals(rows: Sequence[Measured[Any]], predict: Predict | None = None) -> list[Residual]:
    """Log ratios of measured over predicted step times, of what ran."""
    from planner.residuals import Residual

    found = []
    for row in rows:
        predicted = _predicted(row, predict)[1]
        if row.measurement.ok and row.measurement.step_ms and predicted:
            noise = log_noise(row.measurement, passes_of(row.config))
            ratio = math.log(row.measurement.step_ms / predicted)
            found.append(Residual(config=row.config, workload=row.workload, log_ratio=ratio, variance=noise**2))
    return found


def memory_residuals(
    rows: Sequence[Measured[Any]], context_bytes: int, predict: Predict | None = None
) -> list[Residual]:
    """Log ratios of measured over predicted reserved memory; of what ran out of it, that they are larger."""
    from planner.residuals import Residual

    found = []
    for row in rows:
        predicted, out = _predicted(row, predict)[0], row.measurement.status in OUT_OF_MEMORY
        had = row.ceiling_bytes - context_bytes if out and row.ceiling_bytes else None
        held = had if out else row.measurement.peak_reserved_bytes if row.measurement.ok else None
        if predicted and held and held > 0:
            ratio = math.log(held / predicted)
            found.append(Residual(config=row.config, workload=row.workload, log_ratio=ratio, at_least=out))
    return found


def _predicted(row: Measured[Any], predict: Predict | None) -> tuple[int | None, float | None]:
    return (predict and predict(row)) or (row.predicted_reserved_bytes, row.predicted_step_ms)


def relevant(rows: Sequence[Measured[C]], workload: str) -> list[Measured[C]]:
    """All rows of a workload and the newest of the others that ran, oldest first."""
    others = [row for row in rows if row.workload != workload and row.measurement.ok][-_OTHER_ROWS:]
    kept = {id(row) for row in others}
    return [row for row in rows if row.workload == workload or id(row) in kept]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Measured over predicted, as it is believed: log-normal."""

    factor: float
    """Median."""
    log_standard_deviation: float
    """Of its logarithm."""


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """What kept measurements make of the simulator's answers for one workload on one device."""

    workload: str
    """Key of the workload."""
    kind: str
    """Of the device: cuda or cpu."""
    context_bytes: int | None
    """Median of what trials found to be held outside the allocator; None before any."""
    times: tuple[Residual, ...]
    """Of step times."""
    memories: tuple[Residual, ...]
    """Of reserved memory."""

    @classmethod
    def of(cls, rows: Sequence[Measured[C]], *, workload: str, kind: str, context_bytes: int) -> Corrections:
        """From kept measurements; ``context_bytes`` as probed, for those that ran out of memory before they told."""
        rows = relevant(rows, workload)
        contexts = [row.measurement.context_bytes for row in rows if row.measurement.context_bytes]
        return cls(
            workload=workload,
            kind=kind,
            context_bytes=int(statistics.median(contexts)) if contexts else None,
            times=tuple(time_residuals(rows)),
            memories=tuple(memory_residuals(rows, context_bytes)),
        )

    def time(self, config: Config) -> Ratio:
        """What to multiply a predicted step time by."""
        from planner.residuals import time_spread

        return self._ratio(self.times, config, time_spread(self.kind))

    def memory(self, config: Config) -> Ratio:
        """What to multiply predicted reserved memory by."""
        from planner.residuals import memory_spread

        return self._ratio(self.memories, config, memory_spread(self.kind))

    def _ratio(self, rows: Sequence[Residual], config: Config, spread: Any) -> Ratio:
        from planner.residuals import beliefs

        believed = beliefs(rows, [(self.workload, config)], spread)
        deviation = float(believed.standard_deviation[0])
        unknown = math.isinf(spread.device) and not rows
        return Ratio(factor=math.exp(believed.mean[0]), log_standard_deviation=math.inf if unknown else deviation)
