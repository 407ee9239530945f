"""The parent's side of trials: each in a process of its own, whose end, whatever it is, becomes a Measurement.

On Linux one process imports torch once and forks for each trial (server.py); elsewhere every trial starts afresh.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import planner
from planner.errors import TrialError
from planner.measure import protocol
from planner.measure.ending import HostMemory, Limits, Listener, verdict
from planner.measure.process import LineProcess
from planner.measure.protocol import DeviceFacts, Measurement, TrialSpec

__all__ = ["Limits", "TrialRunner"]


class TrialRunner:
    """Runs trials one after another, under one environment. A context manager, since it may keep a server."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        command: Sequence[str] | None = None,
        *,
        forks: bool = sys.platform == "linux",
    ) -> None:
        """Nothing is started yet.

        ``environment`` is all of theirs (None: this process's own); other allocator settings need another runner.
        ``command`` stands in for ``python -m planner.measure``. With ``forks`` a server forks for each trial.
        """
        self.limits = limits or Limits()
        self.environment = dict(os.environ if environment is None else environment)
        self._command = list(command or _default_command())
        self._forks = forks
        self._server: LineProcess | None = None
        self._heard: dict[str, float] = {}
        self.phases_s: Mapping[str, float] = {}
        """Of the latest trial: seconds from its request to each phase that it told."""

    def __enter__(self) -> TrialRunner:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @property
    def server_pid(self) -> int | None:
        """The server's process, while there is one."""
        return self._server.pid if self._server is not None else None

    def close(self) -> None:
        """End the server, if there is one, and all that it started."""
        if self._server is not None:
            server, self._server = self._server, None
            server.end()

    def run(self, spec: TrialSpec) -> Measurement:
        """Run one trial: what it measured, or what became of it.

        Raises TrialError only where no process can be started.
        """
        began = time.monotonic()
        host = HostMemory()
        try:
            measurement = self._served(spec, host) if self._forks else None
            if measurement is None:
                measurement = self._alone(spec, host)
        except BaseException:  # Ctrl-C too
            self.close()
            raise
        self.phases_s = {phase: at - began for phase, at in self._heard.items()}
        return replace(measurement, wall_s=time.monotonic() - began)

    def probe(self, device: str) -> DeviceFacts:
        """What a process of its own finds out about a device. Raises TrialError, in one line."""
        host = HostMemory()
        process = self._start("--probe", device)
        heard: Listener[DeviceFacts | Measurement] = Listener(process, _facts_or_failure, host=host)
        returncode = self._hear_out(process, heard)
        if isinstance(heard.answer, DeviceFacts):
            return heard.answer
        failure = heard.answer or self._verdict(heard, returncode, process, host, device)
        what = f"{protocol.STATUSES[failure.status]}: {failure.reason}" if failure.reason else failure.status
        raise TrialError(f"device {device} could not be probed: {what}")

    def _alone(self, spec: TrialSpec, host: HostMemory) -> Measurement:
        process = self._start()
        process.send(spec.to_json(), last=True)
        heard = Listener(process, _measurement, host=host)
        self._heard = heard.phases
        returncode = self._hear_out(process, heard)
        return heard.answer or self._verdict(heard, returncode, process, host, spec.device)

    def _hear_out(self, process: LineProcess, heard: Listener[Any]) -> int:
        """Listen to a process of one answer until its end; its return code."""
        try:
            heard.listen(self.limits, starting=True)
            if not heard.given_up and not process.ends_within(self.limits.grace_s):
                heard.given_up = protocol.HANG
                heard.unreadable = heard.unreadable or "nothing: it closed its output and went on"
        finally:
            returncode = process.end()
        return returncode

    def _served(self, spec: TrialSpec, host: HostMemory) -> Measurement | None:
        """A trial of the server; None where there can be no server."""
        for _ in range(2):
            if self._server is None or not self._server.running:
                self.close()
                failure = self._start_server(spec, host)
                if self._server is None:
                    return failure
            server = self._server
            server.forget_words()
            server.send(spec.to_json())
            heard = Listener(server, _measurement, host=host, is_last=_has_ended)
            self._heard = heard.phases
            heard.listen(self.limits, starting=True)  # before the fork, it imports the model's code
            returncode = self._after_trial(server, heard)
            gone_before = heard.last is None and not (heard.phase or heard.given_up or heard.unreadable)
            if not gone_before:
                return heard.answer or self._verdict(heard, returncode, server, host, spec.device)
        self._forks = False  # a second server ended as well before it could fork
        return None

    def _after_trial(self, server: LineProcess, heard: Listener[Measurement]) -> int:
        """See to it that the trial's process is gone, and the server too if it does not say so; the return code."""
        last = heard.last
        if last is None and server.running:
            server.kill_descendants()
            rest = Listener(server, _measurement, host=HostMemory(), is_last=_has_ended)
            rest.listen(replace(self.limits, silence_s=self.limits.grace_s), starting=False)
            last = rest.last
        if last is not None:
            return int(last["ended"])
        self._server = None
        return server.end()

    def _start_server(self, spec: TrialSpec, host: HostMemory) -> Measurement | None:
        """Have a server, or switch to processes of one trial each; the trial's end if it can't even be told which."""
        server = self._start("--serve")
        heard = Listener(
            server, _measurement, host=host, is_last=lambda message: message.get("phase") == protocol.SERVING
        )
        limits = replace(self.limits, timeout_s=math.inf, silence_s=self.limits.start_s)
        try:
            heard.listen(limits, starting=True)
        except BaseException:
            server.end()
            raise
        if heard.last is not None:
            self._server = server
            return None
        returncode = server.end()
        if heard.given_up:
            return self._verdict(heard, returncode, server, host, spec.device)
        self._forks = False
        return None

    def _start(self, *options: str) -> LineProcess:
        try:
            return LineProcess([*self._command, *options], self.environment)
        except OSError as error:
            raise TrialError(f"no process can be started for a trial: {error}") from error

    def _verdict(
        self, heard: Listener[Any], returncode: int, process: LineProcess, host: HostMemory, device: str
    ) -> Measurement:
        return verdict(
            heard,
            returncode=returncode,
            stderr=process.words(),
            host=host,
            limits=self.limits,
            on_cpu=device == "cpu",
        )


def _has_ended(message: Mapping[str, Any]) -> bool:
    """Whether a server says that a trial's process is gone, and how."""
    return type(message.get("ended")) is int


def _measurement(text: str) -> Measurement:
    measurement = Measurement.from_json(text)
    if measurement.ok and (measurement.step_ms is None or measurement.peak_reserved_bytes is None):
        raise ValueError("no step time or no memory in a measurement")
    return measurement


def _facts_or_failure(text: str) -> DeviceFacts | Measurement:
    try:
        return DeviceFacts.from_json(text)
    except ValueError:
        return Measurement.from_json(text)


def _default_command() -> list[str]:
    # -P: a file in the user's folder must not stand in for a module; left out where the package lies in that folder
    package = Path(planner.__file__).parent
    flags = [] if package.parent == Path.cwd() else ["-P"]
    return [sys.executable, *flags, "-m", "planner.measure"]
