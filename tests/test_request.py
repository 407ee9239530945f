"""What a request accepts, and that everything wrong with it is said at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planner import config, request
from planner.errors import InputError
from planner.request import PlanRequest, make_request


def problems_of(**arguments):
    """Argument and message of each problem."""
    with pytest.raises(InputError) as caught:
        make_request(**arguments)
    return {problem.argument: problem.message for problem in caught.value.problems}


def ask(**arguments):
    """A request with the two required arguments filled in."""
    return make_request(**{"model": "bert-base-uncased", "vram": "8GB"} | arguments)


def test_two_arguments_are_enough():
    """Model and memory make a request; the rest has defaults."""
    expected = ("bert-base-uncased", 2**33, "train", "auto", None, 2, 0, None)
    r = ask()
    assert expected == (
        r.model,
        r.vram_bytes,
        r.mode,
        r.method,
        r.precision,
        r.num_labels,
        r.headroom_bytes,
        r.host_ram_bytes,
    )


def test_all_problems_at_once():
    """Three wrong values and a missing one give four problems in one error."""
    assert {"model", "vram", "precision", "seq_len"} == set(problems_of(vram="8", precision="fp61", seq_len="-5"))


def test_contradictions_are_found_beside_wrong_values():
    """A wrong value elsewhere doesn't hide that two fields contradict each other."""
    got = problems_of(vram="8", batch_size=8, batch_tokens=4096, method="full", quantization="nf4")
    assert {"model", "vram", "batch_tokens", "quantization"} == set(got)


def test_a_wrong_value_causes_no_contradiction():
    """Nothing is compared with a value that was refused."""
    assert {"vram"} == set(problems_of(model="m", vram="8", headroom="9GB"))


def test_nothing_given_names_both_required_arguments():
    """An empty request says what it lacks, with examples."""
    got = problems_of()
    assert ["model", "vram"] == sorted(got)
    assert "bert-base-uncased" in got["model"]
    assert "8GB" in got["vram"]


def test_none_counts_as_left_out():
    """Callers may pass every argument through, None for those without a value."""
    assert ask() == ask(method=None, seq_len=None, num_labels=None, headroom=None, trust_remote_code=None)


def test_typed_values_are_read_as_the_values_they_spell():
    """The command line's strings and the API's numbers make the same request."""
    typed = ask(seq_len="512", timeout="1.5", seed=" 7 ", precision="FP32, bf16", method="LoRA", headroom="500MB")
    native = ask(seq_len=512, timeout=1.5, seed=7, precision=["fp32", "bf16"], method="lora", headroom="500MB")
    assert native == typed
    assert (("fp32", "bf16"), 500 * 2**20) == (typed.precision, typed.headroom_bytes)


def test_a_path_is_a_model():
    """pathlib paths are taken as they are."""
    assert "models/mine" == ask(model=Path("models/mine")).model


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("precision", config.PRECISIONS),
        ("optimizer", config.OPTIMIZERS),
        ("attention", config.ATTENTIONS),
        ("loss", config.LOSSES),
        ("offload", config.OFFLOADS),
        ("quantization", config.QUANTIZATIONS),
        ("checkpointing", ("none", "full", "every-2", "every-12")),
    ],
)
def test_restrictions_take_every_word_of_their_vocabulary(field, words):
    """Each sweep can be restricted to any of its words; repeated words count once."""
    assert words == getattr(ask(**{field: ",".join((*words, words[0]))}), field)


@pytest.mark.parametrize("field", ["task", "method"])
def test_choices_match_their_types(field):
    """The words that are read are the words of the declared type."""
    schema = PlanRequest.model_json_schema()["properties"][field]
    words = next(part["enum"] for part in [schema, *schema.get("anyOf", [])] if "enum" in part)
    assert words == [getattr(ask(**{field: word}), field) for word in words]


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("optimizer", "adamw", "did you mean adamw_fused?"),
        ("precision", "fp16", "did you mean fp16-amp?"),
        ("task", "sequence_classification", "did you mean sequence-classification?"),
        ("attention", "spda", "did you mean sdpa?"),
        ("checkpointing", "every-1", "every-2, every-4, ..."),
        ("mode", "serve", "accepted: train, infer"),
        ("device", "gpu", "did you mean cuda?"),
        ("seq_len", "5.0", "a whole number of tokens from 1 to"),
        ("headroom", "500", "write 500GB"),
    ],
)
def test_refusal_says_value_accepted_and_near_match(field, value, part):
    """A refused value is named with what is accepted and, where there is one, the near match."""
    message = problems_of(model="m", vram="8GB", **{field: value})[field]
    assert message.startswith(f"got '{value}'; accepted: ")
    assert part in message


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, bad) for name in ("seq_len", "batch_size", "trials", "num_labels") for bad in (0, -1, "x", 1.5, True)]
    + [("seq_len", 10**5000), ("seq_len", "1" * 5000), ("seed", -1), ("seed", 2**32), ("batch_tokens", "1e3")]
    + [("storage", bad) for bad in ("", " ", "a\nb", "a\0b", 5)]
    + [
        (name, bad)
        for name in ("timeout", "trial_timeout")
        for bad in (0, -1, "nan", "inf", "soon", float("nan"), 10**400, True)
    ]
    + [("model", bad) for bad in ("", "  ", "a\nb", "a\0b", "x" * 2000, 5)]
    + [("precision", bad) for bad in ("", ",", "fp32,,bf16", [], 3, [1], {"fp32": 1})]
    + [("gpu", ""), ("trust_remote_code", "yes"), ("trust_remote_code", 1), ("host_ram", "8"), ("vram", 8.0)],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) or value < 2**64 else "huge",
)
def test_wrong_values_are_refused_in_one_line(field, value):
    """Every field refuses what it cannot mean, in one line of bounded length."""
    arguments = {"model": "m", "vram": "8GB"} | {field: value}
    got = problems_of(**arguments)
    assert [field] == list(got)
    assert 1 == len(got[field].splitlines())
    assert 300 > len(got[field])


@pytest.mark.parametrize(
    ("arguments", "argument", "part"),
    [
        ({"batch_size": 8, "batch_tokens": 4096}, "batch_tokens", "leave one out"),
        ({"batch_tokens": 100, "seq_len": 512}, "batch_tokens", "at least one sequence of 512 tokens"),
        ({"method": "full", "quantization": "nf4"}, "quantization", "choose method qlora or auto"),
        ({"method": "lora", "quantization": "nf4"}, "quantization", "are method qlora"),
        ({"method": "qlora", "quantization": "none"}, "quantization", "accepted with it: nf4, int8; adapters on"),
        ({"method": "full", "quantization": "int8"}, "quantization", "choose method qlora or auto"),
        ({"attention": "flash2", "precision": "fp32,tf32"}, "attention", "fp16-amp, bf16-amp, bf16, bf16-master"),
        ({"task": "causal-lm", "target_seq_len": 64}, "target_seq_len", "accepted with: seq2seq-lm"),
        ({"task": "causal-lm", "num_labels": 3}, "num_labels", "accepted with: sequence-classification"),
        ({"headroom": "8GB"}, "headroom", "less than the card's 8GiB"),
    ],
)
def test_contradictions(arguments, argument, part):
    """Values that are right one by one and wrong together are refused under the argument to change."""
    got = problems_of(model="m", vram="8GB", **arguments)
    assert [argument] == list(got)
    assert part in got[argument]


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "auto", "quantization": "nf4"},
        {"method": "full", "quantization": "none,nf4"},
        {"method": "qlora", "quantization": "nf4"},
        {"method": "qlora", "quantization": "int8"},
        {"attention": "flash2,sdpa", "precision": "fp32"},
        {"attention": "flash2", "precision": "fp32,bf16"},
        {"task": "seq2seq-lm", "target_seq_len": 64},
        {"task": "token-classification", "num_labels": 9},
        {"batch_tokens": 512, "seq_len": 512},
        {"headroom": "7GB"},
    ],
)
def test_what_only_looks_like_a_contradiction_is_accepted(arguments):
    """The rules refuse no request that can be met."""
    assert set(arguments) <= ask(**arguments).model_fields_set


def test_unknown_argument_names_the_near_match():
    """A misspelt argument is a problem like any other."""
    assert "unknown argument; did you mean seq_len?" == problems_of(model="m", vram="8GB", seqlen=3)["seqlen"]


def test_request_is_frozen():
    """A request doesn't change after it was checked."""
    with pytest.raises(ValidationError):
        ask().vram = "16GB"


def test_every_field_is_documented():
    """Each field has its docstring, which pydantic shows as the description."""
    assert [] == [name for name, field in PlanRequest.model_fields.items() if not field.description]


# Where trials run


@pytest.mark.parametrize("word", ["auto", "none", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_devices(word):
    """A device is one of four words, or one of several GPUs by its number."""
    assert word == ask(device=word).device == ask(device=f" {word.upper()} ").device


@pytest.mark.parametrize(
    ("got", "meant"), [("gpu", "cuda"), ("gpu:1", "cuda"), ("cud", "cuda"), ("cuda:x", "cuda"), ("cuda:01", "cuda")]
)
def test_a_wrong_device_is_one_line_with_what_is_accepted(got, meant):
    """The line names every word, an example of a number, and what was probably meant."""
    message = problems_of(model="m", vram="8GB", device=got)["device"]
    accepted = "auto, none, cpu, cuda, or one of several GPUs such as cuda:1"
    assert f"got {got!r}; accepted: {accepted}; did you mean {meant}?" == message


@pytest.mark.parametrize(
    "got", ["cuda:", "cuda:-1", "cuda:1000", "mps", "", "cuda:0,cuda:1", "cuda:\u0661", 0, None, True]
)
def test_what_is_no_device(got):
    """Torch's other devices, lists and other digits are refused; None is left out."""
    if got is None:
        assert "auto" == ask(device=got).device
    else:
        assert ["device"] == list(problems_of(model="m", vram="8GB", device=got))


@pytest.mark.parametrize(
    ("arguments", "argument", "part"),
    [
        ({"device": "none", "storage": "a.log"}, "storage", "with device none; accepted with: auto, cpu, cuda"),
        ({"device": "none", "trial_timeout": 5}, "trial_timeout", "no trial runs: leave it out"),
        ({"device": "cpu", "gpu": "T4"}, "gpu", "the processor is the card: leave one of them out"),
        ({"device": "cpu", "offload": "optimizer"}, "offload", "accepted with it: none; everything is in host memory"),
        ({"device": "cpu", "quantization": "nf4"}, "quantization", "accepted with it: none; this version trains on"),
        ({"device": "cpu", "precision": "tf32"}, "precision", "accepted with it: fp32, bf16-amp, bf16, bf16-master"),
        ({"device": "cpu", "precision": "fp16-amp,tf32"}, "precision", "both are for GPUs"),
        ({"device": "cpu", "attention": "flash2"}, "attention", "accepted with it: eager, sdpa; the flash_attn"),
        ({"device": "cpu", "optimizer": "adamw_8bit"}, "optimizer", "adamw_fused, adamw_foreach, adafactor, sgd"),
        ({"device": "cpu", "method": "qlora"}, "method", "accepted with it: auto, full, lora"),
        ({"device": "cpu", "host_ram": "8GB"}, "host_ram", "vram is the ceiling of host memory"),
        ({"device": "cpu", "allocator": "expandable_segments:False"}, "allocator", "it is a GPU's"),
    ],
)
def test_contradictions_with_the_device(arguments, argument, part):
    """What the device can't do is refused, with the reason and what goes with it."""
    got = problems_of(model="m", vram="8GB", **arguments)
    assert [argument] == list(got)
    assert part in got[argument]


def test_all_contradictions_with_the_device_at_once():
    """Each is a problem of its own."""
    wrong = {"gpu": "T4", "offload": "parameters", "precision": "tf32", "attention": "flash2", "quantization": "int8"}
    assert set(wrong) == set(problems_of(model="m", vram="8GB", device="cpu", **wrong))


@pytest.mark.parametrize(
    "arguments",
    [
        {"device": "cpu", "precision": "fp32,tf32", "attention": "flash2,sdpa", "offload": "none,optimizer"},
        {"device": "cpu", "storage": "a.log", "trial_timeout": 60, "trials": 5, "timeout": 60},
        {"device": "cuda:1", "gpu": "T4", "offload": "optimizer", "quantization": "nf4", "method": "qlora"},
        {"device": "auto", "storage": "a.log", "trial_timeout": 60},
        {"device": "none", "trials": 5, "timeout": 60},
    ],
)
def test_what_a_device_can_meet_is_accepted(arguments):
    """A restriction with something left on the device is no contradiction."""
    assert set(arguments) <= ask(**arguments).model_fields_set


@pytest.mark.parametrize(
    ("storage", "shown"),
    [
        ("trials.log", "trials.log"),
        ("postgresql://u:s3cret@h:5/d", "postgresql://u:***@h:5/d"),
        ("postgresql+psycopg://u:s@c:r/et@h/d", "postgresql+psycopg://u:***@h/d"),
        ("postgresql://h/d?user=u&password=s3cret&x=1", "postgresql://h/d?user=u&password=***&x=1"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("sqlite:///a:b.db", "sqlite:///a:b.db"),
    ],
)
def test_a_storages_password_is_used_and_never_saved(storage, shown):
    """The library gets the URL as it was given; plan.json and train.py get it without the password."""
    made = ask(storage=storage)
    assert storage == made.storage == dict(made)["storage"]
    assert shown == made.model_dump()["storage"] == made.model_dump(mode="json")["storage"]


def test_a_worker_needs_a_storage_and_a_device():
    """All problems at once, here too; its device can't be none."""
    with pytest.raises(InputError) as caught:
        request.make_worker_request(device="none", timeout=0)
    assert ["storage", "device", "timeout"] == [problem.argument for problem in caught.value.problems]
    made = request.make_worker_request(storage="a.log", device="CUDA:1", timeout="60")
    assert ("a.log", "cuda:1", 60.0) == (made.storage, made.device, made.timeout)
    assert ("auto", None) == (request.make_worker_request(storage="a.log").device, None)


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {"model": st.just("m"), "vram": st.integers(2**30, 2**40) | st.sampled_from(["8GB", "7.5 GiB"])},
        optional={
            "seq_len": st.integers(1, 4096),
            "precision": st.lists(st.sampled_from(config.PRECISIONS), min_size=1).map(tuple),
            "method": st.sampled_from(request.METHODS),
            "timeout": st.floats(0.001, 1e6),
            "seed": st.integers(0, 2**32 - 1),
            "checkpointing": st.lists(st.sampled_from(["none", "full", "every-3"]), min_size=1).map(tuple),
        },
    )
)
def test_request_survives_json(arguments):
    """plan.json holds the request whole: reading it back gives the same request."""
    made = make_request(**arguments)
    assert made == PlanRequest.model_validate_json(made.model_dump_json()) == make_request(**made.model_dump())


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(list(PlanRequest.model_fields)), st.text("8GBfp32,-. \n\0\u0668") | st.integers() | st.none()
    )
)
def test_no_input_crashes(arguments):
    """Whatever is passed, the answer is a request or an InputError."""
    try:
        assert isinstance(make_request(**arguments), PlanRequest)
    except InputError as error:
        assert error.problems
