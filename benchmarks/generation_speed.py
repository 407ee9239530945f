"""Predicted against published speeds of text generation, and the calibration of an operator's time without gradients.

    python benchmarks/generation_speed.py MEASUREMENTS.csv --out FILE.csv [--calibrate]

MEASUREMENTS.csv has the format of ground_truth/measurements.csv; its rows of Qwen2.5 and Qwen3 with whole weights are
predicted by the planner's own simulator, with the attention kernel that takes no mask. A single sequence's token is
bound by the CPU in small models and short contexts, by the memory's bandwidth in large ones.

``--calibrate`` fits ``inference_operator_us`` of profiles/timing.json to the Qwen2.5 rows with a prompt of one token
and up to 7 B parameters, which the CPU bounds, and writes it there. All other rows are held out.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from configs import spec_of
from ground_truth import load_rows
from reproduction import card_of
from rows import Row

from planner.achievable import Achievable, achievable
from planner.config import InferenceConfig
from planner.inference.simulation import InferenceSimulator
from planner.inference.times import Times
from planner.inference.timing import mean_over_tokens, pass_seconds
from planner.inference.workload import InferenceWorkload

COLUMNS = ("id", "model", "card", "prompt", "predicted_tokens_per_s", "measured_tokens_per_s", "error", "calibrated")
PROFILE = Path(__file__).resolve().parent.parent / "profiles" / "timing.json"
FIELD = "inference_operator_us"
CALIBRATED = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
"""Models of the calibration rows."""
_LENGTHS = re.compile(r"prompt (\d+) \+ (\d+) generated")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published speed."""

    row: Row
    prompt: int
    new_tokens: int

    @property
    def measured_tokens_per_s(self) -> float:
        """Generated tokens a second; Qwen3's table counts the prompt's too."""
        value = float(self.row["throughput_value"])
        return value * self.new_tokens / (self.prompt + self.new_tokens) if self.row.source == "qwen3" else value

    @property
    def used_for_calibration(self) -> bool:
        """Whether the CPU bounds it."""
        return self.row.source == "qwen25" and self.prompt == 1 and self.row["model_id"] in CALIBRATED

    @cached_property
    def times(self) -> Times:
        """The planner's own answer for it."""
        workload = InferenceWorkload(
            spec=spec_of(self.row["model_id"]), task="causal-lm", max_new_tokens=self.new_tokens
        )
        card = card_of(self.row)
        simulator = InferenceSimulator(workload, card, seq_len=self.prompt, ceiling_bytes=card.label_bytes)
        config = InferenceConfig(
            micro_batch_size=1,
            seq_len=self.prompt,
            max_tokens_per_micro_batch=self.prompt + self.new_tokens,
            precision="bf16",
            kv_cache="dynamic",
            max_new_tokens=self.new_tokens,
        )
        return Times(simulator, config)

    def predicted_tokens_per_s(self, reached: Achievable) -> float:
        """Of the whole call of ``generate``."""
        times, shape = self.times, (1, self.prompt)

        def seconds(one: object) -> float:
            return pass_seconds(one.operators, one.amounts, times.config, times.card, reached)  # type: ignore[misc]

        prefill_s = sum(seconds(one) for one in times.prompt(shape))
        token_s = mean_over_tokens(lambda past: seconds(times.token(shape, past)), self.prompt, self.new_tokens - 1)
        return self.new_tokens / (prefill_s + token_s * (self.new_tokens - 1))


def cases_of(rows: Sequence[Row]) -> Iterator[Case]:
    """Rows with a speed, whole weights and known lengths."""
    for row in rows:
        lengths = _LENGTHS.fullmatch(row["seq_len"])
        if row.source in ("qwen25", "qwen3") and row["quantization"] == "none" and row["throughput_value"] and lengths:
            yield Case(row=row, prompt=int(lengths[1]), new_tokens=int(lengths[2]))


def calibrate(cases: Sequence[Case]) -> Achievable:
    """The operator's time with which the median of the calibration rows is right, by halving: speed falls with it."""
    used = [case for case in cases if case.used_for_calibration]
    low, high = 1.0, 100.0
    while high - low > 0.005:
        middle = (low + high) / 2
        reached = replace(achievable(), **{FIELD: middle})
        errors = [case.predicted_tokens_per_s(reached) / case.measured_tokens_per_s - 1 for case in used]
        low, high = (middle, high) if np.median(errors) > 0 else (low, middle)
    return replace(achievable(), **{FIELD: float(f"{low:.3g}")})


def main() -> None:
    """Predict, perhaps calibrate first, write, summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calibrate", action="store_true", help=f"fit and write {PROFILE.name} first")
    arguments = parser.parse_args()
    cases = list(cases_of(load_rows(arguments.measurements)))
    reached = achievable()
    if arguments.calibrate:
        reached = calibrate(cases)
        document = json.loads(PROFILE.read_text(encoding="utf-8"))
        ids = [case.row.id for case in cases if case.used_for_calibration]
        about = "benchmarks/generation_speed.py --calibrate"
        document["values"][FIELD] = {"value": getattr(reached, FIELD), "calibrated": True, "by": about, "rows": ids}
        PROFILE.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    errors: dict[str, list[float]] = {}
    with arguments.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for case in cases:
            predicted, measured = case.predicted_tokens_per_s(reached), case.measured_tokens_per_s
            error = predicted / measured - 1
            errors.setdefault("calibration" if case.used_for_calibration else case.row.source, []).append(error)
            row = (case.row.id, case.row["model_id"], case.times.card.name, case.prompt, f"{predicted:.2f}")
            rest = (f"{measured:.2f}", f"{error:.4f}", "yes" if case.used_for_calibration else "held out")
            writer.writerow(dict(zip(COLUMNS, (*row, *rest), strict=True)))
            speeds = f"{predicted:8.2f} {measured:8.2f} {error:+.1%}"
            print(f"{case.row.id:12} {case.row['model_id']:28} {case.prompt:6} {speeds}")
    for name, values in errors.items():
        absolute = np.abs(values)
        print(f"{name}: {len(values)} rows, median |error| {np.median(absolute):.1%}, worst {absolute.max():.1%}")


if __name__ == "__main__":
    main()
