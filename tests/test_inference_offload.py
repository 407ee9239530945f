"""Layers whose weights come to the card while they run: as accelerate does it, and what follows from one recording."""

import ctypes
import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_repetition import BERT, LLAMA, T5
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.achievable import achievable
from planner.config import InferenceConfig
from planner.hardware import find_card
from planner.inference import offload
from planner.inference.source import InferenceSource
from planner.inference.streaming_time import (
    DRIVER_CALL_US,
    HOOK_US,
    SLOW_DRIVER_CALL_US,
    HostRates,
    StreamingTime,
    emptied,
    streaming_time,
)
from planner.inference.workload import InferenceWorkload
from planner.levers.checkpointing import checkpointing_layers, stack_sizes
from planner.memory.allocator import AllocatorSettings, CachingAllocator
from planner.memory.model import constant_step, fit_step
from planner.parts.placing import look_up_on_host, places_of
from planner.recording.kernels import Target
from planner.recording.record import ACTIVATIONS, INPUTS, OUTSIDE_LAYERS, PARAMETERS, TEMPORARIES, Op, Recording
from planner.recording.recorder import Recorder
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


# -- accelerate itself -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small model's folder, in fp32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    config = workload_of(SMALL, "causal-lm").hf_config()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def dispatched(folder, layers_on_card, **options):
    """The model as infer.py loads it, with the CPU for a card and further layers on disk."""
    from transformers import AutoModelForCausalLM

    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{i}": "cpu" if i < layers_on_card else "disk" for i in range(3)}
    options = {"dtype": torch.bfloat16, "device_map": places, "offload_folder": folder / "offload", **options}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


TOKENS = {"input_ids": torch.arange(32).reshape(2, 16)}


@pytest.fixture(scope="module")
def watched(checkpoint):
    """By number of layers on the card: events of weights that accelerate brought and dropped in a real pass."""
    from accelerate import hooks

    found = {}
    for count in (0, 2):
        model = dispatched(checkpoint, count)
        recorder, blocks = Recorder(Target(kind="cpu", compute_capability=(0, 0)), device="cpu"), {}
        place = hooks.set_module_tensor_to_device

        def watch(module, name, device, *args, recorder=recorder, blocks=blocks, place=place, **kwargs):
            place(module, name, device, *args, **kwargs)
            if str(device) != "meta":
                blocks[recorder.block(getattr(module, name))] = None

        hooks.set_module_tensor_to_device = watch
        try:
            with torch.no_grad(), recorder:
                recorder.phase("pass")
                model(**TOKENS)
                recording = recorder.recording()
        finally:
            hooks.set_module_tensor_to_device = place
        found[count] = [np.sign(e) * recording.sizes[abs(e)] for e in recording.events if abs(e) in blocks]
    return found


@pytest.mark.parametrize("count", [0, 2])
def test_weights_come_and_go_as_accelerate_brings_them(watched, count):
    """The same bytes in the same order, a module's own at a time, each dropped before the next module's come."""
    recording = record(SMALL, "causal-lm", offload="disk", layers_on_card=count, shape=(2, 16))
    blocks = {weight.block for weight in offload.streamed_weights(recording)}
    events = [np.sign(e) * recording.sizes[abs(e)] for e in recording.events if abs(e) in blocks]
    assert (3 - count) * 9 * 2 == len(events)
    assert watched[count] == events
    assert 2 * 64 * 96 == max(np.cumsum(events))  # never more than one matrix


def test_streamed_answers_are_the_models_own(checkpoint):
    """Weights on disk change nothing but where they are."""
    with torch.no_grad():
        expected = dispatched(checkpoint, 3, device_map=None)(**TOKENS).logits
        for count in (0, 2):
            assert torch.equal(expected, dispatched(checkpoint, count)(**TOKENS).logits)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_table_on_the_host_changes_no_answer(checkpoint, where):
    """By the script's own device map: it stays in host memory whole, and accelerate no longer sends it."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(workload_of(SMALL, "causal-lm").hf_config())
    places = places_of(empty, list(empty.model.layers), 1, "cpu", where, empty.get_input_embeddings())
    assert {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": where}.items() <= places.items()
    model = dispatched(checkpoint, 0, device_map=places)
    look_up_on_host(model.get_input_embeddings())
    assert "cpu" == model.get_input_embeddings().weight.device.type
    with torch.no_grad():
        expected = dispatched(checkpoint, 3, device_map=None)(**TOKENS).logits
        assert torch.equal(expected, model(**TOKENS).logits)


def test_vectors_follow_their_tokens_to_the_card():
    """accelerate's own hook, on a card that isn't there: the table stays, its output is where the ids were."""
    with torch.no_grad(), FakeTensorMode():
        table = torch.nn.Embedding(11, 4)
        look_up_on_host(table)
        found = table(torch.zeros(2, 3, dtype=torch.long, device="cuda"))
    assert ("cpu", "cuda", (2, 3, 4)) == (table.weight.device.type, found.device.type, (*found.shape,))


def test_weights_on_disk_are_read_where_they_are(checkpoint):
    """Safetensors files stay the place of weights that they hold: the offload folder stays empty."""
    model = dispatched(checkpoint, 1)
    assert [] == list((checkpoint / "offload").iterdir())
    there = [p.numel() for layer in checkpointing_layers(model)[1:] for p in layer.parameters() if p.is_meta]
    streamed = record(SMALL, "causal-lm", offload="disk", layers_on_card=0)
    need = offload.host_need(config_of(offload="disk", layers_on_card=1), streamed, "fp32")
    assert 4 * sum(there) == need.disk_bytes
    assert 0 == need.waiting_bytes


@pytest.mark.parametrize("options", [{"load_in_8bit": True}, {"load_in_4bit": True}], ids=["int8", "nf4"])
def test_quantized_weights_are_not_offloaded(checkpoint, options):
    """transformers refuses what conflict() refuses."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    with pytest.raises(ValueError, match="dispatched on the CPU or the disk"):
        dispatched(checkpoint, 1, quantization_config=BitsAndBytesConfig(**options))
    quantization = "int8" if "load_in_8bit" in options else "nf4"
    said = offload.conflict(config_of(offload="disk", quantization=quantization))
    assert "transformers refuses bitsandbytes weights" in said
    assert offload.conflict(config_of(offload="disk")) is None
    assert offload.conflict(config_of(quantization=quantization)) is None


# -- the host ----------------------------------------------------------------------------------------------------------


def anonymous_bytes():
    """Memory of this process that no file is behind."""
    with Path("/proc/self/status").open(encoding="utf-8") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def forget():
    """What earlier tests left goes now, and not while a model is loaded; free pages go back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A model of 100 MB in fp32 and its recording with no layer on the card."""
    from transformers import AutoModelForCausalLM

    fields = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    spec = changed(LLAMA, **fields)
    folder = tmp_path_factory.mktemp("larger")
    config = workload_of(spec, "causal-lm").hf_config()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return spec, folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_waits_in_host_memory_was_measured(larger, precision):
    """Weights of the checkpoint's type are its files' pages; others are copies, as large as they say."""
    from transformers import AutoModelForCausalLM

    spec, folder = larger
    streamed = record(spec, "causal-lm", offload="parameters", precision=precision, layers_on_card=0)
    need = offload.host_need(config_of(precision=precision, offload="parameters", layers_on_card=0), streamed, "fp32")
    forget()
    before = anonymous_bytes()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
    grown = anonymous_bytes() - before
    layers = sum(p.nbytes for layer in checkpointing_layers(model) for p in layer.parameters())
    assert layers == need.waiting_bytes
    assert abs(grown - (need.waiting_bytes - need.mapped_bytes)) < 0.1 * layers
    assert need.mapped_bytes in (0, need.waiting_bytes)
    assert (need.mapped_bytes > 0) == (precision == "fp32")


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_streaming_from_disk_keeps_the_resident_set_small(larger, where):
    """After a pass a model in memory has its files' pages; one whose layers are on disk a fraction of its weights."""
    import psutil

    spec, folder = larger
    layers = {f"model.layers.{i}": where for i in range(8)}
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu") | layers
    forget()
    before = psutil.Process().memory_info().rss
    model = dispatched(folder, 0, dtype=torch.float32, device_map=places)
    with torch.no_grad():
        model(**TOKENS)
    grown = psutil.Process().memory_info().rss - before
    pages = sum(mapped.rss for mapped in psutil.Process().memory_maps() if mapped.path.startswith(str(folder)))
    streamed = record(spec, "causal-lm", offload="disk", precision="fp32", layers_on_card=0)
    weights = sum(offload.layer_bytes(streamed).values())
    assert (grown < 0.3 * weights) if where == "disk" else (pages > 0.8 * weights)


def test_checkpoints_type():
    """As config.json names it, in either spelling; fp32 where it doesn't."""
    assert "bf16" == offload.stored_precision({"torch_dtype": "bfloat16"})
    assert "fp16" == offload.stored_precision({"dtype": "float16"})
    assert "fp32" == offload.stored_precision({})


# -- time --------------------------------------------------------------------------------------------------------------

REACHED = replace(achievable(), bandwidth_fraction=1.0, kernel_us=0.0, inference_operator_us=10.0, pcie_fraction=0.5)


def op_of(name, nbytes, position=0, layer=0):
    """An operator that is bound by the bytes that it moves."""
    return Op(name, 0, (nbytes,), "elementwise", position, False, layer)


def time_of(*ops, **options):
    """Of a pass of these operators."""
    moved = np.array([op.moved_bytes[0] for op in ops], dtype=np.int64)
    flops = np.zeros(len(ops), dtype=np.int64)
    options = {"tf32": False, "offload": "parameters", "reached": REACHED, **options}
    return streaming_time(ops, flops, moved, CARD, **options)


WEIGHT, KERNEL = op_of("vramplan.to_card", 10**9), op_of("aten.add", int(CARD.memory_bandwidth_bytes_per_s * 1e-3))


def test_a_copy_is_waited_for():
    """Its hook, the slower of staging and link, then each kernel after its launch: nothing is launched ahead."""
    link, staging = 1e9 / (CARD.pcie_bytes_per_s * 0.5), 0.1
    assert staging > link / 2
    found = time_of(WEIGHT, KERNEL, WEIGHT, KERNEL)
    once = HOOK_US * 1e-6 + max(link, staging) + 10e-6 + 1e-3
    assert 2 * once == pytest.approx(found.expected_s, rel=1e-6)
    assert 2 * (HOOK_US * 1e-6 + link + staging + 10e-6 + 1e-3) == pytest.approx(found.upper_s, rel=1e-6)
    assert 2 * (1e9 / CARD.pcie_bytes_per_s + 1e-3) == pytest.approx(found.lower_s, rel=1e-6)
    assert (2 * 10**9, 2) == (found.copied_bytes, found.copies)


@pytest.mark.parametrize("kind", ["parameters", "disk"])
def test_vectors_are_gathered_before_they_come(kind):
    """In host memory, wherever layers wait: what is no weight is gathered first, then copied as one is."""
    link, staging = 1e9 / (CARD.pcie_bytes_per_s * 0.5), 0.1
    found = time_of(op_of("vramplan.to_card", 10**9, layer=OUTSIDE_LAYERS), offload=kind, tensors_in_file=50)
    assert HOOK_US * 1e-6 + staging + max(link, staging) == pytest.approx(found.expected_s, rel=1e-6)
    assert HOOK_US * 1e-6 + staging + link + staging == pytest.approx(found.upper_s, rel=1e-6)
    assert 1e9 / CARD.pcie_bytes_per_s == pytest.approx(found.lower_s, rel=1e-6)
    assert (10**9, 0) == (found.copied_bytes, found.copies)


def test_without_copies_the_cpu_runs_ahead():
    """As the time model has it: only the first launch is waited for."""
    assert 10e-6 + 3e-3 == pytest.approx(time_of(KERNEL, KERNEL, KERNEL).expected_s, rel=1e-6)


def test_disk_is_slower_and_bounds_hold():
    """From disk a weight takes its file's page faults; the page cache may have it, and the disk may be slow."""
    host = HostRates(mapped_file_bytes_per_s=0.5e9, slow_disk_bytes_per_s=0.25e9)
    found = time_of(WEIGHT, KERNEL, offload="disk", host=host, tensors_in_file=100)
    assert 2.0 < found.expected_s < 2.01
    assert 4.1 < found.upper_s < 4.3
    assert time_of(WEIGHT, KERNEL).lower_s == found.lower_s


def test_an_emptied_cache_costs_driver_calls():
    """Each at its usual time in what is expected, at a slow host's in the upper bound."""
    plain, calling = time_of(WEIGHT), time_of(WEIGHT, driver_calls=7)
    assert 7 * DRIVER_CALL_US * 1e-6 == pytest.approx(calling.expected_s - plain.expected_s)
    assert 7 * SLOW_DRIVER_CALL_US * 1e-6 == pytest.approx(calling.upper_s - plain.upper_s)
    assert plain.lower_s == calling.lower_s


def test_times_add_up():
    """One pass after another."""
    one = StreamingTime(lower_s=1, expected_s=2, upper_s=4, copied_bytes=8, copies=16)
    assert StreamingTime(lower_s=2, expected_s=4, upper_s=8, copied_bytes=16, copies=32) == one + one


def test_emptying_gives_segments_back():
    """A weight's segment goes with the next weight's arrival, and the peak with it."""
    sizes = [0, 30 << 20, 40 << 20]
    recording = Recording(
        sizes=sizes,
        categories=[PARAMETERS] * 3,
        events=[1, -1, 2, -2],
        layers=[0, 0, 1, 1],
        phases={"load": 0, "pass": 0, "end": 4},
        ops=[op_of("vramplan.to_card", sizes[1], 1), op_of("vramplan.to_card", sizes[2], 3)],
    )
    kept = CachingAllocator(AllocatorSettings())
    kept.run(recording.events, np.array(sizes))
    found = emptied(recording)
    assert 70 << 20 == kept.peak_reserved_bytes == found.peak_reserved_bytes
    assert 3 == found.driver_calls  # both segments are asked for; the first one is given back when the second is there


@pytest.mark.parametrize("count", [0, 5])
def test_emptying_never_needs_more(count):
    """Of a whole model: what the allocator holds at most is no more than with its cache kept."""
    recording = record(LLAMA, "causal-lm", offload="parameters", layers_on_card=count, shape=(64, 256))
    kept = CachingAllocator(AllocatorSettings())
    kept.run(recording.events, np.array(recording.sizes))
    assert emptied(recording).peak_reserved_bytes <= kept.peak_reserved_bytes


def test_stack_sizes_of_two_towers():
    """Layers count through both: the encoder's first."""
    source = InferenceSource.make(workload_of(T5, "seq2seq-lm"), config_of(offload="parameters"), TARGET)
    assert [10, 10] == stack_sizes(source.model)
