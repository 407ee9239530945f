"""What the driver says of a card and of the processes on it, where NVML is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def card(device: torch.device) -> Iterator[Any]:
    """The module and the card's handle; None for both where NVML isn't there."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device))
    except Exception:  # no package, no library, a card that it doesn't list (MIG): there are other ways to know
        yield None, None
        return
    try:
        yield pynvml, handle
    finally:
        pynvml.nvmlShutdown()


def free_bytes(device: torch.device) -> int | None:
    """What the driver says that nobody holds, asked without making a context; None where NVML isn't there."""
    with card(device) as (module, handle):
        return None if module is None else int(module.nvmlDeviceGetMemoryInfo(handle).free)


def process_bytes(device: torch.device) -> int | None:
    """What this process holds on the card; None where NVML isn't there, or doesn't know its number."""
    with card(device) as (module, handle):
        if module is None:
            return None
        own = [p for p in module.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
        return int(own[0].usedGpuMemory) if own and own[0].usedGpuMemory else None
