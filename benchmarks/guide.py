"""transformers' single-GPU guide: BERT-large on a V100."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loops import (
    HuggingFaceAdafactor,
    HuggingFaceAdamW,
    Session,
    TrainerLoop,
    optimizer_of,
)
from reproduction import MIB, Setup, card_of, shape_of, structure
from rows import Row, whole

from planner.models import resolve_model
from planner.workload import Workload

GUIDE_CONTEXT_BYTES = 1343 * MIB
"""The guide's own figure: one tensor on its V100."""
_TORCH = (1, 9)
"""The guide, of January 2022, doesn't say. Both releases in use then keep every softmax's input; the older also runs
gelu in fp32 under autocast, without which the fp16 row that isn't checkpointed comes out 448 MiB lower."""
_GUIDE_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw_hf": HuggingFaceAdamW,
    "adafactor": HuggingFaceAdafactor,
    "bnb Adam8bit": optimizer_of("adamw_8bit"),
}


def setup_of(row: Row) -> Setup | str:
    """How the row was run."""
    name = next((name for name in _GUIDE_OPTIMIZERS if row["optimizer"].startswith(name)), None)
    if name is None:
        return f"optimizer {row['optimizer']!r} isn't modelled"
    accumulate = (whole(row["grad_accum"]) or 1) > 1
    checkpointed = row["grad_checkpointing"] == "y"
    return Setup(
        workload=Workload(spec=resolve_model("bert-large-uncased"), task="sequence-classification"),
        config=structure(
            precision=row["precision"],
            attention="eager",
            checkpointing="full" if checkpointed else "none",
        ),
        weights="float32",
        loop=TrainerLoop(optimizer=_GUIDE_OPTIMIZERS[name], zero_grads=True, labels=_one_label),
        loop_name=f"guide {name}",
        use_cache=False,
        card=card_of(row),
        shape=shape_of(row),
        micro_batches=2 if accumulate else 1,
        few_shapes=True,
        context_bytes=GUIDE_CONTEXT_BYTES,
        torch_release=_TORCH,
        notes=("torch isn't stated: 1.9",),
    )


def _one_label(session: Session) -> Any:
    return session.tokens(session.shape[0])
