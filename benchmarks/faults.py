"""What becomes of a plan when something breaks: each fault is injected for real, and the planner has to go on.

    python benchmarks/faults.py --out faults.csv

Columns: fault; status that is reported; reason; exit code of the command when every trial ends so; what survived; what
was left behind (processes, descriptors); seconds until it was reported.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from planner.config import TrainingConfig
from planner.errors import NothingFitsError, TrialError
from planner.measure import protocol
from planner.measure.protocol import Measurement, TrialSpec
from planner.measure.runner import Limits, TrialRunner
from planner.models import ModelSpec
from planner.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parent))

import faulty_trial
from faulty_trial import EVERY
from planner_faults import PLANNER_FAULTS, survive

SCRIPT = [sys.executable, str(Path(faulty_trial.__file__))]
QUICK = Limits(timeout_s=20.0, silence_s=1.0, start_s=60.0, grace_s=0.5)
"""For trials that do nothing but go wrong."""
PATIENT = Limits(timeout_s=120.0, silence_s=60.0, start_s=60.0, grace_s=5.0)
"""For real ones."""
MARK = "VRAMPLAN_FAULTS"
COLUMNS = ("fault", "status", "reason", "exit_code", "survived", "left_behind", "seconds")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault of a trial and what has to be said of it."""

    fault: str
    """A name in faulty_trial.EVERY."""
    status: str
    """That is to be reported."""
    reason: str = ""
    """That the reported reason has to contain."""
    limits: Limits = QUICK
    """Of the trial."""


def _cases() -> tuple[Case, ...]:
    killed, crash, bad = protocol.KILLED, protocol.CRASH, protocol.BAD_REPLY
    short, brief = replace(QUICK, timeout_s=1.5), replace(PATIENT, silence_s=8.0)
    rows: list[tuple[str, str, str, Limits]] = [
        ("kill -9", killed, "SIGKILL", QUICK),
        ("kill -15", killed, "SIGTERM", QUICK),
        ("Ctrl-C in the trial", crash, "KeyboardInterrupt", QUICK),
        ("hang-up", killed, "SIGHUP", QUICK),
        ("segmentation fault", protocol.SEGFAULT, "SIGSEGV", QUICK),
        ("bus error", protocol.SEGFAULT, "SIGBUS", QUICK),
        ("abort", crash, "SIGABRT", QUICK),
        ("exit code 3", crash, "exit code 3 without an answer: something went wrong", QUICK),
        ("exit code 0, no answer", crash, "exit code 0", QUICK),
        ("exception in the trial's code", crash, "LookupError: no such key", QUICK),
        ("std::bad_alloc under a limit", protocol.OOM, "SIGABRT", QUICK),
        ("hang", protocol.HANG, "last heard: start", QUICK),
        ("hang, deaf to signals", protocol.HANG, "last heard: start", QUICK),
        ("stopped (SIGSTOP)", protocol.HANG, "last heard: start", QUICK),
        ("no end, with progress", protocol.TIMEOUT, "longer than 1.5 s; last heard: timed", short),
        ("bad JSON", bad, "{'status': ok}", QUICK),
        ("half a line", bad, '{"status": "ok"', QUICK),
        ("answer of a wrong type", bad, "step_ms", QUICK),
        ("answer with an unknown status", bad, "not a measurement", QUICK),
        ("answer that is a list", bad, "[1, 2]", QUICK),
        ("ok without figures", bad, "no step time", QUICK),
        ("JSON nested 100,000 deep", bad, "recursion", QUICK),
        ("endless garbage", bad, "la la la", QUICK),
        ("50 MB of garbage in one line", bad, "xxxxx", QUICK),
        ("50 MB on standard error", crash, "RuntimeError: the last word", QUICK),
        ("a library that prints", protocol.OK, "", QUICK),
        ("grandchild left behind", protocol.OK, "", QUICK),
        ("grandchild in a session of its own", protocol.OK, "", QUICK),
        ("answer, then no end", protocol.OK, "", QUICK),
        ("answer, then a segmentation fault", protocol.OK, "", QUICK),
        ("NaN loss", protocol.NAN_LOSS, "nan", PATIENT),
        ("frozen parameters", protocol.NO_GRADIENT, "", PATIENT),
        ("checkpointing inactive", protocol.NOT_CHECKPOINTED, "", PATIENT),
        ("torch.OutOfMemoryError", protocol.OOM, "CUDA out of memory", PATIENT),
        ("CUDA error", protocol.DEVICE_ERROR, "illegal memory access", PATIENT),
        ("malloc refuses", protocol.OOM, "can't allocate memory", PATIENT),
        ("MemoryError", protocol.OOM, "MemoryError", PATIENT),
        ("exception in the model's code", protocol.ERROR, "ValueError: shapes do not match", PATIENT),
        ("kill -9 in a forward pass", killed, "SIGKILL", PATIENT),
        ("hang in a forward pass", protocol.HANG, "last heard: first_step", brief),
    ]
    return tuple(Case(fault=f, status=s, reason=r, limits=limits) for f, s, r, limits in rows)


CASES = _cases()
"""Faults of one trial, which the same server outlives."""
_LONGER = replace(QUICK, silence_s=4.0)
SERVER_CASES = (
    Case(fault="server: killed in a trial", status=protocol.KILLED, reason="SIGKILL", limits=_LONGER),
    Case(fault="server: stopped in a trial", status=protocol.HANG, reason="last heard: start", limits=_LONGER),
    Case(fault="server: garbles", status=protocol.BAD_REPLY, reason="soon", limits=_LONGER),
    Case(fault="server: killed at its start", status=protocol.HANG, reason="last heard: start"),
    Case(fault="server: torch cannot be imported", status=protocol.HANG, reason="last heard: start"),
    Case(fault="server: never ready", status=protocol.HANG, reason="no progress", limits=replace(QUICK, start_s=2.0)),
)
"""Faults of the server itself: each has one of its own. Where there can be none, trials are processes of their own."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a fault."""

    fault: str
    """Its name."""
    status: str
    """As reported."""
    reason: str
    """As reported."""
    exit_code: int
    """Of the command, if all of its trials end so."""
    next_status: str
    """Of a good trial after it."""
    left_behind: str
    """Processes, descriptors and files that are still there; empty is right."""
    seconds: float
    """Until it was reported."""


def tiny_spec(seed: int = 0, checkpointing: str = "none") -> TrialSpec:
    """A trial of a BERT of two layers, 32 wide."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = {"model_type": "bert", "vocab_size": 100, "max_position_embeddings": 64, **sizes}
    spec = ModelSpec(
        model_id="tiny",
        config=config,
        source="folder",
        architecture="BertForMaskedLM",
        model_type="bert",
        default_task="masked-lm",
        max_seq_len=64,
    )
    chosen = TrainingConfig(
        micro_batch_size=2,
        seq_len=16,
        max_tokens_per_micro_batch=32,
        gradient_accumulation_steps=1,
        effective_batch_size=2,
        precision="fp32",
        checkpointing=checkpointing,
    )
    workload = Workload(spec=spec, task="sequence-classification")
    return TrialSpec(workload=workload, config=chosen, device="cpu", seed=seed, timed_s=0.05)


def exit_code(status: str) -> int:
    """What ``plan`` ends with if all of its trials end so; 0 as soon as one is ``ok``."""
    if status == protocol.OK:
        return 0
    return NothingFitsError.exit_code if status in protocol.OUT_OF_MEMORY else TrialError.exit_code


@contextmanager
def faulty_runner(fault: str = "by-seed", *, forks: bool = True) -> Iterator[TrialRunner]:
    """A runner whose trials go wrong; whatever it starts carries its mark."""
    environment = os.environ | {MARK: uuid.uuid4().hex, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with TrialRunner(environment, QUICK, [*SCRIPT, fault], forks=forks) as runner:
        yield runner


def inject(runner: TrialRunner, case: Case) -> Outcome:
    """One fault in a runner made for it (or for all of them), and a good trial after it."""
    before = _descriptors()
    measured = _run(runner, case.fault, case.limits)
    strays = _left_behind(runner, before)
    after = _run(runner, "none", replace(QUICK, start_s=case.limits.start_s))
    return Outcome(
        fault=case.fault,
        status=measured.status,
        reason=measured.reason,
        exit_code=exit_code(measured.status),
        next_status=after.status,
        left_behind=strays,
        seconds=measured.wall_s,
    )


def _run(runner: TrialRunner, fault: str, limits: Limits) -> Measurement:
    runner.limits = limits
    checkpointing = "full" if fault == "checkpointing inactive" else "none"
    return runner.run(tiny_spec(list(EVERY).index(fault if fault in EVERY else "hang"), checkpointing))


def _left_behind(runner: TrialRunner, descriptors_before: int) -> str:
    """A server is to stay, with its three pipes' ends; anything else is not."""
    server = runner.server_pid
    strays = [f"process {pid}" for pid in marked(runner.environment[MARK]) if pid != server]
    grown = _descriptors() - descriptors_before
    allowed = 3 if server else 0
    return ", ".join([*strays, *([f"{grown} descriptors"] if grown > allowed else [])])


def marked(mark: str) -> list[int]:
    """Processes, zombies included, that carry a mark in their environment or are this one's dead children."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                found += [process.pid] if process.ppid() == os.getpid() else []
            elif process.environ().get(MARK) == mark:
                found.append(process.pid)
    return found


def _descriptors() -> int:
    return int(psutil.Process().num_fds())


def trial_outcomes() -> Iterator[Outcome]:
    """All faults of trials and servers."""
    with faulty_runner() as runner:
        for case in CASES:
            yield inject(runner, case)
    for case in SERVER_CASES:
        with faulty_runner(case.fault) as runner:
            yield inject(runner, case)


def rows() -> Iterator[dict[str, Any]]:
    """The table's, and whether each is as it should be."""
    expected = {case.fault: case.status for case in (*CASES, *SERVER_CASES)}
    for outcome in trial_outcomes():
        right = outcome.status == expected[outcome.fault] and not outcome.left_behind
        survived = f"the planner; next trial: {outcome.next_status}"
        yield {**vars(outcome), "survived": survived, "right": right}
    for name, (_, status, survived) in PLANNER_FAULTS.items():
        began = time.monotonic()
        found = survive(name)
        right = (status, survived) == (found.status, found.survived)
        seconds = time.monotonic() - began
        yield {"fault": name, **vars(found), "left_behind": "", "seconds": seconds, "right": right}


def main() -> None:
    """Inject all, write the table, and say what was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="faults.csv", type=Path)
    options = parser.parse_args()
    wrong, count = [], 0
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for row in rows():
            writer.writerow(row | {"seconds": f"{row['seconds']:.2f}"})
            print(f"{row['fault']:36} {row['status']:17} exit {row['exit_code']:3}  {row['survived']}", flush=True)
            count += 1
            wrong += [] if row["right"] else [row["fault"]]
    print(f"{count} faults; not as they should be: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
