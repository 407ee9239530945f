"""Adapters: train low-rank matrices beside a frozen base (LoRA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever

if TYPE_CHECKING:
    from torch import nn


class AdaptersLever(Lever):
    """The method: full fine-tuning, LoRA, or LoRA on a quantized base."""

    field = "method"
    lowers_memory = (("lora", "full"), ("qlora", "lora"))

    def choices(self, context: Context) -> list[Choice]:
        """One rung of the ladder at a time: the search comes down only when a rung doesn't fit."""
        reasons = {
            "full": "every parameter is trained, as asked",
            "lora": "frozen base weights need no gradient and no optimizer state",
            "qlora": "a 4-bit base needs a quarter of the memory of 16-bit weights",
        }
        return [Choice(value=context.method, reason=reasons[context.method])]

    def change_model(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """Wrap with peft; adapters are fp32 whatever the base is (peft's autocast_adapter_dtype)."""
        if config.method == "full":
            return model
        from peft import LoraConfig, get_peft_model

        assert config.lora is not None
        wrapped: Any = get_peft_model(
            model,
            LoraConfig(
                r=config.lora.r,
                lora_alpha=config.lora.alpha,
                lora_dropout=config.lora.dropout,
                target_modules=config.lora.target_modules,
                task_type=_peft_task(model),
            ),
        )
        return wrapped  # type: ignore[no-any-return]


def _peft_task(model: nn.Module) -> str | None:
    """What peft wants to know to keep a fresh classification head trainable."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    if name.endswith("ForTokenClassification"):
        return "TOKEN_CLS"
    if name.endswith("ForConditionalGeneration"):
        return "SEQ_2_SEQ_LM"
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "CAUSAL_LM"
    return None
