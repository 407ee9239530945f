"""What a person sees while a plan is made: on a terminal, in a log, and when quiet."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from planner.progress import BarProgress, LineProgress, NoProgress, Progress, showing

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        """The time."""
        return self.now


def tell(progress: Progress) -> None:
    """A short search, as the planner tells it."""
    progress.phase("recording bf16-amp [b]")
    progress.expect(trials=12, seconds=60)
    progress.best(9000.4)
    progress.trial_started("bf16-amp, micro-batch 8")
    progress.trial_ended("bf16-amp, micro-batch 8", tokens_per_s=12345.6)
    progress.trial_started("fp32, micro-batch 16")
    progress.trial_ended("fp32, micro-batch 16", problem="the device ran out of memory")


def terminal(width=100, **options):
    """A console on a terminal of that width, and what it shows."""
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=width, **options), stream


def drawn(bar, stream):
    """The live line as it is drawn now, without what moves the cursor and colours it."""
    stream.seek(0)
    stream.truncate()
    bar._line.refresh()
    return CONTROL.sub("", stream.getvalue()).strip()


# In a log


def test_a_log_gets_a_line_for_each_trial():
    """Text, what came of it, the best so far; phases are not worth a line."""
    lines = []
    tell(LineProgress(lines.append))
    assert [
        "trial 1 of at most 12: bf16-amp, micro-batch 8: 12,346 tokens/s; best 12,346 tokens/s",
        "trial 2 of at most 12: fp32, micro-batch 16: the device ran out of memory; best 12,346 tokens/s",
    ] == lines


def test_without_a_bound_or_a_best_neither_is_told():
    """A first trial that fails, of who knows how many."""
    lines = []
    LineProgress(lines.append).trial_ended("fp32, micro-batch 1", problem="its process was killed")
    assert ["trial 1: fp32, micro-batch 1: its process was killed"] == lines


def test_a_trial_with_a_problem_is_never_the_best():
    """A speed that came with a problem, such as a loss that is not finite, is not one to train at."""
    progress = NoProgress()
    progress.trial_ended("a", tokens_per_s=5.0, problem="the loss was not finite")
    assert None is progress.best_tokens_per_s
    progress.trial_ended("b", tokens_per_s=3.0)
    progress.best(2.0)
    assert 3.0 == progress.best_tokens_per_s


def test_no_terminal_no_control_characters():
    """What goes to a file is plain lines, and only about trials."""
    stream = io.StringIO()
    with showing(console=Console(file=stream)) as progress:
        tell(progress)
    assert 2 == len(stream.getvalue().splitlines())
    assert stream.getvalue().replace("\n", "").isprintable()


def test_quiet_is_silent_on_a_terminal_too(capfd):
    """--quiet shows nothing, and trials are still counted."""
    console, stream = terminal()
    with showing(quiet=True, console=console) as progress:
        tell(progress)
    assert ("", ("", ""), 2) == (stream.getvalue(), tuple(capfd.readouterr()), progress.trials_done)


def test_a_pipe_is_no_terminal_whatever_the_environment_says(tmp_path):
    """FORCE_COLOR, which many CI systems set, makes no live line in a log; standard output stays the command's own."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_progress import showing, tell\n"
        "with showing() as progress: tell(progress); print('{}')"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    environment = os.environ | {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "{}\n" == done.stdout
    assert 2 == len(done.stderr.splitlines())
    assert done.stderr.replace("\n", "").isprintable()


# On a terminal


def test_the_live_line_tells_phase_trials_best_and_time():
    """One line: what is done now, trials done of those at most, the best, the time left."""
    console, stream = terminal()
    with BarProgress(console, Clock()) as bar:
        bar.phase("recording [bold]")
        assert drawn(bar, stream).split("  ")[0].endswith("recording [bold]")
        tell(bar)
        assert " 2/12, best 12,346 tokens/s, 0:00 left at most " in drawn(bar, stream)
        bar.trial_started("bf16-amp, micro-batch 32")
        assert drawn(bar, stream)[2:].startswith("trial 3: bf16-amp, mi")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_live_line_stays_one_line(width):
    """Whatever the terminal's width and the text's."""
    console, stream = terminal(width)
    with BarProgress(console, Clock()) as bar:
        tell(bar)
        bar.trial_started("checkpointing every-2, " * 20)
        assert 1 == len(drawn(bar, stream).splitlines())
        assert width >= len(drawn(bar, stream))


def test_nothing_of_the_live_line_stays():
    """At the end it is erased and the cursor is back, after an exception too."""
    console, stream = terminal()
    with pytest.raises(KeyboardInterrupt), showing(console=console) as progress:
        tell(progress)
        raise KeyboardInterrupt
    assert stream.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    """TERM=dumb can't move the cursor."""
    monkeypatch.setenv("TERM", "dumb")
    console, stream = terminal()
    with showing(console=console) as progress:
        tell(progress)
    assert stream.getvalue().replace("\n", "").isprintable()


def test_a_real_terminal_shows_the_line_and_standard_output_stays_clean(tmp_path):
    """Standard error is a terminal, standard output a pipe, as in ``plan --json > plan.json``."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from test_progress import showing, tell\n"
        "with showing() as progress: tell(progress); print('{\"a\": 1}', flush=True); time.sleep(0.4)"
    )
    theirs, ours = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR",)} | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=ours)
    os.close(ours)
    stdout, _ = running.communicate(timeout=30)
    seen = b""
    while chunk := _read(theirs):
        seen += chunk
    os.close(theirs)
    assert {"a": 1} == json.loads(stdout)
    assert "2/12, best 12,346 tokens/s" in CONTROL.sub("", seen.decode())


def _read(terminal):
    """What a closed terminal still holds; empty at its end."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


# The time left


def test_the_time_left_is_the_smaller_of_two_bounds():
    """What the trials so far say about the ones at most, or what is left of --timeout."""
    clock = Clock()
    progress = NoProgress(clock)
    assert None is progress.seconds_left()
    progress.expect(trials=10, seconds=100)
    assert 100 == progress.seconds_left()
    progress.trial_started("a")
    clock.now += 4
    progress.trial_ended("a", tokens_per_s=1.0)
    assert 9 * 4 == progress.seconds_left()
    progress.trial_started("b")
    clock.now += 1
    assert 9 * 4 - 1 == progress.seconds_left()
    clock.now += 69
    assert 100 - 4 - 70 == progress.seconds_left()
    clock.now += 1000
    assert 0 == progress.seconds_left()


def test_what_is_expected_may_shrink():
    """Rules that make trials unnecessary bring the end nearer."""
    clock = Clock()
    progress = NoProgress(clock)
    progress.expect(trials=10)
    progress.trial_started("a")
    clock.now += 4
    progress.trial_ended("a", tokens_per_s=1.0)
    progress.expect(trials=2)
    assert (3, 8) == (progress.trials_at_most, progress.seconds_left())
    progress.expect()
    assert (None, None) == (progress.trials_at_most, progress.seconds_left())


def test_telling_costs_next_to_nothing():
    """A thousand calls on a terminal take no second: a trial's time is the trial's."""
    console, _ = terminal()
    with BarProgress(console) as bar:
        start = time.perf_counter()
        for number in range(1000):
            bar.phase(f"trial {number}: warming up")
        assert 1 >= time.perf_counter() - start
