"""How several processes share an emitted script's work: what is not shared, and how they are started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NO_SHARDS = {
    "adamw_8bit": "bitsandbytes steps on whole weights",
    "paged_adamw_8bit": "bitsandbytes steps on whole weights",
    "adafactor": "torch's Adafactor divides by means over whole rows and columns, which a shard has not",
}
"""Optimizers that know nothing of sharded weights, and why."""


def sharding_clash(config: Mapping[str, Any]) -> str | None:
    """Why ``parallelism: fsdp2`` doesn't go with a configuration's other values (``config`` of plan.json), or None."""
    if config.get("parallelism") != "fsdp2":
        return None
    if config["optimizer"] in _NO_SHARDS:
        reason = _NO_SHARDS[config["optimizer"]]
        return f"{config['optimizer']} doesn't go with it: {reason}; accepted: adamw_fused, adamw_foreach, sgd"
    if config["offload"] != "none":
        return f"offload {config['offload']} doesn't go with it: weights in shards have no whole copy to move"
    if config["method"] == "qlora":
        return "method qlora doesn't go with it: packed weights of a few bits can't be cut; take lora"
    if config["precision"] == "bf16-master":
        return "precision bf16-master doesn't go with it: the shards are fp32 master weights in bf16-amp already"
    return None


def launch_commands(config: Mapping[str, Any], *, on_cpu: bool) -> tuple[str, str]:
    """The command that reads accelerate.yaml, and one that needs no settings."""
    gpus = config.get("gpus") or 1
    alone = "python" if gpus == 1 else f"torchrun --nproc_per_node {gpus}"
    cpu = "ACCELERATE_USE_CPU=true " if on_cpu else ""
    return "accelerate launch --config_file accelerate.yaml train.py --data FILE", f"{cpu}{alone} train.py --data FILE"
