"""transformers' own ``generate`` under a recorder: its first forward passes, from which the others follow.

The emitted script calls ``model.generate(...)``; so does this, with the same GenerationConfig, on tensors without
data. What generate asks of data is answered as it is on a card: no sequence has ended; the mask of several prompts is
not all ones, as they are padded, and that of a single one is, so transformers drops it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from planner.config import InferenceConfig
from planner.inference.pass_kinds import Beginning
from planner.inference.unrolling import CHOSEN, END, KV_CACHE, PASS, PREFETCHED
from planner.recording import transfers  # noqa: F401  # defines the operators
from planner.recording.record import ACTIVATIONS, INPUTS
from planner.recording.recorder import Recorder
from planner.step import MakeBatch

_CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    "offloaded": {"cache_implementation": "offloaded"},
}


def generation_settings(config: InferenceConfig, max_new_tokens: int, special: dict[str, Any]) -> Any:
    """The GenerationConfig that the emitted script makes. ``special``: ids of the model's own special tokens."""
    from transformers import GenerationConfig

    chunk = {"prefill_chunk_size": config.prefill_chunk_tokens} if config.prefill_chunk_tokens else {}
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens,
        do_sample=False,
        disable_compile=True,
        **chunk,
        **_CACHES[config.kv_cache],
        **special,
    )


def special_tokens(config: Any) -> dict[str, Any]:
    """Ids that generate needs: of padding, and of a text's end, without which it would never look for one."""
    text = config.get_text_config(decoder=True)
    end = next((c.eos_token_id for c in (config, text) if getattr(c, "eos_token_id", None) is not None), 0)
    padding = next((c.pad_token_id for c in (config, text) if getattr(c, "pad_token_id", None) is not None), None)
    found = {"eos_token_id": end, "pad_token_id": padding if isinstance(padding, int) and padding >= 0 else 0}
    if config.is_encoder_decoder:
        start = getattr(config, "decoder_start_token_id", None)
        found["decoder_start_token_id"] = 0 if start is None else start
    return found


def run_generation(
    model: Any, make_batch: MakeBatch, recorder: Recorder, config: InferenceConfig, beginning: Beginning
) -> None:
    """A batch of prompts from its arrival through the first ``beginning.passes`` forward passes.

    Phase ``pass_k`` is the k-th of them, from the end of the one before, so that all of its sizes are of as many
    tokens as it leaves in the cache; ``chosen_k`` begins within the next one, where the token that it led to is
    there. Blocks that hold keys and values get the category KV_CACHE.
    """
    with torch.no_grad():
        kept = _computed(model, recorder, config) if config.prefix_tokens else None
    recorder.phase("inputs", category=INPUTS)
    inputs: dict[str, Any] = dict(make_batch())
    if kept is not None:
        inputs["cache"] = _copied(kept, beginning.batch, model, recorder)
    if model.config.is_encoder_decoder and beginning.decoder_tokens > 1:
        inputs["decoder_input_ids"] = inputs["input_ids"].new_ones(beginning.batch, beginning.decoder_tokens)
    model._previous_max_cache_length = -1  # a static cache is never shorter than that of an earlier call
    settings = generation_settings(config, beginning.new_tokens, special_tokens(model.config))
    generate_watched(model, inputs, settings, recorder, beginning.passes, single=beginning.batch == 1)


def _computed(model: Any, recorder: Recorder, config: InferenceConfig) -> Any:
    """Keys and values of a beginning that prompts share, computed as the emitted script does it; they stay."""
    from transformers import DynamicCache

    recorder.phase("prefix", category=ACTIVATIONS)
    kept = DynamicCache(config=model.config)
    ids = torch.ones(1, config.prefix_tokens, dtype=torch.int64, device=model.device)
    for part in ids.split(config.prefill_chunk_tokens or config.prefix_tokens, dim=1):
        model.base_model(part, use_cache=True, cache=kept)
    recorder.mark(cached_tensors(kept), KV_CACHE)
    return kept


def _copied(kept: Any, batch: int, model: Any, recorder: Recorder) -> Any:
    """``copy.deepcopy(kept)``, repeated for each prompt, layer by layer as both do it."""
    from transformers import DynamicCache

    copied: Any = DynamicCache(config=model.config)
    for index, layer in enumerate(kept.layers):
        with recorder.in_layer(index):
            copied.layers[index] = copy.deepcopy(layer)
    for index, layer in enumerate(copied.layers):
        with recorder.in_layer(index):
            layer.batch_repeat_interleave(batch)
    recorder.mark(cached_tensors(copied), KV_CACHE)
    return copied


def generate_watched(
    model: Any, inputs: dict[str, Any], settings: Any, recorder: Recorder, passes: int, *, single: bool
) -> None:
    """``model.generate`` with what it does told to a recorder, left after so many forward passes."""
    from transformers import StoppingCriteria

    answers = _Answers(single=single)
    caches: list[Any] = []
    count = 0

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        caches[:] = [kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None]
        if not count:
            recorder.phase(PASS.format(0), category=ACTIVATIONS)

    def leave(*_: Any) -> None:
        nonlocal count
        count += 1
        answers.nothing_is_cached = False
        for cache in caches:
            if not getattr(cache, "offloading", False):  # else it is in host memory, but for what is fetched ahead
                recorder.mark(cached_tensors(cache), KV_CACHE)
        if count == passes:
            _end(recorder)
            raise _EnoughError
        recorder.phase(PASS.format(count), category=ACTIVATIONS)

    class Chosen(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            recorder.phase(CHOSEN.format(count - 1), category=ACTIVATIONS)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    hooks = model.register_forward_pre_hook(enter, with_kwargs=True), model.register_forward_hook(leave)
    with hooks[0], hooks[1], warnings.catch_warnings(), streams(recorder), answers, torch.no_grad():
        warnings.simplefilter("ignore")
        with suppress(_EnoughError):
            model.generate(**inputs, generation_config=settings, stopping_criteria=[Chosen()])
            _end(recorder)


def _end(recorder: Recorder) -> None:
    recorder.phase(END)
    recorder.close()


class _EnoughError(Exception):
    """The passes that are to be recorded are there."""


def cached_tensors(cache: Any) -> Iterator[Tensor]:
    """What a cache keeps from one token to the next."""
    for part in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, part):
            yield from cached_tensors(getattr(cache, part))
    for layer in getattr(cache, "layers", ()):
        held = [getattr(layer, name, None) for name in ("keys", "values")]
        for quantized in ("_quantized_keys", "_quantized_values"):
            held += getattr(layer, quantized, None) or ()
        for states in ("conv_states", "recurrent_states"):
            held += (getattr(layer, states, None) or {}).values()
        yield from (tensor for tensor in held if isinstance(tensor, Tensor))


# -- a cache in host memory ------------------------------------------------------------------------------------------


@contextmanager
def streams(recorder: Recorder) -> Iterator[None]:
    """An offloaded cache on tensors without data: its copies are recorded, in transformers' own order.

    cache_utils.py, Cache.update: the next layer's keys and values are fetched on a stream of their own while the
    layer's are concatenated, which then go to host memory on the stream that computes. What was fetched comes from
    that stream's own pool of the caching allocator (PREFETCHED), which gives to no other stream.
    """
    from transformers import cache_utils

    layer: Any = getattr(cache_utils, "CacheLayerMixin", None)
    if layer is None:  # releases of benchmarks, before 4.54: nothing of theirs is offloaded
        yield
        return

    def offload(self: Any) -> None:
        if self.is_initialized:
            self.keys, self.values = (_on_host(tensor) for tensor in (self.keys, self.values))

    def prefetch(self: Any) -> None:
        if self.is_initialized and self.keys.device != self.device:
            with recorder.categorised(PREFETCHED):
                self.keys = torch.ops.vramplan.to_card(self.keys, self.device)
                self.values = torch.ops.vramplan.to_card(self.values, self.device)

    before = [(layer, "offload"), (layer, "prefetch"), (torch, "Stream"), (torch.cuda, "default_stream")]
    kept = [(place, name, getattr(place, name)) for place, name in before]
    try:
        layer.offload, layer.prefetch = offload, prefetch
        torch.Stream = _Stream  # type: ignore[misc, assignment]
        torch.cuda.default_stream = _Stream  # type: ignore[assignment]
        yield
    finally:
        for place, name, value in kept:
            setattr(place, name, value)


def _on_host(tensor: Tensor) -> Tensor:
    host: Tensor = torch.ops.vramplan.to_host(tensor)
    return host.view(tensor.shape)


class _Stream:
    """A stream of a card that isn't there."""

    def __init__(self, *_: Any) -> None:
        """Of whatever device."""

    def wait_stream(self, other: Any) -> None:
        """The order of events is that of the host."""

    def __enter__(self) -> None:
        """Copies go here."""

    def __exit__(self, *_: object) -> None:
        """And no more."""


class _Answers(TorchFunctionMode):
    """What generate would find in its tensors if they had data."""

    def __init__(self, *, single: bool) -> None:
        super().__init__()
        self._single = single
        self.nothing_is_cached = True
        """Until the first forward pass is over: a static cache tells how much it holds by a tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and not _has_data(args[0]):
            return getattr(args[0], "_is_true", False)
        if func in _READS and _has_data(args[0]):
            with _disable_current_modes():
                return func(*args)
        out = func(*args, **kwargs)
        if func in _ALL:
            out._is_true = self._single
        elif func in _EQUALS and isinstance(args[1], int) and args[0].dim() == 0:
            # masking_utils.py: fast_all(mask) compares a sum with the number of elements, q_offset == 0 asks whether
            # the cache is empty; utils.py, StopCheck: unfinished_sequences.max() == 0
            out._is_true = self.nothing_is_cached if args[1] == 0 else self._single
        return out


_READS = (Tensor.__index__, Tensor.__int__)
_ALL = (Tensor.all, torch.all)
_EQUALS = (Tensor.__eq__, Tensor.eq, torch.eq)


def _has_data(tensor: Tensor) -> bool:
    from planner.recording.calls import has_data

    return has_data(tensor)
