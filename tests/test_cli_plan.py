"""The command end to end, as a person runs it: the installed script, a process of its own, no network, no GPU."""

import json
import os
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

PLAN = Path(sysconfig.get_path("scripts")) / "plan"
FILES = {"plan.json", "train.py", "accelerate.yaml", "trials.csv", "memory.csv"}
KEYS = ["schema_version", "request", "hardware", "workload", "config", "memory", "time", "reasons", "alternatives"]
CONFIG_KEYS = {"micro_batch_size", "seq_len", "max_tokens_per_micro_batch", "gradient_accumulation_steps"} | {
    *("effective_batch_size", "precision", "checkpointing", "offload", "quantization", "optimizer", "attention"),
    *("method", "lora"),
}
MEMORY_KEYS = {"peak_allocated_bytes", "peak_reserved_bytes", "context_bytes", "margin_bytes", "total_bytes"} | {
    *("ceiling_bytes", "breakdown"),
}
PARTS = {"parameters", "gradients", "optimizer", "activations", "temporaries", "workspace"}


def environment(cache):
    """Offline, with a cache of its own."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cache)}


def run_plan(folder, cache, *arguments):
    """The finished command, run in the folder."""
    command = [str(PLAN), *arguments]
    return subprocess.run(command, cwd=folder, env=environment(cache), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for this file: its first run starts from nothing."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bert(tmp_path_factory, cache):
    """The main job, run once: the finished command and the folder that it ran in."""
    folder = tmp_path_factory.mktemp("bert")
    return run_plan(folder, cache, "--vram", "8GB", "--model", "bert-base-uncased"), folder


@pytest.fixture(scope="module")
def written(bert):
    """plan.json of the main job."""
    return json.loads((bert[1] / "plans" / "bert-base-uncased-8GB" / "plan.json").read_text())


@pytest.mark.slow
def test_main_job_makes_a_plan(bert):
    """The README's first command ends with 0 and prints the choice, the memory and what to run."""
    done, _ = bert
    assert (0, []) == (done.returncode, [line for line in done.stderr.splitlines() if "rror" in line])
    for heading in ("Choice", "Memory at the peak", "Run"):
        assert heading in done.stdout.splitlines()
    assert "--vram 8GB is 8,589,934,592 bytes" in done.stdout


@pytest.mark.slow
def test_folder_is_whole(bert):
    """The default folder holds every file of a plan, and nothing temporary is left beside it."""
    plans = bert[1] / "plans"
    assert ["bert-base-uncased-8GB"] == [path.name for path in plans.iterdir()]
    assert FILES <= {path.name for path in (plans / "bert-base-uncased-8GB").iterdir()}


@pytest.mark.slow
def test_plan_json_has_its_keys(written):
    """plan.json holds what the contract lists, in its words."""
    assert [] == [key for key in [*KEYS, "versions"] if key not in written]
    assert set() == CONFIG_KEYS - set(written["config"])
    assert set() == MEMORY_KEYS - set(written["memory"])
    assert set() == PARTS - set(written["memory"]["breakdown"])
    assert {"step_ms", "tokens_per_s", "source"} <= set(written["time"])
    assert "simulated" == written["time"]["source"]


@pytest.mark.slow
def test_plan_stays_under_the_ceiling(written):
    """What is needed fits, the ceiling is below the label, and bytes are integers."""
    memory = written["memory"]
    assert memory["total_bytes"] <= memory["ceiling_bytes"] < 8 * 2**30
    assert [] == [key for key in MEMORY_KEYS - {"breakdown"} if not isinstance(memory[key], int)]


@pytest.mark.slow
def test_every_automatic_choice_has_its_reason(written):
    """Each reason names a field and says why."""
    assert written["reasons"]
    assert [] == [reason for reason in written["reasons"] if not (reason["field"] and reason["reason"])]


@pytest.mark.slow
def test_json_is_the_saved_plan(bert, written, cache):
    """--json prints what plan.json holds, the same request gives the same plan, and the folder is replaced."""
    done = run_plan(bert[1], cache, "--vram", "8GB", "--model", "bert-base-uncased", "--json")
    assert 0 == done.returncode, done.stderr
    again = json.loads(done.stdout)
    assert json.loads((bert[1] / "plans" / "bert-base-uncased-8GB" / "plan.json").read_text()) == again
    assert [written[key] for key in ("config", "memory", "time")] == [again[k] for k in ("config", "memory", "time")]


@pytest.mark.slow
def test_quiet_prints_where_the_plan_is(tmp_path, cache):
    """--quiet prints the folder's path alone, and --out chooses it."""
    done = run_plan(tmp_path, cache, "--vram", "8GB", "--model", "bert-base-uncased", "--quiet", "--out", "a/b")
    assert (0, "a/b\n") == (done.returncode, done.stdout), done.stderr
    assert FILES <= {path.name for path in (tmp_path / "a" / "b").iterdir()}


def test_bad_input_makes_no_folder(tmp_path, cache):
    """All problems come at once, and nothing is written."""
    done = run_plan(tmp_path, cache, "--vram", "8", "--model", "bert-base-uncased", "--seq-len", "0")
    assert (2, ["--vram", "--seq-len"]) == (done.returncode, [x.split(":")[0] for x in done.stderr.splitlines()])
    assert [] == list(tmp_path.iterdir())


def test_misspelt_model_names_the_near_match(tmp_path, cache):
    """A model that nobody knows is bad input: one line with what was probably meant."""
    done = run_plan(tmp_path, cache, "--vram", "8GB", "--model", "bert-base-uncasd")
    assert 2 == done.returncode, done.stderr
    assert done.stderr.startswith("--model: ")
    assert "bert-base-uncased" in done.stderr


def test_unknown_card_is_bad_input(tmp_path, cache):
    """So is a card."""
    done = run_plan(tmp_path, cache, "--vram", "8GB", "--model", "bert-base-uncased", "--gpu", "Voodoo 2")
    assert 2 == done.returncode, done.stderr
    assert done.stderr.startswith("--gpu: ")


def test_folder_that_cannot_be_made_is_a_clear_line(tmp_path, cache):
    """A folder below a file is refused before anything is planned."""
    (tmp_path / "file").write_text("x")
    done = run_plan(tmp_path, cache, "--vram", "8GB", "--model", "bert-base-uncased", "--out", "file/plan")
    assert (2, 1) == (done.returncode, len(done.stderr.splitlines()))
    assert done.stderr.startswith("--out: got 'file/plan'; ")


@pytest.mark.slow
def test_nothing_fits_says_what_would(tmp_path, cache):
    """Llama-2-7b at 4 GB ends with 3, says what would do in GB, and writes no folder."""
    done = run_plan(tmp_path, cache, "--vram", "4GB", "--model", "meta-llama/Llama-2-7b-hf")
    assert (3, "") == (done.returncode, done.stdout), done.stderr
    assert "--vram" in done.stderr
    assert "Traceback" not in done.stderr
    assert [] == list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_leaves_nothing(tmp_path):
    """An interrupted run says so in one word, without a traceback, and leaves no half-written folder."""
    command = [str(PLAN), "--vram", "24GB", "--model", "roberta-large"]
    started = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path / "cache"), stderr=subprocess.PIPE, text=True
    )
    # The run takes several times this from an empty cache; by now the command has reached the library.
    time.sleep(1.5)
    started.send_signal(signal.SIGINT)
    _, stderr = started.communicate(timeout=60)
    assert 130 == started.returncode, stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "plans").exists() or [] == list((tmp_path / "plans").iterdir())
