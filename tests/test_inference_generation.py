"""The memory of text generation: whole runs from their first passes, and the exact size of keys and values."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from planner.config import InferenceConfig
from planner.errors import InputError, RecordingError
from planner.inference import unrolling
from planner.inference.generation import cached_tensors, generation_settings, run_generation
from planner.inference.kv_cache import attention_window, kv_cache_bytes
from planner.inference.pass_kinds import GenerationFacts
from planner.inference.run_model import Beginning, GenerationModel, prompt_chunks
from planner.inference.source import InferenceSource
from planner.inference.unrolling import KV_CACHE, PREFETCHED, Run, recorded_passes, unrolled
from planner.inference.workload import InferenceWorkload
from planner.memory.allocator import AllocatorSettings, CachingAllocator
from planner.memory.host import HostSettings
from planner.models import resolve_model
from planner.recording.kernels import Target
from planner.recording.record import Recording
from planner.recording.repetition import Stack

QWEN = ("Qwen/Qwen2.5-0.5B-Instruct", (("num_hidden_layers", 2), ("vocab_size", 1000)))
MISTRAL = ("mistralai/Mistral-7B-v0.1", (("num_hidden_layers", 1), ("hidden_size", 512), ("sliding_window", 128)))
T5 = ("t5-small", (("num_layers", 2), ("num_decoder_layers", 2)))
Model = tuple[str, tuple[tuple[str, Any], ...]]


def config_of(**fields: Any) -> InferenceConfig:
    """A structure; sizes are the tests'."""
    sizes = {"micro_batch_size": 1, "seq_len": 8, "max_tokens_per_micro_batch": 8, "max_new_tokens": 8}
    return InferenceConfig(**{**sizes, "precision": "bf16", "kv_cache": "dynamic", **fields})


@cache
def source_of(model: Model, config: InferenceConfig, stacks: tuple[Stack, ...] = (), kind: Any = "cuda") -> Any:
    """A small model, built once."""
    name, changes = model
    spec = resolve_model(name)
    task = "seq2seq-lm" if "t5" in name else "causal-lm"
    workload = InferenceWorkload(spec=replace(spec, config={**spec.config, **dict(changes)}), task=task)
    return InferenceSource.make(workload, config, Target(compute_capability=(8, 0), kind=kind), stacks)


def record(source: Any, beginning: Beginning) -> Recording:
    """The beginning of a run, recorded once for all tests."""
    key = (id(source), beginning)  # sources are never given back
    if key not in _RECORDED:
        run = partial(run_generation, config=source.config, beginning=beginning)
        _RECORDED[key] = source.record((beginning.batch, beginning.prompt), run)
    return _RECORDED[key]


_RECORDED: dict[tuple[int, Beginning], Recording] = {}


def facts_of(source: Any) -> GenerationFacts:
    """What decides which kinds of passes its runs have."""
    model = source.workload.hf_config()
    return GenerationFacts.of(
        source.config, window=attention_window(model), encodes=bool(model.is_encoder_decoder), max_positions=None
    )


def model_of(source: Any, **settings: Any) -> GenerationModel:
    """What is asked for runs of any size."""
    facts = facts_of(source)
    return GenerationModel(partial(record, source), facts, **settings)


def recorded_to_the_end(source: Any, shape: tuple[int, int], new_tokens: int) -> Run:
    """The run without anything left out or continued."""
    facts = facts_of(source)
    passes = len(prompt_chunks(facts, shape[1])) + new_tokens - 1
    return unrolled(record(source, Beginning(*shape, new_tokens, passes + 1)), passes=passes)


@pytest.mark.parametrize(
    ("model", "fields", "shape", "new_tokens"),
    [
        (QWEN, {}, (1, 37), 9),
        (QWEN, {}, (3, 48), 20),  # over the token that makes 64, whose mask needs no padding
        (QWEN, {"kv_cache": "static"}, (3, 148), 12),
        (QWEN, {"kv_cache": "quantized"}, (2, 50), 9),
        (QWEN, {"kv_cache": "offloaded"}, (2, 50), 9),
        (QWEN, {"prefill_chunk_tokens": 80}, (2, 330), 9),
        (QWEN, {"prefix_tokens": 48}, (2, 90), 9),
        (MISTRAL, {}, (2, 120), 14),  # the window is full after eight
        (T5, {}, (2, 120), 9),
    ],
    ids=["one", "padded", "static", "quantized", "offloaded", "chunked", "prefix", "window", "seq2seq"],
)
def test_a_run_laid_out_from_small_ones_equals_one_recorded_to_its_end(
    model: Model, fields: dict[str, Any], shape: tuple[int, int], new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event for event and byte for byte, as none of the tokens is shortened; the recordings are of other sizes."""
    monkeypatch.setattr(unrolling, "WHOLE_PASSES", 1000)
    source = source_of(model, config_of(**fields))
    expected = recorded_to_the_end(source, shape, new_tokens)
    found = model_of(source)._laid_out(shape, new_tokens)
    assert np.array_equal(expected.events, found.events)
    assert np.array_equal(expected.sizes, found.sizes)


def test_a_deep_model_is_recorded_from_a_shallow_one() -> None:
    """Six layers from four: what each token frees is its own layer's, also of the cache."""
    name, changes = QWEN
    deep = (name, (*changes[1:], ("num_hidden_layers", 6)))
    beginning = Beginning(2, 30, 8, 4)
    whole, repeated = (source_of(deep, config_of(), stacks) for stacks in ((), (Stack(layers=6),)))
    assert record(whole, beginning).structure == record(repeated, beginning).structure


@pytest.mark.parametrize("new_tokens", [1, 2, 40])
def test_tokens_without_their_small_blocks_peak_like_whole_ones(
    new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they leave out was reserved by the first ones; the live bytes are known without laying the tokens out."""
    source = source_of(QWEN, config_of())
    model = model_of(source, cublas_workspace_bytes=8_519_680)
    peak = model.peak((3, 100), new_tokens)
    live = model.allocated_bytes((3, 100), new_tokens)
    monkeypatch.setattr(unrolling, "WHOLE_PASSES", 1000)
    whole = model_of(source, cublas_workspace_bytes=8_519_680)
    assert whole.peak((3, 100), new_tokens) == peak
    assert sum(peak.breakdown.values()) == live == whole._live(whole.run((3, 100), new_tokens)).top
    assert live <= peak.allocated_bytes


def test_the_live_peak_of_many_tokens_is_that_of_the_last_ones() -> None:
    """Short prompts: the cache outgrows the prompt's own pass, and the kinds of tokens alternate."""
    model = model_of(source_of(QWEN, config_of()))
    for new_tokens in (700, 701, 716):
        assert model._live(model.run((4, 20), new_tokens)).top == model.allocated_bytes((4, 20), new_tokens)
    assert "decode" == model.peak((4, 20), 700).phase


@pytest.mark.parametrize(
    ("model", "fields", "kind"),
    [
        (QWEN, {}, "dynamic"),
        (QWEN, {"kv_cache": "static"}, "static"),
        (QWEN, {"kv_cache": "quantized"}, "quantized"),
        (MISTRAL, {}, "dynamic"),
        (T5, {}, "dynamic"),
    ],
)
def test_what_a_run_keeps_of_keys_and_values_is_what_the_formula_says(
    model: Model, fields: dict[str, Any], kind: str
) -> None:
    """After 40 tokens of 3 prompts of 120: 159 tokens are in the cache, or the window's 128, or the encoder's."""
    source = source_of(model, config_of(**fields))
    config = source.workload.hf_config()
    encodes = config.is_encoder_decoder
    expected = kv_cache_bytes(config, 3, 40 if encodes else 159, 2, kind, encoder_tokens=120 if encodes else 0)
    assert expected == kept_bytes(model_of(source).run((3, 120), 40))


def kept_bytes(run: Run) -> int:
    """Of keys and values, at a run's end."""
    freed = {-event for event in run.events.tolist() if event < 0}
    kept = [event for event in run.events.tolist() if event > 0 and event not in freed]
    return int(sum(run.sizes[block] for block in kept if run.categories[block] == KV_CACHE))


def test_a_token_adds_its_keys_and_values_and_its_own_numbers() -> None:
    """Qwen2.5: 2 layers x 2 heads x 64 x (key, value) x 2 bytes; its id, its place in the mask and its position."""
    source = source_of(QWEN, config_of())
    passes = recorded_passes(record(source, Beginning(3, 50, 8, 6)))
    sizes = [one.sizes[one.events.left[one.events.left <= one.events.blocks] - 1].sum() for one in passes[3:5]]
    a_token = kv_cache_bytes(source.workload.hf_config(), 3, 1, 2)
    assert 3 * 2 * 2 * 64 * 2 * 2 == a_token
    assert a_token + 3 * 3 * 8 == sizes[1] - sizes[0]


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized"])
def test_real_caches_hold_what_the_formula_says(kind: str) -> None:
    """A real run on the CPU: 3 prompts of 9 tokens, one of them padded, and 5 tokens written."""
    source = source_of(QWEN, config_of())
    model: Any = source.workload.build_model(attention="sdpa", dtype=torch.bfloat16, device="cpu").eval()
    settings = generation_settings(config_of(kv_cache=kind), 5, {"eos_token_id": 999, "pad_token_id": 0})
    settings.return_dict_in_generate, settings.min_new_tokens = True, 5
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, :2] = 0
    with torch.inference_mode():
        written = model.generate(torch.ones(3, 9, dtype=torch.int64), attention_mask=mask, generation_config=settings)
    held = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in cached_tensors(written.cache)
    }
    assert kv_cache_bytes(model.config, 3, 13, 2, kind) == sum(held.values())


def test_one_prompt_has_no_mask_and_several_have_one() -> None:
    """transformers drops a mask of ones; flash attention takes none, so padded batches go to another kernel."""
    source = source_of(QWEN, config_of())
    one, several = ({op.name for op in record(source, Beginning(b, 30, 8, 3)).ops} for b in (1, 2))
    assert "aten._scaled_dot_product_flash_attention" in one - several
    assert "aten._scaled_dot_product_efficient_attention" in several - one


def test_the_work_of_a_token_is_that_of_its_recording() -> None:
    """At 3 prompts of 77 tokens: FLOPs and bytes of the prompt's pass, and of the token that finds 79 in the cache."""
    source = source_of(QWEN, config_of())
    passes = recorded_passes(record(source, Beginning(3, 77, 8, 5)))
    model = model_of(source)
    [(prompt, at_prompt)], (token, at_token) = model.prompt_passes((3, 77)), model.token_pass((3, 77), 79)
    told = ((prompt.ops_at(at_prompt), passes[1].ops), (token.ops_at(at_token), passes[4].ops))
    for found, expected in told:
        assert [(op.name, op.flops, sum(op.moved_bytes)) for op in expected] == [
            (op.name, op.flops, sum(op.moved_bytes)) for op in found
        ]


def test_what_another_stream_fetches_has_a_pool_of_its_own() -> None:
    """Two replays: blocks that the fetching stream frees serve no layer's own pass."""
    model = model_of(source_of(QWEN, config_of(kv_cache="offloaded")))
    run = model.run((8, 400), 20)
    fetched = run.categories[np.abs(run.events)] == PREFETCHED
    reserved = []
    for mine in (fetched, ~fetched):
        allocator = CachingAllocator(AllocatorSettings())
        allocator.run(run.events[mine], run.sizes)
        reserved.append(allocator.peak_reserved_bytes)
    assert reserved[0] > 0
    assert sum(reserved) == model.peak((8, 400), 20).reserved_bytes


def test_a_run_on_the_processor_is_recorded_too() -> None:
    """Its tensors are as many bytes; memory comes from the heap and from mapped pages."""
    source = source_of(QWEN, config_of(), (), "cpu")
    model = model_of(source, settings=HostSettings())
    assert kv_cache_bytes(source.workload.hf_config(), 2, 49, 2) == kept_bytes(model.run((2, 40), 10))
    assert model.peak((2, 40), 10).reserved_bytes > 0


def test_a_cache_that_is_too_small_for_a_fit_is_recorded_at_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 24 tokens: no three lengths tell anything apart there."""
    monkeypatch.setattr(unrolling, "WHOLE_PASSES", 1000)
    source = source_of(QWEN, config_of(kv_cache="static"))
    expected = recorded_to_the_end(source, (3, 20), 5)
    found = model_of(source).run((3, 20), 5)
    assert np.array_equal(expected.events, found.events)
    assert np.array_equal(expected.sizes, found.sizes)


def test_tokens_that_are_not_alike_are_refused() -> None:
    """Sizes that don't grow by equal steps can't be continued."""
    recording = record(source_of(QWEN, config_of()), Beginning(1, 30, 40, 6))
    sizes = list(recording.sizes)
    sizes[-1] += 512
    with pytest.raises(RecordingError, match="not those of the next"):
        unrolled(replace(recording, sizes=sizes), passes=40)


def test_layers_without_keys_and_values_and_other_kinds_are_named() -> None:
    """Nothing is guessed."""
    config = source_of(QWEN, config_of()).workload.hf_config()
    with pytest.raises(InputError, match="host memory"):
        kv_cache_bytes(config, 1, 8, 2, "offloaded")
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(InputError, match="linear_attention keep no keys"):
        kv_cache_bytes(config, 1, 8, 2)


def test_fitted_passes_are_remembered_by_what_they_depend_on() -> None:
    """One key for each kind of beginning; the same one for other batches and lengths of that kind."""
    kept: dict[str, Any] = {}

    def remember(key: dict[str, Any], make: Any) -> Any:
        if repr(key) not in kept:
            kept[repr(key)] = make()
        return kept[repr(key)]

    source = source_of(QWEN, config_of())
    first, second = (model_of(source, remember=remember) for _ in range(2))
    first.run((2, 77), 3)
    keys = list(kept)
    second.run((5, 201), 9)
    assert keys == list(kept)
