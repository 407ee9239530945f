"""Tools that fine-tune language models from a YAML file: TRL, LLaMA-Factory, Axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from planner.emit.engines.base import Document, Engine, Row, yaml_text
from planner.emit.engines.trainer import arguments_of, merged
from planner.emit.tasks import TASK_WORDS, learning_rate
from planner.errors import Problem

_CHECKPOINTING = "a layer keeps its input alone and is computed twice"
_LENGTH = "tokens; activations grow with it"
_MICRO = "sequences in one pass; sets the peak of the activations"
_RANK = "gradients and optimizer state grow with the rank, and are small"
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash2": "flash_attention_2"}
_LANGUAGE = {
    "task": ("causal-lm",),
    "offload": ("none",),
    "loss": ("standard",),
    "checkpointing": ("none", "full"),
    "parallelism": ("none", "ddp"),
    "quantization": ("none", "int8", "nf4"),
}


class TRL(Engine):
    """``trl sft --config sft.yaml``."""

    name = "trl"
    about = "supervised fine-tuning with TRL"
    run = "trl sft --config sft.yaml --dataset_name DATASET"
    accepted: ClassVar[Mapping[str, tuple[str, ...]]] = {**_LANGUAGE, "long_texts": ("truncate", "pack")}

    def problems(self, plan: Document) -> list[Problem]:
        """What neither TRL nor the Trainer below it can do."""
        return merged(super().problems(plan), plan)

    def files(self, plan: Document) -> dict[str, str]:
        """SFTConfig's, ModelConfig's and the script's fields in one file, as TRL's parser takes them."""
        config, lora = plan["config"], plan["config"]["lora"]
        quantized = config["quantization"]
        weights = "bfloat16" if config["precision"] == "bf16" or config["method"] != "full" else "float32"
        rows: list[Row] = [
            ("model_name_or_path", plan["workload"]["model"], ""),
            ("dtype", weights, "type of the weights"),
            ("attn_implementation", _ATTENTION[config["attention"]], ""),
            ("max_length", config["seq_len"], _LENGTH),
            ("packing", plan["workload"].get("long_texts") == "pack", ""),
        ]
        if config["method"] != "full":
            rows += [
                ("use_peft", True, "frozen weights need no gradient and no optimizer state"),
                ("lora_r", lora["r"], _RANK),
                ("lora_alpha", lora["alpha"], ""),
                ("lora_dropout", lora["dropout"], ""),
                ("lora_target_modules", lora["target_modules"], ""),
            ]
        if quantized != "none":
            rows += [
                ("load_in_4bit", quantized == "nf4", "about half a byte a frozen weight"),
                ("load_in_8bit", quantized == "int8", "a byte a frozen weight"),
                ("use_bnb_nested_quant", quantized == "nf4", ""),
            ]
        rows += [(name, value, _comment(name)) for name, value in arguments_of(plan).items()]
        return {"sft.yaml": yaml_text(self.header(plan), rows)}


def _comment(name: str) -> str:
    return {"per_device_train_batch_size": _MICRO, "gradient_checkpointing": _CHECKPOINTING}.get(name, "")


class LlamaFactory(Engine):
    """``llamafactory-cli train llamafactory.yaml``."""

    name = "llama-factory"
    about = "LLaMA-Factory's YAML"
    run = "llamafactory-cli train llamafactory.yaml (add dataset and template)"
    accepted: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **_LANGUAGE,
        "long_texts": ("truncate", "pack"),
        "precision": ("fp32", "tf32", "fp16-amp", "bf16-amp", "bf16"),
    }

    def files(self, plan: Document) -> dict[str, str]:
        """Fields of src/llamafactory/hparams (model, data, finetuning) and of TrainingArguments."""
        config, lora = plan["config"], plan["config"]["lora"]
        attention = {"eager": "disabled", "sdpa": "sdpa", "flash2": "fa2"}[config["attention"]]
        rows: list[Row] = [
            ("model_name_or_path", plan["workload"]["model"], ""),
            ("stage", "sft", ""),
            ("do_train", True, ""),
            ("finetuning_type", "full" if config["method"] == "full" else "lora", ""),
            ("flash_attn", attention, ""),
            ("cutoff_len", config["seq_len"], _LENGTH),
            ("packing", plan["workload"].get("long_texts") == "pack", ""),
            ("disable_gradient_checkpointing", config["checkpointing"] == "none", _CHECKPOINTING),
            ("use_reentrant_gc", False, ""),
            ("pure_bf16", config["precision"] == "bf16", "2 bytes a weight, and as much for its gradient"),
        ]
        if config["method"] != "full":
            rows += [
                ("lora_rank", lora["r"], _RANK),
                ("lora_alpha", lora["alpha"], ""),
                ("lora_dropout", lora["dropout"], ""),
                ("lora_target", "all", ""),
            ]
        if config["quantization"] != "none":
            rows += [
                ("quantization_method", "bnb", ""),
                ("quantization_bit", 4 if config["quantization"] == "nf4" else 8, "bits of a frozen weight"),
            ]
        own = ("gradient_checkpointing", "gradient_checkpointing_kwargs", "prediction_loss_only", "warmup_steps")
        schedule = {name: value for name, value in arguments_of(plan).items() if name not in own}
        schedule["warmup_ratio"] = 0.05  # its transformers may be older than a share in warmup_steps
        rows += [(name, value, _comment(name)) for name, value in schedule.items()]
        return {"llamafactory.yaml": yaml_text(self.header(plan), rows)}


class Axolotl(Engine):
    """``axolotl train axolotl.yaml``."""

    name = "axolotl"
    about = "Axolotl's YAML"
    run = "axolotl train axolotl.yaml (add datasets)"
    accepted: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **_LANGUAGE,
        "long_texts": ("truncate", "pack"),
        "precision": ("fp32", "tf32", "fp16-amp", "bf16-amp", "bf16"),
    }

    def files(self, plan: Document) -> dict[str, str]:
        """Fields of AxolotlInputConfig (src/axolotl/utils/schemas)."""
        config, lora, packs = plan["config"], plan["config"]["lora"], plan["workload"].get("long_texts") == "pack"
        attention = {"eager": "eager_attention", "sdpa": "sdp_attention", "flash2": "flash_attention"}
        rows: list[Row] = [
            ("base_model", plan["workload"]["model"], ""),
            ("sequence_len", config["seq_len"], _LENGTH),
            ("sample_packing", packs, ""),
            ("group_by_length", not packs, "less padding"),
            ("micro_batch_size", config["micro_batch_size"], _MICRO),
            ("gradient_accumulation_steps", config["gradient_accumulation_steps"], ""),
            ("optimizer", arguments_of(plan)["optim"], ""),
            ("learning_rate", learning_rate("causal-lm", config), ""),
            ("lr_scheduler", "linear", ""),
            ("warmup_ratio", 0.05, ""),
            ("num_epochs", TASK_WORDS["causal-lm"].epochs, ""),
            ("max_grad_norm", 1.0, ""),
            ("gradient_checkpointing", config["checkpointing"] == "full", _CHECKPOINTING),
            (attention[config["attention"]], True, ""),
            *_axolotl_precision(config["precision"]),
            ("seed", plan["request"].get("seed") or 0, ""),
            ("output_dir", "output", ""),
        ]
        if config["checkpointing"] == "full":
            rows.append(("gradient_checkpointing_kwargs", {"use_reentrant": False}, ""))
        if config["method"] != "full":
            rows += [
                ("adapter", "qlora" if config["quantization"] == "nf4" else "lora", ""),
                ("lora_r", lora["r"], _RANK),
                ("lora_alpha", lora["alpha"], ""),
                ("lora_dropout", lora["dropout"], ""),
                ("lora_target_linear", True, ""),
                ("load_in_4bit", config["quantization"] == "nf4", "about half a byte a frozen weight"),
                ("load_in_8bit", config["quantization"] == "int8", "a byte a frozen weight"),
            ]
        return {"axolotl.yaml": yaml_text(self.header(plan), rows)}


def _axolotl_precision(precision: str) -> list[Row]:
    """``bfloat16`` is for weights without autocast, ``bf16`` for autocast (its config.py says so beside each)."""
    words: dict[str, Any] = {
        "bf16": precision == "bf16-amp",
        "fp16": precision == "fp16-amp",
        "bfloat16": precision == "bf16",
        "tf32": precision == "tf32",
    }
    return [(name, value, "") for name, value in words.items()]
