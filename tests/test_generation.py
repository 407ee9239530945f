"""Published runs of text generation, fused kernels and boundaries: how the benchmark reproduces them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import boundaries
import configs
import fms
import fused_kernels
import generation
import ground_truth
import packed_linears
from rows import Row

from planner.errors import RecordingError
from planner.inference import unrolling
from planner.models import resolve_model
from planner.recording.record import Recording
from planner.workload import Workload

GENERATION = {
    **{"model_id": "Qwen/Qwen2.5-0.5B-Instruct", "gpu": "A100-80GB", "vram_gb": "80", "kind": "inference"},
    **{"micro_batch": "1", "seq_len": "prompt 1 + 2048 generated", "quantization": "none", "precision": "pure-bf16"},
    **{"measure": "max_memory_allocated", "quality": "A"},
}
FINE_TUNING = {
    **{"model_id": "meta-llama/Meta-Llama-3-8B", "gpu": "A100-80GB", "vram_gb": "80", "kind": "train"},
    **{"micro_batch": "4", "seq_len": "4096", "quality": "A", "grad_checkpointing": "y"},
    **{"finetune_method": "lora; r16 alpha16 dropout0.1; q_proj", "quantization": "none", "precision": "bf16"},
    **{"measure": "max_memory_allocated"},
}


def row_of(row_id: str, base: dict[str, str], **fields: str) -> Row:
    """A row without a file."""
    given = {**base, **fields}
    lengths = given["seq_len"]
    return Row(
        id=row_id,
        source=row_id.rsplit("-", 1)[0],
        gpu=given["gpu"],
        measure=given["measure"],
        measured_bytes=None,
        micro_batch=int(given["micro_batch"]),
        seq_len=int(lengths) if lengths.isdecimal() else None,
        quality=given["quality"],
        fields=given,
    )


def small_setup(quantization: str = "none", prompt: int = 5) -> Any:
    """Generation with two small layers in place of Qwen2.5's."""
    lengths = f"prompt {prompt} + 2048 generated"
    setup = generation.setup_of(row_of("qwen25-001", GENERATION, quantization=quantization, seq_len=lengths))
    assert not isinstance(setup, str)
    small = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 151936}
    spec = replace(setup.workload.spec, config={**setup.workload.spec.config, **small, "num_attention_heads": 4})
    return replace(setup, workload=replace(setup.workload, spec=spec))


def recorded(setup: Any, monkeypatch: pytest.MonkeyPatch, passes: int = generation._RECORDED_PASSES) -> Recording:
    """The first tokens of a run."""
    monkeypatch.setattr(generation, "_RECORDED_PASSES", passes)
    return ground_truth._record(setup, setup.shape)


def live_bytes(recording: Recording, position: int) -> int:
    """What is requested and not freed before an event."""
    live: set[int] = set()
    for event in recording.events[:position]:
        live.add(event) if event > 0 else live.discard(-event)
    return sum(recording.sizes[block] for block in live)


def test_a_run_made_of_its_first_tokens_equals_one_recorded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens: block for block and event for event, as none of the later ones is shortened."""
    setup = small_setup()
    short = recorded(setup, monkeypatch)
    whole = generation.whole_run(short, new_tokens=10)
    direct = recorded(setup, monkeypatch, passes=11)
    assert direct.events[: len(whole.events)] == whole.events
    assert direct.sizes[: max(whole.events) + 1] == whole.sizes


def test_only_blocks_that_no_other_token_sees_are_left_out_of_the_tokens_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left is a run without a double free, that ends with the same blocks."""
    short = recorded(small_setup(), monkeypatch)
    long = generation.whole_run(short, new_tokens=40)
    live: set[int] = set()
    for event in long.events:
        assert (event not in live) if event > 0 else (-event in live)
        live.add(event) if event > 0 else live.remove(-event)
    again = generation.whole_run(short, new_tokens=12)
    last = [sum(recording.sizes[b] for b in _live(recording)) for recording in (long, again)]
    assert 0 <= last[0] - last[1] - 28 * cache_bytes_a_token(small_setup()) <= 28 * BOOKKEEPING_BYTES


def _live(recording: Recording) -> set[int]:
    freed = {-event for event in recording.events if event < 0}
    return {event for event in recording.events if event > 0 and event not in freed}


def cache_bytes_a_token(setup: Any) -> int:
    """Keys and values of every layer, in bf16."""
    config = setup.workload.spec.config
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim) * 2


BOOKKEEPING_BYTES = 4 * 8
"""A token's number, its place in the mask and its position, in int64."""


def test_a_generated_token_adds_its_keys_and_values_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tokens, what is alive grows by the cache's exact size, but for the token's own few numbers."""
    setup = small_setup()
    recording = recorded(setup, monkeypatch)
    positions = [recording.phases[unrolling.PASS.format(index)] for index in (3, 4)]
    before, after = (live_bytes(recording, position) for position in positions)
    assert 0 <= after - before - cache_bytes_a_token(setup) <= BOOKKEEPING_BYTES


def test_tokens_that_are_not_alike_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that don't grow by equal steps can't be continued."""
    recording = recorded(small_setup(), monkeypatch)
    last = recording.events[recording.phases[unrolling.PASS.format(4)] :]
    changed = list(recording.sizes)
    changed[next(event for event in last if event > 0)] += 512
    with pytest.raises(RecordingError, match="not those of the next"):
        generation.whole_run(replace(recording, sizes=changed), new_tokens=12)


@pytest.mark.parametrize(
    ("quantization", "bits", "persistent"), [("gptq-int8", 8, 0), ("gptq-int4", 4, 1), ("awq-int4", 4, 0)]
)
def test_packed_layers_hold_what_their_checkpoint_stores(quantization: str, bits: int, persistent: int) -> None:
    """Weights and zero points in ``bits``, fp16 scales of 128 weights, GPTQ's group indices; exllama's one buffer."""
    model = resolve_small(quantization)
    layer = model.model.layers[0].mlp.down_proj  # 512 -> 256
    stored = {name: buffer.nbytes for name, buffer in layer.named_buffers()}
    expected = {"qweight": 512 * 256 * bits // 8, "qzeros": 4 * 256 * bits // 8, "scales": 4 * 256 * 2}
    if quantization.startswith("gptq"):
        expected["g_idx"] = 512 * 4
    assert expected == stored
    largest = 2 * 512 * 256 if persistent else 0
    assert largest == sum(buffer.nbytes for name, buffer in model.named_buffers() if name == "temp_dq")
    assert isinstance(model.lm_head, nn.Linear)


def resolve_small(quantization: str) -> Any:
    """The small model with packed weights."""
    workload = small_setup(quantization).workload
    return workload.build_model(attention="eager", dtype=torch.float16)


@pytest.mark.parametrize("kind", packed_linears.QUANTIZATIONS)
@pytest.mark.parametrize("rows", [1, 2048])
def test_packed_layers_give_fp16_results_of_the_right_shape(kind: str, rows: int) -> None:
    """Below and above the number of rows from which kernels unpack the weight."""
    linear = nn.Linear(256, 384, device="meta", dtype=torch.float16)
    out = packed_linears._KINDS[kind](linear)(torch.empty(1, rows, 256, device="meta", dtype=torch.float16))
    assert ((1, rows, 384), torch.float16) == (tuple(out.shape), out.dtype)


def test_unknown_lengths_and_quantizations_are_said() -> None:
    """Nothing is guessed."""
    assert "lengths" in generation.setup_of(row_of("qwen25-001", GENERATION, seq_len="short"))
    assert "fp8" in generation.setup_of(row_of("qwen25-001", GENERATION, quantization="fp8"))


@pytest.mark.parametrize(
    ("notes", "fused"),
    [
        ("packed", "none"),
        ("fused LoRA/rope/rmsnorm/cross-entropy triton kernels", "logits"),
        ("triton kernels; Liger fused-linear cross entropy", "linear"),
    ],
)
def test_rows_of_fused_kernels_are_told_apart(notes: str, fused: str) -> None:
    """Stock transformers, the loss in place of its logits, and none."""
    setup = fms.setup_of(row_of("fms-045", FINE_TUNING, notes=notes))
    assert not isinstance(setup, str)
    assert fused == setup.workload.fused  # type: ignore[attr-defined]


def test_norms_are_upcast_only_where_the_trainer_prepared_the_model() -> None:
    """Embeddings and output layer are back in bf16 then; other rows have no fp32 at all."""
    spec = resolve_model("mistralai/Mistral-7B-v0.1")
    spec = replace(spec, config={**spec.config, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64})
    for upcast, expected in ((True, {torch.float32}), (False, {torch.bfloat16})):
        workload = fms.PackedSequences(spec=spec, task="causal-lm", norms_in_fp32=upcast)
        model: Any = workload.build_model(attention="sdpa", dtype=torch.bfloat16)
        assert expected == {p.dtype for name, p in model.named_parameters() if "norm" in name}
        assert torch.bfloat16 == model.lm_head.weight.dtype


def test_fast_cross_entropy_writes_its_gradient_over_the_logits() -> None:
    """The kernel of the backward pass works in place: no second tensor of tokens times vocabulary."""
    logits, context = torch.randn(6, 70_000), _Context()
    losses = fused_kernels.FastCrossEntropy.forward(context, logits, torch.zeros(6, dtype=torch.int64))
    assert (6,) == tuple(losses.shape)
    assert logits is fused_kernels.FastCrossEntropy.backward(context, losses)[0]


def test_fused_linear_cross_entropy_takes_a_power_of_two_of_tokens_at_a_time() -> None:
    """16384 tokens of 4096 features and 128256 words: 32 parts of 512 (Liger's chunk size)."""
    sizes: list[int] = []
    hidden = torch.empty(16384, 4096, device="meta", requires_grad=True)
    weight = torch.empty(128256, 4096, device="meta")

    class Products(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in ("matmul", "__matmul__") and args[1].shape[0] == 4096:
                sizes.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    with Products():
        loss = fused_kernels.FusedLinearCrossEntropy.forward(
            _Context(), hidden, weight, torch.zeros(16384, dtype=torch.int64, device="meta")
        )
    assert () == tuple(loss.shape)
    assert [512] * 32 == sizes


class _Context:
    """What a torch function's forward pass gets to keep things in."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep them."""
        self.saved_tensors = tensors


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352),
        ("NousResearch/Llama-2-70b-hf", 68_976_648_192),
        ("bigcode/gpt_bigcode-santacoder", 1_124_886_528),
        ("decapoda-research/llama-7b-hf", 6_738_415_616),
        ("tiiuae/falcon-40b", 41_303_293_952),
    ],
)
def test_models_that_the_planner_does_not_ship_have_their_published_sizes(name: str, parameters: int) -> None:
    """As their repositories state them (Falcon-40B's without its untied output layer)."""
    model = Workload(spec=configs.spec_of(name), task="causal-lm").build_model(attention="eager", dtype=torch.bfloat16)
    assert parameters == sum(p.numel() for p in model.parameters())


def test_fused_adapters_keep_their_input_and_what_dropout_left_of_it() -> None:
    """Three projections of one input: one gradient for it, in its own memory, and one for each adapter matrix."""
    layers = [_AdaptedLayer() for _ in range(3)]
    x = torch.randn(2, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    outputs = fused_kernels._apply(x, layers, reuses_input=True)
    assert [(2, 4, 64)] * 3 == [tuple(out.shape) for out in outputs]
    sum(out.float().sum() for out in outputs).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    assert all(p.grad is not None for layer in layers for p in layer.parameters())


class _AdaptedLayer(nn.Module):
    """A 64 x 64 layer with adapters of rank 4, by the names that peft gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(64, 64).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 64, bias=False)})

    def parameters(self, recurse: bool = True) -> Any:
        """The adapters' alone."""
        return [p for p in super().parameters(recurse) if p.requires_grad]


@pytest.mark.parametrize(
    ("row_id", "fields", "expected"),
    [
        ("t4-001", {"quantization": "bnb-int8", "finetune_method": "lora on quantized base"}, ("int8", "qlora", None)),
        ("t4-003", {"quantization": "bnb-fp4", "finetune_method": "lora on quantized base"}, ("nf4", "qlora", None)),
        ("litgptrt-015", {"finetune_method": "lora; r8; q,v; 4194304 trainable params"}, ("none", "lora", 8)),
        ("litgpt-005", {"finetune_method": "lora; r16 alpha16 dropout.1; all linear"}, ("none", "lora", 16)),
        ("litgpt-015", {"finetune_method": "full"}, ("none", "full", None)),
    ],
)
def test_boundaries_are_run_as_their_tables_say(
    row_id: str, fields: dict[str, str], expected: tuple[str, str, int | None]
) -> None:
    """Base weights, method, and the rank where the source states one."""
    given = {"model_id": "meta-llama/Llama-2-7b-hf", "measure": "ooms", "seq_len": "512", **fields}
    setup = boundaries.setup_of(row_of(row_id, FINE_TUNING, **given))
    assert not isinstance(setup, str)
    assert expected[:2] == (setup.config.quantization, setup.config.method)
    assert expected[2] in (None, setup.config.lora and setup.config.lora.r)


def test_measured_peaks_of_other_model_code_are_not_scored() -> None:
    """LitGPT's rows count only where they ran out of memory."""
    assert "own model code" in boundaries.setup_of(row_of("litgptrt-011", FINE_TUNING))
