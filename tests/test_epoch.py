"""Batches of different shapes in data order: the emitted script's batches, and what they leave in the cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emit import make_plan
from test_memory_model import UPDATE, WORKSPACE_BYTES, memory_model, step_model

from planner import plan
from planner.config import TrainingConfig
from planner.emit import render_training_files
from planner.errors import InputError
from planner.hardware import find_card
from planner.lengths import Lengths, assumed_lengths, given_lengths, read_counts
from planner.memory.block_sizes import AllocatorSettings
from planner.memory.epoch import epoch_steps, replay_epoch
from planner.memory.model import MemoryModel, StepModel
from planner.memory.polynomials import Shape
from planner.models import resolve_model
from planner.recording.record import INPUTS, WORKSPACE
from planner.search import SearchResult, Trial
from planner.simulation import Simulator
from planner.timing import Time
from planner.whole_run import epoch_of, whole_run
from planner.workload import Workload


def config(**changes: object) -> TrainingConfig:
    """Eight sequences of at most 64 tokens a step, two of the longest at a time."""
    fields = {
        "micro_batch_size": 2,
        "seq_len": 64,
        "max_tokens_per_micro_batch": 128,
        "gradient_accumulation_steps": 4,
        "effective_batch_size": 8,
        "precision": "fp32",
    }
    return TrainingConfig.model_validate(fields | changes)


# -- the script's batches --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], ModuleType]:
    """Emitted scripts of that configuration."""
    modules = {}
    for task in ("sequence-classification", "seq2seq-lm"):
        for precision in ("fp32", "bf16-amp"):
            plan = make_plan(task, "any", **config(precision=precision).model_dump(mode="json"))
            plan["workload"]["target_seq_len"] = 16
            path = tmp_path_factory.mktemp("script") / "train.py"
            path.write_text(render_training_files(plan)["train.py"], encoding="utf-8")
            spec = importlib.util.spec_from_file_location("emitted", path)
            assert spec and spec.loader
            modules[task, precision] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(modules[task, precision])
    return modules


class _Tokenizer:
    pad_token_id = 0


def script_shapes(script: ModuleType, lengths: Sequence[int], seed: int, *, targets: bool) -> list[list[Shape]]:
    """What the script's own functions send to the card in its first epoch."""
    labels = torch.ones(16, dtype=torch.int64) if targets else torch.tensor(0)
    samples = [{"input_ids": torch.arange(n), "labels": labels} for n in lengths]
    options: list[Any] = [_Tokenizer(), 0] if targets else [_Tokenizer()]
    count = -(-len(samples) // 8)
    return [
        [tuple(script.collate(part, *options)[0]["input_ids"].shape) for part in script.deal(batch, 128, 0, 1)]
        for _, batch in script.optimizer_steps(samples, seed, 0, count)
    ]


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    seed=st.integers(0, 5),
    precision=st.sampled_from(["fp32", "bf16-amp"]),
    targets=st.booleans(),
)
def test_batches_are_those_of_the_emitted_script(
    scripts: dict[tuple[str, str], ModuleType], lengths: list[int], seed: int, precision: str, targets: bool
) -> None:
    """The same shapes in the same order, whatever the lengths."""
    script = scripts["seq2seq-lm" if targets else "sequence-classification", precision]
    ours = list(epoch_steps(lengths, config(precision=precision), seed=seed, full_targets=targets))
    assert script_shapes(script, lengths, seed, targets=targets) == ours


@pytest.mark.parametrize("effective", [2, 8])
def test_the_very_first_micro_batch_is_the_longest(effective: int) -> None:
    """With accumulation and without: as long as the longest sample, and as many as the budget lets through."""
    lengths = [8, 16, 24, 32, 40, 48, 56, 64] * 5
    for seed in range(5):
        steps = list(epoch_steps(lengths, config(effective_batch_size=effective), seed=seed))
        assert 64 == steps[0][0][1]
        assert all(64 >= s for shapes in steps for _, s in shapes)


# -- the replay ------------------------------------------------------------------------------------------------------


def test_an_epoch_of_one_shape_is_the_two_steps_of_a_search() -> None:
    """The same peaks, with and without accumulation."""
    model = memory_model()
    for accumulate in (False, True):
        peak = model.peak((4, 128), accumulate=accumulate)
        epoch = replay_epoch(model, [[(4, 128)] * (2 if accumulate else 1)] * 4)
        assert (peak.allocated_bytes, peak.reserved_bytes) == (epoch.allocated_bytes, epoch.reserved_bytes)
        assert epoch.whole
        assert 4 == epoch.steps


@pytest.mark.parametrize("expandable", [False, True])
def test_short_to_long_makes_the_cache_grow(expandable: bool) -> None:
    """From short to long more is reserved than from long to short; segments that grow leave far less of it."""
    shapes = [(8, n) for n in range(64, 512, 16)]
    model = memory_model(settings=AllocatorSettings(expandable_segments=expandable))
    rising, falling = (
        replay_epoch(model, [[shape] for shape in order]).reserved_bytes for order in (shapes, shapes[::-1])
    )
    assert pytest.approx(replay_epoch(model, [[shapes[-1]]] * 2).reserved_bytes, rel=0.05) == falling
    assert rising > 1.5 * falling if not expandable else rising < 1.05 * falling


def test_each_pass_has_the_events_of_its_own_variant() -> None:
    """Where one sequence alone has no temporary, its pass among others allocates less by that."""
    whole = step_model()
    events = [event for event in whole.template.events if abs(event) != 7]
    bare = replace(whole, template=replace(whole.template, events=events, layers=[-1] * len(events)))

    def allocated(single: StepModel) -> int:
        model = MemoryModel(
            lambda variant: single if variant.single else whole, UPDATE, cublas_workspace_bytes=WORKSPACE_BYTES
        )
        return replay_epoch(model, [[(2, 16), (1, 2048)]]).allocated_bytes

    assert 20_480 * 2048 == allocated(whole) - allocated(bare)


def test_nothing_is_left_of_a_step_but_weights_workspaces_and_state() -> None:
    """However many steps: allocated memory after the last is what it was after the first."""
    model = memory_model()
    few, many = (replay_epoch(model, [[(4, 128), (2, 64)], [(8, 32)]] * n) for n in (2, 20))
    assert few.allocated_bytes == many.allocated_bytes
    assert [INPUTS, WORKSPACE] == model.step((4, 128)).template.categories[2:4]


def test_a_replay_ends_when_reserved_memory_has_long_not_risen() -> None:
    """Or after as many events as it may look at; the whole epoch is told from a part of it."""
    model = memory_model()
    steps = [[(4, 128)]] * 50
    patient = replay_epoch(model, steps, patience=5)
    assert (1, 6, False) == (patient.last_rise, patient.steps, patient.whole)
    assert 12 == replay_epoch(model, [[(4, 128)] * 4] * 50, max_events=100).micro_batches
    assert replay_epoch(model, steps, patience=100).whole


# -- lengths ---------------------------------------------------------------------------------------------------------


def test_assumed_lengths_spread_evenly_and_hold_the_longest() -> None:
    """From an eighth of the longest on, the same at every call."""
    lengths = assumed_lengths(512)
    assert 512 == max(lengths.tokens)
    assert 64 <= min(lengths.tokens) < 80
    assert 288 == pytest.approx(sum(lengths.tokens) / len(lengths.tokens), rel=0.05)
    assert lengths == assumed_lengths(512)
    assert "assumed" in lengths.reason


def test_longer_texts_are_cut_or_become_pieces() -> None:
    """As the task's script has it; the plan says how many they are."""
    assert (10, 64, 64) == given_lengths([10, 64, 150], seq_len=64, long_texts="truncate").tokens
    pieces = given_lengths([10, 64, 150], seq_len=64, long_texts="segment")
    assert (10, 64, 64, 64, 22) == pieces.tokens
    assert "3 texts, 1 of them longer than 64 tokens" in pieces.reason


def test_lengths_are_read_from_text_and_csv(tmp_path: Path) -> None:
    """A header, empty lines and spaces do no harm."""
    path = tmp_path / "lengths.csv"
    path.write_text("tokens\n12\n 7 \n\n512\n", encoding="utf-8")
    assert [12, 7, 512] == read_counts(str(path))


def test_every_bad_line_is_counted(tmp_path: Path) -> None:
    """The first three are shown, with their numbers and values."""
    path = tmp_path / "lengths.txt"
    path.write_text("12\n-3\nabc\n0\n1.5\n7\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_counts(str(path))
    (problem,) = caught.value.problems
    assert "lengths" == problem.argument
    assert "4 of 6 lines are no lengths (line 2 is '-3', line 3 is 'abc', line 4 is '0', ...)" in problem.message
    assert "accepted: a text or csv file" in problem.message


def test_a_file_without_lengths_is_refused(tmp_path: Path) -> None:
    """An empty one, one with a header alone, a folder, none at all."""
    empty, header = tmp_path / "empty.txt", tmp_path / "header.txt"
    empty.write_text("", encoding="utf-8")
    header.write_text("tokens\n", encoding="utf-8")
    for path in (empty, header, tmp_path, tmp_path / "missing.txt"):
        with pytest.raises(InputError) as caught:
            read_counts(str(path))
        assert ["lengths"] == [problem.argument for problem in caught.value.problems]


# -- a plan ----------------------------------------------------------------------------------------------------------


def simulator(ceiling_bytes: int, lengths: Lengths | None = None) -> Simulator:
    """A small BERT on an 8 GB card."""
    torch.set_num_threads(1)
    spec = resolve_model("sentence-transformers/all-MiniLM-L6-v2")
    workload = Workload(spec=spec, task="sequence-classification")
    return Simulator(workload, find_card("rtx 4060"), ceiling_bytes=ceiling_bytes, lengths=lengths, seed=3)


def test_the_users_own_lengths_are_replayed() -> None:
    """Short texts in large batches; the plan's seed is the order's."""
    lengths = given_lengths([16, 32, 48, 64] * 20, seq_len=64, long_texts="truncate")
    epoch = epoch_of(simulator(2**33, lengths), config())
    assert epoch is not None
    assert epoch.whole
    assert 10 == epoch.steps
    expected = list(epoch_steps(lengths.tokens, config(), seed=3))
    assert sum(map(len, expected)) == epoch.micro_batches


def test_the_fastest_trial_whose_whole_run_fits_is_taken() -> None:
    """A trial whose two steps fit and whose epoch does not says so, and the next one is settled on."""
    roomy = simulator(2**33)
    trials = []
    for effective, speed in ((8, 2.0), (4, 1.0)):
        chosen = config(
            effective_batch_size=effective,
            micro_batch_size=effective,
            max_tokens_per_micro_batch=64 * effective,
            gradient_accumulation_steps=1,
        )
        time = Time(step_ms=1.0, micro_batch_ms=1.0, update_ms=0.0, tokens_per_s=speed, source="simulated")
        memory = roomy.memory_of_budget(chosen)
        trials.append(Trial(config=chosen, memory=memory, time=time, status="fits", reason=""))
    runs = [whole_run(roomy, trial.config).total_bytes for trial in trials]
    assert runs[0] > runs[1]
    result = SearchResult(trials=trials)
    result.settle(simulator(runs[0] - 1))
    assert ["exceeds", "fits"] == [trial.status for trial in result.trials]
    assert "two steps fit; " in result.trials[0].reason
    assert result.best is not None and result.best.run is not None
    assert runs[1] == result.best.run.total_bytes
    assert {"epoch", "resume"} <= set(result.best.run.phases)


def test_a_plan_says_which_lengths_it_holds_for(tmp_path: Path) -> None:
    """The user's, with how many are cut; and they are an option of the command like any other."""
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(["20", "50", "70", "200"] * 10), encoding="utf-8")
    narrow = {"precision": "bf16-amp", "checkpointing": "none", "attention": "sdpa", "offload": "none"}
    made = plan(
        model="sentence-transformers/all-MiniLM-L6-v2",
        task="sequence-classification",
        vram="8GB",
        seq_len=64,
        batch_size=8,
        method="full",
        lengths=str(path),
        **narrow,
    )
    (reason,) = [reason for reason in made.reasons if reason.field == "lengths"]
    assert str(path) == reason.value
    assert "as given: 40 texts, 20 of them longer than 64 tokens, which are cut" in reason.reason
    assert "the whole epoch of 5 steps was replayed" in reason.reason
    assert made.peak.phases["epoch"]["peak_reserved_bytes"] <= made.peak.peak_reserved_bytes
