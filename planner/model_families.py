"""What each model family can do: its tasks, its longest input, and whether fp16 holds its activations.

The tables cover the bundled models and their near relatives, so that planning them imports neither torch nor
transformers; any other family is looked up in the installed transformers. Tests hold the tables against it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from planner.tasks import TASK_FACTS

Kind = Literal["encoder", "decoder", "seq2seq", "vision", "speech"]
Positions = Literal["table", "after-padding", "relative", "patches", "target"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One transformers ``model_type``."""

    kind: Kind
    """What the network is."""
    tasks: tuple[str, ...]
    """Tasks that transformers has a class for, the default for fine-tuning first."""
    positions: Positions = "table"
    """Where the length limit comes from: a table of ``max_position_embeddings`` rows (or rotary positions trained up to
    there); a table whose first ``pad_token_id + 1`` rows serve padding; no table at all; image patches; or the
    decoder's ``max_target_positions``."""


_WHOLE_TEXT = ("sequence-classification", "multi-label-classification", "regression", "reranking")
_ENCODER = (*_WHOLE_TEXT, "token-classification", "masked-lm", "embedding")
_DECODER = ("causal-lm", *_WHOLE_TEXT, "token-classification", "embedding")
_PLAIN_DECODER = ("causal-lm", *_WHOLE_TEXT, "embedding")
_SEQ2SEQ = ("seq2seq-lm", *_WHOLE_TEXT, "token-classification")

FAMILIES: Mapping[str, Family] = {
    **{
        name: Family(kind="encoder", tasks=_ENCODER)
        for name in ("bert", "distilbert", "albert", "electra", "mobilebert", "modernbert", "roformer")
    },
    **{
        name: Family(kind="encoder", tasks=_ENCODER, positions="after-padding")
        for name in ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")
    },
    **{name: Family(kind="encoder", tasks=_ENCODER, positions="relative") for name in ("deberta", "deberta-v2")},
    **{
        name: Family(kind="decoder", tasks=_DECODER)
        for name in (
            *("gpt2", "gpt_neo", "gpt_neox", "gpt_bigcode", "llama", "mistral", "mixtral", "qwen2", "qwen3"),
            *("gemma", "gemma2", "phi", "phi3", "stablelm", "starcoder2", "smollm3"),
        )
    },
    **{name: Family(kind="decoder", tasks=_PLAIN_DECODER) for name in ("opt", "gptj", "gemma3_text", "olmo2")},
    "bloom": Family(kind="decoder", tasks=_DECODER, positions="relative"),
    **{name: Family(kind="seq2seq", tasks=_SEQ2SEQ, positions="relative") for name in ("t5", "mt5", "umt5")},
    "longt5": Family(kind="seq2seq", tasks=("seq2seq-lm",), positions="relative"),
    **{name: Family(kind="seq2seq", tasks=("seq2seq-lm", *_WHOLE_TEXT)) for name in ("bart", "mbart")},
    "vit": Family(kind="vision", tasks=("image-classification",), positions="patches"),
    "whisper": Family(kind="speech", tasks=("speech-seq2seq",), positions="target"),
}

_ARCHITECTURE_TASKS = (
    ("ForTokenClassification", "token-classification"),
    ("ForSequenceClassification", "sequence-classification"),
    ("ForImageClassification", "image-classification"),
)
"""Heads that say what the checkpoint is for, whatever its family usually does."""
_UNKNOWN_FAMILY_TASKS = (
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForSpeechSeq2Seq", "speech-seq2seq"),
    # Those who fine-tune a masked language model nearly always put a classifier on it.
    ("ForMaskedLM", "sequence-classification"),
    ("ForPreTraining", "sequence-classification"),
)
TASK_MAPPINGS = {
    **{name: facts.mapping for name, facts in TASK_FACTS.items()},
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
"""Task to the attribute of transformers' ``modeling_auto`` that names each family's class for it."""
_NOT_EMBEDDING = ("seq2seq-lm", "image-classification", "speech-seq2seq")
"""Tasks of families whose base model takes more than one text's tokens: a target's, too, or no text."""
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_FORCED_TIE_TYPES = ("t5", "mt5", "umt5", "longt5")


def default_task(config: Mapping[str, Any]) -> str | None:
    """Return the task that somebody fine-tuning this model most likely means, or None when nothing says so."""
    names = [str(name) for name in config.get("architectures") or ()]
    for suffix, task in _ARCHITECTURE_TASKS:
        # Only the first name counts: BART's hub file lists three classes and means the first.
        if names and names[0].endswith(suffix):
            return "reranking" if task == "sequence-classification" and _has_one_output(config) else task
    family = FAMILIES.get(str(config.get("model_type")))
    if family:
        return family.tasks[0]
    for suffix, task in _UNKNOWN_FAMILY_TASKS:
        if any(name.endswith(suffix) for name in names):
            return task
    if config.get("is_encoder_decoder") and any(n.endswith("ForConditionalGeneration") for n in names):
        return "seq2seq-lm"
    return None


def _has_one_output(config: Mapping[str, Any]) -> bool:
    """Whether a head gives a score: as the checkpoints of cross-encoders do."""
    return len(config.get("id2label") or ()) == 1 or config.get("num_labels") == 1


def supported_tasks(model_type: str) -> tuple[str, ...]:
    """Return the tasks that transformers has a class for; imports transformers only for a family not in the table."""
    family = FAMILIES.get(model_type)
    return family.tasks if family else tasks_in_transformers(model_type)


def tasks_in_transformers(model_type: str) -> tuple[str, ...]:
    """Read the tasks of ``model_type`` from the installed transformers' auto classes."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tasks = tuple(task for task, mapping in TASK_MAPPINGS.items() if model_type in getattr(auto, mapping))
    left_out = "embedding" if set(tasks) & set(_NOT_EMBEDDING) else ""
    return tuple(task for task in tasks if task != left_out)


def known_to_transformers(model_type: str) -> bool:
    """Say whether the installed transformers has this family without code from the hub."""
    if model_type in FAMILIES:
        return True
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    return model_type in auto.CONFIG_MAPPING_NAMES


def max_seq_len(config: Mapping[str, Any]) -> int | None:
    """Return the longest usable input in tokens, or None where positions are relative and nothing ends.

    RoBERTa's relatives number positions from ``pad_token_id + 1``, so that a table of 514 rows holds 512 tokens.
    OPT and BART add their offset to the table themselves: what they say is usable.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    positions = family.positions if family else "table"
    if positions == "patches":
        return _patches(config) + 1
    if positions == "target":
        return _integer(config, "max_target_positions")
    if positions == "relative" and not config.get("position_biased_input"):
        return None
    rows = next((n for key in _LENGTH_KEYS if (n := _integer(config, key)) is not None), None)
    if rows is None or positions != "after-padding":
        return rows
    return rows - (_integer(config, "pad_token_id") or 0) - 1


def has_length_limit(config: Mapping[str, Any]) -> bool:
    """Say whether the family has a hard limit, so that not finding one means that the config leaves it to a default."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and (family.positions != "relative" or bool(config.get("position_biased_input")))


def default_seq_len(config: Mapping[str, Any], task: str, limit: int | None) -> tuple[int, str]:
    """Return a sequence length to plan for when the user gave none, and the reason for it."""
    kind = getattr(FAMILIES.get(str(config.get("model_type"))), "kind", None)
    if kind == "vision" and limit is not None:
        size = config.get("patch_size", 16)
        return limit, f"fixed: {limit - 1} image patches of {size} x {size} pixels and the class token"
    if kind == "speech" and limit is not None:
        frames = _integer(config, "max_source_positions") or 1500
        return limit, f"the decoder's {limit} positions; the encoder always sees {frames} frames"
    if limit is None:
        trained = next((n for key in _LENGTH_KEYS if (n := _integer(config, key)) is not None), 512)
        return min(trained, 512), f"no hard limit (relative positions); {min(trained, 512)} is usual for this model"
    usual = 1024 if task == "causal-lm" else 512
    if limit <= usual:
        return limit, f"the model's limit of {limit} tokens"
    return usual, f"usual for {task}; the model takes up to {limit} tokens"


def fp16_unsafe(model_type: str) -> str | None:
    """Return why fp16 (autocast included) is likely to give nan in this family, or None."""
    if model_type in ("t5", "mt5", "umt5", "longt5", "switch_transformers"):
        return (
            "pre-trained in bfloat16: feed-forward activations exceed 65504, fp16's largest number, and the loss "
            "becomes nan (github.com/huggingface/transformers/issues/5651)"
        )
    if model_type.startswith("gemma"):
        return (
            "pre-trained in bfloat16: activations can exceed 65504, fp16's largest number (reported for Gemma 3: "
            "github.com/huggingface/transformers/issues/36822)"
        )
    return None


def separate_output_layer(config: Mapping[str, Any]) -> bool:
    """Say whether the checkpoint has an output layer of its own although transformers' config class ties it.

    T5 1.1, FLAN and mT5 files say ``tie_word_embeddings: false``; transformers 5 overrules that for a model built from
    a config, yet ``from_pretrained`` finds two different weights and keeps both: ``vocab_size * d_model`` parameters
    more than ``from_config`` shows.
    """
    return config.get("model_type") in _FORCED_TIE_TYPES and config.get("tie_word_embeddings") is False


def _patches(config: Mapping[str, Any]) -> int:
    return int((config.get("image_size", 224) // config.get("patch_size", 16)) ** 2)


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key, (config.get("text_config") or {}).get(key))
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None
