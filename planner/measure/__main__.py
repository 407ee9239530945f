"""One trial, a device's facts, or a server of trials: ``python -m planner.measure --help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TextIO

DESCRIPTION = """\
Reads one trial's request, a line of JSON (planner.measure.protocol.TrialSpec), from standard input and measures it in
this process. Every line on standard output is a JSON object: progress, {"phase": ...}, and last the measurement, which
has a "status" (planner.measure.protocol.Measurement). What libraries print goes to standard error. The exit code is 0
whenever an answer was written. Settings of the environment (allocator, visible devices, threads) are the caller's.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m planner.measure",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--probe", metavar="DEVICE", help="answer with the facts of a device: cpu, cuda, cuda:1")
    other.add_argument("--serve", action="store_true", help="answer many requests, each in a forked process")
    options = parser.parse_args(arguments)
    from planner.measure.server import die_with_parent, serve

    with private_stdout() as out:
        if options.serve:
            return serve(answer, out)
        die_with_parent()
        if options.probe:
            return answer_probe(options.probe, out)
        return answer(sys.stdin.readline(), out)


def private_stdout() -> TextIO:
    """Standard output for answers alone: what else writes to it, in C as well, writes to standard error from now on."""
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return out


def answer(line: str, out: TextIO, *, started: float | None = None) -> int:
    """Measure what a line asks for, and write progress and the measurement; the exit code.

    ``started`` (time.time()) is when the process began, where it is younger than psutil says.
    """
    from planner.measure.protocol import BAD_REQUEST, Measurement, TrialSpec

    def tell(phase: str, **more: int) -> None:
        out.write(json.dumps({"phase": phase, **more}) + "\n")
        out.flush()

    tell("start", pid=os.getpid())
    try:
        spec = TrialSpec.from_json(line)
    except ValueError as error:
        measurement = Measurement(status=BAD_REQUEST, reason=str(error))
    else:
        tell("import")
        from planner.measure.trial import run_trial

        measurement = run_trial(spec, tell=tell, started=started or process_started())
    out.write(measurement.to_json() + "\n")
    out.flush()
    return 0


def answer_probe(device: str, out: TextIO) -> int:
    """Write a device's facts; 1 and a line of standard error where there is no such device."""
    from planner.measure.probe import probe

    out.write(json.dumps({"phase": "probe", "pid": os.getpid()}) + "\n")
    try:
        facts = probe(device)
    except (RuntimeError, ValueError, AssertionError) as error:
        print(f"{device}: {error}", file=sys.stderr)
        return 1
    out.write(facts.to_json() + "\n")
    out.flush()
    return 0


def process_started() -> float:
    """When this process began, in seconds since the epoch."""
    import psutil

    return float(psutil.Process().create_time())


def _end(code: int) -> None:
    """Without tidying up: the system does it faster, and nothing of the answer waits any more."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main())
