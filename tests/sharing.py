"""What must hold of several workers on one storage, whatever the storage: used for journals, SQLite and PostgreSQL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from worlds import make_world, search

from planner.config import TrainingConfig

SEED = 3
SCRIPT = Path(__file__).with_name("worlds.py")


def start(storage, name, cache, *, seconds=0.1, die_after=-1):
    """A worker process on a world of 72 configurations."""
    command = [sys.executable, str(SCRIPT), storage, name, str(cache), str(SEED), str(seconds), str(die_after)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def finish(worker, *, code=0):
    """(what it ran, what it found to be best, what it died at); fails where it ended otherwise than with ``code``."""
    out, errors = worker.communicate(timeout=120)
    assert code == worker.returncode, errors
    lines = out.splitlines()
    ran = [line.split(" ", 3)[3] for line in lines if line.startswith("ran ")]
    best = [line.removeprefix("best ") for line in lines if line.startswith("best ")]
    died = [line.removeprefix("died at ") for line in lines if line.startswith("died at ")]
    return ran, next(iter(best), None), next(iter(died), None)


def check_two_workers(storage, folder):
    """Two workers run disjoint configurations, and both end with what one alone would choose, or as good."""
    workers = [start(storage, "two", folder) for _ in range(2)]
    (first, best, _), (second, other, _) = map(finish, workers)
    assert first and second
    assert len(first) == len(set(first)) and len(second) == len(set(second))
    assert not set(first) & set(second)
    alone = make_world(SEED, attentions=("sdpa", "eager"))
    chosen = search(alone, folder / "alone", storage=f"journal:{folder}/alone.log").best.config
    world = make_world(SEED, attentions=("sdpa", "eager"))
    speeds = [world.tokens_per_s(TrainingConfig.model_validate_json(found)) for found in (best, other)]
    assert min(speeds) >= 0.97 * world.tokens_per_s(chosen)
    # the second worker may have been late: together they still spend no more than a trial each beyond one's
    assert len(first) + len(second) <= len(alone.ran) + 4


def check_killed_worker(storage, folder):
    """A worker killed in the middle of a trial leaves it to the other, which runs it."""
    _, _, died = finish(start(storage, "killed", folder, die_after=1), code=-signal.SIGKILL)
    ran, best, _ = finish(start(storage, "killed", folder, seconds=0))
    assert died in ran
    assert best is not None


def check_resumed(storage, folder, *, between=lambda: None):
    """A second search of the same request runs nothing again, and finds the same."""
    before, best, _ = finish(start(storage, "resumed", folder, seconds=0))
    between()
    after, again, _ = finish(start(storage, "resumed", folder, seconds=0))
    assert before
    assert [] == after
    assert best == again
