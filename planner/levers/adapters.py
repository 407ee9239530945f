"""Adapters: train low-rank matrices beside a frozen base (LoRA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.config import TrainingConfig
from planner.levers.base import Choice, Context, Lever

if TYPE_CHECKING:
    from torch import nn


_TRAINED_WHOLE = {
    # peft finds the modules that it saves whole by their names' ends, so DistilBERT's pre_classifier is one of them
    "SEQ_CLS": ["pre_classifier"],
    "TOKEN_CLS": ["classifier", "score"],
}
"""peft's task to modules that are new and get no adapters: peft fails on a module that it is to wrap twice."""


class AdaptersLever(Lever):
    """The method: full fine-tuning, LoRA, or LoRA on a quantized base."""

    field = "method"
    lowers_memory = (("lora", "full"), ("qlora", "lora"))

    def choices(self, context: Context) -> list[Choice]:
        """One rung of the ladder at a time: the search comes down only when a rung doesn't fit."""
        reasons = {
            "full": "every parameter is trained, as asked",
            "lora": "frozen base weights need no gradient and no optimizer state",
            "qlora": "a quantized base needs a quarter (nf4) or a half (int8) of the memory of 16-bit weights",
        }
        return [Choice(value=context.method, reason=reasons[context.method])]

    def change_model(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """Wrap with peft as the emitted script does: what is trained is fp32 under autocast, the head included."""
        if config.method == "full":
            return model
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        assert config.lora is not None
        task = _peft_task(model)
        settings = LoraConfig(
            r=config.lora.r,
            lora_alpha=config.lora.alpha,
            lora_dropout=config.lora.dropout,
            target_modules=config.lora.target_modules,
            task_type=task,
            modules_to_save=["pooler"] if task == "SEQ_CLS" else None,
            exclude_modules=_TRAINED_WHOLE.get(task or ""),
        )
        base: Any = model
        wrapped: nn.Module = get_peft_model(base, settings)
        if config.precision.endswith("amp"):
            for parameter in wrapped.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            # peft/tuners/tuners_utils.py, _cast_input_dtype: else each adapted layer makes an fp32 copy of its input
            adapted: list[Any] = [module for module in wrapped.modules() if isinstance(module, BaseTunerLayer)]
            for layer in adapted:
                layer.cast_input_dtype_enabled = False
        if config.quantization != "none":
            from planner.recording.quantized_lora import adapt

            adapt(wrapped, autocast=config.precision.endswith("amp"))
        return wrapped


def _peft_task(model: nn.Module) -> str | None:
    """What peft wants to know to keep a fresh classification head trainable."""
    name = type(model).__name__
    endings = {
        "ForSequenceClassification": "SEQ_CLS",
        "ForTokenClassification": "TOKEN_CLS",
        "ForConditionalGeneration": "SEQ_2_SEQ_LM",
        "ForCausalLM": "CAUSAL_LM",
        "LMHeadModel": "CAUSAL_LM",
        "Model": "FEATURE_EXTRACTION",
    }
    return next((task for ending, task in endings.items() if name.endswith(ending)), None)
