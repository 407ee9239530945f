"""Predicted against published step times, and the calibration of the time model.

    python benchmarks/time_accuracy.py MEASUREMENTS.csv --out FILE.csv [--calibrate]

MEASUREMENTS.csv has the format of ground_truth/measurements.csv. Every row whose run can be recorded and whose speed
is known is predicted from its card's specifications. Absolute speed holds on one machine alone, so the summary shows
ratios too: over all pairs of rows of one source on one card, by how much the predicted ratio of their times is off,
and how often the faster of two that differ by more than a tenth is predicted to be the faster. It ends with both
figures for each source in REPORTED and for all of these together, which also end the CSV (status ``ratios``).

``--calibrate`` fits the values of profiles/timing.json that are marked calibrated to the sources in
CALIBRATION_SOURCES and writes them there; the other sources are held out. The first run records every model, which
takes some minutes; later ones read the planner's cache.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path

import numpy as np
from ground_truth import Row, Run, Skipped, load_rows, run_for
from numpy.typing import NDArray
from qwen import for_time
from reproduction import Setup
from scipy.optimize import least_squares
from setups import card_of

from planner.hardware import Card
from planner.recording.record import Op
from planner.timing import Achievable, Operators, Pass, achievable, parameter_bytes, update_seconds

Amounts = NDArray[np.int64]

CALIBRATION_SOURCES = ("perf", "mila", "bert", "distilbert", "gpt2l", "opt350")
"""Six cards from V100 to H200, fp32, tf32, fp16 and fp16-amp, eager and fused attention."""
REPORTED = ("perf", "mila", "fms", "opt350", "gpt2l", "swift", "qwen")
"""Sources whose ratios are stated in the end, each and together."""
PROFILE = Path(__file__).resolve().parent.parent / "profiles" / "timing.json"
FITTED = (
    "matmul_fp32_fraction",
    "matmul_tensor_core_fraction",
    "attention_fp32_fraction",
    "bandwidth_fraction",
    "kernel_us",
    "operator_us",
)
CLEARLY_DIFFERENT = 0.1
"""Times that differ by more than this fraction have an order worth predicting."""

COLUMNS = (
    *("id", "source", "card", "micro_batch", "seq_len", "predicted_s", "measured_s", "error"),
    *("calibrated", "status", "reason", "pairs", "ratio_error", "clear_pairs", "ordered"),
)

_MULTI_TENSOR = {
    "torch.optim.Adam (foreach default)": "adamw_foreach",
    "adamw_torch (HF default)": "adamw_foreach",
    "adamw_torch": "adamw_foreach",
    "": "adamw_foreach",  # ms-swift doesn't say: its default is the Trainer's adamw_torch
    "bnb Adam8bit": "adamw_8bit",
}
"""Optimizers of the sources that the planner has a formula for; the others' recorded operators are timed."""


def main() -> None:
    """Predict, perhaps calibrate first, write, summarise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("measurements", type=Path, help="CSV in the format of ground_truth/measurements.csv")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write, a row for each speed in the file")
    parser.add_argument("--calibrate", action="store_true", help=f"fit and write {PROFILE.name} first")
    arguments = parser.parse_args()
    cases, skipped = read_cases(load_rows(arguments.measurements))
    reached = achievable()
    if arguments.calibrate:
        reached = calibrate([case for case in cases if case.used_for_calibration], reached)
        write_profile(reached, cases)
    write_csv(arguments.out, cases, skipped, reached)
    print("\n".join(summary(cases, len(skipped), reached)))


# -- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row with a known speed and a recorded run."""

    row: Row
    run: Run
    measured_s: float
    """Of one optimizer step, or of one forward and backward pass where the source has no optimizer."""

    @property
    def used_for_calibration(self) -> bool:
        """Whether its source is fitted to."""
        return self.row.source in CALIBRATION_SOURCES

    @property
    def card(self) -> Card:
        """The row's card."""
        return card_of(self.row)

    @property
    def group(self) -> tuple[str, str, str]:
        """Rows whose times can be compared: of one source and card, and of one bound where lengths are in the data."""
        bound = self.row["seq_len"]
        return self.row.source, self.card.name, "" if bound.isdecimal() else bound

    @cached_property
    def _parts(self) -> tuple[list[Op], list[Op]]:
        """The operators of the last recorded micro-batch, and those of the update."""
        ops = self.run.iteration_ops
        end = max(index for index, op in enumerate(ops) if op.in_backward) + 1
        starts = [i for i in range(end) if not ops[i].in_backward and (i == 0 or ops[i - 1].in_backward)]
        return ops[starts[-1] : end], ops[end:]

    @cached_property
    def _micro_batch(self) -> tuple[Operators, Amounts, Amounts]:
        """Operators with their FLOPs and bytes."""
        return Operators.of(self._parts[0]), *_amounts(self._parts[0])

    @cached_property
    def _trained_bytes(self) -> tuple[int, int]:
        """Bytes of the gradients of one pass, and how many tensors they are."""
        recording = self.run.recording
        iterations = sum(name.startswith("iteration_") for name in recording.phases)
        tensors = len(recording.gradients) // (iterations * self.run.recorded_micro_batches)
        blocks = {block for _, block in recording.gradients[-tensors:]}
        return sum(recording.sizes[block] for block in blocks), tensors

    def predicted_s(self, reached: Achievable) -> float:
        """What ``measured_s`` should be."""
        operators, flops, moved = self._micro_batch
        tf32 = "tf32" in self.row["precision"] or "TF32 on" in self.row["precision"]
        kernels = operators.kernel_seconds(flops, moved, self.card, tf32=tf32, reached=reached)
        one_pass = Pass.of(kernels, operators.launch_seconds(reached))
        micro_batches = self.run.sequences // self.run.setup.shape[0]
        bandwidth = self.card.memory_bandwidth_bytes_per_s * reached.bandwidth_fraction
        passes_s = one_pass.repeated(micro_batches, between_s=3 * self._trained_bytes[0] / bandwidth)
        return passes_s + self._update_s(reached, bandwidth)

    def _update_s(self, reached: Achievable, bandwidth: float) -> float:
        update = self._parts[1]
        if not update:
            return 0.0
        optimizer = _MULTI_TENSOR.get(self.row["optimizer"])
        if optimizer is None:
            busy_s = len(update) * reached.bare_operator_us * 1e-6
            return max(float(_amounts(update)[1].sum()) / bandwidth, busy_s)
        nbytes, tensors = self._trained_bytes
        config = self.run.setup.config.model_copy(update={"optimizer": optimizer})
        parameters = nbytes // parameter_bytes(config)
        return update_seconds(
            config, self.card, trainable_parameters=parameters, trainable_tensors=tensors, reached=reached
        )


def _amounts(ops: Sequence[Op]) -> tuple[Amounts, Amounts]:
    flops = np.array([op.flops for op in ops], dtype=np.int64)
    return flops, np.array([sum(op.moved_bytes) for op in ops], dtype=np.int64)


def read_cases(rows: Iterable[Row]) -> tuple[list[Case], list[Skipped]]:
    """Rows that state a speed: those that can be predicted, and why the others can't."""
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for row in rows:
        if row.throughput is None:
            continue
        reason = _not_timed(row)
        run = Skipped(row=row, reason=reason) if reason else run_for(for_time(row))
        if isinstance(run, Skipped):
            skipped.append(run)
        else:
            cases.append(Case(row=row, run=run, measured_s=_SECONDS[row["throughput_unit"]](row.throughput, run)))
    return cases, skipped


def _not_timed(row: Row) -> str:
    """Why a row's speed is not compared, before anything is recorded; empty where it is."""
    if row["kind"] != "train":
        return "generation or inference: the time model is of a training step"
    if row["throughput_unit"] not in _SECONDS:
        return f"speed in {row['throughput_unit']!r}"
    if "triton" in row["notes"]:
        return "fused kernels: their memory is reproduced, their speed is not known"
    return ""


_SECONDS: dict[str, Callable[[float, Run], float]] = {
    "s/batch": lambda value, run: value,
    "s/it (per optimizer step of 8 micro-batches)": lambda value, run: value,
    "samples/s": lambda value, run: run.sequences / value,
    "tokens/s": lambda value, run: run.tokens / value,
}


# -- calibration -----------------------------------------------------------------------------------------------------


def calibrate(cases: Sequence[Case], start: Achievable) -> Achievable:
    """Least squares on the logarithm of time, every source weighing the same, outliers damped.

    Six numbers for all cards, models and rows; fractions stay at or below one.
    """
    counts = defaultdict(int)
    for case in cases:
        counts[case.row.source] += 1
    weights = np.array([np.sqrt(len(cases) / len(counts) / counts[case.row.source]) for case in cases])

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        reached = replace(start, **dict(zip(FITTED, np.exp(logs).tolist(), strict=True)))
        return weights * log_errors(cases, reached)

    highest = [0.0 if name.endswith("fraction") else np.inf for name in FITTED]
    first = np.minimum(np.log([getattr(start, name) for name in FITTED]), np.array(highest) - 1e-3)
    found = least_squares(residuals, first, bounds=(-np.inf, highest), loss="soft_l1", f_scale=0.1)
    return replace(start, **{name: float(f"{np.exp(v):.3g}") for name, v in zip(FITTED, found.x, strict=True)})


def log_errors(cases: Sequence[Case], reached: Achievable) -> NDArray[np.float64]:
    """Logarithm of predicted over measured time. [cases]"""
    return np.array([np.log(case.predicted_s(reached) / case.measured_s) for case in cases])


def write_profile(reached: Achievable, cases: Sequence[Case]) -> None:
    """Put the fitted values and what they rest on into the shipped file."""
    document = json.loads(PROFILE.read_text(encoding="utf-8"))
    for name in FITTED:
        document["values"][name]["value"] = getattr(reached, name)
    used = [case for case in cases if case.used_for_calibration]
    document["calibration"] = {
        "method": "least squares on log time (soft_l1, scale 0.1), every source weighing the same",
        "rows": len(used),
        "median_absolute_log_error": round(float(np.median(np.abs(log_errors(used, reached)))), 4),
        "sources": {
            " ".join(filter(None, (source, "on", card, bound))): {
                "ids": [case.row.id for case in group],
                "mean_log_error": round(float(log_errors(group, reached).mean()), 4),
                "standard_deviation": round(float(log_errors(group, reached).std()), 4),
            }
            for (source, card, bound), group in grouped(used)
        },
    }
    PROFILE.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


# -- results ---------------------------------------------------------------------------------------------------------


def grouped(cases: Iterable[Case]) -> list[tuple[tuple[str, str, str], list[Case]]]:
    """Cases that can be compared, in their order."""
    groups: dict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.group].append(case)
    return list(groups.items())


def write_csv(path: Path, cases: Sequence[Case], skipped: Sequence[Skipped], reached: Achievable) -> None:
    """One row for each speed in the file, then one for each reported source and one for all of them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for case in cases:
            predicted_s = case.predicted_s(reached)
            writer.writerow(
                {
                    **_identity(case.row),
                    "card": case.card.name,
                    "predicted_s": f"{predicted_s:.6g}",
                    "measured_s": f"{case.measured_s:.6g}",
                    "error": f"{predicted_s / case.measured_s - 1:.4f}",
                    "calibrated": "yes" if case.used_for_calibration else "held out",
                    "status": "predicted",
                    "reason": "; ".join(_assumptions(case.run.setup)),
                }
            )
        writer.writerows({**_identity(s.row), "status": "skipped", "reason": s.reason} for s in skipped)
        for title, group in reported(cases):
            ratios = Ratios.of(group, reached)
            writer.writerow({"id": title, "source": title, "status": "ratios", **ratios.columns()})


def _assumptions(setup: Setup) -> tuple[str, ...]:
    return *setup.caveats, *setup.remaining, *setup.notes


def _identity(row: Row) -> dict[str, object]:
    return {"id": row.id, "source": row.source, "micro_batch": row.micro_batch, "seq_len": row.seq_len}


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """What became of pairs of comparable rows."""

    errors: tuple[float, ...]
    """Of each pair, relative and absolute: by how much the ratio of their times is off."""
    ordered: tuple[bool, ...]
    """Of each pair that clearly differs: whether the faster is predicted to be the faster."""

    @classmethod
    def of(cls, cases: Sequence[Case], reached: Achievable) -> Ratios:
        """All pairs of each group."""
        times = [[(case.predicted_s(reached), case.measured_s) for case in group] for _, group in grouped(cases)]
        return cls.of_times(times)

    @classmethod
    def of_times(cls, groups: Iterable[Sequence[tuple[float, float]]]) -> Ratios:
        """From ``(predicted, measured)`` of the rows of each group."""
        errors: list[float] = []
        ordered: list[bool] = []
        for group in groups:
            for (predicted, measured), (other_predicted, other_measured) in combinations(group, 2):
                ratio = measured / other_measured
                errors.append(abs(predicted / other_predicted / ratio - 1))
                if max(ratio, 1 / ratio) > 1 + CLEARLY_DIFFERENT:
                    ordered.append((predicted > other_predicted) == (ratio > 1))
        return cls(errors=tuple(errors), ordered=tuple(ordered))

    def columns(self) -> dict[str, object]:
        """For the CSV."""
        return {
            "pairs": len(self.errors),
            "ratio_error": f"{np.median(self.errors):.4f}" if self.errors else "",
            "clear_pairs": len(self.ordered),
            "ordered": f"{np.mean(self.ordered):.4f}" if self.ordered else "",
        }

    def __str__(self) -> str:
        """Median error and share in order, in the summary's columns."""
        ratio = f"{np.median(self.errors):8.1%}" if self.errors else f"{'':8}"
        return ratio + (f"{np.mean(self.ordered):9.1%}" if self.ordered else f"{'':9}")


def reported(cases: Sequence[Case]) -> list[tuple[str, list[Case]]]:
    """The cases of each reported source, then those of all."""
    groups = [(source, [case for case in cases if case.row.source == source]) for source in REPORTED]
    groups = [(source, group) for source, group in groups if group]
    return [*groups, ("all reported", [case for _, group in groups for case in group])]


def summary(cases: Sequence[Case], skipped: int, reached: Achievable) -> Iterator[str]:
    """A table by source and card, calibrated and held-out rows as wholes, and the ratios of the reported sources."""
    yield f"{'source on card':<44}{'rows':>5}{'|error|':>9}{'bias':>8}{'ratio':>8}{'ordered':>9}"
    for (source, card, bound), group in grouped(cases):
        yield _line(f"{source} on {card} {bound}", group, reached)
    for title, group in (
        ("all calibrated", [case for case in cases if case.used_for_calibration]),
        ("all held out", [case for case in cases if not case.used_for_calibration]),
    ):
        if group:
            yield _line(title, group, reached)
    yield f"{skipped} further rows state a speed and were not predicted; the CSV says why"
    yield ""
    yield f"ratios of times, {'all pairs that can be compared':<36}{'pairs':>8}{'ratio':>9}{'ordered':>9}"
    for title, group in reported(cases):
        ratios = Ratios.of(group, reached)
        yield f"{title:<53}{len(ratios.errors):>8} {ratios}"


def _line(title: str, cases: Sequence[Case], reached: Achievable) -> str:
    """Median absolute error, median error, median error of ratios, share of clearly different pairs in order."""
    errors = np.expm1(log_errors(cases, reached))
    middle, bias = np.median(np.abs(errors)), np.median(errors)
    return f"{title:<44}{len(cases):>5}{middle:9.1%}{bias:+8.1%}{Ratios.of(cases, reached)}"


if __name__ == "__main__":
    main()
