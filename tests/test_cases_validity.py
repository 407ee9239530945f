"""Configurations that people were given and that could not work: none is chosen, each is refused with its reason."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from planner import InputError, Plan, plan
from planner.config import LoraSettings, TrainingConfig
from planner.emit import render_training_files
from planner.hardware import find_card
from planner.levers import Context
from planner.levers.precision import PrecisionLever
from planner.models import ModelSpec, resolve_model
from planner.parts.losses import cross_entropy
from planner.recording.kernels import Target
from planner.recording.source import make_source
from planner.recordings import Recordings
from planner.request import make_request
from planner.workload import Workload

GIB = 2**30
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_REQUEST = {
    "model": MINILM,
    "vram": "8GB",
    "task": "sequence-classification",
    "seq_len": 128,
    "batch_size": 24,
    "precision": "fp32",
}


@cache
def minilm_plan(**changes: Any) -> Plan:
    """A plan that comes in seconds."""
    return plan(**{**MINILM_REQUEST, **changes})


def context(model: str, card: str) -> Context:
    """What levers look at, for a model of the catalogue on a card of the catalogue."""
    return Context(
        spec=resolve_model(model),
        card=find_card(card),
        method="full",
        effective_batch_size=32,
        max_micro_batch_size=32,
        layers=12,
        supports_sdpa=True,
    )


def swept_precisions(model: str, card: str) -> list[str]:
    """Precisions that are tried when the request names none."""
    return [c.value for c in PrecisionLever().choices(context(model, card)) if c.valid and c.swept]


class TestA01:
    """A plan holds fixed numbers; nothing is found out again when it runs."""

    def test_the_batch_and_its_accumulation_are_in_plan_and_script(self) -> None:
        """And no batch finder is."""
        document = minilm_plan().to_json()
        script = render_training_files(document)["train.py"]
        config = document["config"]
        assert f"EFFECTIVE_BATCH_SIZE = {config['effective_batch_size']}" in script
        assert f"MAX_TOKENS_PER_MICRO_BATCH = {config['max_tokens_per_micro_batch']}" in script
        assert "find_executable_batch_size" not in script and "auto_find_batch_size" not in script

    def test_the_trainer_gets_fixed_numbers_too(self, tmp_path: Any) -> None:
        """``auto_find_batch_size`` stays off."""
        arguments = minilm_plan().to_training_arguments(output_dir=str(tmp_path), use_cpu=True)
        config = minilm_plan().config
        assert not arguments.auto_find_batch_size
        assert config.micro_batch_size == arguments.per_device_train_batch_size
        assert config.gradient_accumulation_steps == arguments.gradient_accumulation_steps

    def test_the_same_request_gives_the_same_plan(self) -> None:
        """Down to every figure but the time of day."""
        again = plan(**MINILM_REQUEST)
        assert minilm_plan().to_json() == again.to_json()


@pytest.mark.parametrize("batch_size", [1, 7, 24])
def test_a03_every_candidate_keeps_the_effective_batch(batch_size: int) -> None:
    """Micro-batch times accumulation is what was asked for, in everything that was looked at."""
    rows = minilm_plan(batch_size=batch_size).trial_rows
    products = {row["micro_batch_size"] * row["gradient_accumulation_steps"] for row in rows}
    assert {batch_size} == products


class TestB04:
    """T5's activations leave fp16's range."""

    @pytest.mark.parametrize("model", ["t5-base", "t5-small", "google/flan-t5-base"])
    def test_bf16_where_the_hardware_has_it(self, model: str) -> None:
        """And never fp16 unasked."""
        assert "bf16-amp" in swept_precisions(model, "RTX 3090")
        assert "fp16-amp" not in swept_precisions(model, "RTX 3090")

    @pytest.mark.parametrize("model", ["t5-base", "google/flan-t5-base"])
    def test_fp32_where_it_has_not(self, model: str) -> None:
        """A T4 has fp16 alone: T5 is trained in fp32 there, BERT in fp16."""
        assert ["fp32"] == swept_precisions(model, "Tesla T4")
        assert "fp16-amp" in swept_precisions("bert-base-uncased", "Tesla T4")


class TestB06:
    """bf16 by compute capability, not by what torch calls supported."""

    @pytest.mark.parametrize("card", ["Tesla T4", "V100 16GB", "GTX 1080", "RTX 2080 Ti"])
    def test_older_cards_have_none(self, card: str) -> None:
        """Neither swept nor accepted when named."""
        choices = {c.value: c for c in PrecisionLever().choices(context("bert-base-uncased", card))}
        assert not choices["bf16-amp"].valid and not choices["bf16"].valid
        assert "8.0" in choices["bf16-amp"].reason
        with pytest.raises(InputError, match=r"precision.*8\.0"):
            plan(model=MINILM, vram=f"{find_card(card).label_bytes // GIB}GB", gpu=card, precision="bf16-amp")

    @pytest.mark.parametrize("card", ["RTX 3060 12GB", "RTX 4090", "H100"])
    def test_newer_cards_do(self, card: str) -> None:
        """From 8.0 on."""
        assert "bf16-amp" in swept_precisions("bert-base-uncased", card)


@pytest.mark.parametrize("word", ["int8-dynamic", "dynamic-int8"])
def test_b08_dynamic_int8_is_refused_with_its_reason(word: str) -> None:
    """It runs on CPUs only and can't train."""
    with pytest.raises(InputError, match=r"quantization.*CPU.*train"):
        make_request(model="bert-base-uncased", vram="8GB", quantization=word)


class TestG01:
    """Lengths are held against the positions that a model has, before anything is tried."""

    @pytest.mark.parametrize(
        ("model", "longest"), [("bert-base-uncased", 512), ("roberta-base", 512), ("gpt2", 1024), ("distilgpt2", 1024)]
    )
    def test_one_token_more_is_refused(self, model: str, longest: int) -> None:
        """RoBERTa's configuration says 514, and two of these are taken."""
        assert longest == resolve_model(model).max_seq_len
        with pytest.raises(InputError, match=f"seq_len.*{longest + 1}.*{longest}"):
            plan(model=model, vram="8GB", seq_len=longest + 1)

    @pytest.mark.parametrize("model", ["t5-small", "microsoft/deberta-v3-base"])
    def test_relative_positions_have_no_hard_end(self, model: str) -> None:
        """What was pre-trained on is a default, no limit."""
        limit = resolve_model(model).max_seq_len
        assert limit is None or limit > 512 or model.startswith("microsoft")


class TestG03:
    """Decoders without a padding token can't classify more than one sequence at a time unless they are given one."""

    @pytest.mark.parametrize("model", ["gpt2", "meta-llama/Llama-3.2-1B"])
    def test_the_simulated_model_has_one(self, model: str) -> None:
        """Two sequences go through."""
        spec = _small(model)
        workload = Workload(spec=spec, task="sequence-classification")
        recordings = Recordings(workload, find_card("RTX 3090"))
        assert recordings.record(_config(2, 64), (2, 64)).events

    def test_the_script_gives_it_to_tokenizer_and_model(self) -> None:
        """The tokenizer gets it when it is loaded, and the model from the tokenizer, which comes first."""
        script = render_training_files(minilm_plan().to_json())["train.py"]
        assert "tokenizer.pad_token = tokenizer.eos_token" in script
        assert "model.config.pad_token_id = tokenizer.pad_token_id" in script
        assert script.index("tokenizer = load_tokenizer(") < script.index("model = build_model(")


class TestJ01:
    """A step in which what is trained gets no gradient would look like the best configuration."""

    @pytest.mark.parametrize("checkpointing", ["none", "full", "every-2"])
    @pytest.mark.parametrize("model", ["bert-base-uncased", "gpt2"])
    def test_every_adapter_gets_a_gradient(self, model: str, checkpointing: str) -> None:
        """As many gradients as trained tensors, whatever is recomputed."""
        task = "sequence-classification" if model.startswith("bert") else "causal-lm"
        config = _config(2, 32, method="lora", lora=LoraSettings(), checkpointing=checkpointing)
        source = make_source(Workload(spec=_small(model), task=task), config, Target(compute_capability=(8, 6)))
        assert len(source.trainable) == len(source.record((2, 32)).gradients) > 0

    def test_the_script_looks(self) -> None:
        """And checkpoints without re-entering."""
        document = minilm_plan(method="lora", checkpointing="full").to_json()
        script = render_training_files(document)["train.py"]
        assert "check_gradients(model)" in script and '"use_reentrant": False' in script


class TestK22:
    """Accumulation changes memory and not what is learned, also for models that don't normalise their loss."""

    @pytest.mark.parametrize("model", ["google/gemma-2-2b", "gpt2", "Qwen/Qwen2.5-0.5B"])
    def test_gradients_are_the_same_in_one_pass_and_in_four(self, model: str) -> None:
        """8 sequences of different lengths at once, or 4 times 2: the norms agree to 1 in 1000."""
        workload = Workload(spec=_small(model), task="causal-lm")
        torch.manual_seed(0)
        real = workload.build_model(attention="eager", dtype=torch.float32, device="cpu").eval()
        ids = torch.randint(1, 90, (8, 12))
        labels = ids.clone()
        for row in range(8):
            labels[row, 4 + row :] = -100
        norms = [self._norm(real, ids, labels, micro_batch_size) for micro_batch_size in (8, 2)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)

    @staticmethod
    def _norm(model: Any, ids: torch.Tensor, labels: torch.Tensor, micro_batch_size: int) -> float:
        model.zero_grad()
        items = int((labels != -100).sum())
        for part, wanted in zip(ids.split(micro_batch_size), labels.split(micro_batch_size), strict=True):
            cross_entropy(model(input_ids=part).logits, wanted, items).backward()
        return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


class TestK26:
    """Weights in bf16 without an fp32 copy stop learning: the smallest configuration must not win by itself."""

    def test_pure_bf16_is_never_swept(self) -> None:
        """On no card that has it."""
        assert "bf16" not in swept_precisions("meta-llama/Llama-3.2-1B", "H100")

    def test_naming_it_allows_it_and_says_what_it_costs(self) -> None:
        """The reason stands in the plan."""
        chosen = minilm_plan(precision="bf16")
        reason = next(r.reason for r in chosen.reasons if r.field == "precision")
        assert "bf16" == chosen.config.precision
        assert "lose updates" in reason


def _small(model: str) -> ModelSpec:
    """The model's own code at a size that runs in a moment."""
    spec = resolve_model(model)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "n_embd": 64,
        "intermediate_size": 96,
        "n_layer": 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "n_head": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "layer_types": ["full_attention"] * 4,
    }
    return replace(spec, config={**spec.config, **{k: v for k, v in sizes.items() if k in spec.config}})


def _config(micro_batch_size: int, seq_len: int, **fields: Any) -> TrainingConfig:
    values = {
        "micro_batch_size": micro_batch_size,
        "seq_len": seq_len,
        "max_tokens_per_micro_batch": micro_batch_size * seq_len,
        "gradient_accumulation_steps": 1,
        "effective_batch_size": micro_batch_size,
        "precision": "fp32",
    }
    return TrainingConfig.model_validate({**values, **fields})
