"""What a model is, once built: facts that the levers and the plan need, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.workload import Workload, token_table

if TYPE_CHECKING:
    from torch import Tensor, nn


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
    plain_linears: bool = True
    """Whether its layers multiply by ``nn.Linear``, and not by transformers' Conv1D."""
    layers_name: str | None = None
    """Dotted name of the first stack's module list, such as ``model.layers``; None where layers stand in none."""
    table_parameters: int = 0
    """Of the table of token embeddings; 0 where the output layer has the same weights."""

    @property
    def layers(self) -> int:
        """Repeated layers of all stacks."""
        return sum(self.stacks)


def inspect_model(workload: Workload) -> ModelFacts:
    """Build the model without data and look at it."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from planner.levers.checkpointing import stack_sizes

    model = workload.build_model(attention="eager", dtype=torch.float32)
    table = token_table(model)
    return ModelFacts(
        architecture=workload.architecture,
        parameters=sum(p.numel() for p in model.parameters()),
        stacks=tuple(stack_sizes(model)),
        supports_sdpa=bool(getattr(model, "_supports_sdpa", False)),
        supports_checkpointing=bool(getattr(model, "supports_gradient_checkpointing", False)),
        vocab_size=int(getattr(model.config, "vocab_size", 0) or 0),
        plain_linears=not any(isinstance(module, Conv1D) for module in model.modules()),
        layers_name=_layers_name(model),
        table_parameters=sum(p.numel() for p in table.parameters()) if table is not None else 0,
    )


def _layers_name(model: nn.Module) -> str | None:
    from planner.levers.checkpointing import checkpointing_layers

    first = next(iter(checkpointing_layers(model)), None)
    path = next((name for name, module in model.named_modules() if module is first), "")
    return path.rpartition(".")[0] or None


def fused_loss_obstacle(workload: Workload) -> str:
    """Why the loss can't take over the model's output layer, one clause; empty where it can."""
    if workload.facts.loss == "contrastive":
        return "vectors are compared, and there is no output layer"
    if workload.facts.new_head:
        return "the task's head has few outputs, so its logits are small"
    from planner.levers.fused_loss import obstacle

    return obstacle(*_tried(workload, attention="eager"))


def flash2_obstacle(workload: Workload) -> str:
    """Why the model can't run on the flash_attn package, one clause; empty where it can."""
    if workload.spec.config.get("is_encoder_decoder"):
        return "transformers takes the padding of a decoder's queries from the encoder's mask"
    from planner.recording import flash_attention

    model, inputs = _tried(workload, attention="flash2")
    if not getattr(model, "_supports_flash_attn", False):
        return "transformers has no flash attention for it"
    return "" if flash_attention.is_used_by(model, inputs) else "its code chooses its attention in another way"


def _tried(workload: Workload, *, attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and inputs to look at what its forward pass does."""
    import torch

    model = workload.build_model(attention=attention, dtype=torch.float32).eval()
    return model, {name: tensor for name, tensor in workload.make_batch(1, 8).items() if name != "labels"}
