"""The command end to end, as a person runs it: the installed script, a process of its own, no network, no GPU."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
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
    return os.environ | {"HF_HUB_OFFLINE": "1", "VRAMPLAN_CACHE": str(cache)}


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


# Full disks


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a small model's config.json, an earlier plan of it in ``out``, and a cache."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "model").mkdir()
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500, "n_positions": 128}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    done = run_plan(folder, folder / "cache", *SMALL, "--out", "out")
    assert (0, "") == (done.returncode, done.stderr)
    return folder


SMALL = ["--model", "model", "--vram", "4GB", "--device", "none", "--quiet"]


def limited(folder, cache, largest_bytes, *arguments):
    """The finished command that can write no file larger than this."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, largest_bytes))

    command = [str(PLAN), *arguments]
    pipes = {"capture_output": True, "text": True, "env": environment(cache)}
    return subprocess.run(command, cwd=folder, preexec_fn=limit, check=False, **pipes)


@pytest.mark.slow
def test_a_plan_that_cannot_be_written_leaves_the_earlier_one(small):
    """2, one line about --out and one about the cache, nothing half-written, the earlier plan as it was."""
    before = {path.name: path.read_bytes() for path in (small / "out").iterdir()}
    done = limited(small, small / "other-cache", 1000, *SMALL, "--seq-len", "64", "--out", "out")
    assert (2, "") == (done.returncode, done.stdout), done.stderr
    cache_line, out_line = done.stderr.splitlines()
    assert cache_line.startswith("nothing could be kept in ")
    assert "File too large; VRAMPLAN_CACHE names another folder" in cache_line
    assert out_line.startswith("--out: got 'out'; ")
    assert out_line.endswith("; File too large")
    assert before == {path.name: path.read_bytes() for path in (small / "out").iterdir()}
    assert {"model", "out", "cache", "other-cache"} == {path.name for path in small.iterdir()}
    assert [] == [path for path in (small / "other-cache").rglob("*") if path.is_file() and path.suffix != ".pickle"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_earlier_plan(small, tmp_path):
    """A real file system with no room for a second plan beside the first."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        shutil.copytree(small / "out", disk / "out")
        before = {path.name: path.read_bytes() for path in (disk / "out").iterdir()}
        done = run_plan(small, small / "cache", *SMALL, "--out", str(disk / "out"))
        assert (2, "") == (done.returncode, done.stdout), done.stderr
        (line,) = done.stderr.splitlines()
        assert line.endswith("; No space left on device")
        assert {"out"} == {path.name for path in disk.iterdir()}
        assert before == {path.name: path.read_bytes() for path in (disk / "out").iterdir()}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# Interrupts


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seconds", [1.5, 8])
def test_ctrl_c_ends_with_130_and_leaves_nothing(number, seconds, tmp_path):
    """Loading or recording, an interrupted run says so in one line and leaves no half-written file."""
    command = [str(PLAN), "--vram", "24GB", "--model", "roberta-large"]
    started = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path / "cache"), stderr=subprocess.PIPE, text=True
    )
    # The run takes several times this from an empty cache; by now the command has reached the library.
    time.sleep(seconds)
    started.send_signal(number)
    _, stderr = started.communicate(timeout=60)
    assert (130, "interrupted\n") == (started.returncode, stderr)
    assert not (tmp_path / "plans").exists()
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".pickle"]


STOPPED = """
import os, psutil, signal, sys, threading
from planner import cli, progress

def stop():
    mine = psutil.Process().children(recursive=True)
    open('trials', 'w').write(' '.join(str(process.pid) for process in mine))
    os.kill(os.getpid(), signal.{name})

class Stops(progress.LineProgress):
    def trial_started(self, text):
        super().trial_started(text)
        {started}
    def trial_ended(self, text, **result):
        super().trial_ended(text, **result)
        {ended}

progress.LineProgress = Stops
cli.main()
"""
DURING = {"name": "SIGTERM", "started": "threading.Timer(1, stop).start()", "ended": "raise AssertionError"}
AFTER = {"name": "SIGINT", "started": "pass", "ended": "stop()"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "source", "lines"),
    [
        (DURING, "simulated", ["interrupted before a trial had ended: the plan is simulated, not measured"]),
        (AFTER, "measured", ["trial 1", "interrupted after 1 trial: the plan is the best so far"]),
    ],
)
def test_an_interrupted_search_gives_the_best_so_far(stop, source, lines, small):
    """A real signal while a real trial runs on the processor: a whole plan, printed and said to be unfinished; 130.

    What was not measured is not called so, and no trial's process outlives the command.
    """
    words = ["--model", "model", "--vram", "2GB", "--device", "cpu", "--seq-len", "32", "--batch-size", "4"]
    words += ["--precision", "fp32", "--checkpointing", "none,full", "--out", f"interrupted-{source}"]
    command = [sys.executable, "-c", STOPPED.format(**stop), *words]
    pipes = {"capture_output": True, "text": True, "env": environment(small / "cache")}
    done = subprocess.run(command, cwd=small, check=False, timeout=400, **pipes)
    assert 130 == done.returncode, done.stderr
    assert lines == [line if line.startswith("interrupted") else line[:7] for line in done.stderr.splitlines()]
    assert f"tokens/s ({source})" in done.stdout
    written = json.loads((small / f"interrupted-{source}" / "plan.json").read_text())
    assert source == written["time"]["source"]
    assert FILES <= {path.name for path in (small / f"interrupted-{source}").iterdir()}
    processes = [int(number) for number in (small / "trials").read_text().split()]
    assert processes
    assert [] == [number for number in processes if psutil.pid_exists(number)]
