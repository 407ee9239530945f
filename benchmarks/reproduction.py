"""What a row's authors ran, as data, and the helpers that families of rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loops import (
    Loop,
)
from rows import Row, whole

from planner.config import TrainingConfig
from planner.hardware import Card, find_card
from planner.memory.polynomials import Shape
from planner.recording.record import Recording
from planner.workload import Workload

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a row's authors ran."""

    workload: Workload
    config: TrainingConfig
    """Precision, attention, checkpointing and method; the rest is the loop's."""
    weights: str
    """``float32``, ``float16`` or ``bfloat16``."""
    loop: Loop
    loop_name: str
    """Names the loop and its settings in the cache."""
    card: Card
    shape: Shape
    kbit_preparation: bool = False
    """Whether peft.prepare_model_for_kbit_training ran between quantization and adapters."""
    micro_batches: int = 1
    context_bytes: int = 0
    """Outside the allocator, for rows measured from outside; the source's own figure where it gives one."""
    few_shapes: bool = False
    """So few rows share this structure that recording each at its own shape is less work than a fit."""
    use_cache: bool = True
    """As transformers' configurations have it; the Trainer turns it off with activation checkpointing."""
    unrolled: Callable[[Recording], Recording] | None = None
    """Makes the whole run from a recording of its beginning, where the loop records no more than that."""
    caveats: tuple[str, ...] = ()
    """What the model code of that time did otherwise: said unless it is that code that is recorded."""
    remaining: tuple[str, ...] = ()
    """What differs from what the source ran whatever model code is recorded."""
    measured_from: int | None = None
    """The iteration before which the script resets the peak and empties the cache; None where it doesn't."""
    beside_checkpoint: Mapping[str, int] | None = None
    """None unless the checkpoint passed over the card in fp32 (loading.py); then its tensors that the model's
    parameters don't have: name to elements."""
    torch_release: tuple[int, int] | None = None
    """The source's torch, where it did something that matters otherwise (recording.kernels.Target)."""
    notes: tuple[str, ...] = ()
    """What else was assumed."""


def card_of(row: Row) -> Card:
    """The row's card, by its whole name: a laptop's is slower and holds other sizes than the desktop's."""
    vram_gib = whole(row["vram_gb"])
    return find_card(row.gpu, vram_bytes=vram_gib * GIB if vram_gib else None)


def structure(**fields: Any) -> TrainingConfig:
    """A configuration's structure; shapes and optimizer are the loop's."""
    ones = dict.fromkeys(("micro_batch_size", "seq_len", "max_tokens_per_micro_batch"), 1)
    ones |= dict.fromkeys(("gradient_accumulation_steps", "effective_batch_size"), 1)
    return TrainingConfig(**ones, **fields)


def shape_of(row: Row) -> Shape:
    """Micro-batch and length."""
    assert row.micro_batch is not None and row.seq_len is not None
    return row.micro_batch, row.seq_len


def known(text: str | None) -> tuple[str, ...]:
    """One caveat, or none."""
    return (text,) if text else ()
