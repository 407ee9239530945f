"""Peaks and their inverses on a step made by hand, and event for event on real models."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.config import TrainingConfig
from planner.memory.allocator import replay_events
from planner.memory.block_sizes import MIN_BLOCK_BYTES, AllocatorSettings
from planner.memory.model import MemoryModel, StepModel, Variant, agrees, constant_step, fit_step
from planner.memory.polynomials import N_MONOMIALS, NotPolynomialError, Polynomials
from planner.models import resolve_model
from planner.recording.kernels import Target
from planner.recording.record import (
    ACTIVATIONS,
    CATEGORY_NAMES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    OUTSIDE_LAYERS,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACE,
    Op,
    Recording,
)
from planner.recording.source import StepSource, make_source
from planner.workload import Workload

MIB = 2**20
WORKSPACE_BYTES = 8 * MIB
ONE, B, S, BS, SS, BSS = range(6)
"""Columns of the plain monomials."""

# block: category, coefficient, monomial
BLOCKS = {
    1: (PARAMETERS, 40 * MIB, ONE),
    2: (INPUTS, 8, BS),
    3: (WORKSPACE, 0, ONE),
    4: (ACTIVATIONS, 10_240, BS),
    5: (ACTIVATIONS, 48, BSS),
    6: (GRADIENTS, 40 * MIB, ONE),
    7: (TEMPORARIES, 20_480, BS),
}
EVENTS = [1, 2, 3, 4, 5, 7, -7, -5, 6, -4, -2]
PHASES = {"load": 0, "inputs": 1, "forward": 2, "backward": 5, "end": 11}
STATE = 80 * MIB
UPDATE = Recording(
    sizes=[0, 40 * MIB, 40 * MIB, 40 * MIB, STATE, 40 * MIB],
    categories=[0, PARAMETERS, PARAMETERS, TEMPORARIES, OPTIMIZER, TEMPORARIES],
    events=[1, 2, 3, -3, 4, 5, -5],
    layers=[OUTSIDE_LAYERS] * 7,
    phases={"first_update": 2, "later_update": 5, "end": 7},
)


def polynomials(terms: list[tuple[int, int]]) -> Polynomials:
    """From a coefficient and a monomial each."""
    numerators = np.zeros((len(terms), N_MONOMIALS), dtype=np.int64)
    for row, (coefficient, column) in enumerate(terms):
        numerators[row, column] = coefficient
    return Polynomials(numerators, np.ones(len(terms), dtype=np.int64))


def step_model(*, gates: list[tuple[int, int, int]] | None = None) -> StepModel:
    """A step of seven blocks and two operators."""
    template = Recording(
        sizes=[0] * 8,
        categories=[0, *(kind for kind, _, _ in BLOCKS.values())],
        events=EVENTS,
        layers=[OUTSIDE_LAYERS] * len(EVENTS),
        phases=PHASES,
        gradients=[(9, 6)],
        gates=gates or [],
        ops=[
            Op("aten.mm", 0, (0, 0, 0), "matmul:fp32", 3, False),
            Op("aten.add", 0, (0, 0), "elementwise", 4, False),
        ],
    )
    return StepModel(
        template=template,
        sizes=polynomials([(0, ONE), *((coefficient, column) for _, coefficient, column in BLOCKS.values())]),
        gate_counts=polynomials([(1, BS)] * len(template.gates)),
        flops=polynomials([(2 * 768, BS), (0, ONE)]),
        moved=polynomials([(4, BS), (100, ONE), (4, BS), (4, BS), (8, BS)]),
    )


def memory_model(model: StepModel | None = None, **options: AllocatorSettings) -> MemoryModel:
    """The model of that step, whatever the variant."""
    return MemoryModel(lambda _: model or step_model(), UPDATE, cublas_workspace_bytes=WORKSPACE_BYTES, **options)


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_the_peak_is_in_the_second_steps_backward_pass_when_activations_are_large() -> None:
    """Weights, state, workspace, inputs, both activations and the temporary: 16 x 512 tokens."""
    b, s = 16, 512
    expected = 40 * MIB + STATE + WORKSPACE_BYTES + b * s * (8 + 10_240 + 20_480) + 48 * b * s * s
    peak = memory_model().peak((b, s), accumulate=False)
    assert expected == peak.allocated_bytes
    assert "micro_batch" == peak.phase
    assert {
        "parameters": 40 * MIB,
        "inputs": 8 * b * s,
        "activations": b * s * 10_240 + 48 * b * s * s,
        "temporaries": 20_480 * b * s,
        "gradients": 0,
        "optimizer": STATE,
        "workspace": WORKSPACE_BYTES,
    } == peak.breakdown


def test_the_peak_is_in_the_update_when_activations_are_small() -> None:
    """Weights, gradients, state, workspace, and the temporary of an update that goes over all parameters at once."""
    peak = memory_model().peak((2, 16), accumulate=False)
    assert 3 * 40 * MIB + STATE + WORKSPACE_BYTES == peak.allocated_bytes
    assert "later_update" == peak.phase
    assert 40 * MIB == peak.breakdown["gradients"]


def test_accumulation_keeps_gradients_beside_the_next_micro_batchs_activations() -> None:
    """One set of gradients more, at the same point of the step."""
    b, s = 16, 512
    once, more = (memory_model().peak((b, s), accumulate=accumulate) for accumulate in (False, True))
    assert 40 * MIB == more.allocated_bytes - once.allocated_bytes
    assert "accumulate" == more.phase


def test_sizes_are_rounded_to_blocks_of_512_bytes() -> None:
    """17 tokens of 8 bytes take one block; what the polynomials give is what was requested."""
    model = memory_model()
    assert 136 == model.step((1, 17)).sizes_at((1, 17))[2]
    assert 0 == model.allocated_bytes((1, 17), accumulate=False) % MIN_BLOCK_BYTES


def test_workspaces_have_the_cards_size() -> None:
    """The recording leaves it open; each handle has one, in the first micro-batch of the run."""
    model = memory_model()
    sizes = model.block_sizes((4, 64), accumulate=True)
    events = model.program((4, 64), accumulate=True).events.tolist()
    assert 1 == [int(sizes[event]) for event in events if event > 0].count(WORKSPACE_BYTES)


@pytest.mark.parametrize(("shape", "there"), [((4, 25), False), ((4, 26), True)])
def test_gated_blocks_are_there_above_their_threshold_only(shape: tuple[int, int], there: bool) -> None:
    """A kernel's path that needs a buffer from 101 tokens on."""
    model = memory_model(step_model(gates=[(7, 0, 100)]))
    assert there == (model.step(shape).sizes_at(shape)[7] > 0)


def test_operators_cost_what_their_polynomials_say() -> None:
    """FLOPs, and the sum of the operands' bytes, for each operator."""
    flops, moved = step_model().ops_at((4, 32))
    assert [2 * 768 * 128, 0] == flops.tolist()
    assert [4 * 128 + 100 + 4 * 128, 4 * 128 + 8 * 128] == moved.tolist()


def test_each_variant_of_shapes_has_a_recording_of_its_own() -> None:
    """One sequence or several, aligned length or not; each asked for once."""
    asked: list[Variant] = []

    def step(variant: Variant) -> StepModel:
        asked.append(variant)
        return step_model()

    model = MemoryModel(step, UPDATE, cublas_workspace_bytes=0)
    for shape in ((1, 64), (1, 65), (2, 64), (9, 128), (3, 63)):
        model.peak(shape, accumulate=False)
    assert [Variant(True, True), Variant(True, False), Variant(False, True), Variant(False, False)] == asked
    assert all(Variant.of(shape) == variant for variant in asked for shape in variant.shapes())


shapes = st.tuples(st.integers(1, 64), st.integers(1, 700))


@settings(deadline=None, max_examples=40)
@given(shapes, st.booleans())
def test_the_breakdown_is_the_peak_of_live_bytes(shape: tuple[int, int], accumulate: bool) -> None:
    """Its parts sum to it, nothing is left out or counted twice.

    The allocator's own count is at most 1 MiB a block above: what is left of a block that isn't worth splitting.
    """
    model = memory_model()
    peak = model.peak(shape, accumulate=accumulate)
    assert set(CATEGORY_NAMES) == set(peak.breakdown)
    live = sum(peak.breakdown.values())
    assert model.allocated_bytes(shape, accumulate=accumulate) == live
    assert live <= peak.allocated_bytes <= live + len(BLOCKS) * MIB
    assert min(peak.breakdown.values()) >= 0


@settings(deadline=None, max_examples=40)
@given(shapes, st.booleans(), st.booleans())
def test_allocated_bytes_bound_what_is_reserved_from_below(
    shape: tuple[int, int], accumulate: bool, expandable: bool
) -> None:
    """The quick answer is never above the replay's."""
    model = memory_model(settings=AllocatorSettings(expandable_segments=expandable))
    peak = model.peak(shape, accumulate=accumulate)
    assert model.allocated_bytes(shape, accumulate=accumulate) <= peak.reserved_bytes
    assert peak.allocated_bytes <= peak.reserved_bytes


# -- the other way round ---------------------------------------------------------------------------------------------

budgets = st.integers(190 * MIB, 4096 * MIB)


def fits(model: MemoryModel, shape: tuple[int, int], budget: int, *, accumulate: bool) -> bool:
    """Whether the replay stays within the budget."""
    return model.peak(shape, accumulate=accumulate).reserved_bytes <= budget


@settings(deadline=None, max_examples=25)
@given(budgets, st.sampled_from([16, 100, 512]), st.booleans())
def test_the_largest_micro_batch_fits_and_the_next_does_not(budget: int, seq_len: int, accumulate: bool) -> None:
    """Zero when not even one sequence fits."""
    model = memory_model()
    found = model.largest_micro_batch(seq_len, budget, accumulate=accumulate, limit=300)
    assert found == 0 or fits(model, (found, seq_len), budget, accumulate=accumulate)
    assert found == 300 or not fits(model, (found + 1, seq_len), budget, accumulate=accumulate)
    tokens = model.largest_token_budget(seq_len, budget, accumulate=accumulate)
    assert tokens // seq_len >= found
    assert 0 == tokens % seq_len
    assert tokens == 0 or fits(model, (tokens // seq_len, seq_len), budget, accumulate=accumulate)


@settings(deadline=None, max_examples=25)
@given(budgets, st.sampled_from([1, 8]), st.sampled_from([1, 8, 64]))
def test_the_longest_length_fits_and_the_next_does_not(budget: int, micro_batch: int, multiple: int) -> None:
    """A multiple of what was asked for, within the model's limit."""
    model = memory_model()
    found = model.longest_seq_len(micro_batch, budget, accumulate=False, limit=1000, multiple=multiple)
    assert 0 == found % multiple
    assert found == 0 or fits(model, (micro_batch, found), budget, accumulate=False)
    following = found + multiple
    assert following > 1000 or not fits(model, (micro_batch, following), budget, accumulate=False)


def test_limits_hold_where_memory_does_not() -> None:
    """With memory to spare the answer is the limit, exactly."""
    model = memory_model()
    assert 37 == model.largest_micro_batch(16, 2**45, accumulate=False, limit=37)
    assert 1000 == model.longest_seq_len(1, 2**45, accumulate=False, limit=1003, multiple=8)


def test_nothing_fits_in_too_small_a_budget() -> None:
    """Weights alone are more."""
    model = memory_model()
    assert 0 == model.largest_micro_batch(16, 39 * MIB, accumulate=False)
    assert 0 == model.longest_seq_len(1, 39 * MIB, accumulate=False, limit=1000)
    assert 0 == model.largest_token_budget(16, 39 * MIB, accumulate=False)


# -- fitting ---------------------------------------------------------------------------------------------------------


def made(shape: tuple[int, int], size: int, events: tuple[int, ...] = (1, -1)) -> Recording:
    """A recording of one block."""
    return Recording(
        sizes=[0, size], categories=[0, 2], events=list(events), layers=[-1] * len(events), phases={"forward": 0}
    )


def test_a_step_is_recorded_three_times_when_that_is_enough() -> None:
    """Single monomials need no more; sums take all shapes."""
    for size, expected in ((lambda b, s: 4 * b * s, 3), (lambda b, s: 4 * b * s + s, 8)):
        asked: list[tuple[int, int]] = []

        def record(shape: tuple[int, int], size: object = size, asked: list[tuple[int, int]] = asked) -> Recording:
            asked.append(shape)
            return made(shape, size(*shape))  # type: ignore[operator]

        model = fit_step(record, Variant(False, True).shapes())
        assert expected == len(asked)
        assert [0, size(48, 1024)] == model.sizes_at((48, 1024)).tolist()


def test_a_structure_that_changes_with_the_shape_is_refused() -> None:
    """An event more at some length, or the same sizes in another order."""
    for other in ((1,), (1, -1, 1)):
        with pytest.raises(NotPolynomialError):
            fit_step(
                lambda shape, other=other: made(shape, 8, other if shape[1] > 200 else (1, -1)),  # type: ignore[misc]
                Variant(False, True).shapes(),
            )


def test_one_recorded_shape_is_a_model_of_that_shape() -> None:
    """Its sizes are what they are there; a shape with others, or another structure, doesn't agree with it."""
    model = constant_step(made((3, 100), 12_345))
    assert [0, 12_345] == model.sizes_at((3, 100)).tolist()
    assert agrees(model, made((3, 100), 12_345), (3, 100))
    assert not agrees(model, made((3, 100), 12_346), (3, 100))
    assert not agrees(model, made((3, 100), 12_345, (1,)), (3, 100))


def test_sizes_without_a_polynomial_are_recorded_where_they_are_asked_for() -> None:
    """Each shape once; without a way to record, such a model is refused."""
    asked: list[tuple[int, int]] = []

    def exact(shape: tuple[int, int]) -> Recording:
        asked.append(shape)
        return made(shape, min(shape[1], 100) * MIB)

    empty = Recording(
        sizes=[0], categories=[0], events=[], layers=[], phases={"first_update": 0, "later_update": 0, "end": 0}
    )
    model = MemoryModel(lambda _: None, empty, cublas_workspace_bytes=0, exact=exact)
    for seq_len, expected in ((60, 60), (300, 100), (60, 60)):
        assert expected * MIB == model.peak((2, seq_len), accumulate=False).allocated_bytes
    assert [(2, 60), (2, 300)] == asked
    assert not model.is_polynomial((2, 60))
    with pytest.raises(NotPolynomialError):
        MemoryModel(lambda _: None, empty, cublas_workspace_bytes=0).peak((2, 60), accumulate=False)


# -- real models -----------------------------------------------------------------------------------------------------

MODELS = {
    "bert-base-uncased": "sequence-classification",
    "gpt2": "causal-lm",
    "t5-small": "seq2seq-lm",
}
UNSEEN = ((4, 96), (7, 496), (13, 208))
CAPABILITY = (8, 6)


@cache
def real_source(name: str, precision: str, checkpointing: str) -> StepSource:
    """A full-size model to record."""
    task = MODELS[name]
    workload = Workload(spec=resolve_model(name), task=task, target_seq_len=36 if task == "seq2seq-lm" else None)
    config = TrainingConfig.model_validate(
        {
            "micro_batch_size": 1,
            "seq_len": 8,
            "max_tokens_per_micro_batch": 8,
            "gradient_accumulation_steps": 1,
            "effective_batch_size": 1,
            "precision": precision,
            "checkpointing": checkpointing,
        }
    )
    return make_source(workload, config, Target(compute_capability=CAPABILITY))


def sizes_after_gates(recording: Recording) -> list[int]:
    """As recorded, with what the kernels don't need at this shape left out."""
    sizes = list(recording.sizes)
    for block, count, threshold in recording.gates:
        if count <= threshold:
            sizes[block] = 0
    return sizes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("precision", "checkpointing"), [("fp32", "none"), ("bf16-amp", "full")])
def test_replayed_sizes_equal_a_fresh_recording(name: str, precision: str, checkpointing: str) -> None:
    """At three shapes that were never recorded, event for event: block sizes, FLOPs and traffic."""
    torch.set_num_threads(1)
    source = real_source(name, precision, checkpointing)
    model = fit_step(source.record, Variant.of(UNSEEN[0]).shapes())
    for shape in UNSEEN:
        fresh = source.record(shape)
        assert fresh.structure == model.template.structure
        assert sizes_after_gates(fresh) == model.sizes_at(shape).tolist()
        flops, moved = model.ops_at(shape)
        assert [op.flops for op in fresh.ops] == flops.tolist()
        assert [sum(op.moved_bytes) for op in fresh.ops] == moved.tolist()


@pytest.mark.parametrize("shape", [(1, 112), (1, 77), (6, 77)])
def test_other_variants_replay_as_recorded(shape: tuple[int, int]) -> None:
    """One sequence, and lengths that attention masks are padded for."""
    source = real_source("bert-base-uncased", "bf16-amp", "full")
    model = fit_step(source.record, Variant.of(shape).shapes())
    fresh = source.record(shape)
    assert fresh.structure == model.template.structure
    assert sizes_after_gates(fresh) == model.sizes_at(shape).tolist()


def test_a_replayed_peak_is_that_of_a_fresh_recording() -> None:
    """Two optimizer steps at 8 x 512: allocated and reserved, to the byte."""
    source = real_source("bert-base-uncased", "fp32", "none")
    shape = (8, 512)
    fitted = fit_step(source.record, Variant.of(shape).shapes())
    model = MemoryModel(lambda _: fitted, UPDATE, cublas_workspace_bytes=WORKSPACE_BYTES)
    fresh = source.record(shape)
    exact = dataclasses.replace(fitted, template=fresh)
    reference = MemoryModel(lambda _: exact, UPDATE, cublas_workspace_bytes=WORKSPACE_BYTES)
    program = reference.program(shape, accumulate=True)
    rows = np.array([*sizes_after_gates(fresh), *UPDATE.sizes])
    rows[[k for k, kind in enumerate(fresh.categories) if kind == WORKSPACE]] = WORKSPACE_BYTES
    replay = replay_events(program.events, rows[program.rows], AllocatorSettings())
    peak = model.peak(shape, accumulate=True)
    assert (replay.peak_allocated_bytes, replay.peak_reserved_bytes) == (peak.allocated_bytes, peak.reserved_bytes)
