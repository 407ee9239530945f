"""The run that is replayed: two optimizer steps made of recorded parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.memory.program import Program, build, categories, resumed
from planner.recording.record import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    OUTSIDE_LAYERS,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACE,
    Recording,
)


def recording(events: Sequence[int], kinds: Sequence[int], phases: dict[str, int], **fields: object) -> Recording:
    """A recording whose block ``k`` has ``1000 * k`` bytes."""
    return Recording(
        sizes=[1000 * k for k in range(len(kinds) + 1)],
        categories=[0, *kinds],
        events=list(events),
        layers=[OUTSIDE_LAYERS] * len(events),
        phases=phases,
        **fields,  # type: ignore[arg-type]
    )


WEIGHT, INPUT, HANDLE, HIDDEN, GRADIENT, SCRATCH = range(1, 7)
STEP = recording(
    [WEIGHT, INPUT, HANDLE, HIDDEN, GRADIENT, SCRATCH, -SCRATCH, -HIDDEN, -INPUT],
    [PARAMETERS, INPUTS, WORKSPACE, ACTIVATIONS, GRADIENTS, TEMPORARIES],
    {"load": 0, "inputs": 1, "forward": 2, "backward": 4, "end": 9},
    gradients=[(5, GRADIENT)],
)
# weight and gradient exist before the update begins
NORM, STATE, LATER_NORM = 3, 4, 5
UPDATE = recording(
    [1, 2, NORM, -NORM, STATE, LATER_NORM, -LATER_NORM],
    [PARAMETERS, PARAMETERS, TEMPORARIES, OPTIMIZER, TEMPORARIES],
    {"first_update": 2, "later_update": 5, "end": 7},
)
FIRST_UPDATE_ROW = len(STEP.sizes)


def by_phase(program: Program) -> list[tuple[str, list[int]]]:
    """Each phase with its events as signed rows."""
    ends = [start for _, start in program.marks[1:]] + [len(program.events)]
    found = []
    for (name, start), end in zip(program.marks, ends, strict=True):
        events = program.events[start:end].tolist()
        found.append((name, [int(program.rows[abs(e)]) * (1 if e > 0 else -1) for e in events]))
    return found


def alive(program: Program) -> list[int]:
    """Rows of the blocks that are alive at the end; fails on a block freed twice or never allocated."""
    blocks: set[int] = set()
    seen: set[int] = set()
    for event in program.events.tolist():
        if event > 0:
            assert event not in seen
            seen.add(event)
            blocks.add(event)
        else:
            assert -event in blocks
            blocks.remove(-event)
    assert seen <= set(range(1, len(program.rows)))
    return sorted(int(program.rows[block]) for block in blocks)


def test_a_run_loads_once_and_repeats_its_steps() -> None:
    """Load, then two steps; weights and the workspace come once, the state with the first update."""
    first = FIRST_UPDATE_ROW
    assert [
        ("load", [WEIGHT]),
        ("micro_batch", [INPUT, HANDLE, HIDDEN, GRADIENT, SCRATCH, -SCRATCH, -HIDDEN, -INPUT]),
        ("first_update", [first + NORM, -first - NORM, first + STATE]),
        ("zero_grad", [-GRADIENT]),
        ("micro_batch", [INPUT, HIDDEN, GRADIENT, SCRATCH, -SCRATCH, -HIDDEN, -INPUT]),
        ("later_update", [first + LATER_NORM, -first - LATER_NORM]),
        ("zero_grad", [-GRADIENT]),
    ] == by_phase(build(STEP, UPDATE, accumulate=False))


def test_further_micro_batches_add_into_the_gradients_and_drop_their_own() -> None:
    """A new gradient lives until it is added: from its allocation to the moment that it was noted."""
    phases = by_phase(build(STEP, UPDATE, accumulate=True))
    further = [INPUT, HIDDEN, GRADIENT, -GRADIENT, SCRATCH, -SCRATCH, -HIDDEN, -INPUT]
    assert [further, further] == [events for name, events in phases if name == "accumulate"]
    assert ["load", *["micro_batch", "accumulate", "first_update", "zero_grad"], *["micro_batch", "accumulate"]] == [
        name for name, _ in phases
    ][:7]


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_first_micro_batchs_gradients_live_to_the_end_of_the_step(accumulate: bool) -> None:
    """They are there during the update and freed by zero_grad."""
    program = build(STEP, UPDATE, accumulate=accumulate)
    starts = dict(reversed(program.marks))
    gradient = next(e for e in program.events.tolist() if e > 0 and program.rows[e] == GRADIENT)
    freed = program.events.tolist().index(-gradient)
    assert starts["first_update"] < starts["zero_grad"] == freed


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_stays_is_weights_workspaces_and_state(accumulate: bool) -> None:
    """After the last zero_grad."""
    first = FIRST_UPDATE_ROW
    assert [WEIGHT, HANDLE, first + STATE] == alive(build(STEP, UPDATE, accumulate=accumulate))


def test_gradients_that_share_a_block_are_freed_once() -> None:
    """Tied weights, or two gradients that are views of one result."""
    tied = recording(STEP.events, STEP.categories[1:], STEP.phases, gradients=[(5, GRADIENT), (6, GRADIENT)])
    assert [WEIGHT, HANDLE, FIRST_UPDATE_ROW + STATE] == alive(build(tied, UPDATE, accumulate=False))


def test_an_update_without_state_leaves_nothing() -> None:
    """SGD, or an optimizer on the host."""
    norm_only = recording(
        [1, 2, 3, -3, 4, -4],
        [PARAMETERS, PARAMETERS, TEMPORARIES, TEMPORARIES],
        {"first_update": 2, "later_update": 4, "end": 6},
    )
    nothing = recording([1, 2], [PARAMETERS, PARAMETERS], {"first_update": 2, "later_update": 2, "end": 2})
    for update in (norm_only, nothing):
        assert [WEIGHT, HANDLE] == alive(build(STEP, update, accumulate=True))


def test_categories_of_all_rows() -> None:
    """The step's rows, then the update's."""
    kinds = categories(STEP, UPDATE)
    assert len(STEP.sizes) + len(UPDATE.sizes) == len(kinds)
    assert WORKSPACE == kinds[HANDLE]
    assert OPTIMIZER == kinds[FIRST_UPDATE_ROW + STATE]


@st.composite
def steps(draw: st.DrawFn) -> Recording:
    """Any step: persistent blocks, then blocks in any order of allocation and release; some become gradients."""
    kinds = [PARAMETERS] * draw(st.integers(0, 3))
    events = list(range(1, len(kinds) + 1))
    loaded = len(events)
    live: list[int] = []
    gradients = []
    for _ in range(draw(st.integers(0, 25))):
        if live and draw(st.booleans()):
            events.append(-live.pop(draw(st.integers(0, len(live) - 1))))
            continue
        kinds.append(draw(st.sampled_from([INPUTS, WORKSPACE, ACTIVATIONS, TEMPORARIES, GRADIENTS])))
        events.append(len(kinds))
        if kinds[-1] == GRADIENTS:
            gradients.append((len(events), len(kinds)))
        elif kinds[-1] != WORKSPACE:
            live.append(len(kinds))
    events += [-block for block in draw(st.permutations(live))]
    return recording(events, kinds, {"load": 0, "inputs": loaded, "end": len(events)}, gradients=gradients)


@st.composite
def updates(draw: st.DrawFn) -> Recording:
    """Any update: state made in the first, temporaries in both."""
    before = draw(st.integers(0, 3))
    kinds, events, phases = [PARAMETERS] * before, list(range(1, before + 1)), {}
    for name in ("first_update", "later_update"):
        phases[name] = len(events)
        temporary: list[int] = []
        for _ in range(draw(st.integers(0, 5))):
            kinds.append(OPTIMIZER if name == "first_update" and draw(st.booleans()) else TEMPORARIES)
            events.append(len(kinds))
            if kinds[-1] == TEMPORARIES:
                temporary.append(len(kinds))
        events += [-block for block in draw(st.permutations(temporary))]
    return recording(events, kinds, {**phases, "end": len(events)})


@given(steps(), updates(), st.booleans())
def test_any_run_frees_each_block_at_most_once_and_after_its_allocation(
    step: Recording, update: Recording, accumulate: bool
) -> None:
    """What stays is what is kept on purpose, each once: weights, workspaces, state."""
    program = build(step, update, accumulate=accumulate)
    kinds = categories(step, update)
    kept = alive(program)
    assert 1 == max(Counter(kept).values(), default=1)
    expected = {PARAMETERS, WORKSPACE}
    expected_rows = [row for row in range(1, len(step.sizes)) if kinds[row] in expected]
    expected_rows += [row for row in range(len(step.sizes) + 1, len(kinds)) if kinds[row] == OPTIMIZER]
    assert expected_rows == kept
    assert [mark for _, mark in program.marks] == sorted(mark for _, mark in program.marks)


EVALUATION = recording(
    [1, 2, 3, 4, -4, -3],
    [PARAMETERS, WORKSPACE, INPUTS, ACTIVATIONS],
    {"load": 0, "inputs": 1, "forward": 2, "end": 6},
)


def test_an_evaluation_comes_between_two_steps() -> None:
    """Its rows come after the update's; it opens no handle again, and the step after it is a later one."""
    program = build(STEP, UPDATE, accumulate=False, evaluation=EVALUATION)
    names = ["load", "first_step", "steady_step", "evaluate", "steady_step"]
    assert names == [name for name, _ in program.phases]
    first = len(STEP.sizes) + len(UPDATE.sizes)
    phases = dict(by_phase(program))
    assert [first + 3, first + 4, -first - 4, -first - 3] == phases["evaluate"]
    assert "later_update" == [name for name, _ in program.marks][-2]
    assert [WEIGHT, HANDLE, FIRST_UPDATE_ROW + STATE] == alive(program)
    kinds = categories(STEP, UPDATE, EVALUATION)
    assert ACTIVATIONS == kinds[first + 4]


@given(steps(), updates(), st.booleans())
def test_any_resumed_run_keeps_what_an_unbroken_one_keeps(step: Recording, update: Recording, accumulate: bool) -> None:
    """Weights, workspaces and state, each once; the state is there before the first micro-batch."""
    program = resumed(step, update, accumulate=accumulate)
    assert alive(build(step, update, accumulate=accumulate)) == alive(program)
    marks = dict(reversed(program.marks))
    kinds = categories(step, update)
    made = [index for index, event in enumerate(program.events) if event > 0]
    state = [index for index in made if kinds[program.rows[program.events[index]]] == OPTIMIZER]
    assert all(index < marks["micro_batch"] for index in state)
