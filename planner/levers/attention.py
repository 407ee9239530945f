"""Attention: the implementation that transformers is asked for."""

from __future__ import annotations

from planner.levers.base import Choice, Context, Lever, ruled_out_on_cpu


class AttentionLever(Lever):
    """eager keeps S x S matrices for the backward pass; sdpa runs a fused kernel; flash2 the flash_attn package's."""

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
        flash2_on_cpu = {"flash2": "the flash_attn package has CUDA kernels alone"}
        return ruled_out_on_cpu([sdpa, eager, _flash2(context)], context, flash2_on_cpu)


def _flash2(context: Context) -> Choice:
    """Its kernels need what torch's own flash attention needs; it takes padding, which torch's doesn't."""
    major, minor = context.card.compute_capability
    problem = f"not for {context.spec.model_type}: {context.flash2_obstacle}" if context.flash2_obstacle else ""
    if not problem and not context.card.supports_bf16:
        problem = f"flash_attn needs compute capability 8.0, this card has {major}.{minor}"
    return Choice(
        value="flash2",
        valid=not problem,
        swept=False,
        reason=problem or "the flash_attn package: padding is taken out before its kernels, fp16 and bf16 alone",
    )


def conflict(attention: str, precision: str) -> str | None:
    """Why an attention can't run in a precision, or None."""
    if attention == "flash2" and precision in ("fp32", "tf32"):
        return f"flash2 computes in fp16 and bf16 alone, not in {precision}"
    return None
