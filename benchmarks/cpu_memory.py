"""The CPU as a device: memory simulated on fake tensors against memory of real trials.

    python benchmarks/cpu_memory.py --out cpu_memory.csv [--mode train|infer]

For each configuration, of training and of inference: the peak of live tensors, simulated and recorded on real ones,
which must be equal to the byte; what the process's resident set grew by over what it held before, against what the
simulated malloc says; and the time of a step, whose order among configurations is what the simulator is for.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from planner.cache import library_versions
from planner.config import Config, InferenceConfig, LoraSettings, TrainingConfig, passes_of
from planner.hardware import Card, card_of_device
from planner.inference.simulation import InferenceSimulator
from planner.inference.workload import InferenceWorkload
from planner.measure.environment import trial_environment
from planner.measure.protocol import DeviceFacts, Measurement, TrialSpec
from planner.measure.runner import TrialRunner
from planner.models import ModelSpec, resolve_model
from planner.simulation import Simulator
from planner.units import MIB
from planner.workload import Workload

CALIBRATION = Path(__file__).resolve().parent.parent / "profiles" / "cpu_calibration.json"
GROWTH_WITHIN = 0.10
"""Of the simulated growth of the resident set."""
NEW_TOKENS = 24
"""Written for each prompt."""
LOSS_BYTES = 4
"""One fp32 number."""


def small_models() -> dict[str, Workload]:
    """Three small models by a short name: MiniLM, DistilBERT with two layers, GPT-2 with four narrow ones."""
    minilm, gpt2 = _minilm(), _gpt2()
    distilbert = _changed(resolve_model("distilbert-base-uncased"), n_layers=2)
    return {
        "MiniLM": Workload(spec=minilm, task="sequence-classification"),
        "DistilBERT, 2 layers": Workload(spec=distilbert, task="sequence-classification"),
        "GPT-2, 4 layers": Workload(spec=gpt2, task="causal-lm"),
    }


def running_models() -> dict[str, InferenceWorkload]:
    """The same models answering: MiniLM with vectors and with labels, GPT-2 with text."""
    return {
        "MiniLM, vectors": InferenceWorkload(spec=_minilm(), task="embedding"),
        "MiniLM, labels": InferenceWorkload(spec=_minilm(), task="sequence-classification"),
        "GPT-2, writing": InferenceWorkload(spec=_gpt2(), task="causal-lm", max_new_tokens=NEW_TOKENS),
    }


def _minilm() -> ModelSpec:
    return resolve_model("sentence-transformers/all-MiniLM-L6-v2")


def _gpt2() -> ModelSpec:
    return _changed(resolve_model("gpt2"), n_layer=4, n_embd=256, n_head=4)


def _changed(spec: ModelSpec, **values: Any) -> ModelSpec:
    return dataclasses.replace(spec, config={**spec.config, **values})


def make_config(micro_batch_size: int, seq_len: int, *, accumulation: int = 1, **fields: Any) -> TrainingConfig:
    """A configuration; what isn't named is fp32 without levers."""
    return TrainingConfig(
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        max_tokens_per_micro_batch=micro_batch_size * seq_len,
        gradient_accumulation_steps=accumulation,
        effective_batch_size=micro_batch_size * accumulation,
        **{"precision": "fp32", **fields},
    )


def make_running(micro_batch_size: int, seq_len: int, *, new_tokens: int = 0, **fields: Any) -> InferenceConfig:
    """A configuration of inference; what isn't named is fp32 without levers."""
    return InferenceConfig(
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        max_tokens_per_micro_batch=micro_batch_size * (seq_len + new_tokens),
        max_new_tokens=new_tokens,
        **{"precision": "fp32", "kv_cache": "dynamic" if new_tokens else "none", **fields},
    )


CONFIGS: tuple[tuple[str, TrainingConfig], ...] = (
    ("MiniLM", make_config(8, 128)),
    ("MiniLM", make_config(16, 128, checkpointing="full")),
    ("MiniLM", make_config(8, 128, checkpointing="every-2", accumulation=2)),
    ("MiniLM", make_config(2, 64, precision="bf16-amp")),
    ("MiniLM", make_config(8, 64, attention="eager", method="lora", lora=LoraSettings())),
    ("DistilBERT, 2 layers", make_config(8, 128, optimizer="adamw_foreach")),
    ("DistilBERT, 2 layers", make_config(1, 72, precision="bf16")),
    ("GPT-2, 4 layers", make_config(2, 128, accumulation=4)),
    ("GPT-2, 4 layers", make_config(8, 64, checkpointing="full", loss="fused-linear")),
    ("GPT-2, 4 layers", make_config(4, 60, precision="bf16-amp", checkpointing="full")),
)
"""Models and configurations: precision, checkpointing, attention, loss, method, optimizer, accumulation, shapes."""
RUNNING: tuple[tuple[str, InferenceConfig], ...] = (
    ("MiniLM, vectors", make_running(8, 128)),
    ("MiniLM, vectors", make_running(32, 64)),
    ("MiniLM, vectors", make_running(1, 256)),
    ("MiniLM, vectors", make_running(4, 72, precision="bf16")),
    ("MiniLM, labels", make_running(8, 64, attention="eager")),
    ("MiniLM, labels", make_running(16, 128)),
    ("MiniLM, labels", make_running(8, 64, quantization="int8-dynamic")),
    ("GPT-2, writing", make_running(4, 64, new_tokens=NEW_TOKENS)),
    ("GPT-2, writing", make_running(1, 100, new_tokens=NEW_TOKENS)),
    ("GPT-2, writing", make_running(8, 48, new_tokens=NEW_TOKENS, kv_cache="static")),
    ("GPT-2, writing", make_running(4, 64, new_tokens=NEW_TOKENS, precision="bf16")),
    ("GPT-2, writing", make_running(4, 96, new_tokens=NEW_TOKENS, prefill_chunk_tokens=32)),
)
"""Of inference: precision, attention, quantization, caches, chunks, shapes."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration. In bytes."""

    model: str
    """Short name."""
    config: Config
    """The configuration."""
    simulated: int
    """Peak of live tensors, on fake ones."""
    grows: int
    """The resident set's simulated growth."""
    step_ms: float
    """Simulated time of an optimizer step, or of a batch that is answered."""
    trial: Measurement
    """What was measured."""

    @property
    def difference(self) -> int:
        """Recorded on real tensors less simulated."""
        return (self.trial.peak_allocated_bytes or 0) - self.simulated

    @property
    def reason(self) -> str:
        """Why the two differ, as far as that is known."""
        if isinstance(self.config, InferenceConfig):
            packed = self.config.quantization == "int8-dynamic"  # simulated as tensors
            return ("weights packed by torch.ao are no tensors" if packed else "unknown") if self.difference else ""
        micro_batches = min(2, self.config.gradient_accumulation_steps)
        known = {
            LOSS_BYTES * (micro_batches - 1): "a trial keeps the loss of the step's first micro-batch until the update",
            LOSS_BYTES * (micro_batches + 1): "the peak is in the update, where a trial has its losses and the norm",
        }
        return known.get(self.difference, "unknown") if self.difference else ""

    @property
    def growth(self) -> int:
        """Of the resident set; at inference while batches are answered, which is what is simulated here."""
        batches = [self.trial.phases[name] for name in ("first_batch", "batch") if name in self.trial.phases]
        return max([p["peak_reserved_bytes"] for p in batches], default=self.trial.peak_reserved_bytes or 0)

    @property
    def growth_ratio(self) -> float:
        """Measured growth to simulated growth."""
        return self.growth / self.grows

    def as_dict(self) -> dict[str, Any]:
        """A row of the file."""
        fields = self.config.model_dump(mode="json", exclude_defaults=True)
        shape = {"micro_batch_size", "seq_len", "gradient_accumulation_steps", "max_new_tokens"}
        derived = {"max_tokens_per_micro_batch", "effective_batch_size", "lora"}
        levers = [f"{name} {value}" for name, value in fields.items() if name not in shape | derived]
        return {
            "model": self.model,
            "levers": "; ".join(levers),
            **{name: getattr(self.config, name, "") for name in sorted(shape)},
            "status": self.trial.status,
            "simulated_bytes": self.simulated,
            "recorded_bytes": self.trial.peak_allocated_bytes,
            "difference_bytes": self.difference,
            "reason": self.reason,
            "simulated_growth_bytes": self.grows,
            "growth_bytes": self.growth,
            "growth_ratio": f"{self.growth_ratio:.4f}",
            "context_bytes": self.trial.context_bytes,
            "simulated_step_ms": f"{self.step_ms:.1f}",
            "step_ms": None if self.trial.step_ms is None else f"{self.trial.step_ms:.1f}",
        }


def rows(facts: DeviceFacts, runner: TrialRunner, configs: Sequence[tuple[str, Config]]) -> Iterator[Row]:
    """Simulate and try each."""
    workloads: dict[str, Workload] = {**small_models(), **running_models()}
    card = card_of_device(facts, facts.total_bytes)
    simulators: dict[str, Any] = {}
    for name, config in configs:
        if name not in simulators:
            simulators[name] = _simulator(workloads[name], config, card, facts)
        memory = simulators[name].memory(config)
        trial = runner.run(TrialSpec(workload=workloads[name], config=config, device="cpu", timed_s=0.1))
        yield Row(
            model=name,
            config=config,
            simulated=memory.peak_allocated_bytes,
            grows=memory.peak_reserved_bytes,
            step_ms=simulators[name].time(config).step_ms,
            trial=trial,
        )


def _simulator(workload: Workload, config: Config, card: Card, facts: DeviceFacts) -> Simulator | InferenceSimulator:
    given: dict[str, Any] = {"ceiling_bytes": facts.total_bytes, "context": (facts.context_bytes, "measured")}
    if isinstance(workload, InferenceWorkload):
        return InferenceSimulator(workload, card, seq_len=config.seq_len, **given)
    return Simulator(workload, card, **given)


def main() -> int:
    """Measure, write one row for each configuration, and say how many hold; 1 when one doesn't."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="cpu_memory.csv", type=Path)
    parser.add_argument("--mode", choices=("train", "infer"), help="one of the two alone; the other's residuals stay")
    parser.add_argument("--calibrate", action="store_true", help="write the margin's residuals to profiles/")
    options = parser.parse_args()
    configs: list[tuple[str, Config]] = [
        *(CONFIGS if options.mode != "infer" else ()),
        *(RUNNING if options.mode != "train" else ()),
    ]
    with TrialRunner(trial_environment("cpu", "")) as runner, options.out.open("w", newline="") as file:
        facts = runner.probe("cpu")
        writer: csv.DictWriter[str] | None = None
        done: list[Row] = []
        for row in rows(facts, runner, configs):
            values = row.as_dict()
            if writer is None:
                writer = csv.DictWriter(file, list(values))
                writer.writeheader()
            writer.writerow(values)
            file.flush()
            done.append(row)
            print(_line(row), flush=True)
    explained = sum(row.trial.ok and row.reason != "unknown" for row in done)
    equal = sum(row.trial.ok and row.difference == 0 for row in done)
    near = sum(row.trial.ok and abs(row.growth_ratio - 1) <= GROWTH_WITHIN for row in done)
    print(f"equal to the byte: {equal} of {len(done)}, for a known reason not: {explained - equal}")
    print(f"resident growth within {GROWTH_WITHIN:.0%}: {near} of {len(done)}")
    print(f"rank correlation of step times: {_rank_correlation(done):.3f}")
    if options.calibrate:
        CALIBRATION.write_text(json.dumps(calibration(done), indent=1) + "\n", encoding="utf-8")
    return int(explained < len(done) or near < len(done))


def calibration(done: Sequence[Row]) -> dict[str, object]:
    """What a plan's margin on a processor is read from: by how much processes held more than predicted."""
    training = [row for row in done if isinstance(row.config, TrainingConfig)]
    running = [row for row in done if isinstance(row.config, InferenceConfig)]
    before = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    return {
        "made_by": "benchmarks/cpu_memory.py --calibrate; edit nothing here",
        "versions": library_versions(),
        "meaning": "of a process's resident set, measured / predicted - 1, by trial; above zero it needed more; "
        "residuals are those of training",
        "residuals": _residuals(training) or before["residuals"],
        "inference": _residuals(running) or before["inference"],
    }


def _residuals(done: Sequence[Row]) -> dict[str, float]:
    residuals = {}
    for number, row in enumerate(done, start=1):
        context = row.trial.context_bytes
        if row.trial.ok and context is not None:
            residuals[f"{row.model}-{number:02}"] = round((row.growth + context) / (row.grows + context) - 1, 6)
    return residuals


def _rank_correlation(done: Sequence[Row]) -> float:
    """Spearman's, of simulated and measured times of a token."""
    timed = [row for row in done if row.trial.step_ms is not None]
    tokens = [row.config.micro_batch_size * passes_of(row.config) * row.config.seq_len for row in timed]
    pairs = zip(timed, tokens, strict=True)
    table = pd.DataFrame([(row.step_ms / n, (row.trial.step_ms or 0.0) / n) for row, n in pairs])
    return float(table.rank().corr().iloc[0, 1])


def _line(row: Row) -> str:
    if not row.trial.ok:
        return f"{row.model:22}{row.trial.status}: {row.trial.reason}"
    simulated, growth = row.simulated / MIB, row.growth / MIB
    memory = f"{simulated:8.1f} MiB {row.difference:+4d} B   grew {growth:7.1f} MiB, {row.growth_ratio:.3f} of it"
    return f"{row.model:22}{memory}   step {row.step_ms:8.1f} ms, measured {row.trial.step_ms:8.1f}"


if __name__ == "__main__":
    sys.exit(main())
