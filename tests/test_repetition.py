"""Recordings of shallow models, deepened: equal to the deep model's own recording, event for event."""

import pytest

from planner.config import LoraSettings, TrainingConfig
from planner.levers.checkpointing import every_n, stack_sizes
from planner.models import ModelSpec
from planner.recording.kernels import Target
from planner.recording.record import Recording
from planner.recording.repetition import NotRegularError, Stack, repeat_layers
from planner.recording.source import make_source, plan_stacks
from planner.workload import Workload

TARGET = Target(compute_capability=(8, 9))


def spec_of(model_type, **config):
    """A small model of a family."""
    return ModelSpec(
        model_id=f"tiny-{model_type}",
        config={"model_type": model_type, "vocab_size": 211, **config},
        source="folder",
        architecture="",
        model_type=model_type,
        default_task="causal-lm",
        max_seq_len=512,
    )


BERT = spec_of("bert", hidden_size=64, num_attention_heads=4, intermediate_size=128, num_hidden_layers=10)
GPT2 = spec_of("gpt2", n_embd=64, n_head=4, n_layer=10)
LLAMA = spec_of(
    "llama",
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    num_hidden_layers=10,
    max_position_embeddings=512,
)
T5 = spec_of("t5", d_model=64, d_kv=16, d_ff=128, num_heads=4, num_layers=10, num_decoder_layers=10)
MODELS = [
    (BERT, "sequence-classification"),
    (GPT2, "causal-lm"),
    (LLAMA, "causal-lm"),
    (T5, "seq2seq-lm"),
]
STRUCTURES = [
    {"precision": "fp32"},
    {"precision": "bf16-amp"},
    {"precision": "fp32", "checkpointing": "every-2"},
    {"precision": "bf16-amp", "checkpointing": "full"},
    {"precision": "bf16-amp", "method": "lora", "lora": LoraSettings()},
]


def config_of(**fields):
    """A configuration; its shape is not looked at."""
    shape = dict.fromkeys(
        (
            "micro_batch_size",
            "seq_len",
            "max_tokens_per_micro_batch",
            "gradient_accumulation_steps",
            "effective_batch_size",
        ),
        1,
    )
    return TrainingConfig(**shape, **fields)


def without_layers(recording):
    """What must be equal: everything but the tags that say which template layer an event came from."""
    document = recording.to_json()
    del document["layers"]
    document["ops"] = [row[:-1] for row in document["ops"]]
    return document


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: "-".join(str(v) for v in s.values() if v)[:30])
@pytest.mark.parametrize(("spec", "task"), MODELS, ids=lambda value: getattr(value, "model_type", ""))
def test_deepened_recording_equals_the_deep_models(spec, task, structure):
    """Ten layers from four (or eight, in pairs) are the recording of ten; where not, it is refused, never wrong."""
    workload = Workload(spec=spec, task=task, target_seq_len=32 if task == "seq2seq-lm" else None)
    config = config_of(**structure)
    deep = make_source(workload, config, TARGET)
    stacks = plan_stacks(workload, config.attention, stack_sizes(deep.model), every=every_n(config.checkpointing) or 1)
    assert stacks
    shallow = make_source(workload, config, TARGET, stacks)
    assert sum(stack.template_layers for stack in stacks) == sum(stack_sizes(shallow.model))
    try:
        deepened = shallow.record((2, 48))
    except NotRegularError:
        assert "t5" == spec.model_type, "only T5's checkpointed decoder is irregular"
        assert "checkpointing" in structure
        return
    assert without_layers(deep.record((2, 48))) == without_layers(deepened)


def test_nothing_repeats_in_a_shallow_model():
    """Four layers are recorded as they are."""
    recording = Recording(sizes=[0, 8], categories=[0, 0], events=[1], layers=[0], phases={"load": 0})
    assert recording is repeat_layers(recording, (Stack(layers=4),))


def test_layers_that_differ_are_refused():
    """A middle layer that allocates something else than its neighbour can't be repeated."""
    recording = Recording(
        sizes=[0, 8, 8, 16, 8],
        categories=[2] * 5,
        events=[1, 2, 3, 4],
        layers=[0, 1, 2, 3],
        phases={"forward": 0},
    )
    with pytest.raises(NotRegularError, match="sizes of units differ"):
        repeat_layers(recording, (Stack(layers=9),))


def test_middle_layers_are_repeated_in_the_order_of_each_pass():
    """Forward blocks come in ascending order and are freed in descending order, each by its own layer."""
    recording = Recording(
        sizes=[0, 10, 11, 11, 13],
        categories=[2] * 5,
        events=[1, 2, 3, 4, -4, -3, -2, -1],
        layers=[0, 1, 2, 3, 3, 2, 1, 0],
        phases={"forward": 0, "backward": 4},
    )
    deep = repeat_layers(recording, (Stack(layers=6),))
    assert [1, 2, 3, 4, 5, 6, -6, -5, -4, -3, -2, -1] == deep.events
    assert [0, 10, 11, 11, 11, 11, 13] == deep.sizes
    assert {"forward": 0, "backward": 6} == deep.phases
