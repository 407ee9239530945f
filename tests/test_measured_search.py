"""The loop of measured trials, over hand-made worlds: what it runs, what it doesn't, and how it ends."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from worlds import TARGET, make_space, make_world, search

from planner.errors import TrialError
from planner.measure.protocol import Measurement
from planner.measured_search import describe, study_name
from planner.measurements import MeasurementStore
from planner.progress import NoProgress


class Log(NoProgress):
    """Remembers what it was told."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def trial_started(self, text):
        """Kept."""
        self.lines.append(("started", text))

    def trial_ended(self, text, *, tokens_per_s=None, problem=""):
        """Kept."""
        self.lines.append(("ended", text, tokens_per_s, problem))

    def best(self, tokens_per_s):
        """Kept."""
        self.lines.append(("best", tokens_per_s))

    def expect(self, *, trials=None, seconds=None):
        """Kept."""
        self.lines.append(("expect", trials, seconds))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    """Studies of one test are no other's."""
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path / "cache"))


def test_finds_the_fastest_that_fits_in_few_trials(tmp_path):
    """Of 36 configurations; every one comes back, with its measurement or why it has none."""
    world = make_world(1)
    result = search(world, tmp_path)
    assert world.best == pytest.approx(world.tokens_per_s(result.best.config), rel=0.03)
    assert result.run == len(world.ran) == len(result.measured) <= 0.15 * 36 + 2
    assert 36 == len(result.trials)
    assert all(trial.reason for trial in result.trials if trial.status != "fits")
    assert {"fits", "exceeds", "oom", "pruned"} >= {trial.status for trial in result.trials}
    assert all(trial.measured for trial in result.fitting)
    assert "expected to gain" in result.stopped
    assert "torch" not in sys.modules or "planner.step" in sys.modules


def test_what_is_measured_beats_what_is_predicted(tmp_path):
    """The best is the fastest by measurement, where the simulator says otherwise."""
    world = make_world(2, structure_bias=0.3)
    result = search(world, tmp_path)
    assert world.best == pytest.approx(result.best.measured.tokens_per_s, rel=0.03)
    assert result.best is max(result.fitting, key=lambda t: t.measured.tokens_per_s)


def test_the_same_request_again_runs_nothing(tmp_path):
    """The study has it all."""
    first = search(make_world(1), tmp_path)
    world = make_world(1)
    second = search(world, tmp_path)
    assert [] == world.ran
    assert first.best.config == second.best.config


def test_another_request_uses_what_was_kept(tmp_path):
    """Another study of the same workload on the same device: what was measured and holds here isn't run again."""
    before = make_world(1)
    search(before, tmp_path)
    world = make_world(1)
    result = search(world, tmp_path, name="another")
    assert not set(world.ran) & set(before.ran)
    assert result.best.config in before.ran
    assert result.run <= 1


def test_another_ceiling_knows_what_holds_there(tmp_path):
    """What fit in much fits in less if it held less; what ran out in much is not tried in less."""
    before = make_world(5)
    search(before, tmp_path)
    world = make_world(5)
    less = world.ceiling_bytes - 200 * 2**20
    world.candidates = [replace(candidate, ceiling_bytes=less) for candidate in world.candidates]
    world.ceiling_bytes = less
    search(world, tmp_path, name="less")
    fitting = {config for config in before.ran if world.fits(config)}
    assert not fitting & set(world.ran)
    assert not {config for config in before.ran if not before.fits(config)} & set(world.ran)


def test_measurements_of_another_model_make_the_next_plan_better(tmp_path):
    """How far the simulator is off on this device is known: the first trial's residual comes as no surprise."""
    search(make_world(1), tmp_path)
    (path,) = Path(tmp_path).glob("*.jsonl")
    rows = MeasurementStore({"device": "hand-made"}, folder=tmp_path).rows()
    path.write_text("".join(replace(row, workload="another").to_json() + "\n" for row in rows), encoding="utf-8")
    world = make_world(1)
    result = search(world, tmp_path, name="another")
    assert world.best == pytest.approx(world.tokens_per_s(result.best.config), rel=0.03)


def test_trials_are_counted(tmp_path):
    """No more than were allowed, failed ones included."""
    world = make_world(1)
    result = search(world, tmp_path, trials=2)
    assert 2 == len(world.ran) == result.run
    assert "all 2 trials" in result.stopped
    assert any("all 2 trials" in trial.reason for trial in result.trials if trial.status == "pruned")


def test_time_is_kept(tmp_path):
    """No trial is begun that would end too late, as long as the ones before took."""
    world, now = make_world(3, attentions=("sdpa", "eager")), [0.0]

    def measure(config):
        now[0] += 10
        return world.measure(config)

    result = search(world, tmp_path, measure=measure, timeout_s=25, clock=lambda: now[0])
    assert 2 == result.run
    assert "25 s" in result.stopped
    assert result.best is not None


def test_an_interrupt_ends_it_with_what_there_is(tmp_path):
    """The best so far comes back; what was running may be run again."""
    world = make_world(3, attentions=("sdpa", "eager"))

    def measure(config):
        if len(world.ran) == 2:
            world.ran.append(config)
            raise KeyboardInterrupt
        return world.measure(config)

    result = search(world, tmp_path, measure=measure)
    assert result.interrupted
    assert result.best is not None
    assert 2 == len(result.measured)
    again = make_world(3, attentions=("sdpa", "eager"))
    search(again, tmp_path)
    assert again.ran[0] == world.ran[2]


def test_an_interrupt_before_anything_ran_is_no_error(tmp_path):
    """There is no best; the caller says so."""

    def measure(config):
        raise KeyboardInterrupt

    result = search(make_world(3), tmp_path, measure=measure)
    assert result.interrupted
    assert result.measured == []


def test_what_fails_for_the_moment_is_tried_once_more(tmp_path):
    """A configuration that was killed once and then runs counts as if nothing had been."""
    world, failed = make_world(1), []

    def measure(config):
        if not failed:
            failed.append(config)
            return Measurement(status="killed", reason="signal 9")
        return world.measure(config)

    result = search(world, tmp_path, measure=measure)
    assert failed[0] in world.ran
    assert "fits" == next(t for t in result.trials if t.config == failed[0]).status


def test_what_fails_twice_is_left(tmp_path):
    """It is an error in the result, and the others are run."""
    world, tries = make_world(1), {}
    victim = search(make_world(1), tmp_path / "other", name="look").best.config

    def measure(config):
        tries[config] = tries.get(config, 0) + 1
        return Measurement(status="hang", reason="silent for 60 s") if config == victim else world.measure(config)

    result = search(world, tmp_path, measure=measure)
    assert 2 == tries[victim]
    assert max(tries[config] for config in tries if config != victim) == 1
    (trial,) = [t for t in result.trials if t.config == victim]
    assert ("error", "silent for 60 s") == (trial.status, trial.reason)
    assert result.best is not None


def test_what_its_code_raised_is_not_tried_again(tmp_path):
    """An exception would come again."""
    world, tries = make_world(1), []

    def measure(config):
        tries.append(config)
        return Measurement(status="error", reason="ValueError") if len(tries) == 1 else world.measure(config)

    search(world, tmp_path, measure=measure)
    assert len(set(tries)) == len(tries)


def test_when_everything_fails_it_says_so_soon(tmp_path):
    """Each kind of failure once, with how often; a few trials are enough to know."""
    tries = []

    def measure(config):
        tries.append(config)
        return Measurement(status="device-error" if len(tries) % 2 else "segfault", reason=f"error {len(tries)}")

    with pytest.raises(TrialError) as told:
        search(make_world(1), tmp_path, measure=measure)
    assert 3 <= len(tries) <= 6
    lines = str(told.value).splitlines()
    assert "all failed" in lines[0]
    assert {"device-error", "segfault"} == {line.split(" x ")[1].split(":")[0] for line in lines[1:]}


def test_failures_of_an_earlier_session_are_forgiven(tmp_path):
    """A card that was occupied yesterday doesn't spoil today's plan."""
    with pytest.raises(TrialError):
        search(make_world(1), tmp_path, measure=lambda _: Measurement(status="occupied"))
    world = make_world(1)
    assert search(world, tmp_path).best is not None


def test_where_nothing_fits_there_is_no_best(tmp_path):
    """Running out of memory is an answer, not a failure; most of it is settled by the least."""
    world = make_world(1)
    world.reserved_bytes = dict.fromkeys(world.reserved_bytes, 2**50)
    result = search(world, tmp_path)
    assert result.best is None
    assert {"oom"} == {trial.status for trial in result.measured}
    assert result.run < 36 / 2
    assert any("did not fit" in trial.reason for trial in result.trials)


def test_unusable_configurations_are_errors_and_kept(tmp_path):
    """A loss that is not finite says something about the configuration: the next plan knows it."""
    world = make_world(1)
    victim = search(make_world(1), tmp_path / "other", name="look").best.config

    def measure(config):
        return Measurement(status="nan-loss") if config == victim else world.measure(config)

    result = search(world, tmp_path, measure=measure)
    assert "error" == next(t for t in result.trials if t.config == victim).status
    assert victim != result.best.config
    again = make_world(1)
    search(again, tmp_path, name="again")
    assert victim not in again.ran


def test_a_store_that_can_not_be_written_is_said_once(tmp_path):
    """The search goes on."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    result = search(make_world(1), tmp_path / "file" / "measurements")
    assert result.best is not None
    assert 1 == sum("measurements are not kept" in problem for problem in result.problems)


def test_lines_of_the_store_that_can_not_be_read_are_said(tmp_path):
    """With how many they are."""
    search(make_world(1), tmp_path)
    (path,) = Path(tmp_path).glob("*.jsonl")
    path.write_text(path.read_text(encoding="utf-8") + "broken\n", encoding="utf-8")
    assert any("1 measurements" in problem for problem in search(make_world(1), tmp_path, name="b").problems)


def test_near_ties_are_settled_by_memory(tmp_path):
    """Of two that noise can't tell apart the smaller one is the best."""
    world = make_world(1, noise=0.004)
    result = search(world, tmp_path)
    fastest = max(result.measured, key=lambda t: t.measured.tokens_per_s or 0)
    twin = replace(
        fastest,
        config=fastest.config.model_copy(update={"seq_len": 64}),
        measured=replace(
            fastest.measured,
            tokens_per_s=fastest.measured.tokens_per_s * 0.999,
            peak_reserved_bytes=fastest.measured.peak_reserved_bytes // 2,
        ),
    )
    result.trials.append(twin)
    assert twin is result.best
    slower = replace(twin, measured=replace(twin.measured, tokens_per_s=fastest.measured.tokens_per_s * 0.95))
    result.trials[-1] = slower
    assert fastest.config == result.best.config


def test_what_noise_may_hide_is_measured_again(tmp_path):
    """With measurements that are off by a tenth the best two are run twice; a limit on trials forbids it."""
    world = make_world(1, noise=0.15)
    result = search(world, tmp_path)
    twice = {config for config in world.ran if world.ran.count(config) == 2}
    assert 1 <= len(twice) <= 2
    assert result.run == len(world.ran)
    (trial,) = [t for t in result.trials if t.config in twice][:1]
    assert trial.measured.step_ms == pytest.approx(4096 / trial.measured.tokens_per_s * 1e3)
    limited = make_world(1, noise=0.15)
    search(limited, tmp_path / "limited", name="limited", trials=2)
    assert 2 == len(set(limited.ran)) == len(limited.ran)


def test_progress_is_told(tmp_path):
    """Each trial's begin and end, the best, what is still to come."""
    log, world = Log(), make_world(1)
    result = search(world, tmp_path, progress=log, trials=4, timeout_s=1000)
    assert result.run == sum(line[0] == "started" for line in log.lines)
    ended = [line for line in log.lines if line[0] == "ended"]
    assert [describe(config) for config in world.ran] == [line[1] for line in ended]
    assert all(math.isfinite(line[2]) for line in ended if not line[3])
    expected = [line for line in log.lines if line[0] == "expect"]
    assert 4 == expected[0][1]
    assert all(0 <= seconds <= 1000 for _, _, seconds in expected)


def test_what_is_known_before_is_told_once(tmp_path):
    """The best of another search, when this one begins; not what is run here, which is told as it ends."""
    log = Log()
    first = search(make_world(1), tmp_path, progress=log)
    assert not [line for line in log.lines if line[0] == "best"]
    again = Log()
    search(make_world(1), tmp_path, name="another", progress=again)
    assert [("best", first.best.measured.tokens_per_s)] == [line for line in again.lines if line[0] == "best"]


def test_study_names_differ_by_what_decides():
    """Another workload, device, ceiling or space is another study; the same is the same."""
    space, device, limits = make_space(), {"device": "a", "versions": {"torch": "1"}}, {"ceiling_bytes": 1}
    name = study_name(space, TARGET, device, limits)
    assert name == study_name(make_space(), TARGET, dict(device), dict(limits))
    others = [
        study_name(make_space(("eager",)), TARGET, device, limits),
        study_name(space, replace(TARGET, workload="b"), device, limits),
        study_name(space, TARGET, {**device, "versions": {"torch": "2"}}, limits),
        study_name(space, TARGET, device, {"ceiling_bytes": 2}),
    ]
    assert 5 == len({name, *others})
