"""Batching: the micro-batch, with accumulation keeping the effective batch as it was asked for."""

from __future__ import annotations

from planner.levers.base import Choice, Context, Lever


class BatchingLever(Lever):
    """Micro-batches that divide the effective batch, so that every configuration trains the same batches."""

    field = "micro_batch_size"

    def choices(self, context: Context) -> list[Choice]:
        """Every divisor of a card's share of the effective batch, up to the largest that is worth looking at."""
        total = context.effective_batch_size // context.gpus
        whole = "the effective batch" if context.gpus == 1 else "each card's share of the effective batch,"
        return [
            Choice(value=str(b), reason=f"{total // b} micro-batches of {b} are {whole} of {total}")
            for b in range(1, min(total, context.max_micro_batch_size) + 1)
            if total % b == 0
        ]
