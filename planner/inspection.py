"""What a model is, once built: facts that the levers and the plan need, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of one model with a task's head."""

    architecture: str
    """The transformers class."""
    parameters: int
    """Number of parameters, the head included."""
    stacks: tuple[int, ...]
    """Repeated layers of each stack (those that activation checkpointing counts)."""
    supports_sdpa: bool
    """Whether transformers has sdpa attention for it."""
    supports_checkpointing: bool
    """Whether transformers has activation checkpointing for it."""
    vocab_size: int
    """Entries of the vocabulary; 0 where there is none."""

    @property
    def layers(self) -> int:
        """Repeated layers of all stacks."""
        return sum(self.stacks)


def inspect_model(workload: Workload) -> ModelFacts:
    """Build the model without data and look at it."""
    import torch

    from planner.levers.checkpointing import stack_sizes

    model = workload.build_model(attention="eager", dtype=torch.float32)
    return ModelFacts(
        architecture=workload.architecture,
        parameters=sum(p.numel() for p in model.parameters()),
        stacks=tuple(stack_sizes(model)),
        supports_sdpa=bool(getattr(model, "_supports_sdpa", False)),
        supports_checkpointing=bool(getattr(model, "supports_gradient_checkpointing", False)),
        vocab_size=int(getattr(model.config, "vocab_size", 0) or 0),
    )
