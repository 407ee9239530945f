"""The shared study: where it is kept, that no two workers run the same, and that nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import optuna
import pytest
import sharing
from optuna.trial import TrialState

from planner import study as study_module
from planner.errors import InputError, TrialError
from planner.measure.protocol import ABOUT_THE_CONFIGURATION, OK, OUT_OF_MEMORY, STATUSES, Measurement
from planner.storages import ACCEPTED, default_journal, journal_path, open_storage
from planner.study import SharedStudy, known_studies

SPACE = {"precision": ["fp32", "bf16-amp"], "micro_batch_size": ["1", "2", "4"]}
CHOICE = {"precision": "fp32", "micro_batch_size": "2"}
OTHER = {"precision": "fp32", "micro_batch_size": "4"}
DONE = Measurement(status=OK, step_ms=10.0, tokens_per_s=100.0, process_bytes=5)


def make(storage, **options):
    """A study in a storage."""
    return SharedStudy(storage, name="n", space=SPACE, **options)


def of_another(study, worker):
    """As another process with this identity would have made it."""
    study._worker = {**study._worker, **worker}
    return study


@pytest.fixture
def journal(tmp_path):
    """A journal's text."""
    return f"journal:{tmp_path}/trials"


# -- storages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("trials", ""),
        ("nothing://host/trials", "no known kind of database"),
        ("sqlite:////proc/nowhere/trials.db", "can't be opened"),
        ("/proc/nowhere/trials.log", "can't be written"),
        ("journal:/proc/version", "can't be written"),
        ("mysql://user:secret@127.0.0.1/trials", "driver that is not installed"),
    ],
)
def test_a_wrong_storage_is_told_in_one_line(text, why):
    """Value, what is accepted and the remedy, for the argument, without the password."""
    with pytest.raises(InputError) as told:
        open_storage(text, "x")
    (problem,) = told.value.problems
    assert "storage" == problem.argument
    assert why in problem.message
    assert ACCEPTED in problem.message
    assert "\n" not in problem.message
    assert "secret" not in problem.message


def test_a_file_that_is_no_journal_stays_as_it_is(tmp_path):
    """Somebody's text is refused, not overwritten."""
    path = tmp_path / "notes.log"
    path.write_text("dear diary\ntoday", encoding="utf-8")
    with pytest.raises(InputError, match="no journal"):
        open_storage(str(path), "x")
    assert "dear diary\ntoday" == path.read_text(encoding="utf-8")


def test_journal_paths():
    """With the prefix any path; without it one that ends as a journal does."""
    assert Path("a/b") == journal_path("journal:a/b")
    assert Path("a.log") == journal_path("a.log")
    assert journal_path("sqlite:///a.log") is None
    assert journal_path("a.txt") is None


def test_a_line_that_was_cut_off_is_mended(journal, tmp_path):
    """A worker killed while it wrote leaves half a line: what was before is kept, and writing goes on."""
    first = make(journal)
    first.tell(first.claim(CHOICE), DONE, over_bytes=-1)
    with (tmp_path / "trials").open("a", encoding="utf-8") as file:
        file.write('{"op_code": 4, "worker')
    again = make(journal)
    assert [DONE] == [told.measurement for told in again.trials()]
    again.tell(again.claim(OTHER), DONE, over_bytes=-1)
    assert 2 == len(make(journal).trials())


def test_a_broken_journal_of_the_cache_is_put_aside():
    """The default storage is no reason to fail: the file is kept under another name and a new one begun."""
    path = default_journal("broken")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("garbage\n", encoding="utf-8")
    study = SharedStudy(None, name="broken", space=SPACE)
    assert study.claim(CHOICE) is not None
    assert not study.problem
    (aside,) = path.parent.glob("broken.journal.broken-*")
    assert "garbage\n" == aside.read_text(encoding="utf-8")


def test_the_default_storage_resumes():
    """With no storage named, the same request finds what it had."""
    first = SharedStudy(None, name="resumes", space=SPACE)
    first.tell(first.claim(CHOICE), DONE, over_bytes=-1)
    assert [DONE] == [told.measurement for told in SharedStudy(None, name="resumes", space=SPACE).trials()]


def test_a_cache_that_can_not_be_written_costs_only_the_journal(monkeypatch, tmp_path):
    """Trials are kept in memory, and the study says so."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path / "file" / "cache"))
    study = SharedStudy(None, name="n", space=SPACE)
    study.tell(study.claim(CHOICE), DONE, over_bytes=-1)
    assert [DONE] == [told.measurement for told in study.trials()]
    assert "can't be kept" in study.problem


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_meanwhile_costs_only_the_journal(tmp_path, monkeypatch):
    """What was told before and what is told then is all there, in memory; one line says why."""
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path))
    study = SharedStudy(None, name="full", space=SPACE)
    study.tell(study.claim(CHOICE), DONE, over_bytes=-1)
    claim = study.claim(OTHER)
    study.trials()
    study.study._storage._backend._file_path = "/dev/full"
    study.tell(claim, DONE, over_bytes=-1)
    assert 2 == len(study.trials())
    assert "No space left" in study.problem


# -- claims ------------------------------------------------------------------------------------------------------------


def test_a_configuration_is_claimed_once(journal):
    """While it runs, and after it ran; not after it failed for the moment's sake."""
    mine, theirs = make(journal), make(journal)
    theirs._is_lost = lambda trial: False  # both are this process: as if both were alive
    claim = mine.claim(CHOICE)
    assert CHOICE == claim.choice
    assert theirs.claim(CHOICE) is None
    assert theirs.claim(OTHER) is not None
    mine.tell(claim, Measurement(status="killed"), over_bytes=0)
    again = theirs.claim(CHOICE)
    assert again is not None
    theirs.tell(again, DONE, over_bytes=-1)
    assert mine.claim(CHOICE) is None
    assert mine.claim(CHOICE, repeat=True) is not None


def test_the_one_that_yields_is_told_and_does_not_count(journal):
    """It is PRUNED with its reason, and no result."""
    mine, theirs = make(journal), make(journal)
    theirs._is_lost = lambda trial: False
    mine.claim(CHOICE)
    theirs.claim(CHOICE)
    first, second = mine.study.get_trials()
    assert (TrialState.RUNNING, TrialState.PRUNED) == (first.state, second.state)
    assert "another worker runs it" == second.user_attrs["reason"]
    assert 1 == len(mine.trials())


def test_waits_for_a_lower_number_that_has_not_chosen(journal):
    """The lower number wins although it stores its choice later."""
    study, later = make(journal), make(journal)
    later._is_lost = lambda trial: False
    early = study.study.ask()
    won = []
    thread = threading.Thread(target=lambda: won.append(later.claim(CHOICE)))
    thread.start()
    time.sleep(0.3)
    assert not won
    for field, values in SPACE.items():
        choices = optuna.distributions.CategoricalDistribution(values)
        study.study._storage.set_trial_param(early._trial_id, field, values.index(CHOICE[field]), choices)
    thread.join(timeout=10)
    assert [None] == won


def test_one_that_never_chooses_is_not_waited_for_for_ever(journal, monkeypatch):
    """After a while it is told FAIL; should it live, it finds out before it runs anything."""
    monkeypatch.setattr(study_module, "CHOOSING_S", 0.3)
    study = make(journal)
    stuck = study.study.ask()
    assert study.claim(CHOICE) is not None
    assert TrialState.FAIL == study.study.get_trials()[stuck.number].state


def test_a_dead_worker_of_this_host_is_buried(journal):
    """Its process is gone: its trial is FAIL, and may be run again."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    theirs = of_another(make(journal), {"pid": ended.pid, "created": time.time()})
    theirs.claim(CHOICE)
    study = make(journal)
    assert 1 == study.bury()
    assert study.claim(CHOICE) is not None


def test_a_live_worker_of_this_host_is_left_alone(journal):
    """However long it takes."""
    import psutil

    parent = psutil.Process(os.getppid())
    theirs = of_another(make(journal), {"pid": parent.pid, "created": parent.create_time(), "limit_s": 0.0})
    theirs.claim(CHOICE)
    study = make(journal)
    assert 0 == study.bury()
    assert study.claim(CHOICE) is None


def test_a_worker_of_another_host_has_its_time(journal, monkeypatch):
    """Its trial is lost once it is older than it may be."""
    monkeypatch.setattr(study_module, "CHOOSING_S", 0.2)
    theirs = of_another(make(journal), {"host": "elsewhere", "limit_s": 0.3})
    theirs.claim(CHOICE)
    study = make(journal)
    assert 0 == study.bury()
    assert study.claim(CHOICE) is None
    time.sleep(0.6)
    assert 1 == study.bury()
    assert study.claim(CHOICE) is not None


def test_a_result_that_comes_after_the_burial_counts(journal):
    """A worker that was slow and not dead tells what it measured all the same."""
    theirs = of_another(make(journal), {"pid": 2**22 + 1})
    claim = theirs.claim(CHOICE)
    study = make(journal)
    assert 1 == study.bury()
    theirs.tell(claim, DONE, over_bytes=-1)
    assert [DONE] == [told.measurement for told in study.trials()]


# -- what is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", STATUSES)
def test_what_samplers_learn(journal, status):
    """A speed from what ran, a violated constraint from what can't be used, nothing from the moment's failures."""
    study = make(journal)
    told = Measurement(status=status, tokens_per_s=100.0 if status == OK else None)
    study.tell(study.claim(CHOICE), told, over_bytes=-3.0 if status == OK else 0.0)
    (trial,) = study.study.get_trials()
    if status == OK:
        assert (TrialState.COMPLETE, 100.0, {"memory": -3.0}) == (trial.state, trial.value, trial.constraints)
    elif status in ABOUT_THE_CONFIGURATION | OUT_OF_MEMORY:
        assert (TrialState.COMPLETE, 0.0) == (trial.state, trial.value)
        assert max(trial.constraints.values()) > 0
    else:
        assert TrialState.FAIL == trial.state
    assert [told] == [t.measurement for t in study.trials()]


def test_optunas_own_samplers_can_go_on_with_the_study(journal):
    """Parameters, values and constraints are as TPE wants them."""
    study = make(journal)
    study.tell(study.claim(CHOICE), DONE, over_bytes=-1)
    study.tell(study.claim(OTHER), Measurement(status="oom"), over_bytes=7)
    loaded = optuna.load_study(
        study_name="n", storage=study.study._storage, sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=1)
    )
    trial = loaded.ask({f: optuna.distributions.CategoricalDistribution(v) for f, v in SPACE.items()})
    assert set(SPACE) == set(trial.params)
    assert 100.0 == loaded.best_value


def test_what_a_worker_that_joins_has_to_know(journal):
    """Is stored once, and found with the storage alone."""
    make(journal, about={"request": {"model": "a"}})
    make(journal, about={"request": {"model": "b"}})
    assert [("n", {"request": {"model": "a"}})] == known_studies(journal)


def test_a_journal_that_can_not_be_written_any_more_ends_the_search(journal):
    """One that the user named is where the others look: going on alone would run what they run."""
    study = make(journal)
    claim = study.claim(CHOICE)
    study.study._storage._backend._file_path = "/dev/full"
    with pytest.raises(TrialError, match="journal can't be written"):
        study.tell(claim, DONE, over_bytes=-1)


# -- many workers ------------------------------------------------------------------------------------------------------

STORAGES = ("journal:{}/shared", "sqlite:///{}/shared.db")


@pytest.mark.parametrize("storage", STORAGES)
def test_two_workers(storage, tmp_path):
    """Two processes run disjoint trials, and together find what one would."""
    sharing.check_two_workers(storage.format(tmp_path), tmp_path)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_killed_worker(storage, tmp_path):
    """What a worker ran when it was killed is run by the next, and the journal can be read."""
    sharing.check_killed_worker(storage.format(tmp_path), tmp_path)
    if storage.startswith("journal"):
        assert all(map(json.loads, (tmp_path / "shared").read_text(encoding="utf-8").splitlines()))


def test_a_finished_search_runs_nothing_again(tmp_path):
    """The same request on the same journal."""
    sharing.check_resumed(STORAGES[0].format(tmp_path), tmp_path)
