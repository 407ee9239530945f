"""What is run: a model, padded texts as they come to it, and how many tokens it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_MAX_NEW_TOKENS = 256
"""Tokens that a generating task writes for a request that doesn't say how many: a paragraph or two."""


@dataclass(frozen=True, kw_only=True)
class InferenceWorkload(Workload):
    """A model that answers texts."""

    max_new_tokens: int = 0
    """Tokens that a generating task writes for each request, at most."""

    def _make_config(self, **changes: Any) -> Any:
        return super()._make_config(**{"use_cache": self.facts.generates, **changes})

    def make_batch(
        self, micro_batch_size: int, seq_len: int, *, device: str = "meta", seed: int = 0
    ) -> dict[str, Tensor]:
        """Texts on their way to the model: int64 [b, s] each, without labels.

        Of a generating task the padding is on the left, where the model goes on at the right end.
        """
        batch = super().make_batch(micro_batch_size, seq_len, device=device, seed=seed)
        for name in ("labels", "decoder_input_ids"):
            batch.pop(name, None)
        if self.facts.generates and device != "meta" and seq_len > 1:
            # a single prompt has no padding
            batch["attention_mask"][-1, -1], batch["attention_mask"][-1, 0] = 1, int(len(batch["attention_mask"]) == 1)
        return batch

    @property
    def sequences_per_input(self) -> int:
        """Rows of a batch that one input takes: one, also where training takes pairs."""
        return 1

    def tokens_per_sequence(self, seq_len: int) -> int:
        """Tokens of one input."""
        return seq_len
