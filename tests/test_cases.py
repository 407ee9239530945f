"""Trouble that people reported, as numbers that must come out: bert-base-uncased and gpt2 at full size.

Where a case counted what is saved for the backward pass on a CPU, dropout masks took four bytes an element there;
CUDA's fused dropout keeps one. The expectations here are CUDA's. Cases about configurations that cannot work are in
test_cases_validity.py, F03 (order of lengths) in test_epoch.py, I13 (host memory) in test_offload.py.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.api import Estimate, estimate
from planner.budget import Memory
from planner.config import LoraSettings, TrainingConfig
from planner.hardware import ceiling_bytes, typical_card
from planner.models import resolve_model
from planner.recording.record import ACTIVATIONS
from planner.simulation import Simulator
from planner.workload import Workload

GIB, MIB = 2**30, 2**20
TASKS = {"bert-base-uncased": "sequence-classification", "gpt2": "causal-lm"}


@cache
def simulator(model: str, vram_gb: int) -> Simulator:
    """On the typical card of a size."""
    card, _ = typical_card(vram_gb * GIB)
    ceiling, _ = ceiling_bytes(vram_gb * GIB, card, named=False)
    workload = Workload(spec=resolve_model(model), task=TASKS.get(model, "causal-lm"))
    return Simulator(workload, card, ceiling_bytes=ceiling)


def config(micro_batch_size: int, seq_len: int, accumulation: int = 1, **fields: Any) -> TrainingConfig:
    """fp32, eager, fused AdamW, no checkpointing unless said otherwise."""
    values = {
        "micro_batch_size": micro_batch_size,
        "seq_len": seq_len,
        "max_tokens_per_micro_batch": micro_batch_size * seq_len,
        "gradient_accumulation_steps": accumulation,
        "effective_batch_size": micro_batch_size * accumulation,
        "precision": "fp32",
        "attention": "eager",
    }
    return TrainingConfig.model_validate({**values, **fields})


def memory(model: str, vram_gb: int, *shape: int, **fields: Any) -> Memory:
    """What a configuration needs on a card of a size."""
    return simulator(model, vram_gb).memory(config(*shape, **fields))


def kept_bytes_a_sequence(model: str, seq_len: int, **fields: Any) -> int:
    """What one sequence more keeps for the backward pass."""
    memory_model = simulator(model, 24).model(config(8, seq_len, **fields))
    step = memory_model.step((8, seq_len))
    kept = np.array(step.template.categories) == ACTIVATIONS
    return int(step.sizes_at((9, seq_len))[kept].sum() - step.sizes_at((8, seq_len))[kept].sum())


def test_bert_base_at_8_x_512_in_fp32() -> None:
    """12 GB take it. Its parts: 16 bytes a parameter less the gradients, and 624 MiB a sequence.

    Counted with the CPU's dropout masks it would be 1.1 GiB more, and too much for 8 GB.
    """
    ours = memory("bert-base-uncased", 12, 8, 512)
    assert ours.fits
    static = 12 * 109.48e6
    assert static + 8 * 624 * MIB == pytest.approx(ours.peak_allocated_bytes, rel=0.03)
    assert memory("bert-base-uncased", 8, 16, 512).total_bytes > 8 * GIB


class TestB01:
    """Mixed precision keeps fp32 weights, gradients and state: it saves activations alone."""

    def test_static_memory_is_that_of_fp32(self) -> None:
        """At least 1.63 GiB for bert-base in both; at a tiny batch no less than 0.98 times fp32's peak."""
        full, mixed = (memory("bert-base-uncased", 24, 1, 32, precision=p) for p in ("fp32", "bf16-amp"))
        for ours in (full, mixed):
            parts = ours.breakdown
            assert 1.63 * GIB <= parts["parameters"] + parts["gradients"] + parts["optimizer"]
        assert 0.98 * full.peak_reserved_bytes <= mixed.peak_reserved_bytes

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_larger_batches_need_less(self, attention: str) -> None:
        """From 16 x 128 on."""
        full, mixed = (
            memory("bert-base-uncased", 24, 16, 128, precision=p, attention=attention) for p in ("fp32", "bf16-amp")
        )
        assert mixed.peak_reserved_bytes < full.peak_reserved_bytes


class TestD01:
    """A ceiling is about the device: the context takes part of it before the allocator gets anything."""

    @pytest.mark.parametrize("vram_gb", [8, 12, 24])
    def test_the_allocator_gets_what_the_context_leaves(self, vram_gb: int) -> None:
        """Between 200 and 1000 MiB less than the ceiling."""
        sim = simulator("bert-base-uncased", vram_gb)
        fraction = sim.budget.margin(config(1, 128)).fraction
        context_bytes = sim.ceiling_bytes / (1 + fraction) - sim.budget.allocator_bytes(config(1, 128))
        assert 200 * MIB <= context_bytes <= 1000 * MIB


def test_d07_the_first_update_brings_the_optimizers_state() -> None:
    """Two states of 4 bytes: 0.82 GiB for bert-base, though the first backward pass ran without them."""
    assert 0.82 * GIB == pytest.approx(memory("bert-base-uncased", 8, 1, 32).breakdown["optimizer"], rel=0.02)


class TestI01:
    """GPT-2's documented example, batch 8 x 1024, ran out of memory on 16 and 32 GB."""

    def test_eager_fp32_fits_neither_16_nor_24_gb(self) -> None:
        """12 layers of 12 maps of 1024 x 1024 a sequence."""
        for vram_gb in (16, 24):
            assert not memory("gpt2", vram_gb, 8, 1024).fits
        assert 24.5 * GIB <= memory("gpt2", 24, 8, 1024).total_bytes <= 27 * GIB

    def test_fused_attention_is_marginal_at_16_gb(self) -> None:
        """14 to 16 GiB, before the margin."""
        ours = memory("gpt2", 16, 8, 1024, attention="sdpa")
        assert 14 * GIB <= ours.total_bytes - ours.margin_bytes <= 16 * GIB

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_checkpointing_fits_16_gb_easily(self, attention: str) -> None:
        """Well under three quarters of it."""
        ours = memory("gpt2", 16, 8, 1024, attention=attention, checkpointing="full")
        assert ours.total_bytes < 0.75 * ours.ceiling_bytes


class TestI02:
    """GPT-2 on 6 GB: accumulation doesn't lower the floor of one sequence."""

    def test_accumulation_is_neutral_below_a_micro_batch_of_one(self) -> None:
        """Two steps or 1024."""
        assert memory("gpt2", 6, 1, 1024, 2) == memory("gpt2", 6, 1, 1024, 1024)
        assert memory("gpt2", 6, 1, 1024, 1).total_bytes < memory("gpt2", 6, 1, 1024, 2).total_bytes

    def test_checkpointing_lowers_it(self) -> None:
        """About 3.2 GiB of the card's 6, with accumulation; nearly all of them without."""
        ours = memory("gpt2", 6, 1, 1024, 2, checkpointing="full")
        assert 3.2 * GIB == pytest.approx(ours.total_bytes, rel=0.1)
        assert 0.85 * ours.ceiling_bytes < memory("gpt2", 6, 1, 1024, 2).total_bytes


def test_i04_largest_batches_on_12_gb_are_between_the_published_and_a_few_times_more() -> None:
    """TensorFlow's table of that time for BERT-Base; strictly fewer with the length."""
    published = {64: 64, 128: 32, 256: 16, 320: 14, 384: 12, 512: 6}
    sim = simulator("bert-base-uncased", 12)
    model = sim.model(config(8, 64))
    ours = {
        s: model.largest_micro_batch(s, sim.budget.allocator_bytes(config(1, 128)), accumulate=False) for s in published
    }
    for seq_len, batch in published.items():
        assert batch <= ours[seq_len] <= 3.7 * batch, seq_len
    assert sorted(set(ours.values()), reverse=True) == list(ours.values())


class TestJ04:
    """Checkpointing that takes effect shows in what a sequence keeps."""

    @pytest.mark.parametrize(("seq_len", "on_cpu"), [(128, 109.2), (256, 272.3), (384, 489.5), (512, 760.6)])
    def test_bert_keeps_the_cpus_count_with_masks_of_a_byte(self, seq_len: int, on_cpu: float) -> None:
        """Three bytes less for each element of 12 x 12 attention maps and 25 hidden states."""
        mask_elements = 12 * 12 * seq_len**2 + 25 * seq_len * 768
        expected = on_cpu * MIB - 3 * mask_elements
        assert expected == pytest.approx(kept_bytes_a_sequence("bert-base-uncased", seq_len), rel=0.005)

    @pytest.mark.parametrize(
        ("model", "seq_len", "expected"), [("bert-base-uncased", 512, 22.5 * MIB), ("gpt2", 1024, 245 * MIB)]
    )
    def test_checkpointing_leaves_a_hidden_state_a_layer(self, model: str, seq_len: int, expected: float) -> None:
        """And GPT-2's logits: less than a tenth of what is kept otherwise."""
        ours = kept_bytes_a_sequence(model, seq_len, checkpointing="full")
        assert expected == pytest.approx(ours, rel=0.02)
        assert 10 * ours < kept_bytes_a_sequence(model, seq_len)


@pytest.mark.slow
def test_i09_a_large_vocabulary_costs_logits() -> None:
    """256,000 entries against 32,000: 13.7 GiB a copy at 4 x 4096, though the model is a third of the size."""
    fields = {"precision": "bf16-amp", "method": "lora", "lora": LoraSettings(), "checkpointing": "full"}
    gemma, mistral = (
        memory(name, 80, 4, 4096, **fields) for name in ("google/gemma-2-2b", "mistralai/Mistral-7B-v0.1")
    )
    copies = [ours.breakdown["temporaries"] + ours.breakdown["activations"] for ours in (gemma, mistral)]
    assert 13.7 * GIB <= copies[0] - copies[1]


DEBERTA_V2_XXLARGE = {
    "model_type": "deberta-v2",
    "architectures": ["DebertaV2ForMaskedLM"],
    "vocab_size": 128100,
    "hidden_size": 1536,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "conv_kernel_size": 3,
    "conv_act": "gelu",
    "position_biased_input": False,
}
"""microsoft/deberta-v2-xxlarge's sizes (its config.json)."""


class TestE03:
    """Evaluating a masked language model gathered the logits of every batch: 1000 x 512 x 30522 of them."""

    def test_the_plan_shows_what_evaluation_holds(self) -> None:
        """One batch's logits beside weights and optimizer state, whatever the number of samples: less than training."""
        phases = estimate(
            model="bert-base-uncased",
            vram="24GB",
            task="masked-lm",
            micro_batch_size=8,
            seq_len=512,
            precision="bf16-amp",
        ).phases
        logits_bytes = 8 * 512 * 30522 * 4
        weights_and_state_bytes = 12 * 109_514_298
        evaluate = phases["evaluate"]["peak_allocated_bytes"]
        assert weights_and_state_bytes + logits_bytes < evaluate < weights_and_state_bytes + 4 * logits_bytes
        assert evaluate < phases["steady_step"]["peak_allocated_bytes"]


@pytest.mark.slow
class TestI05:
    """A model of 1.5 billion parameters on a card of 16 GB: the answer is a number, and what fits instead."""

    def estimate(self, tmp_path: Path, **fields: Any) -> Estimate:
        """One sequence of 128 tokens with everything else as small as it gets."""
        (tmp_path / "config.json").write_text(json.dumps(DEBERTA_V2_XXLARGE))
        values = {"precision": "fp32", "checkpointing": "full", "attention": "eager", "task": "sequence-classification"}
        shape = {"micro_batch_size": 1, "seq_len": 128, "host_ram": "128GB"}
        return estimate(model=str(tmp_path), vram="16GB", gpu="Tesla T4", **{**values, **shape, **fields})

    def test_full_fine_tuning_is_impossible_whatever_the_batch(self, tmp_path: Path) -> None:
        """16 bytes a parameter are 23.3 GiB before the first activation."""
        ours = self.estimate(tmp_path)
        assert not ours.fits
        assert 23.2 * GIB <= ours.breakdown["parameters"] + ours.breakdown["gradients"] + ours.breakdown["optimizer"]

    @pytest.mark.parametrize("change", [{"offload": "optimizer"}, {"method": "lora", "precision": "fp16-amp"}])
    def test_offloading_or_adapters_fit(self, tmp_path: Path, change: dict[str, Any]) -> None:
        """8 bytes a parameter, or 2."""
        assert self.estimate(tmp_path, **change).fits


@pytest.mark.slow
class TestI07:
    """A reranker's batch of 8 groups of 8 is 64 sequences, and costs 64."""

    def test_memory_grows_with_the_sequences_of_a_group(self) -> None:
        """Eight times what 8 sequences keep, beside autocast's copy of the weights (0.2 GB), which both have."""
        fields = {"precision": "fp16-amp", "attention": "eager"}
        kept = [memory("bert-base-uncased", 80, count, 512, **fields).breakdown["activations"] for count in (8, 64)]
        assert kept[1] == pytest.approx(8 * kept[0], rel=0.05)


@pytest.mark.slow
class TestK29:
    """Mistral-7B, batch 4: a 4-bit base is the answer for 24 GB, and bf16 weights, which are faster, for 40 GB."""

    @staticmethod
    def estimate(method: str, vram: str, gpu: str) -> Estimate:
        """LoRA in bf16 with activation checkpointing, at 4096 tokens."""
        quantization = "nf4" if method == "qlora" else "none"
        fields = {"precision": "bf16-amp", "checkpointing": "full", "quantization": quantization, "task": "causal-lm"}
        name = "mistralai/Mistral-7B-v0.1"
        return estimate(model=name, vram=vram, gpu=gpu, micro_batch_size=4, seq_len=4096, method=method, **fields)

    def test_at_24_gb_only_the_quantized_base_fits(self) -> None:
        """By what is reserved."""
        assert not self.estimate("lora", "24GB", "RTX 3090").fits
        assert self.estimate("qlora", "24GB", "RTX 3090").fits

    def test_at_40_gb_both_fit_and_the_plain_base_is_faster(self) -> None:
        """Published: 5 % faster."""
        plain, quantized = (self.estimate(method, "40GB", "A100 40GB") for method in ("lora", "qlora"))
        assert plain.fits and quantized.fits
        assert 1.0 < plain.tokens_per_s / quantized.tokens_per_s < 1.15
