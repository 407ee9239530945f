"""How the processes of an emitted script are started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def launch_commands(config: Mapping[str, Any], *, on_cpu: bool) -> tuple[str, str]:
    """The command that reads accelerate.yaml, and one that needs no settings."""
    gpus = config.get("gpus") or 1
    alone = "python" if gpus == 1 else f"torchrun --nproc_per_node {gpus}"
    cpu = "ACCELERATE_USE_CPU=true " if on_cpu else ""
    return "accelerate launch --config_file accelerate.yaml train.py --data FILE", f"{cpu}{alone} train.py --data FILE"
