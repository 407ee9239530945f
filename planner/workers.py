"""Who runs a trial, and whether it still lives."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil


@cache
def this_worker() -> dict[str, Any]:
    """Who this process is: where its number means something, its number, and when it began."""
    host = [platform.node()]
    with suppress(OSError):  # Linux: containers may share a name and even a kernel, but not their processes' numbers
        host.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        host.append(str(Path("/proc/self/ns/pid").readlink()))
    return {"host": " ".join(host), "pid": os.getpid(), "created": psutil.Process().create_time()}


def is_alive(worker: Mapping[str, Any]) -> bool:
    """Whether a worker of this host still runs: its number may have gone to another process."""
    try:
        process = psutil.Process(worker["pid"])
        same = abs(process.create_time() - float(worker["created"])) < 1
        return same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
