"""The ceiling and what is taken off it: what a configuration needs against what a card gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.calibration import DEFAULT_RISK, Margin, margin
from planner.config import Config

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "workspace")
"""The parts of a breakdown."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a configuration needs on the card, part by part. All in bytes; the fields of plan.json."""

    peak_allocated_bytes: int
    """``torch.cuda.max_memory_allocated()`` of a run."""
    peak_reserved_bytes: int
    """``torch.cuda.max_memory_reserved()``: what the caching allocator holds."""
    context_bytes: int
    """The CUDA context with its loaded kernels, outside the allocator."""
    margin_bytes: int
    """Kept free for what the simulation doesn't know (and for what the user asked to keep free)."""
    total_bytes: int
    """Reserved, context and margin: what must be under the ceiling."""
    ceiling_bytes: int
    """What the card can give."""
    breakdown: Mapping[str, int]
    """Allocated bytes at the peak by parameters, gradients, optimizer, activations, temporaries, workspace;
    empty where the other figures are a lower bound that was over the ceiling."""
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """``peak_allocated_bytes`` and ``peak_reserved_bytes`` of each phase of a run: load, first_step, steady_step,
    evaluate, resume, and epoch: many steps over batches of different lengths. Empty where only two steps at one shape
    were looked at."""

    @property
    def fits(self) -> bool:
        """Whether the total is under the ceiling."""
        return self.total_bytes <= self.ceiling_bytes


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A card's memory and what is kept off the allocator."""

    ceiling_bytes: int
    """What the card can give."""
    context_bytes: int
    """The CUDA context with its loaded kernels."""
    headroom_bytes: int = 0
    """Kept free for other uses of the card."""
    risk: float = DEFAULT_RISK
    """Probability, at most, that a run needs more than its prediction and margin."""
    device: str = "cuda"
    """Kind of the card: cuda or cpu."""

    def margin(self, config: Config) -> Margin:
        """What is kept free for what the simulation doesn't know."""
        return margin(config, self.risk, device=self.device)

    def process_bytes(self, config: Config) -> int:
        """What a process may hold on the card: the ceiling without headroom and margin."""
        return int((self.ceiling_bytes - self.headroom_bytes) / (1 + self.margin(config).fraction))

    def allocator_bytes(self, config: Config) -> int:
        """What the allocator may reserve: that without the context."""
        return self.process_bytes(config) - self.context_bytes

    def memory(
        self,
        config: Config,
        *,
        allocated_bytes: int,
        reserved_bytes: int,
        breakdown: Mapping[str, int],
        phases: Mapping[str, Mapping[str, int]] | None = None,
        context_bytes: int | None = None,
    ) -> Memory:
        """Add what lies outside the allocator; ``context_bytes``: as measured with this configuration."""
        context_bytes = self.context_bytes if context_bytes is None else context_bytes
        held = reserved_bytes + context_bytes
        margin = math.ceil(self.margin(config).fraction * held) + self.headroom_bytes
        return Memory(
            peak_allocated_bytes=allocated_bytes,
            peak_reserved_bytes=reserved_bytes,
            context_bytes=context_bytes,
            margin_bytes=margin,
            total_bytes=held + margin,
            ceiling_bytes=self.ceiling_bytes,
            breakdown=breakdown,
            phases=phases or {},
        )
