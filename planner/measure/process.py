"""A process that answers in lines, from its start to its end: nothing of it stays behind, whatever it does."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

import psutil

LONGEST_LINE_BYTES = 1 << 20
"""What is longer is cut into pieces of this size, none of which can be an answer."""
STDERR_BYTES = 1 << 20
"""What standard error may hold on the disk; past it, the older part is dropped."""
_KEPT_BYTES = 1 << 14
_WAITING_LINES = 8
_GRACE_S = 5.0


class LineProcess:
    """A process in a session of its own. Its standard error goes to a file without a name, which the kernel frees."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError when that isn't possible."""
        self._stderr = cast("IO[bytes]", tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  # end() closes
        _append_only(self._stderr.fileno())
        try:
            self._popen = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=dict(environment),
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone, which then ends this one
            )
        except BaseException:
            self._stderr.close()
            raise
        with suppress(
            OSError
        ):  # Linux: should memory run out, the kernel is to choose this one (proc(5), oom_score_adj)
            Path(f"/proc/{self.pid}/oom_score_adj").write_text("1000", encoding="ascii")
        self._lines: queue.Queue[bytes] = queue.Queue(_WAITING_LINES)
        self._over = False
        self._last_words = b""
        self._threads = [_in_background(_copy_lines, self._popen.stdout, self._lines)]

    @property
    def pid(self) -> int:
        """Its id, and that of its process group."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        if self._popen.returncode is not None or not hasattr(os, "waitid"):
            return self._popen.poll() is None
        with suppress(ChildProcessError):  # looked at, not reaped: so long, no other process group gets its number
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return False

    def send(self, line: str, *, last: bool = False) -> None:
        """Write a line to its standard input, whenever it reads it; ``last`` closes that after it."""
        # A thread: a stopped process does not read, and a pipe holds 64 KiB.
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(_in_background(_write, self._popen.stdin, f"{line}\n".encode(), last))

    def next_line(self, within_s: float) -> bytes | None:
        """The next line; None if there is none within that time; empty once there will be none any more."""
        if self._over:
            return b""
        try:
            line = self._lines.get(timeout=within_s) if within_s > 0 else self._lines.get_nowait()
        except queue.Empty:
            return None
        self._over = not line
        return line

    def words(self) -> str:
        """The end of what it wrote to standard error; after ``end`` too."""
        return (self._tail() if not self._stderr.closed else self._last_words).decode("utf-8", "replace")

    def forget_words(self) -> None:
        """Empty standard error: what comes after belongs to something else."""
        self._stderr.truncate(0)

    def trim_words(self) -> None:
        """Keep the end of standard error alone once it has grown too long."""
        if os.fstat(self._stderr.fileno()).st_size > STDERR_BYTES:
            tail = self._tail()
            self._stderr.truncate(0)
            self._stderr.write(tail)

    def kill_descendants(self) -> None:
        """Kill every process that it started, and those that they started; not itself."""
        _kill(self._descendants())

    def ends_within(self, seconds: float) -> bool:
        """Wait for it to end by itself; whether it did."""
        deadline = time.monotonic() + seconds
        pause = 0.001
        while self.running and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return not self.running

    def end(self) -> int:
        """Kill what is left of it and of its descendants, and free all that it held here; its return code.

        Safe to call twice. Where it had ended by itself, the return code is its own.
        """
        if self._popen.returncode is not None:
            return self._popen.returncode
        descendants = self._descendants()
        if self.running:
            self._popen.kill()
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM where only a zombie is left of the group
                os.killpg(self.pid, signal.SIGKILL)
        _kill(descendants)
        returncode = self._popen.wait()
        self._release()
        return returncode

    def _descendants(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return list(psutil.Process(self.pid).children(recursive=True))
        return []

    def _tail(self) -> bytes:
        size = os.fstat(self._stderr.fileno()).st_size
        self._stderr.seek(max(0, size - _KEPT_BYTES))
        return self._stderr.read(_KEPT_BYTES)

    def _release(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        while not self._over and time.monotonic() < deadline:
            self.next_line(0.05)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._last_words = self._tail()
        self._stderr.close()
        # A process that left the session and still holds a pipe keeps its thread waiting; so would closing.
        if not any(thread.is_alive() for thread in self._threads):
            for stream in (self._popen.stdin, self._popen.stdout):
                with suppress(OSError):  # there is no one to read what was still to be written
                    cast("IO[bytes]", stream).close()


def _append_only(descriptor: int) -> None:
    """Have writers go on at the new end after a cut; TemporaryFile's mode "a" does not, it opens by O_TMPFILE."""
    with suppress(ImportError):
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _in_background(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name="trial", daemon=True)
    thread.start()
    return thread


def _copy_lines(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    while line := stream.readline(LONGEST_LINE_BYTES):
        lines.put(line)
    lines.put(b"")


def _write(stream: IO[bytes], data: bytes, last: bool) -> None:
    with suppress(OSError, ValueError):  # it is gone: its end is seen where its lines are read
        stream.write(data)
        stream.flush()
        if last:
            stream.close()
