"""Faults around trials: files that are cut off, corrupt, stale or can't be written, a full disk, workers that collide.

Used by faults.py. All are real: a tiny file system that is full where one can be mounted, a limit on files elsewhere.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from planner import cache
from planner.config import TrainingConfig
from planner.errors import InputError, TrialError
from planner.measure.protocol import OK, Measurement
from planner.measurements import Measured, MeasurementStore
from planner.storages import default_journal
from planner.study import SharedStudy

SPACE = {"precision": ["fp32", "bf16-amp"]}
CHOICE = {"precision": "fp32"}
GOOD = Measurement(status=OK, step_ms=1.0, tokens_per_s=1.0, peak_reserved_bytes=1, process_bytes=2)
LONG = replace(GOOD, reason="x" * 8192)
"""Longer than what is left of a file's last block on a full file system."""
KEY = {"device": "cpu", "torch": "2.13"}


@dataclass(frozen=True, kw_only=True)
class Survival:
    """What became of a fault around trials."""

    status: str
    """What was said or done, in a word or two."""
    reason: str
    """The message, where there is one."""
    survived: str
    """What is still there."""
    exit_code: int = 0
    """Of the command."""


def row(measurement: Measurement = GOOD) -> Measured:
    """A measurement that is kept."""
    config = TrainingConfig(
        micro_batch_size=1,
        seq_len=8,
        max_tokens_per_micro_batch=8,
        gradient_accumulation_steps=1,
        effective_batch_size=1,
        precision="fp32",
    )
    nothing = {"ceiling_bytes": None, "predicted_reserved_bytes": None, "predicted_step_ms": None}
    return Measured(workload="w", config=config, measurement=measurement, **nothing)


def store(folder: Path, key: Mapping[str, str] = KEY, rows: int = 0) -> MeasurementStore:
    """A store with some measurements."""
    kept = MeasurementStore(key, folder / "measurements")
    for _ in range(rows):
        kept.append(row())
    return kept


def study() -> SharedStudy:
    """A study in the cache's own journal."""
    return SharedStudy(None, name="vramplan-fault", space=SPACE)


# -- what was measured -------------------------------------------------------------------------------------------------


def cut_off_measurement(folder: Path) -> Survival:
    """A planner was killed while it wrote a line."""
    kept = store(folder, rows=2)
    with kept.path.open("ab") as file:
        file.write(row().to_json().encode()[:50])
    kept.append(row())
    rows = kept.rows()
    return Survival(status=f"{kept.unreadable} line skipped", reason="", survived=f"{len(rows)} of 3 measurements")


def corrupt_measurements(folder: Path) -> Survival:
    """A block of the file is something else."""
    kept = store(folder, rows=3)
    lines = kept.path.read_bytes().splitlines(keepends=True)
    kept.path.write_bytes(lines[0] + b"\x00\xff" * 40 + b"\n" + lines[2])
    rows = kept.rows()
    return Survival(status=f"{kept.unreadable} line skipped", reason="", survived=f"{len(rows)} of 2 measurements")


def stale_measurements(folder: Path) -> Survival:
    """They are another torch's."""
    old, new = store(folder, rows=2), store(folder, {**KEY, "torch": "2.14"})
    return Survival(
        status=f"{len(new.rows())} used", reason="", survived=f"{len(old.rows())} of 2 measurements, for that version"
    )


def full_disk_measurements(folder: Path) -> Survival:
    """No room for the next line."""
    kept = store(folder, rows=2)
    with full(folder):
        reason = kept.append(row(LONG))
    survived = f"{len(kept.rows())} of 2 measurements, {whole(kept.path)}"
    return Survival(status="said" if reason else "nothing was said", reason=reason, survived=survived)


def unwritable_measurements(folder: Path) -> Survival:
    """Nobody can write there."""
    kept = MeasurementStore(KEY, Path("/proc/nowhere"))
    reason = kept.append(row())
    return Survival(status="said" if reason else "nothing was said", reason=reason, survived="the plan")


def whole(path: Path) -> str:
    """Whether a file ends with a whole line."""
    return "nothing half-written" if path.read_bytes().endswith(b"\n") else "HALF A LINE"


# -- recordings --------------------------------------------------------------------------------------------------------


def corrupt_recording(folder: Path) -> Survival:
    """A cache entry is garbage."""
    cache.remembered("fault", {"a": 1}, lambda: 7)
    for path in folder.glob("fault/*"):
        path.write_bytes(path.read_bytes()[:-3] + b"???")
    value = cache.remembered("fault", {"a": 1}, lambda: 8)
    return Survival(status="made again" if value == 8 else f"read {value}", reason="", survived="the plan")


def full_disk_recording(folder: Path) -> Survival:
    """No room for an entry."""
    with full(folder), noted() as said:
        value = cache.remembered("fault", {"b": 1}, lambda: "x" * 5_000_000)
    left = [path for path in folder.glob("fault/*") if path.stat().st_size]
    return Survival(
        status="said", reason=said(), survived=f"the plan ({len(value):,} characters); {len(left)} files half-written"
    )


def unwritable_recordings(folder: Path) -> Survival:
    """The cache's folder is a file."""
    (folder / "file").touch()
    os.environ["VRAMPLAN_CACHE"] = str(folder / "file")
    with noted() as said:
        value = cache.remembered("fault", {"c": 1}, lambda: 7)
    return Survival(status="said", reason=said(), survived="the plan" if value == 7 else "nothing")


@contextmanager
def noted() -> Iterator[Callable[[], str]]:
    """What the cache warns of within."""
    before = len(cache.problems())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cache.CacheWarning)
        yield lambda: "; ".join(cache.problems()[before:])


# -- the study ---------------------------------------------------------------------------------------------------------


def cut_off_journal(folder: Path) -> Survival:
    """A worker was killed while it wrote the journal."""
    first = study()
    claim = first.claim(CHOICE)
    assert claim is not None
    first.tell(claim, GOOD, over_bytes=0)
    with default_journal("vramplan-fault").open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    return Survival(status="mended", reason="", survived=f"{len(study().trials())} of 1 trials")


def corrupt_journal(folder: Path) -> Survival:
    """The journal is something else."""
    path = default_journal("vramplan-fault")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no journal\n")
    anew = study()
    aside = list(path.parent.glob("*broken*"))
    return Survival(status="put aside", reason=anew.problem, survived=f"the broken file ({len(aside)}), measurements")


def full_disk_journal(folder: Path) -> Survival:
    """No room for the trial's result."""
    shared = study()
    claim = shared.claim(CHOICE)
    assert claim is not None
    with full(folder):
        shared.tell(claim, LONG, over_bytes=0)
    return Survival(
        status="said" if shared.problem else "nothing was said",
        reason=shared.problem,
        survived=f"{len(shared.trials())} of 1 trials, in memory",
    )


def killed_worker(folder: Path) -> Survival:
    """kill -9 between claim and result."""
    script = (
        "import os, signal; from planner.study import SharedStudy\n"
        f"SharedStudy(None, name='vramplan-fault', space={SPACE!r}).claim({CHOICE!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    next_one = study()
    buried, claim = next_one.bury(), next_one.claim(CHOICE)
    return Survival(
        status=f"{buried} trial buried", reason="", survived="its configuration can be run" if claim else "nothing"
    )


def two_workers(folder: Path) -> Survival:
    """Two want the same configuration."""
    script = (
        "import sys; from planner.study import SharedStudy\n"
        f"claim = SharedStudy(None, name='vramplan-fault', space={SPACE!r}).claim({CHOICE!r})\n"
        "print(claim is not None, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    granted = [other.stdout.readline() == "True\n", study().claim(CHOICE) is not None]
    other.communicate("")
    return Survival(status=f"{sum(granted)} of 2 may run it", reason="", survived="both workers")


def interrupted_study(folder: Path) -> Survival:
    """Ctrl-C in a trial."""
    first = study()
    claim = first.claim(CHOICE)
    assert claim is not None
    first.give_up(claim)
    again = study().claim(CHOICE)
    return Survival(
        status="given up", reason="", survived="its configuration can be run" if again else "nothing", exit_code=130
    )


def no_storage(folder: Path) -> Survival:
    """--storage names a folder in which nobody can write."""
    try:
        SharedStudy("journal:/proc/nowhere/trials", name="vramplan-fault", space=SPACE)
    except (InputError, TrialError) as error:
        return Survival(
            status=type(error).__name__, reason=str(error), survived="nothing was begun", exit_code=error.exit_code
        )
    return Survival(status="no error", reason="", survived="?")


PLANNER_FAULTS: dict[str, tuple[Callable[[Path], Survival], str, str]] = {
    "measurements: a line cut off": (cut_off_measurement, "1 line skipped", "3 of 3 measurements"),
    "measurements: corrupt": (corrupt_measurements, "1 line skipped", "2 of 2 measurements"),
    "measurements: another torch's": (stale_measurements, "0 used", "2 of 2 measurements, for that version"),
    "measurements: disk full": (full_disk_measurements, "said", "2 of 2 measurements, nothing half-written"),
    "measurements: folder unwritable": (unwritable_measurements, "said", "the plan"),
    "recording: corrupt": (corrupt_recording, "made again", "the plan"),
    "recordings: disk full": (full_disk_recording, "said", "the plan (5,000,000 characters); 0 files half-written"),
    "recordings: cache is a file": (unwritable_recordings, "said", "the plan"),
    "journal: a line cut off": (cut_off_journal, "mended", "1 of 1 trials"),
    "journal: corrupt": (corrupt_journal, "put aside", "the broken file (1), measurements"),
    "journal: disk full": (full_disk_journal, "said", "1 of 1 trials, in memory"),
    "study: worker killed in a trial": (killed_worker, "1 trial buried", "its configuration can be run"),
    "study: two workers on one trial": (two_workers, "1 of 2 may run it", "both workers"),
    "study: interrupted": (interrupted_study, "given up", "its configuration can be run"),
    "storage: folder unwritable": (no_storage, "InputError", "nothing was begun"),
}
"""What injects a fault into an empty cache folder, the status that is right, and what has to survive."""


def survive(name: str) -> Survival:
    """Inject one fault."""
    before = os.environ.get("VRAMPLAN_CACHE")
    try:
        with small_folder() as folder:
            os.environ["VRAMPLAN_CACHE"] = str(folder)
            return PLANNER_FAULTS[name][0](folder)
    finally:
        os.environ.pop("VRAMPLAN_CACHE")
        if before is not None:
            os.environ["VRAMPLAN_CACHE"] = before


@contextmanager
def small_folder() -> Iterator[Path]:
    """On a file system of 2 MiB, where one may be mounted."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = False
        if sys.platform == "linux" and os.geteuid() == 0:
            mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "vramplan-fault", folder]
            mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
        try:
            yield Path(folder)
        finally:
            if mounted:
                subprocess.run(["umount", folder], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """No byte more can be written within: to a full file system, or past a limit on files where it is a large one."""
    if os.path.ismount(folder):
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:  # it is full
                pass
        try:
            yield
        finally:
            filler.unlink()
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
