"""Cheap trials: one process imports torch and transformers, and forks for each request.

A fork does exactly what a process of its own would do. So that it can, this one runs no operator: OpenMP's threads,
autograd's threads and CUDA's driver do not survive a fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TextIO

import psutil

from planner.config import InferenceConfig
from planner.measure.mapped_files import Range, map_again, mapped_ranges
from planner.measure.protocol import SERVING, TrialSpec

Answer = Callable[[str, TextIO], int]
"""Runs the trial that a line asks for, writes its lines to where answers go, and returns the exit code."""

_LIBRARIES = ("torch", "torch._dynamo", "torch.utils.checkpoint", "transformers", "accelerate", "planner.measure.trial")
"""What any trial imports: torch._dynamo alone, which checkpointing and optimizers ask for late, takes a second."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_CUDA_ERROR_NOT_INITIALIZED = 3  # cuda.h


def serve(answer: Answer, out: TextIO, requests: int = 0) -> int:
    """Answer requests, lines of a file descriptor, until their end; the exit code. Linux only.

    After a trial the line ``{"ended": <return code, negative for a signal>}`` follows, whatever became of it.

    Raises OSError where the kernel has no pidfd_open (before 5.3).
    """
    os.close(os.pidfd_open(os.getpid()))
    gc.disable()  # what is collected here leaves holes in pages that the forks share
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() would start the driver
    for name in _LIBRARIES:
        importlib.import_module(name)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a trial leaves behind becomes this process's child
    _say(out, {"phase": SERVING})
    lines = _Lines(requests)
    while (line := lines.next()) is not None:
        _prepare(line)
        returncode = _wait(_fork(answer, line, out), lines)
        _end_rest()
        if returncode is None:
            break
        _say(out, {"ended": returncode})
    return 0


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Lines:
    """Lines from a descriptor that can be watched: nothing waits in a buffer that select doesn't see."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pending = b""

    def next(self) -> str | None:
        """The next line, or None at the end."""
        while b"\n" not in self._pending:
            if not self.read():
                return None
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode("utf-8", "replace")

    def read(self) -> bool:
        """Take what is there, or wait for it; False at the end."""
        data = os.read(self.descriptor, 1 << 16)
        self._pending += data
        return bool(data)


def _say(out: TextIO, message: dict[str, object]) -> None:
    # a line of its own even if the trial ended in the middle of one
    out.write(f"\n{json.dumps(message)}\n")
    out.flush()


def _prepare(line: str) -> None:
    """Import what this trial and those after it need beyond _LIBRARIES, then make it fit to be shared."""
    with suppress(Exception):  # whatever is wrong with the request, the trial itself will say
        spec = TrialSpec.from_json(line)
        from planner.workload import model_class

        model_class(spec.workload.spec.model_type, spec.workload.architecture)
        if isinstance(spec.config, InferenceConfig):
            importlib.import_module("planner.inference.trial")
        elif spec.config.method != "full" and not _peft_starts_cuda(spec.device):
            importlib.import_module("peft.tuners.lora")
    if _driver_started():
        sys.exit("an import started CUDA's driver: a fork could not use it")
    gc.collect()
    gc.freeze()


def _peft_starts_cuda(device: str) -> bool:
    """peft imports bitsandbytes if it is there, and that asks the card for its compute capability."""
    return device != "cpu" and importlib.util.find_spec("bitsandbytes") is not None


def _driver_started() -> bool:
    """Whether cuInit was called in this process: its state is lost in a fork, and can't be had again there."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _CUDA_ERROR_NOT_INITIALIZED)


def _fork(answer: Answer, line: str, out: TextIO) -> int:
    server, mapped = os.getpid(), mapped_ranges()
    pid = os.fork()
    if pid == 0:
        _run_and_exit(answer, line, out, server, mapped)
    return pid


def _run_and_exit(answer: Answer, line: str, out: TextIO, server: int, mapped: list[Range]) -> NoReturn:
    """In the fork: what a process of its own does, then out without the server's exit handlers."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() != server:  # it died before that call
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        map_again(mapped)
        gc.enable()
        code = answer(line, out)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, lines: _Lines) -> int | None:
    """Until the trial's process ends: its return code; None, and it is killed, when no more requests will come."""
    process = os.pidfd_open(pid)
    watched, goes_on = [process, lines.descriptor], True
    while process not in select.select(watched, [], [])[0]:
        if not lines.read():
            goes_on = False
            watched = [process]
            os.kill(pid, signal.SIGKILL)
    os.close(process)
    with suppress(ProcessLookupError):  # not reaped yet, so the group's number is still its own
        os.killpg(pid, signal.SIGKILL)
    returncode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return returncode if goes_on else None


def _end_rest() -> None:
    """Kill and reap what the trial left behind outside its process group."""
    with suppress(ChildProcessError):  # none are left
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for process in psutil.Process().children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                os.waitpid(-1, 0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
