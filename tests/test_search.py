"""The search on the simulated space: as good as looking at everything."""

import itertools

import pytest

from planner.hardware import ceiling_bytes, typical_card
from planner.interrupts import interrupts_as_they_are
from planner.levers import Context, conflict
from planner.measured_search import candidates_of
from planner.models import resolve_model
from planner.request import make_request
from planner.search import EXHAUSTIVE_UP_TO, evaluate, search
from planner.simulation import Simulator
from planner.space import make_space, rungs
from planner.units import GIB
from planner.workload import Workload

MODELS = [
    ("sentence-transformers/all-MiniLM-L6-v2", "sequence-classification", 256, (1, 2, 4)),
    ("distilgpt2", "causal-lm", 512, (4, 6, 10)),
    ("t5-small", "seq2seq-lm", 256, (2, 4, 6)),
]
CASES = [(*model[:3], vram) for model in MODELS for vram in model[3]]


def make(model, task, seq_len, vram_gib, **request_fields):
    """The space of a request on a typical card of that size, and its simulator."""
    request = make_request(model=model, vram=f"{vram_gib}GB", seq_len=seq_len, **request_fields)
    card, _ = typical_card(request.vram_bytes)
    workload = Workload(spec=resolve_model(model), task=task, target_seq_len=64 if task == "seq2seq-lm" else None)
    ceiling, _ = ceiling_bytes(request.vram_bytes, card, named=False)
    simulator = Simulator(workload, card, ceiling_bytes=ceiling, host_ram_bytes=64 * GIB)
    context = Context(
        spec=workload.spec,
        card=card,
        method=rungs(request.method)[0],
        effective_batch_size=32,
        max_micro_batch_size=512,
        layers=simulator.facts.layers,
        supports_sdpa=simulator.facts.supports_sdpa,
    )
    return make_space(request, context, seq_len), simulator


@pytest.mark.parametrize(("model", "task", "seq_len", "vram_gib"), CASES)
def test_search_equals_enumeration(model, task, seq_len, vram_gib):
    """Optuna's answer is the fastest of all configurations that fit, at three ceilings of three models."""
    space, simulator = make(model, task, seq_len, vram_gib)
    speeds = [
        trial.time.tokens_per_s
        for trial in (evaluate(config, simulator) for config in space.configurations())
        if trial.status == "fits"
    ]
    best = search(space, simulator).best
    assert speeds
    assert max(speeds) == pytest.approx(best.time.tokens_per_s, rel=1e-3)
    assert best.memory.total_bytes <= best.memory.ceiling_bytes


def test_a_space_too_large_to_enumerate_is_sampled():
    """With more configurations than the limit TPE looks at as many as it is given, all under the constraint."""
    space, simulator = make("sentence-transformers/all-MiniLM-L6-v2", "sequence-classification", 256, 2)
    many = {**space.values, "optimizer": ["adamw_fused", "adamw_foreach", "sgd", "adafactor", "adamw_8bit"]}
    large = type(space)(
        context=space.context,
        seq_len=space.seq_len,
        values={**many, "checkpointing": ["none", "every-2", "every-3", "full"], "attention": ["sdpa", "eager"]},
    )
    assert large.size > EXHAUSTIVE_UP_TO
    result = search(large, simulator, trials=40, seed=1)
    assert 0 < len(result.trials) <= 40
    assert result.best is not None
    assert all(t.memory.total_bytes <= t.memory.ceiling_bytes for t in result.fitting)


def test_same_seed_same_answer():
    """The search is deterministic."""
    answers = []
    for _ in range(2):
        space, simulator = make("sentence-transformers/all-MiniLM-L6-v2", "sequence-classification", 256, 1)
        answers.append(search(space, simulator, trials=30, seed=3).best.config)
    assert answers[0] == answers[1]


def test_every_configuration_keeps_the_effective_batch():
    """Micro-batch times accumulation is the effective batch that was asked for, always."""
    space, _ = make("sentence-transformers/all-MiniLM-L6-v2", "sequence-classification", 256, 2)
    products = {
        config.micro_batch_size * config.gradient_accumulation_steps
        for config in itertools.islice(space.configurations(), 500)
    }
    assert {32} == products


def test_one_trial_finds_that_something_fits():
    """The first of a few trials is the most frugal configuration, so a small budget never says that nothing fits."""
    space, simulator = make("t5-small", "seq2seq-lm", 256, 2)
    result = search(space, simulator, trials=1)
    assert ["full"] == [trial.config.checkpointing for trial in result.trials]
    assert result.best is not None


@pytest.mark.parametrize(
    ("model", "task", "seq_len"),
    [("sentence-transformers/all-MiniLM-L6-v2", "sequence-classification", 256), ("distilgpt2", "causal-lm", 512)],
)
def test_what_fits_nowhere_among_the_least_fits_nowhere(model: str, task: str, seq_len: int) -> None:
    """No configuration of the space allocates less than the least of those that claim to."""
    space, simulator = make(model, task, seq_len, 8)
    possible = [config for config in space.configurations() if not conflict(config)]
    least = [space.configuration(chosen) for chosen in space.least()]
    needs = [min(simulator.memory(c).peak_allocated_bytes for c in configs) for configs in (possible, least)]
    assert needs[0] == needs[1]
    assert len(least) < len(possible) / 4


def test_a_hopeless_space_is_given_up_early() -> None:
    """And the trials that show it are there, each with its need."""
    space, _ = make("distilgpt2", "causal-lm", 512, 8)
    _, simulator = make("distilgpt2", "causal-lm", 512, 1)
    result = search(space, simulator)
    assert result.best is None
    assert 0 < len(result.trials) < space.size / 4
    assert result.closest(simulator) is not None


def test_what_is_left_to_be_measured() -> None:
    """All that fits and what is a little over, with the simulator's own figures; nothing that is certain not to fit."""
    space, simulator = make("sentence-transformers/all-MiniLM-L6-v2", "sequence-classification", 256, 1)
    result, ceiling = search(space, simulator), simulator.ceiling_bytes
    left = {c.config: c for c in candidates_of(result, simulator, kind="cpu", ceiling_of=lambda _: ceiling)}
    assert {trial.config for trial in result.fitting} <= set(left)
    assert len(left) < len(result.trials)
    for trial in result.fitting:
        candidate = left[trial.config]
        assert trial.time.tokens_per_s == candidate.tokens_per_s
        assert simulator.memory(trial.config).peak_reserved_bytes == candidate.reserved_bytes
    over = [c for c in left.values() if c.log_room < 0]
    assert over
    assert all(candidate.log_room > -0.5 for candidate in left.values())


def test_an_interrupt_stays_one():
    """What a library's way out makes of it is told from other errors by what came before."""

    def fails_on_its_way_out(first):
        try:
            raise first
        finally:
            raise UnboundLocalError("as Optuna's does")

    with pytest.raises(KeyboardInterrupt), interrupts_as_they_are():
        fails_on_its_way_out(KeyboardInterrupt())
    with pytest.raises(UnboundLocalError), interrupts_as_they_are():
        fails_on_its_way_out(ValueError())
