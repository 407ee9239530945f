"""Plans of mode infer: what is chosen for texts, what is said about it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emitted import minilm
from hypothesis import given
from hypothesis import strategies as st

from planner import estimate, plan
from planner.allocator_settings import DEFAULT_ALLOCATOR, parse_allocator
from planner.cli import run
from planner.config import InferenceConfig
from planner.errors import InputError, NothingFitsError
from planner.hardware import find_card
from planner.inference.question import look_up
from planner.inference.simulation import InferenceSimulator, budget_shapes
from planner.inference.timing import batch_shapes
from planner.inference.workload import InferenceWorkload
from planner.models import resolve_model
from planner.plans import Plan
from planner.request import make_request
from planner.tasks import GENERATING_TASKS, INFERENCE_TASKS, TASK_FACTS, facts_for

RERANKER = {"model": "cross-encoder/ms-marco-MiniLM-L6-v2", "task": "reranking", "mode": "infer"}


def problems(**arguments: Any) -> dict[str, str]:
    """Argument and message of each problem."""
    with pytest.raises(InputError) as caught:
        make_request(**{"model": "m", "vram": "8GB", "mode": "infer", **arguments})
    return {problem.argument: problem.message for problem in caught.value.problems}


def config_of(**fields: Any) -> InferenceConfig:
    """A configuration of texts."""
    values = {"micro_batch_size": 8, "seq_len": 512, "max_tokens_per_micro_batch": 4096, "precision": "fp32", **fields}
    return InferenceConfig(**values)


@pytest.fixture(scope="module")
def reranker() -> Plan[Any]:
    """A small cross-encoder on a card where everything fits."""
    return plan(**RERANKER, vram="8GB", gpu="RTX 4060")


@pytest.fixture(scope="module")
def simulator() -> InferenceSimulator:
    """The same, asked directly."""
    spec = resolve_model(RERANKER["model"], task="reranking")
    card = find_card("RTX 4060")
    workload = InferenceWorkload(spec=spec, task="reranking")
    allocator = parse_allocator(DEFAULT_ALLOCATOR)
    return InferenceSimulator(workload, card, seq_len=512, ceiling_bytes=2**31, allocator=allocator)


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "argument", "part"),
    [
        ({"precision": "bf16-amp"}, "precision", "with mode infer; did you mean bf16?"),
        ({"method": "lora"}, "method", "accepted with mode train alone"),
        ({"gpus": 2}, "gpus", "accepted with mode train alone"),
        ({"task": "masked-lm"}, "task", "accepted with it: sequence-classification"),
        ({"task": "reranking", "max_new_tokens": 5}, "max_new_tokens", "accepted with: causal-lm, seq2seq-lm"),
        ({"quantization": "int8-dynamic"}, "quantization", "accepted with device cpu alone"),
        ({"device": "cpu", "offload": "parameters"}, "offload", "everything is in host memory already"),
        ({"batch_size": 8, "concurrency": 4}, "batch_size", "at most the 4 sequences"),
        ({"seq_len": 64, "prefix_tokens": 64}, "prefix_tokens", "less than the prompt's 64 tokens"),
        ({"mode": "train", "max_new_tokens": 5}, "max_new_tokens", "accepted with mode infer alone"),
        ({"mode": "train", "quantization": "int8-dynamic"}, "quantization", "can't train"),
    ],
)
def test_what_belongs_to_the_other_mode_or_task_is_refused(arguments: Any, argument: str, part: str) -> None:
    """One line with the value, what is accepted and where."""
    assert part in problems(**arguments)[argument]


def test_a_task_that_only_the_model_shows_to_be_wrong_is_refused() -> None:
    """What is for writing is refused for a model that writes nothing, also where no task was named."""
    with pytest.raises(InputError) as caught:
        plan(model=RERANKER["model"], mode="infer", vram="8GB", max_new_tokens=5)
    assert ["max_new_tokens"] == [problem.argument for problem in caught.value.problems]


@pytest.mark.parametrize("task", INFERENCE_TASKS)
def test_inputs_have_no_labels_and_prompts_are_not_cut_up(task: str) -> None:
    """At inference an embedding takes one text, nothing takes a label, and generating tasks only ever truncate."""
    facts = facts_for(task, "infer")
    assert () == facts.usual_label_columns
    assert "pack" not in facts.long_texts
    assert (task in GENERATING_TASKS) == (facts.long_texts == ("truncate",) and TASK_FACTS[task].generates)
    if task == "embedding":
        assert (1, 1) == facts.text_columns


# -- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_fits_and_explains_every_field(reranker: Plan[Any]) -> None:
    """Total under the ceiling; each of the configuration's choices has its reason."""
    assert reranker.peak.total_bytes <= reranker.peak.ceiling_bytes
    told = {reason.field for reason in reranker.reasons}
    chosen = {"precision", "quantization", "attention", "offload", "kv_cache", "micro_batch_size"}
    assert chosen | {"max_tokens_per_micro_batch", "longest_seq_len", "largest_micro_batch_size"} <= told


def test_half_precision_is_chosen_and_nothing_that_changes_answers(reranker: Plan[Any]) -> None:
    """fp16 is the fastest of what rounds; quantized weights are only shown among the levers."""
    assert ("fp16", "none", "none") == (
        reranker.config.precision,
        reranker.config.quantization,
        reranker.config.offload,
    )
    assert {"int8", "nf4"} <= {row["change"].removeprefix("none -> ") for row in reranker.levers}


def test_a_saved_plan_is_read_back_as_it_was(reranker: Plan[Any], tmp_path: Path) -> None:
    """The folder has infer.py in place of a training's files."""
    folder = reranker.save(tmp_path / "plan")
    assert {"plan.json", "infer.py", "trials.csv", "memory.csv"} == {file.name for file in folder.iterdir()}
    again = Plan.load(folder)
    assert (reranker.config, reranker.time, reranker.peak) == (again.config, again.time, again.peak)
    with pytest.raises(InputError, match="mode 'train'"):
        again.to_training_arguments()


def test_tables_have_the_contracts_columns(reranker: Plan[Any]) -> None:
    """Every configuration field with what was predicted; memory over batches and lengths."""
    fields = {*InferenceConfig.model_fields, "predicted_total_bytes", "measured_step_ms", "status", "reason"}
    assert fields <= set(reranker.trials.columns)
    columns = {"micro_batch_size", "seq_len", "peak_allocated_bytes", "peak_reserved_bytes", "total_bytes", "fits"}
    assert columns <= set(reranker.memory.columns)


def test_what_is_asked_for_restricts_the_batch() -> None:
    """A batch is as large as asked for, and never has more sequences than there are at once."""
    asked = plan(**RERANKER, vram="8GB", batch_size=5, precision="fp32")
    assert (5, 5, "fp32") == (asked.config.micro_batch_size, asked.config.max_sequences, asked.config.precision)
    served = plan(**RERANKER, vram="8GB", concurrency=3)
    assert 3 >= served.config.micro_batch_size
    assert 3 == served.config.max_sequences
    tokens = plan(**RERANKER, vram="8GB", batch_tokens=2048)
    assert (2048, 4) == (tokens.config.max_tokens_per_micro_batch, tokens.config.micro_batch_size)


def test_weights_that_find_no_room_are_streamed_and_the_time_has_bounds() -> None:
    """No answer changes; the first layers stay; the others wait in host memory."""
    small = plan(model="BAAI/bge-reranker-v2-m3", task="reranking", mode="infer", vram="600MB", seq_len=512)
    assert not small.config.embedding_on_card
    assert ("none", "parameters") == (small.config.quantization, small.config.offload)
    assert 0 <= small.config.layers_on_card < 24
    assert small.time.lower_ms < small.time.step_ms < small.time.upper_ms
    assert small.peak.total_bytes <= small.peak.ceiling_bytes
    reasons = {reason.field: reason for reason in small.reasons}
    assert "nothing fits with all weights on the card" in reasons["offload"].reason
    waiting = reasons["host_bytes"].value
    assert 0 < waiting < 24 * 4 * 12_596_224  # a layer of it has 12.6 M parameters


def test_nothing_fits_only_where_the_host_is_too_small_as_well() -> None:
    """With little host memory quantized weights are tried; where these don't fit either, the error says what would."""
    asked = {"model": "roberta-large", "task": "sequence-classification", "mode": "infer", "vram": "512MB"}
    few = {"seq_len": 64, "batch_size": 2, "precision": "fp16"}
    with pytest.raises(NothingFitsError) as caught:
        plan(**asked, **few, host_ram="256MB")
    assert "would fit: --offload parameters --host-ram 1GB" in str(caught.value)
    streamed = plan(**asked, **few, host_ram="32GB")
    assert "parameters" == streamed.config.offload


def test_the_command_makes_a_folder_and_prints_how_to_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0; the report names texts a second, and the two commands."""
    out = str(tmp_path / "plan")
    assert 0 == run(
        ["--vram", "8GB", "--mode", "infer", "--model", RERANKER["model"], "--task", "reranking", "--out", out]
    )
    printed = capsys.readouterr().out
    assert "documents/s" in printed
    assert "infer.py --data FILE" in printed
    assert "infer" == json.loads((tmp_path / "plan" / "plan.json").read_text())["request"]["mode"]


def test_the_users_data_decides_lengths_and_says_how_long_all_of_it_takes(tmp_path: Path) -> None:
    """No labels are asked for; a row that is no JSON is named by its line; inputs over speed is the time."""
    data = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": "word " * (5 + i % 40)}) for i in range(60)]
    data.write_text("\n".join([*lines, "no JSON"]) + "\n", encoding="utf-8")
    found = plan(model=str(minilm()), mode="infer", task="embedding", vram="2GB", data=str(data), precision="fp32")
    told = found.workload["data"]
    assert (60, [61]) == (told["rows"], told["bad_rows"][0]["lines"])
    assert 48 == found.config.seq_len
    assert 60 == told["answers"]["inputs"]
    assert 60 / found.time.sequences_per_s == pytest.approx(told["answers"]["seconds"])


# -- answers ---------------------------------------------------------------------------------------------------------


def test_an_estimate_is_the_simulators_answer(simulator: InferenceSimulator) -> None:
    """One given configuration, with memory and time as attributes."""
    found = estimate(**RERANKER, vram="8GB", gpu="RTX 4060", micro_batch_size=8, seq_len=512, precision="fp16")
    config = simulator.settled(config_of(precision="fp16", max_sequences=8))
    assert config == found.config
    assert simulator.whole_run(config).peak_reserved_bytes == found.peak_reserved_bytes
    assert simulator.time(config).sequences_per_s == pytest.approx(found.sequences_per_s)


def test_the_longest_text_and_the_largest_batch_are_the_last_that_fit(simulator: InferenceSimulator) -> None:
    """One sequence more, or (below the model's positions) one token more, is over the ceiling."""
    config = config_of()
    size = simulator.largest_batch(config)
    assert simulator.memory(config.model_copy(update={"micro_batch_size": size})).fits
    assert not simulator.memory(config.model_copy(update={"micro_batch_size": size + 1})).fits
    many = config.model_copy(update={"micro_batch_size": 2 * size})
    longest = simulator.longest_text(many)
    assert 0 < longest < 512
    assert simulator.memory(many.model_copy(update={"seq_len": longest})).fits
    assert not simulator.memory(many.model_copy(update={"seq_len": longest + 1})).fits


def test_a_whole_run_needs_no_less_than_its_largest_batch(simulator: InferenceSimulator) -> None:
    """Batches of other lengths come on top, if anything."""
    config = config_of(precision="fp16")
    assert simulator.memory(config).peak_reserved_bytes <= simulator.whole_run(config).peak_reserved_bytes


def test_weights_are_most_of_what_a_small_batch_needs(simulator: InferenceSimulator) -> None:
    """Parameters as stored: 4 bytes each in fp32, 2 in fp16 (each tensor rounded up to 512 bytes)."""
    count = simulator.facts.parameters
    for precision, each in (("fp32", 4), ("fp16", 2)):
        found = simulator.memory(config_of(micro_batch_size=1, precision=precision)).breakdown["parameters"]
        assert count * each <= found < 1.01 * count * each


def test_gradients_and_optimizer_take_nothing(simulator: InferenceSimulator) -> None:
    """There are none at inference."""
    breakdown = simulator.memory(config_of()).breakdown
    assert (0, 0) == (breakdown["gradients"], breakdown["optimizer"])


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=60),
    size=st.integers(1, 16),
    rows=st.one_of(st.none(), st.integers(1, 8)),
)
def test_every_text_is_in_one_batch_within_the_budget(lengths: list[int], size: int, rows: int | None) -> None:
    """Padded tokens within the budget, unless one text is alone; never more sequences than allowed."""
    config = config_of(micro_batch_size=size, max_tokens_per_micro_batch=size * 512, max_sequences=rows)
    shapes = batch_shapes(lengths, config)
    assert len(lengths) == sum(count * b for (b, _), count in shapes.items())
    assert all(b == 1 or b * s <= size * 512 for b, s in shapes)
    assert all(rows is None or b <= rows for b, _ in shapes)


def shapes_of(config: InferenceConfig) -> Iterator[tuple[int, int]]:
    """Shapes that the search looks at beside the longest."""
    yield from budget_shapes(config)


@given(size=st.integers(1, 64), new=st.integers(0, 300))
def test_shorter_texts_fill_the_same_budget(size: int, new: int) -> None:
    """Rows times length and new tokens stay within the budget, and shapes get shorter."""
    config = config_of(micro_batch_size=size, max_tokens_per_micro_batch=size * (512 + new), max_new_tokens=new)
    shapes = list(shapes_of(config))
    assert shapes
    assert all(rows * (width + new) <= size * (512 + new) for rows, width in shapes)
    assert sorted((width for _, width in shapes), reverse=True) == [width for _, width in shapes]


def test_more_sequences_never_need_less(simulator: InferenceSimulator) -> None:
    """Allocated memory grows with the batch and with the length."""
    base = config_of(precision="fp16")
    needs = [simulator.memory(base.model_copy(update={"micro_batch_size": b})).peak_allocated_bytes for b in (2, 8, 32)]
    assert sorted(needs) == needs
    lengths = [simulator.memory(base.model_copy(update={"seq_len": s})).peak_allocated_bytes for s in (64, 256, 512)]
    assert sorted(lengths) == lengths


def test_replaced_lengths_change_the_speed_that_is_told(simulator: InferenceSimulator) -> None:
    """Speeds are at the user's lengths: short texts go faster than long ones."""
    from planner.lengths import given_lengths

    speeds = []
    for tokens in (32, 512):
        other = InferenceSimulator(
            simulator.workload,
            simulator.card,
            seq_len=512,
            ceiling_bytes=2**31,
            lengths=replace(given_lengths([tokens] * 50, seq_len=512, long_texts="truncate")),
        )
        speeds.append(other.time(config_of()).sequences_per_s)
    assert speeds[0] > 4 * speeds[1]


# -- generation ------------------------------------------------------------------------------------------------------

WRITER = {
    **{"model": "HuggingFaceTB/SmolLM2-135M", "mode": "infer", "vram": "8GB", "gpu": "RTX 4060", "precision": "fp16"},
    **{"micro_batch_size": 2, "seq_len": 64, "max_new_tokens": 8},
}
LAYERS, KEY_VALUE_HEADS, HEAD_SIZE = 30, 3, 64
"""Of SmolLM2-135M."""


def cache_of(sequences: int, tokens: int) -> int:
    """Its keys and values in fp16."""
    return 2 * LAYERS * KEY_VALUE_HEADS * HEAD_SIZE * 2 * sequences * tokens


def test_generation_is_told_apart_by_prompt_and_token() -> None:
    """Prefill and each further token; the cache beside the other parts, as large as prompts and what was written."""
    found = estimate(**WRITER)
    assert found.time.prefill_ms + 7 * found.time.decode_ms_per_token == pytest.approx(found.time.step_ms)
    assert 2 * 64 / found.time.prefill_ms * 1e3 == pytest.approx(found.time.prefill_tokens_per_s)
    assert cache_of(2, 64) <= found.memory.breakdown["kv_cache"] <= 1.1 * cache_of(2, 64 + 7)


def test_shared_beginnings_have_room_of_their_own() -> None:
    """Four of them: the one that a batch goes on from is in the recording, the others come on top."""
    one = estimate(**WRITER, prefix_tokens=32)
    assert cache_of(4, 32) == one.config.prefix_cache_bytes
    several = one.memory.breakdown["kv_cache"] - cache_of(3, 32)
    assert cache_of(2, 64) < several


def test_an_offloaded_cache_waits_in_host_memory() -> None:
    """Each layer's keys and values in pinned memory, which comes in powers of two; little of it is on the card."""
    found = estimate(**WRITER, kv_cache="offloaded")
    assert found.memory.breakdown["kv_cache"] < cache_of(2, 64 + 8) / 3
    simulator = look_up(make_request(**_asked(WRITER), kv_cache="offloaded", device="none")).simulator
    layer = cache_of(2, 64 + 8) // (2 * LAYERS)
    assert 2 * LAYERS * 2 ** (layer - 1).bit_length() == simulator.host_bytes(found.config)


def _asked(given: dict[str, Any]) -> dict[str, Any]:
    return {("batch_size" if name == "micro_batch_size" else name): value for name, value in given.items()}
