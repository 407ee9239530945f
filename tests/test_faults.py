"""What breaks in a trial, in its server and around them: each fault is real, and the planner goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import faults
from faults import CASES, PATIENT, QUICK, SCRIPT, SERVER_CASES, Case, faulty_runner, inject, marked, tiny_spec
from faulty_trial import EVERY
from planner_faults import PLANNER_FAULTS, survive

from planner.errors import TrialError
from planner.measure.process import LineProcess
from planner.measure.runner import TrialRunner

linux = pytest.mark.skipif(sys.platform != "linux", reason="the server forks on Linux alone")
ALONE = ("kill -9", "segmentation fault", "exit code 3", "hang", "bad JSON", "half a line", "grandchild left behind")


@pytest.fixture(autouse=True)
def _one_killer_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernel counts its out-of-memory kills for the whole machine: other tests' trials aren't killed meanwhile."""
    if not any(word in request.node.name for word in ("kill", "memory", "SIG")):
        yield
        return
    with FileLock(Path(tempfile.gettempdir()) / "vramplan-tests-killing.lock"):
        yield


@pytest.fixture(scope="module")
def runner() -> Iterator[TrialRunner]:
    """One server for all faults of trials: that it lives through them is what is tested."""
    with faulty_runner() as runner:
        yield runner


@linux
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_a_fault_of_a_trial_is_named_and_the_next_trial_runs(runner: TrialRunner, case: Case) -> None:
    """Each has its status and reason, the server and the planner go on, and no process or descriptor stays."""
    outcome = inject(runner, case)
    assert (case.status, "ok", "") == (outcome.status, outcome.next_status, outcome.left_behind)
    assert case.reason in outcome.reason
    assert "\n" not in outcome.reason


@linux
def test_one_server_lived_through_all_of_that(runner: TrialRunner) -> None:
    """Faults of trials are no reason to import torch again."""
    inject(runner, CASES[0])
    server = runner.server_pid
    for case in CASES[:8]:
        inject(runner, case)
    assert server == runner.server_pid


@linux
@pytest.mark.slow
@pytest.mark.parametrize("case", SERVER_CASES, ids=lambda case: case.fault)
def test_a_fault_of_the_server_costs_at_most_one_trial(case: Case) -> None:
    """The trial that ran is lost, with a status; the next one has a new server, or none where there can be none."""
    with faulty_runner(case.fault) as runner:
        outcome = inject(runner, case)
        mark = runner.environment[faults.MARK]
    assert (case.status, "") == (outcome.status, outcome.left_behind)
    assert case.reason in outcome.reason
    assert outcome.next_status == ("hang" if case.fault == "server: never ready" else "ok")
    assert [] == marked(mark)


@pytest.mark.parametrize("fault", ALONE)
def test_a_process_of_its_own_reports_the_same_as_a_fork(fault: str) -> None:
    """Where there is no fork, statuses are the same and nothing is left behind either."""
    case = next(case for case in CASES if case.fault == fault)
    with faulty_runner(forks=False) as runner:
        outcome = inject(runner, case)
    assert (case.status, "ok", "") == (outcome.status, outcome.next_status, outcome.left_behind)
    assert case.reason in outcome.reason


def test_a_process_that_closes_its_output_and_goes_on_is_ended() -> None:
    """It can't answer any more: a bad reply, within the grace and not at the timeout."""
    with faulty_runner("output closed", forks=False) as runner:
        measured = runner.run(tiny_spec())
    assert "bad-reply" == measured.status
    assert "closed its output" in measured.reason
    assert measured.wall_s < 10


def test_a_process_that_never_starts_is_a_hang() -> None:
    """The first line has a limit of its own."""
    with faulty_runner("slow start", forks=False) as runner:
        runner.limits = replace(QUICK, start_s=0.5)
        measured = runner.run(tiny_spec())
    assert ("hang", "no progress for too long; nothing was heard") == (measured.status, measured.reason)


def test_no_interpreter_is_an_error_in_one_line() -> None:
    """The only thing that run() raises: there is nothing that could fail."""
    with TrialRunner(command=["/no/such/python"]) as runner, pytest.raises(TrialError, match="no process can be") as e:
        runner.run(tiny_spec())
    assert "\n" not in str(e.value)
    assert 4 == e.value.exit_code


def test_a_device_that_is_not_there_is_an_error_in_one_line() -> None:
    """The last line of the probe's standard error says which."""
    with (
        faulty_runner("probe: no such device") as runner,
        pytest.raises(TrialError, match="invalid device ordinal") as e,
    ):
        runner.probe("cuda:7")
    assert "\n" not in str(e.value)


def test_a_probe_that_hangs_is_an_error() -> None:
    """After the limit for a start."""
    with faulty_runner("probe: hang") as runner:
        runner.limits = replace(QUICK, start_s=0.5)
        with pytest.raises(TrialError, match="made no progress"):
            runner.probe("cuda")


@linux
def test_a_server_killed_between_trials_costs_none(runner: TrialRunner) -> None:
    """The next trial finds another."""
    runner.limits = QUICK
    good = tiny_spec(list(EVERY).index("none"))
    runner.run(good)
    before = runner.server_pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert "ok" == runner.run(good).status
    assert before != runner.server_pid


@linux
def test_a_request_that_cannot_be_read_is_said(runner: TrialRunner) -> None:
    """The real process's own answer."""
    command = [sys.executable, "-m", "planner.measure"]
    done = subprocess.run(command, input="{}\n", capture_output=True, text=True, check=False)
    assert '"status": "bad-request"' in done.stdout.splitlines()[-1]
    assert 0 == done.returncode


@linux
def test_ctrl_c_ends_the_trial_and_is_passed_on(runner: TrialRunner) -> None:
    """No process is left, and the same runner can be used again."""
    runner.limits = PATIENT
    mark = runner.environment[faults.MARK]
    script = f"import os, signal, time; time.sleep(1.5); os.kill({os.getpid()}, signal.SIGINT)"
    with pytest.raises(KeyboardInterrupt):
        runner.run(tiny_spec(list(EVERY).index("none")))  # a server is there
        interrupter = subprocess.Popen([sys.executable, "-c", script])
        runner.run(tiny_spec(list(EVERY).index("hang")))
    interrupter.wait()
    assert [] == marked(mark)
    assert "ok" == runner.run(tiny_spec(list(EVERY).index("none"))).status


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("forks", "processes"), [(True, 2), (False, 1)])
def test_nothing_outlives_a_planner_that_is_killed(forks: bool, processes: int) -> None:
    """kill -9 of the parent in the middle of a trial: server and trial notice and end."""
    mark = f"parent-{os.getpid()}-{forks}"
    script = (
        f"import os, sys; sys.path.insert(0, {str(Path(faults.__file__).parent)!r}); import faults\n"
        "from planner.measure.runner import TrialRunner\n"
        f"environment = os.environ | {{{faults.MARK!r}: {mark!r}}}\n"
        f"with TrialRunner(environment, command=[*faults.SCRIPT, 'by-seed'], forks={forks}) as runner:\n"
        f"    runner.run(faults.tiny_spec({list(EVERY).index('hang')}))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    assert waited_for(lambda: len(marked(mark)) == processes, 60)
    parent.kill()
    parent.wait()
    assert waited_for(lambda: not marked(mark), 10)


@linux
def test_the_kernels_out_of_memory_killer_is_told_from_another_kill(tmp_path: Path) -> None:
    """In a control group with 300 MiB, for real."""
    group = Path(f"/sys/fs/cgroup/memory/vramplan-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError:
        pytest.skip("needs the right to make a control group (version 1)")
    try:
        script = tmp_path / "in_group.sh"
        script.write_text(f'echo $$ > {group}/cgroup.procs\nexec "$@"\n')
        command = ["sh", str(script), *SCRIPT, "out of memory in a control group"]
        with TrialRunner(None, replace(PATIENT, silence_s=60.0), command, forks=False) as runner:
            measured = runner.run(tiny_spec())
    finally:
        waited_for(lambda: not (group / "cgroup.procs").read_text(), 5)
        group.rmdir()
    assert ("host-oom", "the kernel's out-of-memory killer ended it") == (measured.status, measured.reason)


def test_standard_error_stays_small_while_it_floods() -> None:
    """An hour of warnings must not fill the disk: the file is cut, and its end kept."""
    flood = "import os\nwhile True: os.write(2, b'warning: again\\n' * 1000)"
    process = LineProcess([sys.executable, "-c", flood], os.environ)
    try:
        assert waited_for(process.words, 20), "it has started"
        sizes = []
        for _ in range(20):
            process.next_line(0.02)
            process.trim_words()
            sizes.append(os.fstat(process._stderr.fileno()).st_size)
        os.kill(process.pid, signal.SIGSTOP)  # nothing is written while the last cut is looked at
        time.sleep(0.2)
        process.trim_words()
        cut = os.fstat(process._stderr.fileno()).st_size
    finally:
        process.end()
    assert "warning: again" in process.words()
    assert max(sizes) < 200 << 20
    assert cut < 1 << 20


@linux
@pytest.mark.parametrize("fault", PLANNER_FAULTS)
def test_a_fault_around_trials_loses_nothing(fault: str) -> None:
    """Cut-off, corrupt and stale files, full disks, workers that die or collide: it is said, and the rest stays."""
    _, status, survived = PLANNER_FAULTS[fault]
    found = survive(fault)
    assert (status, survived) == (found.status, found.survived)
    assert "\n" not in found.reason


def waited_for(condition, seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(met)


def test_no_zombies_are_left_by_all_of_this() -> None:
    """Each process was waited for."""
    zombies = [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]
    assert [] == zombies
