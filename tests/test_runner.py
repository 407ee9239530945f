"""Trials from the parent's side: what a fork measures, what a runner leaves behind, how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from faults import PATIENT, faulty_runner, tiny_spec
from faulty_trial import EVERY
from trial_cost import footprint, run, spec_of

from planner.measure.protocol import Measurement, TrialSpec
from planner.measure.runner import TrialRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server forks on Linux alone")


@pytest.fixture(scope="module")
def server() -> Iterator[TrialRunner]:
    """The real server."""
    with TrialRunner(limits=PATIENT) as runner:
        yield runner


def minilm() -> TrialSpec:
    """A model of which a trial takes a few hundred MiB."""
    spec = spec_of("sentence-transformers/all-MiniLM-L6-v2")
    larger = spec.config.model_copy(update={"micro_batch_size": 16, "seq_len": 64, "max_tokens_per_micro_batch": 1024})
    return replace(spec, config=larger, timed_s=0.2)


@pytest.mark.slow
def test_a_fork_measures_what_a_process_of_its_own_measures(server: TrialRunner) -> None:
    """Live tensors to the byte, the resident set's growth and start within a few percent, the same checks passed."""
    with TrialRunner(limits=PATIENT, forks=False) as alone:
        own = alone.run(minilm())
    server.run(tiny_spec())
    fork = server.run(minilm())
    assert ("ok", "ok") == (own.status, fork.status)
    assert own.peak_allocated_bytes == fork.peak_allocated_bytes
    assert own.phases.keys() == fork.phases.keys()
    assert own.peak_reserved_bytes == pytest.approx(fork.peak_reserved_bytes, rel=0.05)
    assert own.context_bytes == pytest.approx(fork.context_bytes, rel=0.05)
    assert own.process_bytes == pytest.approx(fork.process_bytes, rel=0.05)
    assert own.loss == pytest.approx(fork.loss)
    assert (own.steps_executed > 1) == (fork.steps_executed > 1)
    assert own.versions == fork.versions


def test_a_fork_has_all_of_torchs_threads_and_runs_backward() -> None:
    """With two threads asked for, OpenMP's in the fork do not wait for those of the server, which had none."""
    with TrialRunner(os.environ | {"OMP_NUM_THREADS": "2"}, PATIENT) as runner:
        measured = [runner.run(tiny_spec()) for _ in range(2)]
    assert ["ok", "ok"] == [trial.status for trial in measured]


def test_a_second_trial_starts_in_a_fraction_of_the_first_ones_time(server: TrialRunner) -> None:
    """Imports are paid once: a tenth is left, which leaves room for a busy machine at a third."""
    with TrialRunner(limits=PATIENT) as fresh:
        first = run(fresh, tiny_spec())
        later = run(fresh, tiny_spec())
    assert later["start_s"] < first["start_s"] / 3


def test_a_ceiling_too_low_is_out_of_memory(server: TrialRunner) -> None:
    """The cap holds in a fork: what does not fit fails, and the next trial has all of the machine's memory again."""
    measured = server.run(replace(minilm(), ceiling_bytes=500 << 20))
    assert "oom" == measured.status
    assert "ok" == server.run(tiny_spec()).status


@pytest.mark.slow
def test_the_parent_stays_flat_over_many_trials() -> None:
    """Resident set within 20 KiB a trial between the first and the last ten; no descriptor, process or file more."""
    held = footprint(tiny_spec(), 25)
    first, last = held.resident_bytes[:10], held.resident_bytes[-10:]
    assert max(last) - min(first) < 25 * 20 * 1024
    assert 1 == len(set(held.descriptors))
    assert 1 == len(set(held.children))  # other tests' server may be one of them
    assert 1 == len(set(held.files))  # torch makes a folder of its own when the server imports it


def test_close_leaves_nothing_and_may_come_twice() -> None:
    """No server, no thread, no descriptor; a closed runner starts a new server when it is asked again."""
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    with faulty_runner() as runner:
        good = tiny_spec(list(EVERY).index("none"))
        runner.run(good)
        server = runner.server_pid
        runner.close()
        runner.close()
        assert runner.server_pid is None
        assert (threads, descriptors) == (threading.active_count(), len(list(Path("/proc/self/fd").iterdir())))
        assert "ok" == runner.run(good).status
        assert runner.server_pid != server
    assert (threads, descriptors) == (threading.active_count(), len(list(Path("/proc/self/fd").iterdir())))


def test_a_server_can_be_used_from_any_thread(server: TrialRunner) -> None:
    """A trial dies with the server, not with the thread that asked for it first."""
    answers: list[Measurement] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: answers.append(server.run(tiny_spec())))
        thread.start()
        thread.join()
    assert ["ok", "ok"] == [answer.status for answer in answers]


def test_wall_time_and_phases_are_the_parents(server: TrialRunner) -> None:
    """In the order in which a trial goes through them."""
    measured = server.run(tiny_spec())
    times = [server.phases_s[phase] for phase in ("start", "libraries", "load", "first_step", "steady_step", "timed")]
    assert sorted(times) == times
    assert measured.wall_s > times[-1]


def test_the_runner_imports_neither_torch_nor_transformers() -> None:
    """It lies on the way of plan --help."""
    code = "import sys, planner.measure.runner; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "set()" == done.stdout.strip()
