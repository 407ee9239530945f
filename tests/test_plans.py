"""The plan as an object and as a folder: saved whole, read back equal, in the libraries' own words."""

import json

import pandas as pd
import pytest

from planner import InputError, NothingFitsError, Plan, RecordingError, TrainingConfig, estimate, plan
from planner.units import GIB

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def made():
    """A plan for a small model on a small ceiling."""
    return plan(model=MINILM, vram="2GB", seq_len=128, task="sequence-classification", num_labels=5)


def test_plan_is_what_was_asked_for(made):
    """The configuration keeps model, length and effective batch, and fits."""
    assert (128, 32) == (made.config.seq_len, made.config.effective_batch_size)
    assert 32 == made.config.micro_batch_size * made.config.gradient_accumulation_steps
    assert made.peak.total_bytes <= made.peak.ceiling_bytes <= 2 * GIB
    assert MINILM == made.workload["model"]
    assert isinstance(made.config, TrainingConfig)


def test_config_is_frozen(made):
    """The configuration can't be changed by accident."""
    with pytest.raises(ValueError, match="frozen"):
        made.config.seq_len = 1


def test_breakdown_is_the_allocated_peak(made):
    """The parts add up to what is allocated at the peak, but for blocks that the allocator didn't split."""
    assert sum(made.peak.breakdown.values()) <= made.peak.peak_allocated_bytes
    assert sum(made.peak.breakdown.values()) >= 0.99 * made.peak.peak_allocated_bytes
    outside = made.peak.context_bytes + made.peak.margin_bytes
    assert made.peak.total_bytes == made.peak.peak_reserved_bytes + outside


def test_saved_plan_is_read_back_equal(made, tmp_path):
    """load(save(plan)) has the same configuration, figures and tables."""
    folder = made.save(tmp_path / "plan")
    again = Plan.load(folder)
    assert made.to_json() == again.to_json()
    assert list(made.trials["status"]) == list(again.trials["status"])
    assert made.memory["total_bytes"].tolist() == again.memory["total_bytes"].tolist()


def test_folder_has_every_file(made, tmp_path):
    """plan.json, the two tables, the script and accelerate's file; nothing temporary stays."""
    folder = made.save(tmp_path / "plan")
    names = {path.name for path in folder.iterdir()}
    assert {"plan.json", "trials.csv", "memory.csv", "train.py", "accelerate.yaml"} == names
    assert ["plan"] == [path.name for path in tmp_path.iterdir()]
    document = json.loads((folder / "plan.json").read_text())
    assert made.peak.total_bytes == document["memory"]["total_bytes"]


def test_a_folder_of_other_files_is_left_alone(made, tmp_path):
    """A plan never replaces what is no plan."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="folder: got"):
        made.save(tmp_path)
    assert "years of work" == (tmp_path / "thesis.txt").read_text()


def test_an_earlier_plan_is_replaced_whole(made, tmp_path):
    """A stale file of an earlier plan doesn't survive."""
    folder = made.save(tmp_path / "plan")
    (folder / "deepspeed.json").write_text("{}")
    made.save(folder)
    assert not (folder / "deepspeed.json").exists()


def test_load_of_no_plan_is_a_clear_line(tmp_path):
    """A folder without a plan, a broken file and another schema version are told apart."""
    with pytest.raises(InputError, match=r"no readable plan\.json"):
        Plan.load(tmp_path)
    (tmp_path / "plan.json").write_text('{"schema_version": 99}')
    with pytest.raises(InputError, match="schema version 99"):
        Plan.load(tmp_path)


def test_trials_table_has_every_configuration(made):
    """One row for each configuration looked at; bytes are integers; the best is first."""
    trials = made.trials
    assert isinstance(trials, pd.DataFrame)
    assert {"fits", "exceeds", "pruned"} >= set(trials["status"])
    assert "Int64" == str(trials["predicted_total_bytes"].dtype)
    assert made.config.micro_batch_size == trials.iloc[0]["micro_batch_size"]
    assert not trials.duplicated(subset=[c for c in TrainingConfig.model_fields if c in trials]).any()


def test_memory_table_grows_with_batch_and_length(made):
    """memory.csv is monotone in both, and says where the ceiling is."""
    table = made.memory
    assert {True, False} >= set(table["fits"])
    for _, group in table.groupby("seq_len"):
        totals = group.sort_values("micro_batch_size")["total_bytes"].tolist()
        assert sorted(totals) == totals


def test_training_arguments_train_the_plan(made, tmp_path):
    """transformers gets the micro-batch, the accumulation and the optimizer."""
    arguments = made.to_training_arguments(output_dir=str(tmp_path), bf16=False, tf32=None, use_cpu=True)
    assert made.config.micro_batch_size == arguments.per_device_train_batch_size
    assert made.config.gradient_accumulation_steps == arguments.gradient_accumulation_steps
    assert "adamw_torch_fused" == arguments.optim


def test_trainer_refuses_what_it_cannot_do():
    """Optimizer offload and every-N checkpointing are named, not dropped."""
    from planner.emit.trainer import training_arguments

    shape = {"micro_batch_size": 1, "seq_len": 8, "max_tokens_per_micro_batch": 8, "effective_batch_size": 1}
    config = TrainingConfig(
        **shape, gradient_accumulation_steps=1, precision="fp32", offload="optimizer", checkpointing="every-2"
    )
    with pytest.raises(InputError) as caught:
        training_arguments(config, task="masked-lm")
    assert ["offload", "checkpointing"] == [problem.argument for problem in caught.value.problems]


def test_nothing_fits_says_what_would():
    """The error names the closest configuration, the smallest card, and an option that was tried and fits."""
    with pytest.raises(NothingFitsError) as caught:
        plan(model="roberta-large", vram="2GB", method="full", seq_len=512, offload="none,optimizer")
    message = str(caught.value)
    assert "closest: full" in message
    assert caught.value.smallest_vram_bytes >= 4 * GIB
    assert "--method lora" in message
    smallest = caught.value.smallest_vram_bytes
    would_do = plan(model="roberta-large", vram=smallest, method="full", seq_len=512)
    assert would_do.peak.total_bytes <= would_do.peak.ceiling_bytes <= smallest


def test_estimate_has_memory_and_time_as_attributes():
    """estimate() answers for one configuration; what is off the ceiling is said, not raised."""
    answer = estimate(model=MINILM, vram="1GB", micro_batch_size=64, seq_len=256, precision="fp32", attention="eager")
    assert answer.memory.total_bytes == answer.total_bytes
    assert answer.time.step_ms == answer.step_ms
    assert not answer.fits
    with pytest.raises(AttributeError):
        _ = answer.nonsense


def test_all_problems_of_names_come_at_once():
    """A model and a card that nobody knows are both reported."""
    with pytest.raises(InputError) as caught:
        plan(model="bert-base-uncasd", vram="8GB", gpu="Voodoo 2")
    assert ["model", "gpu"] == [problem.argument for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("model", "seq_len", "fits"),
    [("bert-base-uncased", 512, True), ("bert-base-uncased", 513, False), ("roberta-base", 514, False)],
)
def test_length_beyond_the_positions_is_bad_input(model, seq_len, fits):
    """Case G01: more tokens than positions is refused before anything is simulated."""
    if fits:
        assert estimate(model=model, vram="24GB", micro_batch_size=2, seq_len=seq_len).fits
        return
    with pytest.raises(InputError, match="positions for 512 tokens"):
        plan(model=model, vram="24GB", seq_len=seq_len)


def test_a_model_that_needs_data_is_a_clear_line():
    """Longformer reads the number of global tokens out of its mask: told in one line, without a traceback."""
    with pytest.raises(RecordingError, match=r"longformer.* can't be simulated: it reads a whole number") as caught:
        plan(model="allenai/longformer-base-4096", vram="12GB")
    assert 4 == caught.value.exit_code
    assert "\n" not in str(caught.value)
