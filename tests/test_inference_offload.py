"""Layers whose weights come to the card while they run: what follows from one recording for any number of them."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from test_repetition import BERT, LLAMA, T5

from planner.config import InferenceConfig
from planner.hardware import find_card
from planner.inference import offload
from planner.inference.source import InferenceSource
from planner.inference.streaming_time import emptied, streaming_time
from planner.inference.workload import InferenceWorkload
from planner.levers.checkpointing import stack_sizes
from planner.memory.model import constant_step, fit_step
from planner.recording.kernels import Target
from planner.recording.record import ACTIVATIONS, INPUTS, OUTSIDE_LAYERS, TEMPORARIES
from planner.recording.repetition import Stack
from planner.workload import token_table

TARGET = Target(compute_capability=(8, 9))


def changed(spec, **fields):
    """A model of the same family."""
    return replace(spec, config={**spec.config, **fields})


TIED = changed(LLAMA, tie_word_embeddings=True)
SMALL = changed(LLAMA, num_hidden_layers=3, intermediate_size=96, vocab_size=96)
MODELS = [(BERT, "sequence-classification"), (LLAMA, "causal-lm"), (TIED, "causal-lm"), (T5, "seq2seq-lm")]
CARD = find_card("RTX 3060 12GB")
OWNERS = [(TIED, "causal-lm"), (LLAMA, "causal-lm"), (BERT, "sequence-classification")]


def config_of(**fields):
    """A configuration; its shape is not looked at."""
    shape = dict.fromkeys(("micro_batch_size", "seq_len", "max_tokens_per_micro_batch"), 1)
    return InferenceConfig(**{**shape, "precision": "bf16", **fields})


def workload_of(spec, task):
    """What runs a model of a task."""
    return InferenceWorkload(spec=spec, task=task, target_seq_len=32 if task == "seq2seq-lm" else None)


def run_passes(model, make_batch, watcher, passes=1):
    """Passes over a batch; of two towers with a short beginning of the answer."""
    watcher.phase("inputs", category=INPUTS)
    batch = make_batch()
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"][:, :8]
    for number in range(passes):
        watcher.phase(f"pass{number}", category=ACTIVATIONS)
        with torch.no_grad():
            model(**batch, **({} if "bert" in model.config.model_type else {"use_cache": False}))
    watcher.phase("end")
    del batch


def record(spec, task, *, stacks=(), passes=1, shape=(3, 48), **fields):
    """A recording of a model of a family."""
    source = InferenceSource.make(workload_of(spec, task), config_of(**fields), TARGET, stacks)
    return source.record(shape, partial(run_passes, passes=passes))


# -- some layers on the card -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "task", "where"),
    [(*model, "parameters") for model in MODELS] + [(LLAMA, "causal-lm", "disk")],
    ids=["bert", "llama", "tied", "t5", "llama-disk"],
)
def test_layers_on_the_card_follow_from_a_recording_without_them(spec, task, where):
    """For each number of layers: to the byte what a recording with so many layers on the card has, tags included."""
    streamed = record(spec, task, offload=where, layers_on_card=0)
    layers = len(offload.layer_bytes(streamed))
    assert layers == (20 if spec is T5 else 10)
    for count in (1, layers - 1, layers):
        direct = record(spec, task, offload=where, layers_on_card=count)
        assert direct.to_json() == offload.with_layers_on_card(streamed, count).to_json()
    assert record(spec, task, offload=where).to_json() == direct.to_json()  # None: all of them


@pytest.mark.parametrize(
    ("spec", "task", "stacks", "count"),
    [
        (LLAMA, "causal-lm", (Stack(layers=10),), 0),
        (LLAMA, "causal-lm", (Stack(layers=10, period=2),), 7),
        (T5, "seq2seq-lm", (Stack(layers=10), Stack(layers=10)), 12),
    ],
    ids=["llama", "pairs", "t5"],
)
def test_streamed_layers_repeat(spec, task, stacks, count):
    """Ten layers from four (or eight) are the recording of ten, with each event's own layer."""
    whole = record(spec, task, offload="parameters", layers_on_card=count)
    assert whole.to_json() == record(spec, task, offload="parameters", layers_on_card=count, stacks=stacks).to_json()
    assert set(range(10)) <= set(whole.layers)


def test_weights_of_later_passes_stay_as_well():
    """Two passes over the same layers: what stays is adopted once and copied never."""
    streamed = record(LLAMA, "causal-lm", offload="parameters", layers_on_card=0, passes=2)
    direct = record(LLAMA, "causal-lm", offload="parameters", layers_on_card=4, passes=2)
    assert direct.to_json() == offload.with_layers_on_card(streamed, 4).to_json()
    assert 2 * 6 * 9 == len(offload.streamed_weights(direct))


def test_one_layer_in_two_passes_is_adopted_once():
    """Where there is but one layer its turns follow each other: what is outside of it lies between them."""
    one = changed(LLAMA, num_hidden_layers=1)
    streamed = record(one, "causal-lm", offload="disk", layers_on_card=0, passes=2)
    direct = record(one, "causal-lm", offload="disk", layers_on_card=1, passes=2)
    assert direct.to_json() == offload.with_layers_on_card(streamed, 1).to_json()


def test_polynomials_with_layers_on_the_card():
    """A fitted step with layers put on the card is the step that is fitted with them there."""
    shapes = ((10, 80), (15, 240), (20, 400))  # three, as planner.memory.model.Variant.shapes has them
    fitted = [
        fit_step(lambda shape, n=n: record(LLAMA, "causal-lm", offload="disk", layers_on_card=n, shape=shape), shapes)
        for n in (0, 6)
    ]
    derived = offload.step_with_layers_on_card(fitted[0], 6)
    assert fitted[1].template.structure == derived.template.structure
    assert np.array_equal(fitted[1].sizes_at((7, 160)), derived.sizes_at((7, 160)))
    for expected, got in zip(fitted[1].ops_at((7, 160)), derived.ops_at((7, 160)), strict=True):
        assert np.array_equal(expected, got)


def pass_time(recording, kind, card):
    """Of all passes of a recording whose weights come from host memory or disk."""
    flops, moved = constant_step(recording).ops_at((1, 1))
    calls = emptied(recording).driver_calls if card.kind == "cuda" else 0
    names = len(offload.weight_bytes(recording))
    return streaming_time(
        recording.ops, flops, moved, card, tf32=False, offload=kind, driver_calls=calls, tensors_in_file=names
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpu_reads_layers_from_disk(precision):
    """Without a card a weight takes its own size while its module runs; nothing is reserved beforehand."""
    target = Target(kind="cpu", compute_capability=(0, 0))
    found = {}
    for count in (0, 4):
        config = config_of(offload="disk", precision=precision, layers_on_card=count)
        found[count] = InferenceSource.make(workload_of(LLAMA, "causal-lm"), config, target).record((3, 48), run_passes)
    assert found[4].to_json() == offload.with_layers_on_card(found[0], 4).to_json()
    assert 0 == found[4].sizes[1]
    card = replace(CARD, kind="cpu", pcie_bytes_per_s=CARD.memory_bandwidth_bytes_per_s)
    time = pass_time(found[0], "disk", card)
    assert 10 * 9 == time.copies
    assert time.lower_s < time.expected_s < time.upper_s


def test_a_pass_of_a_fitted_step():
    """Its bounds stand around what is expected, which is the more the fewer layers stay on the card."""
    streamed = record(LLAMA, "causal-lm", offload="parameters", layers_on_card=0)
    times = [pass_time(offload.with_layers_on_card(streamed, count), "parameters", CARD) for count in (0, 5, 10)]
    assert all(time.lower_s <= time.expected_s <= time.upper_s for time in times)
    assert times[0].expected_s > times[1].expected_s > times[2].expected_s
    assert [sum(offload.layer_bytes(streamed).values()), 0] == [times[0].copied_bytes - 2 * 90, times[2].copied_bytes]


@pytest.mark.parametrize(
    ("spec", "task", "count", "stacks"),
    [
        (BERT, "sequence-classification", 0, ()),
        (LLAMA, "causal-lm", 10, ()),
        (LLAMA, "causal-lm", 4, (Stack(layers=10),)),
    ],
    ids=["bert", "llama", "llama-repeated"],
)
def test_a_table_on_the_host_sends_vectors(spec, task, count, stacks):
    """Nothing of it is on the card; one copy brings what its lookup would have made, before the first layer."""
    fields = {"offload": "parameters", "layers_on_card": count, "stacks": stacks}
    staying, waiting = (record(spec, task, embedding_on_card=there, **fields) for there in (True, False))
    vocabulary = spec.config["vocab_size"]
    assert 2 * vocabulary * 64 == staying.sizes[1] - waiting.sizes[1]
    assert len(staying.sizes) - 1 == len(waiting.sizes)
    came = [op for op in waiting.ops if op.name == "vramplan.to_card" and op.layer == OUTSIDE_LAYERS]
    assert [2 * 3 * 48 * 64] == [waiting.sizes[waiting.events[op.position - 1]] for op in came]
    assert TEMPORARIES == waiting.categories[waiting.events[came[0].position - 1]]  # gone before the end
    assert len(offload.streamed_weights(staying)) == len(offload.streamed_weights(waiting))
    one = record(spec, task, **{**fields, "layers_on_card": 0}, embedding_on_card=False)
    assert waiting.to_json() == offload.with_layers_on_card(one, count).to_json()


def test_a_table_that_writes_too_stays():
    """Where the output layer has the same weights they are needed whole; a classifier's model has no such layer."""
    made = {spec: workload_of(spec, task).build_model(attention="eager", dtype=torch.float32) for spec, task in OWNERS}
    assert [False, True, True] == [token_table(made[spec]) is not None for spec, _ in OWNERS]


def test_a_model_may_have_no_table():
    """transformers' own answer of a model whose tokens are not looked up."""
    from transformers import PreTrainedConfig, PreTrainedModel

    assert token_table(PreTrainedModel(PreTrainedConfig())) is None


def test_what_is_reserved_is_what_is_loaded():
    """transformers reserves all that it loads in one block: what is in no layer, and the first layers."""
    streamed = record(LLAMA, "causal-lm", offload="parameters", layers_on_card=0)
    layer = offload.layer_bytes(streamed)[0]
    outside = 2 * 2 * 211 * 64 + 2 * 64 + 2 * 4 * 8  # embedding, output and last norm in bf16; frequencies, twice
    assert outside == streamed.sizes[1]
    assert outside + 3 * layer == offload.with_layers_on_card(streamed, 3).sizes[1]


def test_checkpoints_type():
    """As config.json names it, in either spelling; fp32 where it doesn't."""
    assert "bf16" == offload.stored_precision({"torch_dtype": "bfloat16"})
    assert "fp16" == offload.stored_precision({"dtype": "float16"})
    assert "fp32" == offload.stored_precision({})


def test_stack_sizes_of_two_towers():
    """Layers count through both: the encoder's first."""
    source = InferenceSource.make(workload_of(T5, "seq2seq-lm"), config_of(offload="parameters"), TARGET)
    assert [10, 10] == stack_sizes(source.model)
