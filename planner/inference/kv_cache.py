"""What keys and values take: by layers, heads, head sizes and length, as transformers' caches store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.errors import InputError, Problem

SLIDING = ("sliding_attention", "hybrid_sliding", "reference_sliding_attention", "chunked_attention")
"""transformers' words for layers that see a window of the last tokens."""
FULL = "full_attention"
_HEADS = ("num_key_value_heads", "num_kv_heads", "decoder_attention_heads", "num_attention_heads", "num_heads")
_FP8_BYTES, _SCALE_BYTES = 1, 4
"""Fp8QuantizedLayer: float8_e4m3fn, and a fp32 scale for the keys and for the values of a layer."""


def layer_types(model_config: Any) -> list[str]:
    """What transformers' caches take each layer of the decoder for. ``model_config`` is transformers'."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    return list(get_layer_types_and_kwargs(model_config.get_text_config(decoder=True))[0])


def attention_window(model_config: Any) -> int:
    """Tokens that layers with sliding attention see; 0 where there are none of them."""
    if not any(kind in SLIDING for kind in layer_types(model_config)):
        return 0
    text = model_config.get_text_config(decoder=True)
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return next((int(window) for window in windows if window), 0)


def kv_cache_bytes(
    model_config: Any, batch: int, tokens: int, dtype_bytes: int, kind: str = "dynamic", *, encoder_tokens: int = 0
) -> int:
    """Bytes of the keys and values of ``batch`` sequences, once a token has been written after the prompt.

    ``tokens`` are those in the cache; of a static cache, those that it has room for. ``encoder_tokens``: of an
    encoder-decoder model, whose decoder keeps keys and values of the encoder's tokens as well. A sliding layer of a
    dynamic cache holds its window's tokens, the newest included. Raises InputError for layers that keep something
    else than keys and values, and for an offloaded cache, of which the card holds two layers at a time.
    """
    types = [one for one in layer_types(model_config) if one != "dummy"]
    _check(types, kind)
    text = model_config.get_text_config(decoder=True)
    window = attention_window(model_config)
    held = [min(tokens, window) if one in SLIDING else tokens for one in types]
    if model_config.is_encoder_decoder:
        held = [tokens + encoder_tokens] * _decoder_layers(text)
    elements = batch * _heads(text) * sum(_head_sizes(text)) * sum(held)
    if kind == "quantized":
        return elements * _FP8_BYTES + 2 * _SCALE_BYTES * len(held)
    return elements * dtype_bytes


def _check(types: Sequence[str], kind: str) -> None:
    other = sorted({one for one in types if one not in (FULL, *SLIDING)})
    problems = [
        Problem(
            argument="model",
            message=f"its layers of {one} keep no keys and values; what they keep is in a recording of the model",
        )
        for one in other
    ]
    if kind == "offloaded":
        message = "got 'offloaded'; accepted: dynamic, static, quantized; its layers wait in host memory"
        problems.append(Problem(argument="kind", message=message))
    if problems:
        raise InputError(problems)


def _decoder_layers(text: Any) -> int:
    names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
    return next(int(getattr(text, name)) for name in names if getattr(text, name, None))


def _heads(text: Any) -> int:
    """Heads of keys and values."""
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return next(int(getattr(text, name)) for name in _HEADS if getattr(text, name, None))


def _head_sizes(text: Any) -> tuple[int, int]:
    """Elements of a head's key and value; of DeepSeek's latent attention as transformers stores them, expanded."""
    rope = getattr(text, "qk_rope_head_dim", None)
    if rope is not None and getattr(text, "v_head_dim", None):
        return int(text.qk_nope_head_dim) + int(rope), int(text.v_head_dim)
    size = getattr(text, "head_dim", None) or getattr(text, "d_kv", None)
    if not size:
        heads = ("decoder_attention_heads", "num_attention_heads", "num_heads")
        size = text.hidden_size // next(getattr(text, name) for name in heads if getattr(text, name, None))
    return int(size), int(size)
