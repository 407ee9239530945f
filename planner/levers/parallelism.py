"""Parallelism: what several cards of one kind share in a step."""

from __future__ import annotations

from collections.abc import Iterator

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever

_SHARDED_OPTIMIZERS = ("adamw_fused", "adamw_foreach", "sgd")


def conflict(config: TrainingConfig) -> str | None:
    """Why a configuration's parallelism doesn't go with its other values, or None."""
    if config.gpus > 1 and config.offload != "none":
        return f"offload {config.offload} is for one card: every process would keep a copy in the host's memory"
    if config.parallelism != "fsdp2":
        return None
    return next((reason for holds, reason in _clashes(config) if holds), None)


def _clashes(config: TrainingConfig) -> Iterator[tuple[bool, str]]:
    """What fsdp2 doesn't go with: whether it is so here, and why."""
    # accelerate/utils/fsdp_utils.py, fsdp2_prepare_model: Params4bit of bytes are left out of the shards
    yield config.quantization != "none", f"fsdp2 can't cut {config.quantization} weights: packed bytes with a state"
    others = f"{config.optimizer} has no shards: its scales span whole weights; fsdp2 goes with adamw_fused, sgd"
    yield config.optimizer not in _SHARDED_OPTIMIZERS, others
    masters = "fsdp2 with bf16-amp keeps fp32 weights in shards already: bf16-master would keep them twice"
    yield config.precision == "bf16-master", masters
    scaler = "fsdp2 doesn't go with fp16-amp here: its step in fp16 alone overflows where autocast's does not"
    yield config.precision == "fp16-amp", scaler
    adapters = "fsdp2 wants trained weights of one type: with adapters choose bf16-amp or fp32"
    yield config.method != "full" and config.precision == "bf16", adapters
    loss = "fsdp2 gathers the output layer when its module runs: a loss that takes it over would see a shard"
    yield config.loss != "standard", loss


class ParallelismLever(Lever):
    """none on one card; on several, ddp (all have everything) or fsdp2 (each has its share)."""

    field = "parallelism"
    lowers_memory = (("fsdp2", "ddp"),)

    def choices(self, context: Context) -> list[Choice]:
        """With one card there is nothing to share; with several, both are swept: neither changes results."""
        several = context.gpus > 1
        one = "one card has nobody to share with: ask for --gpus 2 or more"
        ddp = "every card has all weights, gradients and state; only the gradients' sums cross the link"
        fsdp2 = f"weights, gradients and state in {context.gpus} shards; a layer is gathered when it runs, in "
        fsdp2 += "the precision that it computes in (with bf16-amp its norms too)"
        return [
            Choice(value="none", valid=not several, swept=not several, reason="one card holds everything"),
            Choice(value="ddp", valid=several, swept=several, reason=ddp if several else one),
            Choice(value="fsdp2", valid=several, swept=several, reason=fsdp2 if several else one),
        ]
