"""The conformance suite: what every lever must hold, whatever it does."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import bitsandbytes
import pytest
import torch
from peft import prepare_model_for_kbit_training
from test_emit import make_plan
from torch import nn

from planner.budget import Memory
from planner.config import METHODS, LoraSettings, TrainingConfig
from planner.emit import render_training_files
from planner.hardware import Card, find_card
from planner.inspection import flash2_obstacle
from planner.levers import LEVERS, Choice, Context, Lever, conflict
from planner.levers.checkpointing import checkpointing_layers, every_n, stack_sizes
from planner.levers.fused_loss import loss_of_outputs
from planner.levers.optimizer import STATE_BYTES_PER_PARAMETER, make_optimizer
from planner.levers.precision import autocast_dtype, base_dtype
from planner.models import ModelSpec, resolve_model
from planner.recording.kernels import Target
from planner.recording.record import OPTIMIZER, OUTSIDE_LAYERS, PARAMETERS
from planner.recording.recorder import Recorder
from planner.recording.source import StepSource
from planner.recording.stand_ins import Int8Linear, Nf4Linear
from planner.simulation import Simulator
from planner.step import build_model
from planner.workload import Workload

GIB = 2**30
BY_FIELD: dict[str, Lever] = {lever.field: lever for lever in LEVERS}
LORA = LoraSettings(dropout=0.0)


def tiny(name: str, **changes: Any) -> ModelSpec:
    """A bundled model with few and narrow layers."""
    spec = resolve_model(name)
    special = {key: 1 for key in ("bos_token_id", "eos_token_id") if key in spec.config}
    return dataclasses.replace(spec, config={**spec.config, "vocab_size": 500, **special, **changes})


BERT = tiny(
    "bert-base-uncased",
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=128,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
GPT2 = tiny("gpt2", n_embd=64, n_layer=4, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
WORKLOADS = [Workload(spec=BERT, task="sequence-classification"), Workload(spec=GPT2, task="causal-lm")]


def configuration(**fields: Any) -> TrainingConfig:
    """A configuration with these values, and what they imply."""
    if fields.get("quantization", "none") != "none":
        fields["method"] = "qlora"
    if fields.get("method") == "qlora":
        fields.setdefault("quantization", "nf4")
    if fields.get("method", "full") != "full":
        fields["lora"] = LORA
    micro = int(fields.pop("micro_batch_size", 8))
    seq_len = fields.pop("seq_len", 128)
    return TrainingConfig.model_validate(
        {
            "micro_batch_size": micro,
            "seq_len": seq_len,
            "max_tokens_per_micro_batch": micro * seq_len,
            "gradient_accumulation_steps": 2,
            "effective_batch_size": 2 * micro,
            "precision": "fp32",
            **fields,
        }
    )


def context(card: str = "RTX 3090", spec: ModelSpec = BERT, **changes: Any) -> Context:
    """What choices depend on: full fine-tuning of a tiny BERT."""
    values: dict[str, Any] = {
        "spec": spec,
        "card": find_card(card),
        "method": "full",
        "effective_batch_size": 32,
        "max_micro_batch_size": 16,
        "layers": 4,
        "supports_sdpa": True,
    }
    return Context(**(values | changes))


CONTEXTS = [
    *(context(card, method=method) for card in ("RTX 3090", "Tesla T4", "GTX 1060 6GB") for method in METHODS),
    context(spec=resolve_model("t5-small")),
    context("Tesla T4", spec=resolve_model("t5-small")),
    context(supports_sdpa=False, layers=2),
    context(effective_batch_size=1),
]


def values_of(lever: Lever) -> list[str]:
    """Every value that a lever offers in any context."""
    return list(dict.fromkeys(choice.value for where in CONTEXTS for choice in lever.choices(where)))


@cache
def simulator(card: str = "RTX 3090", task: str = "sequence-classification") -> Simulator:
    """BERT-base on a card."""
    workload = Workload(spec=resolve_model("bert-base-uncased"), task=task)
    return Simulator(workload, find_card(card), ceiling_bytes=24 * GIB)


def memory(*, task: str = "sequence-classification", **fields: Any) -> Memory:
    """What BERT-base needs."""
    return simulator(task=task).memory(configuration(**fields))


def real_loss(workload: Workload, config: TrainingConfig) -> tuple[float, nn.Module]:
    """First loss of a real model on the CPU with every lever applied, and the model after its backward pass."""
    torch.manual_seed(0)
    model = workload.build_model(attention=config.attention, dtype=torch.float32, device="cpu")
    model = model.to(base_dtype(config.precision, config.method))
    for lever in LEVERS:
        model = lever.change_model(model, config)
    torch.manual_seed(1)
    batch = workload.make_batch(3, 24, device="cpu")
    batch["input_ids"] = torch.randint(0, 500, (3, 24))
    labels = batch.pop("labels")
    labels = labels.flatten()[: len(labels)] % 2 if labels.dim() == 1 else batch["input_ids"]
    low = autocast_dtype(config.precision)
    with torch.autocast("cpu", dtype=low) if low else nullcontext():
        logits = model(**batch)["logits"]
    loss = loss_of_outputs(model, "cross-entropy")(logits, labels, labels.numel())
    loss.backward()
    return loss.item(), model


@cache
def real_step(index: int, field: str, value: str) -> tuple[float, nn.Module]:
    """``real_loss`` of a workload with one lever pulled, beside eager attention."""
    return real_loss(WORKLOADS[index], configuration(**{"attention": "eager", **_fields(BY_FIELD[field], value)}))


def applicable(lever: Lever, index: int) -> Iterator[str]:
    """Values that change a real step on the CPU; the stand-ins for quantized layers and flash_attn compute nothing."""
    if lever.field == "loss" and WORKLOADS[index].facts.new_head:
        return
    if lever.field not in ("micro_batch_size", "optimizer"):
        yield from (value for value in values_of(lever) if value not in ("nf4", "int8", "qlora", "flash2"))


@pytest.mark.parametrize("lever", LEVERS, ids=[lever.field for lever in LEVERS])
class TestEveryLever:
    """Adding a lever to LEVERS puts it through all of this."""

    def test_sets_a_field_of_the_configuration(self, lever: Lever) -> None:
        """Its values are the field's values."""
        assert lever.field in TrainingConfig.model_fields
        for value in values_of(lever):
            assert value == str(getattr(configuration(**{lever.field: value}), lever.field))

    def test_gives_a_reason_with_every_choice(self, lever: Lever) -> None:
        """One clause for a person: no newline, no full stop, and ``explain`` tells the same."""
        for where in CONTEXTS:
            choices = lever.choices(where)
            assert choices
            assert len(choices) == len({choice.value for choice in choices})
            for choice in choices:
                assert choice.reason.strip() == choice.reason
                assert len(choice.reason) > 10
                assert not choice.reason.endswith(".")
                assert "\n" not in choice.reason
                assert choice.reason == lever.explain(choice.value, where)

    def test_leaves_something_to_sweep_in_every_context(self, lever: Lever) -> None:
        """A request that names nothing always has a value to try."""
        for where in CONTEXTS:
            assert any(choice.valid and choice.swept for choice in lever.choices(where))

    def test_knows_the_values_that_it_makes_claims_about(self, lever: Lever) -> None:
        """Memory claims and loss tolerances are about its own values."""
        claimed = {value for pair in lever.lowers_memory for value in pair} | set(lever.loss_tolerance)
        assert claimed <= set(values_of(lever))

    def test_lowers_memory_where_it_says_so(self, lever: Lever) -> None:
        """On BERT-base at 8 x 128 and at 2 x 32, where weights and state are nearly all.

        A thousandth is left for what counts tensors and not bytes: fused AdamW keeps a step counter a parameter on
        the card, which takes a block of 512 bytes.
        """
        for value, baseline in lever.lowers_memory:
            for shape in ({"micro_batch_size": 8, "seq_len": 128}, {"micro_batch_size": 2, "seq_len": 32}):
                ours = memory(**_fields(lever, value), **shape, **_task(lever))
                baseline_fields = _fields(lever, baseline, with_adapters="lora" in (value, baseline))
                theirs = memory(**baseline_fields, **shape, **_task(lever))
                assert ours.peak_allocated_bytes <= 1.001 * theirs.peak_allocated_bytes, (value, baseline, shape)

    @pytest.mark.parametrize("index", range(len(WORKLOADS)), ids=[w.task for w in WORKLOADS])
    def test_keeps_the_first_loss_within_its_tolerance(self, lever: Lever, index: int) -> None:
        """Of the plain step's, on a tiny real model; exactly where it states no tolerance."""
        expected, _ = real_step(index, "attention", "eager")
        for value in applicable(lever, index):
            loss, _ = real_step(index, lever.field, value)
            tolerance = lever.loss_tolerance.get(value, 1e-6)
            assert expected == pytest.approx(loss, rel=tolerance), value

    @pytest.mark.parametrize("index", range(len(WORKLOADS)), ids=[w.task for w in WORKLOADS])
    def test_leaves_gradients_to_every_trained_parameter(self, lever: Lever, index: int) -> None:
        """Finite, and not zero but where mathematics says so.

        lora_A's is zero while lora_B is, and a bias of keys shifts all scores of a row alike.
        """
        for value in applicable(lever, index):
            _, model = real_step(index, lever.field, value)
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    assert parameter.grad is None
                    continue
                assert parameter.grad is not None, (value, name)
                assert parameter.grad.isfinite().all(), (value, name)
                if "lora_A" not in name and "key.bias" not in name:
                    assert parameter.grad.any(), (value, name)

    def test_appears_in_scripts_that_compile(self, lever: Lever) -> None:
        """For every value, the emitted script is Python."""
        for value in values_of(lever):
            plan = make_plan(**configuration(**_fields(lever, value)).model_dump(), **_task(lever))
            for name, text in render_training_files(plan).items():
                if name.endswith(".py"):
                    ast.parse(text)


def _task(lever: Lever) -> dict[str, str]:
    """The task that a lever is for, where it isn't for all."""
    return {"task": "masked-lm"} if lever.field == "loss" else {}


def _fields(lever: Lever, value: str, *, with_adapters: bool = False) -> dict[str, Any]:
    """A lever's value, with the method that it belongs to."""
    if lever.field == "quantization" and value == "none" and not with_adapters:
        return {"quantization": "none", "method": "lora"}
    if lever.field == "offload":  # parameters need it, and the others are compared with it
        return {"offload": value, "checkpointing": "full"}
    return {lever.field: value}


# -- verdicts that follow the card and the model ---------------------------------------------------------------------


def verdicts(field: str, where: Context) -> dict[str, Choice]:
    """A lever's choices by value."""
    return {choice.value: choice for choice in BY_FIELD[field].choices(where)}


@pytest.mark.parametrize(
    ("card", "valid", "swept"),
    [
        ("RTX 3090", {"fp32", "tf32", "fp16-amp", "bf16-amp", "bf16", "bf16-master"}, {"fp32", "tf32", "bf16-amp"}),
        ("Tesla T4", {"fp32", "fp16-amp"}, {"fp32", "fp16-amp"}),
        ("Tesla V100 16GB", {"fp32", "fp16-amp"}, {"fp32", "fp16-amp"}),
        ("GTX 1060 6GB", {"fp32", "fp16-amp"}, {"fp32", "fp16-amp"}),
    ],
)
def test_precision_follows_the_compute_capability(card: str, valid: set[str], swept: set[str]) -> None:
    """bf16 and tf32 need 8.0 in hardware; fp16 is for the cards that have nothing better."""
    found = verdicts("precision", context(card))
    assert valid == {value for value, choice in found.items() if choice.valid}
    assert swept == {value for value, choice in found.items() if choice.valid and choice.swept}
    for value in ("tf32", "bf16-amp", "bf16", "bf16-master"):
        major, minor = find_card(card).compute_capability
        assert value in valid or f"{major}.{minor}" in found[value].reason


@pytest.mark.parametrize("name", ["t5-small", "t5-base"])
def test_models_that_overflow_in_fp16_are_not_swept_in_it(name: str) -> None:
    """T5's activations exceed 65504; it stays possible for who names it, with the reason."""
    choice = verdicts("precision", context("Tesla T4", spec=resolve_model(name)))["fp16-amp"]
    assert (True, False) == (choice.valid, choice.swept)
    assert "fp16" in choice.reason


def test_eager_is_for_models_without_fused_attention() -> None:
    """sdpa wins where there is one; naming it is an error where there is none."""
    swept = {v: c.swept for v, c in verdicts("attention", context()).items()}
    assert {"sdpa": True, "eager": False, "flash2": False} == swept
    without = verdicts("attention", context(supports_sdpa=False))
    assert (False, True) == (without["sdpa"].valid, without["eager"].swept)


@pytest.mark.parametrize(("layers", "swept"), [(2, {"none", "full"}), (12, {"none", "full", "every-2"})])
def test_partial_checkpointing_is_swept_from_four_layers(layers: int, swept: set[str]) -> None:
    """Of two layers a half is one."""
    found = verdicts("checkpointing", context(layers=layers))
    assert swept == {value for value, choice in found.items() if choice.swept}


def test_optimizers_that_train_otherwise_are_only_named() -> None:
    """The ladder gives up nothing that wasn't asked for."""
    assert {"adamw_fused"} == {v for v, choice in verdicts("optimizer", context()).items() if choice.swept}


@pytest.mark.parametrize(("method", "swept"), [("full", True), ("lora", False), ("qlora", False)])
def test_offload_is_for_full_fine_tuning(method: str, swept: bool) -> None:
    """Adapters have next to no state."""
    assert swept == verdicts("offload", context(method=method))["optimizer"].swept


@pytest.mark.parametrize(
    ("effective", "largest", "expected"),
    [
        (32, 512, [1, 2, 4, 8, 16, 32]),
        (32, 10, [1, 2, 4, 8]),
        (7, 512, [1, 7]),
        (1, 512, [1]),
        (12, 6, [1, 2, 3, 4, 6]),
    ],
)
def test_micro_batches_divide_the_effective_batch(effective: int, largest: int, expected: list[int]) -> None:
    """So that micro-batch times accumulation is what was asked for, always."""
    found = verdicts("micro_batch_size", context(effective_batch_size=effective, max_micro_batch_size=largest))
    assert expected == [int(value) for value in found]


# -- what levers do to a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "expected"), [("none", None), ("full", 1), ("every-2", 2), ("every-12", 12)])
def test_every_n(text: str, expected: int | None) -> None:
    """One of how many layers is recomputed."""
    assert expected == every_n(text)


@pytest.mark.parametrize(
    ("checkpointing", "expected"),
    [("none", [False] * 4), ("full", [True] * 4), ("every-2", [True, False] * 2), ("every-4", [True, *[False] * 3])],
)
def test_checkpointing_marks_its_layers(checkpointing: str, expected: list[bool]) -> None:
    """Layers 0, N, 2N, ..."""
    config = configuration(checkpointing=checkpointing)
    model = WORKLOADS[0].build_model(attention="sdpa", dtype=torch.float32)
    BY_FIELD["checkpointing"].change_model(model, config)
    assert expected == [layer.gradient_checkpointing for layer in checkpointing_layers(model)]
    assert [4] == stack_sizes(model)


@pytest.mark.parametrize("index", range(len(WORKLOADS)), ids=[w.task for w in WORKLOADS])
@pytest.mark.parametrize("checkpointing", ["full", "every-2"])
def test_checkpointed_adapters_get_the_gradients_of_plain_ones(index: int, checkpointing: str) -> None:
    """The first layer's input needs no gradient for its recomputation."""
    plain, again = (
        real_loss(WORKLOADS[index], configuration(method="lora", checkpointing=value))[1]
        for value in ("none", checkpointing)
    )
    trained = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert any("lora_B" in name and grad.any() for name, grad in trained.items() if grad is not None)
    for name, parameter in again.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, trained[name])


def test_encoder_and_decoder_are_two_stacks() -> None:
    """T5-small has six layers in each."""
    workload = Workload(spec=resolve_model("t5-small"), task="seq2seq-lm", target_seq_len=8)
    assert [6, 6] == stack_sizes(workload.build_model(attention="eager", dtype=torch.float32))


def test_adapters_freeze_the_base() -> None:
    """Trained are the low-rank matrices and the new head; adapters are fp32 whatever the base is."""
    for method in ("lora", "qlora"):
        config = configuration(method=method, precision="bf16-amp")
        model = WORKLOADS[0].build_model(attention="sdpa", dtype=torch.bfloat16)
        for lever in LEVERS:
            model = lever.change_model(model, config)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert all("lora_" in name or "classifier" in name or "pooler" in name for name in trained)
        assert {torch.float32} == {p.dtype for name, p in trained.items() if "lora_" in name}
        assert 2 * 6 * 4 <= sum("lora_" in name for name in trained)


@pytest.mark.parametrize(("quantization", "kind"), [("nf4", Nf4Linear), ("int8", Int8Linear)])
def test_quantization_replaces_linear_layers_but_heads(quantization: str, kind: type[nn.Module]) -> None:
    """Every linear layer of the encoder's layers, and not the classifier; GPT-2's kind of linear layer as well."""
    config = configuration(quantization=quantization, precision="bf16-amp")
    for workload, layers in zip(WORKLOADS, (6 * 4, 4 * 4), strict=True):
        model = workload.build_model(attention="sdpa", dtype=torch.bfloat16)
        sizes = {name: p.shape.numel() for name, p in model.named_parameters()}
        model = BY_FIELD["quantization"].change_model(model, config)
        replaced = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
        assert layers == sum("layer." in name or ".h." in name for name in replaced)
        assert not {"classifier", "lm_head"} & set(replaced)
        assert not any(p.requires_grad for p in model.parameters())
        for name, module in replaced.items():
            assert sizes[f"{name}.weight"] == module.in_features * module.out_features


@pytest.mark.parametrize("spec", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize(("quantization", "kind"), [("nf4", "Linear4bit"), ("int8", "Linear8bitLt")])
def test_a_trial_quantizes_the_layers_that_were_simulated(spec: str, quantization: str, kind: str) -> None:
    """bitsandbytes' own layers where there is data, of the same weights, quantized before there are adapters."""
    t5 = tiny("t5-small", d_model=64, d_ff=128, d_kv=32, num_heads=2, num_layers=2, num_decoder_layers=2)
    workload = {
        "bert": WORKLOADS[0],
        "gpt2": WORKLOADS[1],
        "t5": Workload(spec=t5, task="seq2seq-lm"),
    }[spec]
    config = configuration(quantization=quantization, precision="bf16-amp")
    simulated, real = (build_model(workload, config, device=device) for device in ("meta", "cpu"))
    expected = [name for name, m in simulated.named_modules() if isinstance(m, (Nf4Linear, Int8Linear))]
    quantized = {name: m for name, m in real.named_modules() if isinstance(m, getattr(bitsandbytes.nn, kind))}
    assert expected == list(quantized) != []
    assert {torch.uint8 if quantization == "nf4" else torch.int8} == {m.weight.dtype for m in quantized.values()}
    trained = [[name for name, p in model.named_parameters() if p.requires_grad] for model in (simulated, real)]
    assert trained[0] == trained[1]


def test_a_batch_with_data_is_random_and_padded_at_its_end() -> None:
    """Equal for equal seeds; the last token of the last sequence is padding, and its label no part of the loss."""
    workload = Workload(spec=BERT, task="token-classification", num_labels=3)
    batch, again, other = (workload.make_batch(4, 16, device="cpu", seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    assert 4 * 16 - 1 == batch["attention_mask"].sum()
    assert (0, 0, -100) == tuple(int(batch[name][-1, -1]) for name in ("input_ids", "attention_mask", "labels"))
    assert {0, 1, 2} == set(batch["labels"].flatten()[:-1].tolist())
    assert 0 <= int(batch["input_ids"].min()) < 400 < int(batch["input_ids"].max()) < 500


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.task)
def test_a_batch_without_data_has_the_same_tensors(workload: Workload) -> None:
    """Names in the same order, shapes and types."""
    described = [
        [(name, tuple(t.shape), t.dtype) for name, t in workload.make_batch(4, 16, device=device).items()]
        for device in ("meta", "cpu")
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_adapters_on_a_quantized_base_cast_nothing_under_autocast(quantization: str) -> None:
    """peft gives adapters of ordinary layers their input in fp32; those of bitsandbytes' layers take it as it is."""
    seen: list[torch.dtype] = []
    for precision in ("bf16-amp", "bf16"):
        config = configuration(quantization=quantization, precision=precision)
        model = WORKLOADS[1].build_model(attention="sdpa", dtype=torch.bfloat16)
        for lever in LEVERS:
            model = lever.change_model(model, config)
        adapted = next(m for m in model.modules() if hasattr(m, "lora_dropout"))
        adapted.lora_A["default"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        adapted.lora_A["default"].forward = lambda x: x[..., :16].float()
        adapted(torch.empty(2, 8, 64, dtype=torch.bfloat16, device="meta"))
    assert [torch.bfloat16, torch.float32] == seen


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (tiny("gpt2", n_layer=1), ""),
        (BERT, ""),
        (resolve_model("t5-small"), "encoder's mask"),
        (tiny("microsoft/deberta-v3-base", num_hidden_layers=1), "no flash attention"),
    ],
)
def test_flash_attn_is_for_models_that_transformers_has_it_for(spec: ModelSpec, said: str) -> None:
    """Tried on the model itself; what can't run is refused with the reason, on any card."""
    task = "seq2seq-lm" if spec.model_type == "t5" else "causal-lm" if spec.model_type == "gpt2" else "masked-lm"
    found = flash2_obstacle(Workload(spec=spec, task=task, target_seq_len=8))
    assert (said in found) if said else found == ""
    choice = verdicts("attention", context(flash2_obstacle=found))["flash2"]
    assert choice.valid == (not said)
    assert not verdicts("attention", context("Tesla T4"))["flash2"].valid


def test_values_that_do_not_go_together_are_told() -> None:
    """flash_attn has no fp32; the search leaves such configurations out with the reason."""
    assert "fp16 and bf16" in str(conflict(configuration(attention="flash2", precision="tf32")))
    assert conflict(configuration(attention="flash2", precision="bf16-amp")) is None


@pytest.mark.parametrize("name", STATE_BYTES_PER_PARAMETER)
def test_optimizers_keep_the_state_that_they_say(name: str) -> None:
    """Bytes a parameter on the card, for matrices of a usual size; small parts (counters, scales) come on top."""
    parameters = [nn.Parameter(torch.zeros(1024, 512, device="meta")) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(name, parameters)
    recorder = Recorder(Target(compute_capability=(8, 6)))
    recorder.adopt((tensor, OUTSIDE_LAYERS) for p in parameters for tensor in (p, p.grad) if tensor is not None)
    with recorder:
        recorder.phase("first_update", category=OPTIMIZER)
        optimizer.step()
        recorder.phase("end")
    recording = recorder.recording()
    freed = {-event for event in recording.events if event < 0}
    made = enumerate(zip(recording.sizes, recording.categories, strict=True))
    kept = sum(size for block, (size, kind) in made if kind == OPTIMIZER and block not in freed)
    count = sum(p.numel() for p in parameters)
    assert STATE_BYTES_PER_PARAMETER[name] * count <= kept <= (STATE_BYTES_PER_PARAMETER[name] + 0.05) * count


@pytest.mark.parametrize(
    ("precision", "method", "expected"),
    [
        ("fp32", "full", torch.float32),
        ("tf32", "lora", torch.float32),
        ("fp16-amp", "full", torch.float32),
        ("bf16-amp", "full", torch.float32),
        ("bf16", "full", torch.bfloat16),
        ("bf16-amp", "lora", torch.bfloat16),
        ("fp16-amp", "qlora", torch.float16),
    ],
)
def test_weights_have_the_type_that_the_method_needs(precision: str, method: str, expected: torch.dtype) -> None:
    """Trained weights under autocast are fp32; frozen ones are in the type that the step computes in."""
    assert expected == base_dtype(precision, method)


def test_cards_are_what_verdicts_are_based_on() -> None:
    """The same model and method on two cards differ in precision and in what flash_attn runs on."""
    cards: list[Card] = [find_card("RTX 3090"), find_card("Tesla T4")]
    for lever in LEVERS:
        ours, theirs = (lever.choices(context(card.name)) for card in cards)
        assert (lever.field not in ("precision", "attention")) == (ours == theirs)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_k_bit_preparation_can_be_recorded(quantization: str) -> None:
    """peft's fp32 casts of all that is not quantized, which other scripts make and the emitted one doesn't."""
    config = configuration(quantization=quantization, precision="bf16-amp")
    held = {}
    for prepared in (False, True):
        model: Any = WORKLOADS[1].build_model(attention="sdpa", dtype=torch.bfloat16)
        model = BY_FIELD["quantization"].change_model(model, config)
        if prepared:
            model.is_loaded_in_4bit = True
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model = BY_FIELD["method"].change_model(model, config)
        target = Target(compute_capability=(8, 6))
        source = StepSource(workload=WORKLOADS[1], config=config, model=model, stacks=(), target=target)
        recording = source.record((2, 32))
        held[prepared] = sum(
            size for size, kind in zip(recording.sizes, recording.categories, strict=True) if kind == PARAMETERS
        )
    unquantized = 500 * 64 + 1024 * 64 + 4 * (4 * 64 + 3 * 64 + 64 + 128 + 64) + 2 * 64
    assert held[True] - held[False] == pytest.approx(2 * unquantized, rel=0.02)


def test_distilberts_head_is_trained_whole_under_adapters() -> None:
    """peft saves DistilBERT's pre_classifier whole by the end of its name: it gets no adapter as well, which fails."""
    workload = Workload(spec=resolve_model("distilbert-base-uncased"), task="sequence-classification")
    config = TrainingConfig(
        micro_batch_size=2,
        seq_len=16,
        max_tokens_per_micro_batch=32,
        gradient_accumulation_steps=1,
        effective_batch_size=2,
        precision="fp32",
        method="lora",
        lora=LoraSettings(),
    )
    trained = [name for name, p in build_model(workload, config).named_parameters() if p.requires_grad]
    head = ["pre_classifier", "pre_classifier", "classifier", "classifier"]
    assert head == [name.split(".")[2] for name in trained if "lora" not in name]
