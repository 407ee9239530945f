"""Hand-made worlds for the search: what a simulator predicts, and what a device does, as formulas; no torch.

Run as a script it is a worker: ``worlds.py STORAGE NAME CACHE SEED [seconds per trial] [die after this many trials]``
joins the study and prints what it ran, a line each.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from planner.budget import Memory
from planner.config import TrainingConfig
from planner.expected_gain import Candidate, Target
from planner.hardware import typical_card
from planner.levers import Context
from planner.measure.protocol import OK, OOM, Measurement
from planner.measured_search import measured_search
from planner.measurements import MeasurementStore
from planner.models import resolve_model
from planner.search import SearchResult, Trial
from planner.space import Space
from planner.study import SharedStudy
from planner.timing import Time

SEQ_LEN = 128
EFFECTIVE = 32
CONTEXT_BYTES = 300 * 2**20
PRECISIONS = ("fp32", "bf16-amp")
CHECKPOINTINGS = ("none", "every-2", "full")
RECOMPUTED = {"none": 1.0, "every-2": 1.17, "full": 1.33}
KEPT = {"none": 1.0, "every-2": 0.6, "full": 0.25}
TARGET = Target(workload="a-model", kind="cpu")


def make_space(attentions=("sdpa",), micro_batches=(1, 2, 4, 8, 16, 32)):
    """Precisions x checkpointing x attention x micro-batches: 36 configurations with one attention."""
    context = Context(
        spec=resolve_model("bert-base-uncased"),
        card=typical_card(8 * 2**30)[0],
        method="full",
        effective_batch_size=EFFECTIVE,
        max_micro_batch_size=512,
        layers=12,
        supports_sdpa=True,
    )
    values = {
        "precision": list(PRECISIONS),
        "attention": list(attentions),
        "quantization": ["none"],
        "method": ["full"],
        "checkpointing": list(CHECKPOINTINGS),
        "loss": ["standard"],
        "optimizer": ["adamw_fused"],
        "offload": ["none"],
        "micro_batch_size": [str(b) for b in micro_batches],
    }
    return Space(context=context, seq_len=SEQ_LEN, values=values)


@dataclass
class World:
    """A space with predictions, and what is true."""

    space: Space
    candidates: list[Candidate]
    step_ms: dict[TrainingConfig, float]
    """True."""
    reserved_bytes: dict[TrainingConfig, int]
    """True."""
    ceiling_bytes: int
    noise: float = 0.0
    """Standard deviation of a measurement's logarithm."""
    seed: int = 0
    ran: list[TrainingConfig] = field(default_factory=list)
    """What was measured, in order."""

    def fits(self, config):
        """Whether it truly does."""
        return self.reserved_bytes[config] + CONTEXT_BYTES <= self.ceiling_bytes

    def tokens_per_s(self, config):
        """Truly."""
        return EFFECTIVE * SEQ_LEN / self.step_ms[config] * 1e3

    @property
    def best(self):
        """The fastest that truly fits, in tokens a second; 0 where nothing does."""
        return max((self.tokens_per_s(c) for c in self.step_ms if self.fits(c)), default=0.0)

    def measure(self, config):
        """As a trial would answer."""
        self.ran.append(config)
        if not self.fits(config):
            return Measurement(status=OOM, reason="out of memory", wall_s=float(len(self.ran)))
        normal = np.random.default_rng([self.seed, len(self.ran), config.micro_batch_size])
        step_ms = self.step_ms[config] * math.exp(self.noise * normal.standard_normal())
        micro = step_ms / config.gradient_accumulation_steps
        passes = tuple(micro * math.exp(2 * self.noise * z) for z in (-1, -0.5, 0, 0.5, 1))
        return Measurement(
            status=OK,
            step_ms=step_ms,
            tokens_per_s=EFFECTIVE * SEQ_LEN / step_ms * 1e3,
            micro_batch_ms=passes,
            peak_reserved_bytes=self.reserved_bytes[config],
            context_bytes=CONTEXT_BYTES,
            process_bytes=self.reserved_bytes[config] + CONTEXT_BYTES,
            wall_s=float(len(self.ran)),
        )

    @property
    def simulated(self):
        """What a simulated search would hand over."""
        return SearchResult(trials=[self._trial(candidate) for candidate in self.candidates])

    def _trial(self, candidate):
        total = candidate.reserved_bytes + CONTEXT_BYTES
        memory = Memory(
            peak_allocated_bytes=candidate.reserved_bytes,
            peak_reserved_bytes=candidate.reserved_bytes,
            context_bytes=CONTEXT_BYTES,
            margin_bytes=0,
            total_bytes=total,
            ceiling_bytes=self.ceiling_bytes,
            breakdown={"parameters": candidate.reserved_bytes},
        )
        step_ms = candidate.step_ms
        time_ = Time(step_ms=step_ms, micro_batch_ms=step_ms, update_ms=0.0, tokens_per_s=candidate.tokens_per_s)
        status = "fits" if memory.fits else "exceeds"
        reason = "" if memory.fits else "over the ceiling"
        return Trial(config=candidate.config, memory=memory, time=time_, status=status, reason=reason)


def make_world(
    seed=0, *, attentions=("sdpa",), precision_bias=0.1, structure_bias=0.1, error=0.07, limit=0.03, noise=0.0
):
    """A model of random size on a random device, whose simulator is off by structure and by configuration.

    Recomputing more is never truly faster: the simulator's errors don't change what a lever does.
    """
    normal = np.random.default_rng(seed)
    base, each = normal.uniform(200e6, 900e6), normal.uniform(25e6, 75e6)
    overhead_s, low = normal.uniform(0.001, 0.03), normal.uniform(0.4, 1.2)
    device, by_precision = normal.normal(0, 1), {p: normal.normal(0, precision_bias) for p in PRECISIONS}
    space = make_space(attentions)
    candidates, step_ms, reserved = [], {}, {}
    ceiling = int(base + each * normal.uniform(2, 40)) + CONTEXT_BYTES
    for precision, attention, checkpointing in itertools.product(PRECISIONS, attentions, CHECKPOINTINGS):
        off, larger = normal.normal(0, structure_bias), normal.normal(0, limit)
        for b in (1, 2, 4, 8, 16, 32):
            more = 1.3 if attention == "eager" else 1.0
            held = base + each * b * KEPT[checkpointing] * more * (1.0 if precision == "fp32" else 0.6)
            busy = b * 0.01 * more**0.5 * (1.0 if precision == "fp32" else low)
            predicted = EFFECTIVE / b * (overhead_s + busy) * RECOMPUTED[checkpointing] * 1e3
            config = space.configuration(_words(precision, attention, checkpointing, b))
            candidates.append(candidate(config, predicted, int(held), ceiling))
            true = predicted * math.exp(device + by_precision[precision] + off + normal.normal(0, error))
            for less in CHECKPOINTINGS[: CHECKPOINTINGS.index(checkpointing)]:
                true = max(true, 1.03 * step_ms[space.configuration(_words(precision, attention, less, b))])
            step_ms[config] = true
            reserved[config] = int(held * math.exp(larger + normal.normal(0, limit / 2)))
    return World(space, candidates, step_ms, reserved, ceiling, noise=noise, seed=seed)


def _words(precision, attention, checkpointing, b):
    rest = {"quantization": "none", "method": "full", "loss": "standard", "optimizer": "adamw_fused", "offload": "none"}
    own = {"precision": precision, "attention": attention, "checkpointing": checkpointing, "micro_batch_size": str(b)}
    return {**rest, **own}


def candidate(config, step_ms, reserved_bytes, ceiling_bytes):
    """With its prediction."""
    return Candidate(
        config=config,
        reserved_bytes=reserved_bytes,
        ceiling_bytes=ceiling_bytes,
        context_bytes=CONTEXT_BYTES,
        step_ms=step_ms,
        tokens_per_s=EFFECTIVE * SEQ_LEN / step_ms * 1e3,
    )


def search(world, folder, *, storage=None, name="study", measure=None, **options):
    """The measured search of a world, with its store in ``folder`` and its study in ``storage``."""
    store = MeasurementStore({"device": "hand-made"}, folder=Path(folder))
    limit_s = options.pop("limit_s", 600.0)
    study = SharedStudy(storage, name=name, space=world.space.values, limit_s=limit_s)
    return measured_search(
        world.space,
        world.simulated,
        world.candidates,
        TARGET,
        measure=measure or world.measure,
        store=store,
        study=study,
        **options,
    )


def _work(storage, name, cache, seed, seconds="0", die_after="-1"):
    os.environ["VRAMPLAN_CACHE"] = cache
    world = make_world(int(seed), attentions=("sdpa", "eager"))

    def measure(config):
        if len(world.ran) == int(die_after):
            print("died at", config.model_dump_json(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.time()
        time.sleep(float(seconds))
        answer = world.measure(config)
        print("ran", f"{began:.3f} {time.time():.3f}", config.model_dump_json(), flush=True)
        return answer

    # a store of its own: what one worker knows of the other comes through the study
    result = search(world, Path(cache) / str(os.getpid()), storage=storage, name=name, measure=measure, worker=True)
    assert "torch" not in sys.modules
    best = result.best
    print("best", best.config.model_dump_json() if best else "none", flush=True)


if __name__ == "__main__":
    _work(*sys.argv[1:])
