"""The environment of a trial's process: what must be set before torch, or the C library, is loaded."""

from __future__ import annotations

import os

MMAP_THRESHOLD_BYTES = 65_536
"""Of glibc's malloc, in trials on the CPU and in the scripts of plans for it."""
CPU_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES)}
"""glibc's mallopt(3), M_MMAP_THRESHOLD: tensors from 64 KiB on are given back to the system when they are freed.

Unset, the limit rises with what is freed, up to 32 MiB, and what a process holds depends on how its small objects
lie between tensors. A training run on a CPU under a memory ceiling should set it as well.
"""


def trial_environment(device: str, allocator: str) -> dict[str, str]:
    """All variables of a trial's process on ``cpu``, ``cuda`` or ``cuda:1``; what isn't named here is inherited.

    ``allocator`` is what the run sets as PYTORCH_CUDA_ALLOC_CONF; empty: nothing. ``cuda:1`` is still to be called
    that: other cards stay visible, so that numbers mean the same in the parent and in the trial. Threads are the
    user's own settings.
    """
    environment = dict(os.environ)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # no context on a card that the trial isn't about
        return environment | CPU_MALLOC
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # the second is what torch 2.9 renamed it to
        environment.pop(name, None)
    if allocator:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi and NVML number cards
    return environment
