"""What trials of training and of inference have in common: their course, timed passes, and how they end."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from planner.measure.backends import Backend
from planner.measure.protocol import MIN_PASSES, OCCUPIED, THRASHING, TrialSpec
from planner.recording.record import ACTIVATIONS
from planner.recording.recorder import Recorder

Tell = Callable[[str], None]
"""Is told what a trial is at."""

MAX_PASSES = 200
"""Passes that are timed at most: by then the median is known."""
JUMP = 3.0
"""Times the median of its kind that a pass takes when the card's memory has run out."""
JUMPING_SHARE = 0.05
"""Of passes that may take so long for other reasons: Python collects garbage, the system runs something else."""


class Ended(Exception):  # noqa: N818  # most trials' end is no error of anyone
    """A trial can't go on: its status and why."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Course(ABC):
    """The trial's state, and what was found so far."""

    model: nn.Module

    def __init__(self, spec: TrialSpec, backend: Backend, tell: Tell, found: dict[str, Any], started: float) -> None:
        self.spec, self.backend = spec, backend
        self._tell, self._found, self._started = tell, found, started

    def run(self) -> None:
        """All of it. Raises Ended, and whatever the model's code and the device raise."""
        self._prepare()
        with self.backend.phase("load"):
            self._tell("load")
            self._load()
        self._found["setup_s"] = time.time() - self._started
        self._warm_up()
        self._time()
        self._time_typical()

    def _prepare(self) -> None:
        self._tell("libraries")
        self._import_libraries()
        if problem := self.backend.start(self.spec):
            raise Ended(OCCUPIED, problem)
        torch.manual_seed(self.spec.seed)
        if self.spec.config.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # each int8 layer warns of each cast to fp16

    @abstractmethod
    def _import_libraries(self) -> None:
        """What the configuration needs; a process's memory before the model is counted with it."""

    @abstractmethod
    def _load(self) -> None:
        """Build what is run."""

    @abstractmethod
    def _warm_up(self) -> None:
        """The first passes of the longest shape, watched."""

    @abstractmethod
    def _time(self) -> None:
        """More of them, timed."""

    @abstractmethod
    def _time_typical(self) -> None:
        """Passes of a typical shape, where one is named."""

    def _count_retries(self) -> None:
        """From now on the allocator's cache has what it needs."""
        self._found["allocation_retries"] = 0
        self._retries = self.backend.allocation_retries

    def _look_for_thrashing(self, *kinds: Sequence[float]) -> None:
        retries = self._found["allocation_retries"] = self.backend.allocation_retries - self._retries
        if retries:
            raise Ended(THRASHING, f"the allocator freed its cache to ask again {retries} times")
        if self.backend.jumps and (number := jumping(*kinds)):
            raise Ended(THRASHING, f"{number} passes took over {JUMP:g} times as long as most")


def jumping(*kinds: Sequence[float]) -> int:
    """Passes that took several times their kind's median; 0 if they are no more than something else explains."""
    jumps = sum(ms > JUMP * median(kind) for kind in kinds for ms in kind)
    return jumps if jumps > max(1, JUMPING_SHARE * sum(map(len, kinds))) else 0


def arrive(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """On the CPU as well: each of the emitted script's batches is a new one."""
    return {name: tensor.to(device, copy=True) for name, tensor in batch.items()}


class Unwatched:
    """A pass that is timed tells nobody where it is."""

    def phase(self, name: str, *, category: int = ACTIVATIONS, backward: bool = False) -> None:
        """Nothing."""


class Watched:
    """Is told where in a pass it is, and tells a recorder, if there is one."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._phase = ""

    def begin(self, phase: str) -> None:
        """A part of the trial begins, whose recorded phases get its name."""
        self._phase = phase

    def phase(self, name: str, *, category: int = ACTIVATIONS, backward: bool = False) -> None:
        """A part of the pass begins."""
        if self._recorder is not None:
            self._recorder.phase(f"{self._phase}/{name}", category=category, backward=backward)


class Passes:
    """Times of one kind of pass, with the device waited for before and after."""

    def __init__(self, backend: Backend, seconds: float, *, least: int = MIN_PASSES) -> None:
        """``seconds`` that they may take together; ``least`` of them are timed in any case."""
        self._backend, self._seconds, self._least = backend, seconds, least
        self._began = time.perf_counter()
        self.ms: tuple[float, ...] = ()

    @property
    def wanted(self) -> bool:
        """Whether one more is to be timed: it would end within the time, or there are too few."""
        spent = time.perf_counter() - self._began
        in_time = not self.ms or spent * (len(self.ms) + 1) / len(self.ms) <= self._seconds
        return len(self.ms) < self._least or (in_time and len(self.ms) < MAX_PASSES)

    def time(self, run: Callable[[], object]) -> None:
        """Run once."""
        self._backend.synchronize()
        start = time.perf_counter()
        run()
        self._backend.synchronize()
        self.ms += ((time.perf_counter() - start) * 1000,)
