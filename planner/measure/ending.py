"""How a trial ends: what its process said until then, and what its end means when it gave no answer."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

from planner.measure import protocol
from planner.measure.process import LineProcess
from planner.measure.protocol import Measurement
from planner.units import format_bytes

Answer = TypeVar("Answer")

_TICK_S = 0.25
_NEARLY_USED_UP = 0.1  # earlyoom ends processes where a smaller part is available
_ACCESS_VIOLATION = 0xC0000005  # Windows' exit code of a process that touched memory that isn't its own
_SEGFAULTS = frozenset({"SIGSEGV", "SIGBUS"})
_OWN_DOING = frozenset({"SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"})
_OUT_OF_MEMORY = ("std::bad_alloc", "annot allocate memory", "an't allocate memory", "libgomp: Thread creation failed")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a trial may take, in seconds, before it is ended."""

    timeout_s: float = 600.0
    """A whole trial, from its request to its end; then ``timeout``. Most take less than ten seconds. What takes minutes
    is a model with billions of random weights on a CPU, or a step that swaps: no plan would come of it."""
    silence_s: float = 120.0
    """Without a line of progress; then ``hang``. A trial says one before each piece of work, of which the longest are
    the model's weights (some ten seconds for a billion parameters on a CPU) and one micro-batch."""
    start_s: float = 120.0
    """Until a process says its first line; a server imports the model's code before that, and forks. Importing torch
    takes 3 to 10 s; a minute from a cold network disk."""
    grace_s: float = 5.0
    """That a process gets to end by itself after its answer; the answer stands if it doesn't."""


class HostMemory:
    """Whether the host's memory ran out since this was made."""

    def __init__(self) -> None:
        self._kills = _out_of_memory_kills()
        self._least_bytes = sys.maxsize
        self.look()

    def look(self) -> None:
        """Note how much is available now."""
        self._least_bytes = min(self._least_bytes, psutil.virtual_memory().available)

    def ran_out(self) -> str:
        """What says so, or nothing."""
        if _out_of_memory_kills() > self._kills:
            return "the kernel's out-of-memory killer ended it"
        if self._least_bytes < _NEARLY_USED_UP * psutil.virtual_memory().total:
            return f"something killed it when {format_bytes(self._least_bytes)} of host memory were left"
        return ""


def _out_of_memory_kills() -> int:
    """Processes that the kernel killed so far, for want of memory of the machine or of a control group.

    Linux counts both here (mm/oom_kill.c, __oom_kill_process); elsewhere 0.
    """
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class Listener(Generic[Answer]):
    """Listens to a process until it said its last line, ended, or must be given up."""

    def __init__(
        self,
        process: LineProcess,
        read_answer: Callable[[str], Answer],
        *,
        host: HostMemory,
        is_last: Callable[[Mapping[str, Any]], bool] = lambda message: False,
    ) -> None:
        self._process = process
        self._read_answer = read_answer
        self._host = host
        self._is_last = is_last
        self.answer: Answer | None = None
        """The last answer that could be read."""
        self.last: Mapping[str, Any] | None = None
        """The message after which nothing more comes."""
        self.given_up = ""
        """``timeout`` or ``hang`` where the process has to be ended."""
        self.unreadable = ""
        """The beginning of the first line that is neither answer nor progress, and what was wrong."""
        self.phase = ""
        """The last progress."""
        self.phases: dict[str, float] = {}
        """When each phase was first heard of (time.monotonic())."""

    def listen(self, limits: Limits, *, starting: bool) -> None:
        """Until the end; ``starting`` gives the first line its own limit."""
        began = heard = looked = time.monotonic()
        patience = limits.start_s if starting else limits.silence_s
        while self.last is None:
            line = self._process.next_line(_TICK_S)
            now = time.monotonic()
            if now - looked >= _TICK_S:
                looked = now
                self._host.look()
                self._process.trim_words()
            if line and self._take(line):
                heard, patience = now, limits.silence_s if self.answer is None else limits.grace_s
            if line == b"" or (line is None and not self._process.running and not self._rest()):
                return
            if now - heard > patience or now - began > limits.timeout_s:  # babbling is no progress
                self._give_up(protocol.TIMEOUT if now - began > limits.timeout_s else protocol.HANG)
                return

    def _rest(self) -> bool:
        """Take what a process that has ended left behind, while a descendant keeps its output open."""
        while line := self._process.next_line(_TICK_S):
            self._take(line)
        return False

    def _give_up(self, status: str) -> None:
        if self.answer is None:  # with an answer it only fails to end
            self.given_up = status

    def _take(self, line: bytes) -> bool:
        """Read a line; whether it could be read."""
        text = line.decode("utf-8", "replace").strip()
        if not text:
            return False
        try:
            message = json.loads(text)
            if self._is_last(message):
                self.last = message
            elif set(message) <= {"phase", "pid"} and isinstance(message["phase"], str):
                self.phase = message["phase"]
                self.phases.setdefault(self.phase, time.monotonic())
            else:
                self.answer = self._read_answer(text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.unreadable = self.unreadable or f"{text[:80]!r} ({' '.join(str(error).split())[:120]})"
            return False
        return True


def verdict(
    heard: Listener[Any], *, returncode: int, stderr: str, host: HostMemory, limits: Limits, on_cpu: bool
) -> Measurement:
    """What the end of a process without an answer means.

    ``stderr`` is the end of what it wrote there; its last line enters the reason.
    """
    status, what = _meaning(heard, returncode, stderr, host, limits, on_cpu=on_cpu)
    words = last_line(stderr)
    return Measurement(status=status, reason=f"{what}: {words}" if words else what)


def _meaning(
    heard: Listener[Any], returncode: int, stderr: str, host: HostMemory, limits: Limits, *, on_cpu: bool
) -> tuple[str, str]:
    place = f"last heard: {heard.phase}" if heard.phase else "nothing was heard"
    status, what = _by_returncode(returncode, host)
    if heard.given_up == protocol.TIMEOUT:
        status, what = protocol.TIMEOUT, f"longer than {limits.timeout_s:g} s; {place}"
    elif heard.given_up and not heard.unreadable:
        status, what = protocol.HANG, f"no progress for too long; {place}"
    elif status == protocol.CRASH and any(text in stderr for text in _OUT_OF_MEMORY):
        status, what = protocol.OOM if on_cpu else protocol.HOST_OOM, f"its process ended for want of memory ({what})"
    elif heard.unreadable and (heard.given_up or returncode >= 0):
        status, what = protocol.BAD_REPLY, f"it said {heard.unreadable}"
    return status, what


def _by_returncode(returncode: int, host: HostMemory) -> tuple[str, str]:
    if returncode == _ACCESS_VIOLATION:
        return protocol.SEGFAULT, "ended by an access violation"
    if returncode >= 0:
        return protocol.CRASH, f"exit code {returncode} without an answer"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    if name in _SEGFAULTS:
        return protocol.SEGFAULT, f"ended by {name}"
    if name in _OWN_DOING:
        return protocol.CRASH, f"ended by {name}"
    why = host.ran_out() if name == "SIGKILL" else ""
    return (protocol.HOST_OOM, why) if why else (protocol.KILLED, f"ended by {name}")


def last_line(text: str) -> str:
    """The last line that says anything, at most 300 characters."""
    lines = (" ".join(line.split()) for line in reversed(text.splitlines()))
    return next((line[:300] for line in lines if line), "")
