"""Weights that are not on the card as accelerate brings them, for real, and what they take of the host's memory."""

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from test_inference_offload import SMALL, changed, config_of, record, workload_of
from test_repetition import LLAMA
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.inference import offload
from planner.levers.checkpointing import checkpointing_layers
from planner.parts.placing import look_up_on_host, places_of
from planner.recording.kernels import Target
from planner.recording.recorder import Recorder

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
