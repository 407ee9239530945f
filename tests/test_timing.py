"""The time model on hand-made steps and cards: the expected milliseconds are worked out in the tests."""

import json
from dataclasses import fields, replace
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.config import LoraSettings, TrainingConfig
from planner.hardware import Card
from planner.memory.model import MemoryModel, Variant, fit_step
from planner.recording.record import Op, Recording
from planner.timing import Achievable, Pass, achievable, step_time

WEIGHTS = 1_000_000
"""Trainable parameters of the hand-made models."""
AMPERE_RATES = {"fp32": 10e12, "tf32": 40e12, "fp16": 80e12, "bf16": 80e12}
REACHED = Achievable(
    matmul_fp32_fraction=0.8,
    matmul_tensor_core_fraction=0.5,
    attention_fp32_fraction=0.25,
    attention_half_fraction=0.4,
    bandwidth_fraction=0.5,
    kernel_us=2.0,
    operator_us=20.0,
    inference_operator_us=15.0,
    bare_operator_us=5.0,
    pcie_fraction=0.8,
    host_bandwidth_bytes_per_s=40e9,
)


def make_card(rates=AMPERE_RATES, *, compute_capability=(8, 6), has_tensor_cores=True):
    """10 TFLOP/s in fp32, 1 TB/s, PCIe of 10 GB/s."""
    return Card(
        name="hand-made",
        label_bytes=8 << 30,
        reported_bytes=8 << 30,
        compute_capability=compute_capability,
        memory_bandwidth_bytes_per_s=1e12,
        dense_flops_per_s=rates,
        pcie_bytes_per_s=10e9,
        has_tensor_cores=has_tensor_cores,
        source="made up",
    )


AMPERE = make_card()
TURING = make_card({"fp32": 10e12, "fp16": 80e12}, compute_capability=(7, 5))
PASCAL = make_card({"fp32": 10e12, "fp16": 10e12}, compute_capability=(6, 1), has_tensor_cores=False)


def make_model(*operators, tensors=1):
    """A model whose micro-batch runs ``(name, kind, flops, bytes)`` in order.

    FLOPs and bytes are numbers, or functions of micro-batch and length.
    """

    def at(amount, shape):
        return amount(*shape) if callable(amount) else amount

    def record(shape):
        ops = [
            Op(name, at(flops, shape), (at(moved, shape),), kind, position=0, in_backward=False)
            for name, kind, flops, moved in operators
        ]
        blocks = list(range(1, tensors + 1))
        return Recording(
            sizes=[0] + [4] * tensors,
            categories=[0] * (tensors + 1),
            events=blocks,
            layers=[-1] * tensors,
            phases={"load": 0, "inputs": 0, "forward": 0, "backward": 0, "end": tensors},
            gradients=[(block, block) for block in blocks],
            ops=ops,
        )

    update = Recording(sizes=[0], categories=[0], events=[], layers=[], phases={"first_update": 0, "later_update": 0})
    return MemoryModel(lambda variant: fit_step(record, Variant.of((2, 16)).shapes()), update, cublas_workspace_bytes=0)


def make_config(micro_batch_size=2, seq_len=16, accumulation=1, **values):
    """A configuration; fp32 unless said otherwise."""
    values.setdefault("precision", "fp32")
    if values.get("method", "full") != "full":
        values["lora"] = LoraSettings()
    return TrainingConfig(
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        max_tokens_per_micro_batch=micro_batch_size * seq_len,
        gradient_accumulation_steps=accumulation,
        effective_batch_size=micro_batch_size * accumulation,
        **values,
    )


def time_of(model, card=AMPERE, *, parameters=0, reached=REACHED, **values):
    """Step time with no parameters to update unless said otherwise."""
    config = make_config(**values)
    return step_time(
        model,
        config,
        card,
        trainable_parameters=parameters,
        tokens_per_sequence=config.seq_len,
        reached=reached,
    )


def matmul(dtype="fp32", flops=10**12):
    """One matrix product of a TFLOP whose operands are nothing."""
    return ("aten.mm", f"matmul:{dtype}", flops, 0)


LAUNCH_MS, KERNEL_MS = 0.020, 0.002


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_a_memory_bound_kernel_takes_its_bytes_over_what_it_reaches_of_the_bandwidth():
    """5 GB at half of 1 TB/s are 10 ms, after one launch, and the constant of a kernel."""
    model = make_model(("aten.add", "elementwise", 0, 5 * 10**9))
    assert LAUNCH_MS + 10 + KERNEL_MS == pytest.approx(time_of(model).micro_batch_ms)


def test_a_matrix_product_takes_its_operations_over_what_it_reaches_of_the_rate():
    """A TFLOP at 0.8 of 10 TFLOP/s is 125 ms."""
    assert LAUNCH_MS + 125 + KERNEL_MS == pytest.approx(time_of(make_model(matmul())).micro_batch_ms)


def test_a_matrix_product_of_few_operations_on_many_bytes_is_bound_by_memory():
    """A GFLOP takes 0.125 ms, but 500 MB take 1 ms."""
    model = make_model(("aten.mm", "matmul:fp32", 10**9, 5 * 10**8))
    assert LAUNCH_MS + 1 + KERNEL_MS == pytest.approx(time_of(model).micro_batch_ms)


@pytest.mark.parametrize(
    ("card", "precision", "kind", "rate"),
    [
        (AMPERE, "fp32", "matmul:fp32", 10e12 * 0.8),
        (AMPERE, "tf32", "matmul:fp32", 40e12 * 0.5),
        (AMPERE, "bf16-amp", "matmul:bf16", 80e12 * 0.5),
        (AMPERE, "bf16-amp", "matmul:fp32", 10e12 * 0.8),
        (TURING, "fp16-amp", "matmul:fp16", 80e12 * 0.5),
        (TURING, "bf16-amp", "matmul:bf16", 10e12 * 0.8),
        (TURING, "tf32", "matmul:fp32", 10e12 * 0.8),
        (PASCAL, "fp16-amp", "matmul:fp16", 10e12 * 0.8),
        (AMPERE, "fp32", "attention:fp32", 10e12 * 0.25),
        (AMPERE, "tf32", "attention:fp32", 10e12 * 0.25),
        (AMPERE, "bf16-amp", "attention:bf16", 80e12 * 0.4),
        (PASCAL, "fp16-amp", "attention:fp16", 10e12 * 0.25),
    ],
)
def test_the_rate_is_the_cards_for_the_type(card, precision, kind, rate):
    """tf32 changes fp32 products alone, and only where the card has it; what has no tensor cores runs as fp32 does."""
    model = make_model(("aten.op", kind, 10**12, 0))
    assert LAUNCH_MS + 1e15 / rate + KERNEL_MS == pytest.approx(
        time_of(model, card, precision=precision).micro_batch_ms
    )


def test_tf32_is_faster_where_the_card_has_it_and_the_same_where_not():
    """Everything else equal."""
    model = make_model(matmul(), ("aten.add", "elementwise", 0, 10**9))
    assert time_of(model, AMPERE, precision="tf32").step_ms < time_of(model, AMPERE, precision="fp32").step_ms
    assert time_of(model, TURING, precision="tf32").step_ms == time_of(model, TURING, precision="fp32").step_ms


def test_operators_without_a_kernel_take_no_time():
    """A view that copies nothing and a tensor that nothing is written to."""
    plain = make_model(matmul())
    more = make_model(matmul(), ("aten._unsafe_view", "elementwise", 0, 10**9), ("aten.empty", "elementwise", 0, 10**9))
    assert time_of(plain) == time_of(more)


def test_dequantizing_counts_what_its_kernel_reads_and_writes():
    """2.5 bytes an element: 400 million take 2 ms."""
    model = make_model(("vramplan.dequantized", "elementwise", 0, 10**9))
    assert LAUNCH_MS + 2 + KERNEL_MS == pytest.approx(time_of(model).micro_batch_ms)


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_small_kernels_are_as_slow_as_the_cpu_launches_them():
    """A hundred launches of 20 us, then the last kernel: 8 KB take 0.016 us."""
    model = make_model(*[("aten.add", "elementwise", 0, 8000)] * 100)
    assert 100 * LAUNCH_MS + KERNEL_MS + 16e-6 == pytest.approx(time_of(model).micro_batch_ms)


def test_casts_cost_the_cpu_less_than_a_models_operators():
    """5 us each instead of 20."""
    model = make_model(*[("aten._to_copy", "elementwise", 0, 8000)] * 100)
    assert 100 * 0.005 + KERNEL_MS + 16e-6 == pytest.approx(time_of(model).micro_batch_ms)


def test_launches_hide_behind_a_long_kernel():
    """While the card computes for 125 ms the CPU queues a hundred small kernels, which then take 2.016 us each."""
    model = make_model(matmul(), *[("aten.add", "elementwise", 0, 8000)] * 100)
    assert LAUNCH_MS + 125 + KERNEL_MS + 100 * (KERNEL_MS + 16e-6) == pytest.approx(time_of(model).micro_batch_ms)


def run_queue(kernels, launches, times):
    """When the card is done with passes that follow each other, kernel by kernel."""
    launched = done = 0.0
    for _ in range(times):
        for kernel, launch in zip(kernels, launches, strict=True):
            launched += launch
            done = max(launched, done) + kernel
    return done


durations = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=20)


@given(durations, st.integers(1, 5))
def test_passes_take_as_long_as_the_queue_they_stand_for(pairs, times):
    """The closed form equals going through the kernels one by one."""
    kernels, launches = np.array(pairs).T
    expected = run_queue(kernels.tolist(), launches.tolist(), times)
    assert expected == pytest.approx(Pass.of(kernels, launches).repeated(times))


@given(durations, st.integers(0, 20), st.floats(0, 10), st.floats(0, 10))
def test_one_more_operator_never_makes_a_pass_faster(pairs, index, kernel, launch):
    """So recomputation (checkpointing) costs time at the same micro-batch, wherever it happens."""
    kernels, launches = np.array(pairs).T
    more = Pass.of(
        np.insert(kernels, min(index, len(pairs)), kernel), np.insert(launches, min(index, len(pairs)), launch)
    )
    assert more.alone_s >= Pass.of(kernels, launches).alone_s - 1e-9


def layer(*, forward_again):
    """One layer's forward and backward pass, with its forward again in between under checkpointing."""
    forward = [("aten.mm", "matmul:fp32", lambda b, s: b * s * 10**7, lambda b, s: b * s * 4000)]
    backward = [("aten.mm", "matmul:fp32", lambda b, s: b * s * 2 * 10**7, lambda b, s: b * s * 8000)]
    return forward * 8 + (forward if forward_again else []) + backward * 8


@pytest.mark.parametrize("shape", [(1, 16), (2, 16), (8, 512)])
def test_checkpointing_is_never_faster_at_the_same_micro_batch(shape):
    """Bound by the CPU or by the card."""
    none, full = (make_model(*layer(forward_again=again)) for again in (False, True))
    times = [time_of(model, micro_batch_size=shape[0], seq_len=shape[1]).step_ms for model in (none, full)]
    assert times == sorted(times)
    assert times[0] < times[1]


def test_a_step_takes_longer_with_more_sequences_and_with_longer_ones():
    """Along both, at sizes bound by launches and by arithmetic."""
    model = make_model(*layer(forward_again=False))
    by_batch = [time_of(model, micro_batch_size=b).step_ms for b in (2, 4, 16, 64, 256)]
    by_length = [time_of(model, seq_len=s).step_ms for s in (16, 64, 512, 4096)]
    assert by_batch == sorted(by_batch)
    assert by_length == sorted(by_length)
    assert by_batch[0] < by_batch[-1]
    assert by_length[0] < by_length[-1]


# -- accumulation and update -------------------------------------------------------------------------------------------


def test_a_step_is_its_micro_batches_and_its_update():
    """And its tokens over its time are its speed."""
    time = time_of(make_model(matmul()), parameters=WEIGHTS, micro_batch_size=2, seq_len=16, accumulation=4)
    assert 4 * time.micro_batch_ms + time.update_ms == pytest.approx(time.step_ms)
    assert 4 * 2 * 16 / time.step_ms * 1e3 == pytest.approx(time.tokens_per_s)
    assert "simulated" == time.source


def test_a_further_micro_batch_adds_its_gradients_to_those_that_are_there():
    """12 bytes a parameter at half of 1 TB/s: 0.024 ms for a million, and no waiting for its first launch."""
    model = make_model(matmul())
    once, twice = (time_of(model, parameters=WEIGHTS, accumulation=n) for n in (1, 2))
    second_ms = 2 * twice.micro_batch_ms - once.micro_batch_ms
    assert 125 + KERNEL_MS + 0.024 == pytest.approx(second_ms)


@pytest.mark.parametrize(
    ("values", "bytes_a_parameter"),
    [
        ({"optimizer": "adamw_fused"}, 12 + 28),
        ({"optimizer": "adamw_foreach"}, 12 + 80),
        ({"optimizer": "adamw_8bit"}, 12 + 12 + 4 + 1 / 16),
        ({"optimizer": "adafactor"}, 12 + 68),
        ({"optimizer": "sgd"}, 12 + 12),
        ({"precision": "bf16"}, 6 + 14),
        ({"precision": "bf16", "method": "lora"}, 12 + 28),
        ({"precision": "bf16-master"}, 6 + 28 + 12),
        ({"precision": "bf16-master", "method": "lora"}, 12 + 28),
        ({"precision": "bf16-amp"}, 12 + 28),
        ({"precision": "fp16-amp"}, 12 + 8 + 28),
    ],
)
def test_the_update_moves_its_bytes(values, bytes_a_parameter):
    """Clipping reads gradients twice and writes them once; the optimizer's kernels as their code has it."""
    time = time_of(make_model(matmul()), parameters=1000 * WEIGHTS, **values)
    assert bytes_a_parameter * 1e9 / 0.5e12 * 1e3 == pytest.approx(time.update_ms)


def test_many_small_tensors_bound_an_update_by_the_cpu():
    """20 operators of 5 us for each of 300 tensors in Adafactor's loop; one each where kernels take all tensors."""
    model = make_model(matmul(), tensors=300)
    looped, fused = (time_of(model, parameters=1, optimizer=name) for name in ("adafactor", "adamw_fused"))
    assert 300 * 20 * 0.005 == pytest.approx(looped.update_ms, rel=1e-4)
    assert 300 * 0.005 == pytest.approx(fused.update_ms, rel=1e-4)


def test_a_paged_state_crosses_the_bus_both_ways():
    """2 bytes a parameter in and out at 8 GB/s, beside what 8-bit AdamW takes."""
    model = make_model(matmul())
    paged, plain = (time_of(model, parameters=WEIGHTS, optimizer=f"{name}adamw_8bit") for name in ("paged_", ""))
    assert 4 * WEIGHTS / 8e9 * 1e3 == pytest.approx(paged.update_ms - plain.update_ms)


def test_master_weights_take_one_tensor_after_the_other():
    """For each of 300 tensors 4 operators beside the optimizer's own."""
    time = time_of(make_model(matmul(), tensors=300), parameters=1, precision="bf16-master")
    assert 300 * 5 * 0.005 == pytest.approx(time.update_ms, rel=1e-4)


def test_an_offloaded_optimizer_crosses_the_bus_and_steps_on_the_host():
    """A million parameters: 8 MB at 8 GB/s are 1 ms, 28 MB at 40 GB/s 0.7 ms, clipping 0.024 ms."""
    model = make_model(matmul())
    offloaded = time_of(model, parameters=WEIGHTS, offload="optimizer")
    assert 1 + 0.7 + 0.024 == pytest.approx(offloaded.update_ms)
    assert time_of(model, parameters=WEIGHTS).step_ms < offloaded.step_ms


# -- the shipped values ------------------------------------------------------------------------------------------------


def test_shipped_values_are_possible():
    """No kernel exceeds a peak, nothing is free."""
    for name, value in vars(achievable()).items():
        assert value > 0, name
        assert not name.endswith("fraction") or value <= 1, name


def test_every_shipped_value_says_where_it_comes_from():
    """Fitted to rows that are listed, or assumed from a source."""
    document = json.loads(resources.files("planner.profiles").joinpath("timing.json").read_text("utf-8"))
    assert {field.name for field in fields(Achievable)} == set(document["values"])
    for name, entry in document["values"].items():
        assert entry["calibrated"] or entry["source"], name
    assert document["calibration"]["rows"] == sum(
        len(source["ids"]) for source in document["calibration"]["sources"].values()
    )


def test_shipped_values_are_used_unless_others_are_given():
    """``reached=None`` is what everybody but the calibration asks for."""
    model = make_model(matmul())
    shipped = time_of(model, reached=achievable())
    assert shipped == time_of(model, reached=None)
    assert shipped != time_of(model, reached=replace(achievable(), matmul_fp32_fraction=0.01))
