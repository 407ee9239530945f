"""Models of the rows whose configurations the planner doesn't ship, as changes to one that it does.

The values are those of each repository's config.json; parameter counts are what its authors state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.models import ModelSpec, resolve_model

_LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen2.5-32B-Instruct": (  # 32.76 B parameters
        "Qwen/Qwen2.5-7B-Instruct",
        {
            **{"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "max_window_layers": 64},
            **{"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064},
        },
    ),
    "NousResearch/Llama-2-70b-hf": (  # 68.98 B parameters
        "meta-llama/Llama-2-7b-hf",
        {
            **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
            **{"num_attention_heads": 64, "num_key_value_heads": 8},
        },
    ),
    "decapoda-research/llama-7b-hf": (  # 6.74 B parameters: Llama 1, of the same shapes
        "meta-llama/Llama-2-7b-hf",
        {"max_position_embeddings": 2048},
    ),
}
"""For each model, a bundled one and what differs."""

_FALCON_40B: dict[str, Any] = {  # 41.8 B parameters
    **{"architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 65024, "hidden_size": 8192},
    **{"num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True},
    **{"parallel_attn": True, "bias": False, "alibi": False, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}
_SANTACODER: dict[str, Any] = {  # 1.12 B parameters
    **{"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "vocab_size": 49280},
    **{"n_embd": 2048, "n_head": 16, "n_inner": 8192, "n_layer": 24, "n_positions": 2048, "multi_query": True},
    **{"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-05},
    **{"activation_function": "gelu_pytorch_tanh", "scale_attn_weights": True, "bos_token_id": 49152},
    **{"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True, "eos_token_id": 49152},
}
_OCTOCODER: dict[str, Any] = {  # 15.5 B parameters: StarCoder's shapes
    **{**_SANTACODER, "vocab_size": 49152, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40},
    **{"n_positions": 8192, "activation_function": "gelu", "bos_token_id": 0, "eos_token_id": 0},
}


_WHOLE = {
    **{"bigcode/gpt_bigcode-santacoder": _SANTACODER, "bigcode/octocoder": _OCTOCODER},
    "tiiuae/falcon-40b": _FALCON_40B,
}
"""Models like no bundled one."""


def spec_of(model_id: str) -> ModelSpec:
    """A model of the rows. Raises InputError."""
    if model_id in _WHOLE:
        config = _WHOLE[model_id]
        return ModelSpec(
            model_id=model_id,
            config=config,
            source="bundled",
            architecture=config["architectures"][0],
            model_type=config["model_type"],
            default_task="causal-lm",
            max_seq_len=config.get("n_positions", 2048),
        )
    if model_id not in _LIKE:
        return resolve_model(model_id)
    like, changes = _LIKE[model_id]
    spec = resolve_model(like)
    return replace(spec, model_id=model_id, config={**spec.config, **changes})
