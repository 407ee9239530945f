"""Attention: the implementation that transformers is asked for."""

from __future__ import annotations

from planner.levers.base import Choice, Context, Lever


class AttentionLever(Lever):
    """eager keeps S x S matrices for the backward pass; sdpa runs one fused kernel that doesn't."""

    field = "attention"
    lowers_memory = (("sdpa", "eager"),)
    loss_tolerance = {"sdpa": 1e-4}  # noqa: RUF012

    def choices(self, context: Context) -> list[Choice]:
        """sdpa where the model's code has it: it computes the same from less memory traffic."""
        if context.supports_sdpa:
            sdpa = Choice(value="sdpa", reason="fused attention: no S x S matrix is kept, and less memory traffic")
            eager = Choice(value="eager", swept=False, reason="the same result as sdpa from more memory and time")
        else:
            sdpa = Choice(
                value="sdpa", valid=False, reason=f"transformers has no sdpa attention for {context.spec.model_type}"
            )
            eager = Choice(value="eager", reason="the only attention of this model in transformers")
        return [sdpa, eager]
