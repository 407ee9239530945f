"""What each task asks of the simulator and of trials: batches, losses, heads, and the loss over a whole step."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planner import model_families
from planner.config import LoraSettings, TrainingConfig
from planner.errors import InputError
from planner.hardware import find_card
from planner.levers.checkpointing import checkpointing_layers
from planner.measure.protocol import OK, TrialSpec
from planner.measure.trial import run_trial
from planner.memory.model import MemoryModel, Variant, agrees
from planner.memory.polynomials import N_MONOMIALS, monomials
from planner.models import ModelSpec, resolve_model
from planner.parts.losses import contrastive_loss
from planner.question import look_up
from planner.recording.kernels import Target
from planner.recording.record import PARAMETERS, Recording
from planner.recording.recorder import Recorder
from planner.recording.source import make_source
from planner.request import make_request
from planner.simulation import Simulator
from planner.step import CachedGradients, build_model, contrast, embed, run_micro_batch
from planner.tasks import TASK_FACTS
from planner.timing import step_time
from planner.workload import Workload, device_tensors

GIB = 2**30
CPU = Target(kind="cpu")
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}
NEW = ("multi-label-classification", "regression", "reranking", "embedding")
SHAPE = (3, 24)


def tiny(name: str = "bert-base-uncased", **changes: Any) -> ModelSpec:
    """A bundled model with few and narrow layers."""
    spec = resolve_model(name)
    return dataclasses.replace(spec, config={**spec.config, "vocab_size": 300, **SMALL, **changes})


def workload(task: str, **changes: Any) -> Workload:
    """That BERT with three labels where the task has any."""
    return Workload(spec=tiny(**changes), task=task, num_labels=3)


def config(shape: tuple[int, int] = SHAPE, *, accumulation: int = 1, sequences: int = 1, **fields: Any) -> Any:
    """A configuration; what isn't named is fp32 without levers."""
    return TrainingConfig(
        micro_batch_size=shape[0],
        seq_len=shape[1],
        max_tokens_per_micro_batch=sequences * shape[0] * shape[1],
        gradient_accumulation_steps=accumulation,
        effective_batch_size=shape[0] * accumulation,
        lora=LoraSettings(r=4) if fields.get("method") == "lora" else None,
        **{"precision": "fp32", **fields},
    )


def simulator(task: str, **changes: Any) -> Simulator:
    """On an RTX 3090."""
    return Simulator(workload(task, **changes), find_card("RTX 3090"), ceiling_bytes=8 * GIB)


class Silent:
    """Watches nothing."""

    def phase(self, name: str, **_: Any) -> None:
        """Nothing."""


# -- batches and heads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "shape", "dtype", "outputs"),
    [
        ("sequence-classification", (3,), torch.int64, 3),
        ("multi-label-classification", (3, 3), torch.float32, 3),
        ("regression", (3, 1), torch.float32, 1),
        ("reranking", (3, 1), torch.float32, 1),
        ("token-classification", (3, 24), torch.int64, 3),
        ("masked-lm", (3, 24), torch.int64, 0),
    ],
)
def test_labels_are_what_the_tasks_loss_takes(task: str, shape: Any, dtype: torch.dtype, outputs: int) -> None:
    """A class, numbers, classes of words, tokens; on a device and without data alike."""
    load = workload(task)
    assert outputs == load.outputs
    for device in ("meta", "cpu"):
        labels = load.make_batch(*SHAPE, device=device)["labels"]
        assert (shape, dtype) == (labels.shape, labels.dtype)


def test_an_embedding_sample_is_two_rows_without_labels() -> None:
    """A text and its partner, which count for twice the tokens."""
    load = workload("embedding")
    batch = load.make_batch(*SHAPE)
    assert {"input_ids": (6, 24), "attention_mask": (6, 24)} == {name: tuple(t.shape) for name, t in batch.items()}
    assert 48 == load.tokens_per_sequence(24)


def test_a_pair_in_one_sequence_says_which_token_is_whose() -> None:
    """BERT's tokenizer does, XLM-RoBERTa's doesn't; one text needs no such marks."""
    assert "token_type_ids" in workload("reranking").make_batch(*SHAPE)
    assert "token_type_ids" not in workload("regression").make_batch(*SHAPE)
    reranker = Workload(spec=tiny("BAAI/bge-reranker-v2-m3"), task="reranking")
    assert "token_type_ids" not in reranker.make_batch(*SHAPE)


def test_a_vector_needs_no_pooler_and_every_weight_has_a_gradient() -> None:
    """BERT's pooler is dropped as in the script: its weights would be trained by nothing."""
    model = build_model(workload("embedding"), config(), device="cpu")
    batch = workload("embedding").make_batch(*SHAPE, device="cpu")
    embed(model, batch, None).pow(3).sum().backward()
    assert "BertModel" == type(model).__name__
    assert [] == [name for name, p in model.named_parameters() if "pooler" in name or p.grad is None]


def test_peft_is_told_of_a_model_without_a_head() -> None:
    """Its task is feature extraction, and nothing but adapters is trained."""
    model: Any = build_model(workload("embedding"), config(method="lora"))
    assert TASK_FACTS["embedding"].peft_task == model.peft_config["default"].task_type
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


def test_a_head_with_one_output_is_a_rerankers() -> None:
    """A checkpoint with more is a classifier's."""
    config_of = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    assert "reranking" == model_families.default_task({**config_of, "id2label": {"0": "LABEL_0"}})
    assert "reranking" == model_families.default_task({**config_of, "num_labels": 1})
    assert "sequence-classification" == model_families.default_task({**config_of, "id2label": {"0": "a", "1": "b"}})


def test_a_model_that_needs_a_target_makes_no_vectors() -> None:
    """T5's base model runs its decoder as well."""
    assert "embedding" not in model_families.supported_tasks("t5")
    assert "embedding" not in model_families.tasks_in_transformers("pegasus")
    assert "embedding" in model_families.tasks_in_transformers("cohere")


def test_one_sample_a_step_has_nothing_to_be_compared_with() -> None:
    """The contrastive loss of one pair is zero."""
    arguments = {"model": "bert-base-uncased", "task": "embedding", "vram": "8GB"}
    with pytest.raises(InputError, match="batch_size: got 1 with task embedding; accepted with it: 2 or more"):
        look_up(make_request(**arguments, batch_size=1))


# -- what is recorded ------------------------------------------------------------------------------------------------


def real_recording(load: Workload, chosen: TrainingConfig, cached: CachedGradients | None) -> Recording:
    """A micro-batch on real tensors."""
    model = build_model(load, chosen, device="cpu")
    recorder, layers = Recorder(CPU), checkpointing_layers(model)
    recorder.watch_gradients([p for p in model.parameters() if p.requires_grad])
    recorder.watch_layers(layers)
    recorder.phase("load", category=PARAMETERS)
    recorder.adopt(device_tensors(model, layers))
    host = load.make_batch(*SHAPE, device="cpu")

    def arrive() -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in host.items()}

    with recorder:
        run_micro_batch(model, arrive, recorder, None, loss=load.facts.loss, cached=cached)
    return recorder.recording()


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("task", NEW)
def test_fake_tensors_record_what_real_ones_do(task: str, accumulation: int) -> None:
    """Every allocation, free and operator of a micro-batch, in order, with its size: with cached gradients as well."""
    load, chosen, cached = workload(task), config(accumulation=accumulation), None
    if task == "embedding" and accumulation > 1:
        cached = CachedGradients(vectors=torch.randn(6, 32), place=torch.arange(6))
    expected = real_recording(load, chosen, cached)
    fake = make_source(load, chosen, CPU).record(SHAPE)
    differing = [pair for pair in zip(expected.sizes, fake.sizes, strict=True) if pair[0] != pair[1]]
    # mse_loss sums into the storage that held the single errors, which its meta kernel doesn't tell: 4 bytes a row
    assert ([(12, 4)] if task == "regression" else []) == differing
    assert expected.structure == fake.structure


def test_the_comparison_is_recorded_as_it_runs() -> None:
    """Vectors, scores and gradients of 4 x 6 rows, event for event."""
    recorder = Recorder(CPU)
    with recorder:
        held = contrast((4, 6, 32), "cpu", recorder)
        recorder.phase("end")
        expected = recorder.recording()
    fake = make_source(workload("embedding"), config(accumulation=4), CPU).record_contrast(3, 4)
    assert held.vectors.grad is not None
    assert expected.sizes == fake.sizes
    assert expected.structure == fake.structure


@pytest.mark.parametrize("task", NEW)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_sizes_are_polynomials_and_agree_with_a_fresh_recording(task: str, accumulation: int) -> None:
    """Also the scores of a step of one micro-batch, which grow with its square."""
    sim, chosen = simulator(task), config(accumulation=accumulation, precision="bf16-amp")
    for shape in ((1, 96), (7, 200), (11, 77)):
        model = sim.model(chosen)
        assert model.is_polynomial(shape)
        assert agrees(model.step(shape), sim.recordings.record(chosen, shape), shape)


# -- the loss over a whole step --------------------------------------------------------------------------------------


def without_dropout(load: Workload) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return build_model(load, config(), device="cpu").eval()


def gradients(model: nn.Module) -> Tensor:
    """All of them, in a row."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_cached_gradients_are_those_of_the_whole_batch() -> None:
    """Four pairs at once, and in two micro-batches of two pairs."""
    load = workload("embedding")
    whole = without_dropout(load)
    batch = load.make_batch(4, 24, device="cpu")
    run_micro_batch(whole, lambda: dict(batch), Silent(), None, loss="contrastive")
    model = without_dropout(load)
    with torch.no_grad():
        vectors = embed(model, batch, None)
    contrastive_loss(vectors.requires_grad_(), 2).backward()
    assert vectors.grad is not None
    for place in torch.arange(8).split(4):
        part = {name: tensor[place] for name, tensor in batch.items()}
        cached = CachedGradients(vectors=vectors.grad, place=place)
        run_micro_batch(model, lambda part=part: dict(part), Silent(), None, loss="contrastive", cached=cached)
    assert gradients(whole).abs().max() > 1e-3
    torch.testing.assert_close(gradients(whole), gradients(model), rtol=1e-4, atol=1e-6)


def _other(model: MemoryModel, sim: Simulator, chosen: TrainingConfig) -> MemoryModel:
    """Without the comparison before each step."""
    return MemoryModel(
        lambda variant: sim.recordings.step_model(chosen, variant),
        model.update,
        cublas_workspace_bytes=model._workspace_bytes,
        settings=model.settings,
    )


def test_vectors_of_the_effective_batch_are_held_beside_each_micro_batch() -> None:
    """Places of 16 rows in each of 4 parts, fp32 vectors with gradients of 64 rows, and the loss: blocks of 512."""
    sim, chosen, shape = simulator("embedding"), config((8, 128), accumulation=4), (8, 128)
    model = sim.model(chosen)
    other = _other(model, sim, chosen).peak(shape, accumulate=True)
    expected = 4 * 512 + 2 * 64 * 32 * 4 + 512
    peak = model.peak(shape, accumulate=True)
    assert "accumulate" == peak.phase == other.phase
    assert expected == peak.allocated_bytes - other.allocated_bytes


def test_many_samples_of_short_texts_peak_in_their_comparison() -> None:
    """The scores of 4096 pairs are 64 MiB, beside which a micro-batch of two pairs is nothing."""
    sim = simulator("embedding")
    peak = sim.model(config((2, 16), accumulation=2048)).peak((2, 16), accumulate=True)
    assert "contrast" == peak.phase
    assert peak.allocated_bytes > 3 * 4096**2 * 4


def test_the_first_pass_takes_time() -> None:
    """Each micro-batch goes forward once more: a quarter to two thirds of what it took."""
    sim, chosen = simulator("embedding"), config((8, 128), accumulation=4, sequences=2)
    model = sim.model(chosen)
    arguments = {"trainable_parameters": 20_000, "tokens_per_sequence": 256}
    plain = step_time(_other(model, sim, chosen), chosen, sim.card, **arguments)
    cached = step_time(model, chosen, sim.card, **arguments)
    assert 1.25 < cached.micro_batch_ms / plain.micro_batch_ms < 1.67
    assert plain.update_ms == cached.update_ms


# -- trials ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "accumulation"), [("embedding", 3), ("embedding", 1), ("multi-label-classification", 2)]
)
def test_a_trial_runs_the_tasks_own_step(task: str, accumulation: int) -> None:
    """Gradients arrive everywhere, the loss is a number, and the typical length fills the budget in samples."""
    sequences = TASK_FACTS[task].sequences_per_sample
    chosen = config((4, 32), accumulation=accumulation, sequences=sequences)
    spec = TrialSpec(workload=workload(task), config=chosen, device="cpu", timed_s=0.0, typical_seq_len=16)
    measured = run_trial(spec)
    assert (OK, "", ()) == (measured.status, measured.reason, tuple(measured.without_gradient))
    assert measured.loss is not None
    assert 0 < measured.loss < 10
    assert measured.tokens_per_s == pytest.approx(1000 * 4 * accumulation * sequences * 32 / measured.step_ms)


# -- few positions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [48, 64, 128, 256, 512])
@pytest.mark.parametrize(("single", "aligned"), list(itertools.product((False, True), repeat=2)))
def test_recorded_lengths_tell_apart_what_differs_below_the_limit(limit: int, single: bool, aligned: bool) -> None:
    """Two monomials that look alike at the first three shapes are alike at every shape of the model."""
    shapes = Variant(single, aligned).shapes(limit)
    seen = np.stack([monomials(shape) for shape in shapes[:3]])
    lengths = [s for s in range(1, limit + 1) if (s % 16 == 0) == aligned]
    every = np.stack([monomials((b, s)) for b in ((1,) if single else (2, 3, 7)) for s in lengths])
    assert max(s for _, s in shapes) <= limit
    for i, j in itertools.combinations(range(N_MONOMIALS), 2):
        if np.array_equal(seen[:, i] * seen[0, j], seen[:, j] * seen[0, i]):
            assert np.array_equal(every[:, i] * seen[0, j], every[:, j] * seen[0, i]), (i, j)


@pytest.mark.parametrize("limit", [64, 128, 256])
def test_a_model_with_few_positions_is_simulated(limit: int) -> None:
    """Its sizes are polynomials, from recordings that its positions are enough for."""
    load = dataclasses.replace(workload("regression").spec, max_seq_len=limit)
    spec = dataclasses.replace(load, config={**load.config, "max_position_embeddings": limit})
    sim = Simulator(Workload(spec=spec, task="regression"), find_card("RTX 3090"), ceiling_bytes=8 * GIB)
    for shape in ((5, limit), (5, limit - 3)):
        chosen = config(shape)
        assert sim.model(chosen).is_polynomial(shape)
        assert agrees(sim.model(chosen).step(shape), sim.recordings.record(chosen, shape), shape)


def test_a_model_with_very_few_positions_is_recorded_shape_by_shape() -> None:
    """There are not enough lengths to tell sizes apart."""
    assert () == Variant(False, True).shapes(40)
