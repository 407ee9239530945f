"""The command's surface: options, exit codes, messages, the report. What it plans is tested in test_cli_plan."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from planner import cache, cli, config
from planner.budget import Memory
from planner.config import LoraSettings, TrainingConfig
from planner.errors import InputError, NothingFitsError, Problem, TrialError
from planner.progress import NoProgress
from planner.render import next_commands, render
from planner.request import PlanRequest, WorkerRequest, make_request

PLAN = Path(sysconfig.get_path("scripts")) / "plan"
OUTPUT_OPTIONS = {"out", "snapshot", "as_json", "quiet", "version", "help"}
HEAVY = ["torch", "transformers", "optuna", "pandas", "numpy", "pydantic", "rich"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Nothing here writes into the checkout."""
    monkeypatch.chdir(tmp_path)


def run_with(monkeypatch, plan, *arguments):
    """Exit code of the command where ``planner.plan`` is the given function."""
    monkeypatch.setattr("planner.plan", plan, raising=False)
    return cli.run(["--model", "bert-base-uncased", "--vram", "8GB", *arguments])


def raiser(error):
    """A ``plan()`` that fails."""

    def plan(**_):
        raise error

    return plan


def handmade_plan(**changes):
    """A plan of plain values, as the report takes it."""
    chosen = TrainingConfig(
        micro_batch_size=16,
        seq_len=512,
        max_tokens_per_micro_batch=8192,
        gradient_accumulation_steps=2,
        effective_batch_size=32,
        precision="bf16-amp",
    )
    breakdown = {"parameters": 2**29, "gradients": 2**29, "optimizer": 2**30, "activations": 3 * 2**30}
    memory = Memory(
        peak_allocated_bytes=5 * 2**30,
        peak_reserved_bytes=5 * 2**30 + 2**27,
        context_bytes=2**29,
        margin_bytes=2**28,
        total_bytes=6_308_233_216,
        ceiling_bytes=8_342_973_972,
        breakdown=breakdown | {"temporaries": 0, "workspace": 0},
        phases={"load": {"peak_allocated_bytes": 2**29, "peak_reserved_bytes": 2**29}},
    )
    other = chosen.model_dump() | {"micro_batch_size": 8, "checkpointing": "full"}
    lever = {"lever": "checkpointing", "change": "none -> full", "saves_bytes": 2**31, "speed_ratio": 0.78}
    values = {
        "request": make_request(model="bert-base-uncased", vram="8GB"),
        "hardware": {"name": "RTX 4060 [8 GB]"},
        "workload": {"model": "bert-base-uncased", "task": "sequence-classification"},
        "config": chosen,
        "peak": memory,
        "time": SimpleNamespace(step_ms=1234.4, tokens_per_s=13265.7, source="simulated"),
        "search": {},
        "reasons": [
            SimpleNamespace(field="precision", value="bf16-amp", reason="the card has bf16 [cc 8.9]"),
            SimpleNamespace(field="gpu", value="RTX 4060", reason="a typical card with 8 GB"),
        ],
        "alternatives": [
            other | {"total_bytes": 2**32, "tokens_per_s": 9000.0, "reason": f"slower ({n})"} for n in range(5)
        ],
        "levers": [lever | {"reason": "recomputes activations"}],
        "interrupted": False,
        "to_json": lambda: {"schema_version": 1},
        "save": lambda folder: folder,
    }
    return SimpleNamespace(**(values | changes))


def report(plan, folder="plans/x", width=100):
    """The report as text, as a file of that width gets it."""
    stream = io.StringIO()
    render(plan, Path(folder), Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


# The options


def test_options_are_the_request_fields():
    """Every argument of the API has its option and every option its argument, but those about output."""
    assert set(PlanRequest.model_fields) == {p.name for p in cli.command.params} - OUTPUT_OPTIONS


def test_option_names_are_the_field_names_with_dashes():
    """seq_len is --seq-len, and so on for all."""
    got = {p.name: p.opts for p in cli.command.params if p.name not in OUTPUT_OPTIONS}
    assert {name: [cli.flag(name)] for name in PlanRequest.model_fields} == got


def test_a_workers_options_are_its_requests_fields():
    """plan worker has an option for each argument of worker(), and --quiet."""
    worker = cli.command.commands["worker"]
    assert {*WorkerRequest.model_fields, "quiet"} == {p.name for p in worker.params}
    assert {name: [cli.flag(name)] for name in WorkerRequest.model_fields} == {
        p.name: p.opts for p in worker.params if p.name != "quiet"
    }


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("task", config.TASKS),
        ("method", ("auto", *config.METHODS)),
        ("precision", config.PRECISIONS),
        ("offload", config.OFFLOADS),
        ("quantization", config.QUANTIZATIONS),
        ("optimizer", config.OPTIMIZERS),
        ("attention", config.ATTENTIONS),
        ("loss", config.LOSSES),
    ],
)
def test_help_names_every_word_of_a_vocabulary(option, words):
    """The help is written by hand, so that it needs no import; it must not fall behind the vocabulary."""
    text = next(p.help for p in cli.command.params if p.name == option)
    assert [] == [word for word in words if word not in re.findall(r"[\w-]+", text)]


def test_help_names_the_defaults():
    """Defaults in the help are the request's."""
    helps = {p.name: p.help for p in cli.command.params}
    for name in ("mode", "method", "device", "num_labels", "headroom", "seed"):
        assert helps[name].endswith(f"[default: {PlanRequest.model_fields[name].default}]")


# Help


@pytest.mark.parametrize(
    ("words", "shown"), [([], "worker   Run trials"), (["worker"], "--storage URL"), ([], "--vram SIZE")]
)
def test_help_imports_nothing_heavy(words, shown, tmp_path):
    """``plan --help`` imports neither torch nor transformers nor anything else that takes time; nor for a command."""
    run = f"run([*{words}, '--help'])"
    code = f"import sys; from planner.cli import run; {run}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.splitlines()[-1]
    assert shown in done.stdout


def test_help_is_quick(tmp_path):
    """The installed command prints its help in half a second (the best of three, on a busy machine)."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([PLAN, "--help"], cwd=tmp_path, capture_output=True, check=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) <= 0.5


def test_version_is_the_distribution_version():
    """``plan --version`` names the installed release."""
    result = CliRunner().invoke(cli.command, ["--version"])
    assert (0, True) == (result.exit_code, result.output.startswith("vramplan, version "))


# Bad input


def test_all_problems_at_once_as_flags(tmp_path):
    """The installed command ends with 2, one line on standard error for each problem, none on standard output."""
    wrong = ["--vram", "8", "--seq-len", "-5", "--precision", "fp61", "--out", __file__]
    done = subprocess.run([PLAN, *wrong], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (2, "") == (done.returncode, done.stdout)
    lines = done.stderr.splitlines()
    assert ["--model", "--vram", "--seq-len", "--precision", "--out"] == [line.split(":")[0] for line in lines]
    assert lines[1].startswith("--vram: got '8'; accepted: ")
    assert lines[1].endswith("write 8GB")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "--model: missing"),
        (["--vrm", "8GB"], "Did you mean '--vram'"),
        (["--vram"], "requires an argument"),
        (["bert"], "got 'bert'; accepted: options such as --model bert, or one of the commands worker"),
        (["--vram", "8GB", "bert"], "got 'bert'; accepted: "),
        (["--vram", "8GB", "worker", "--storage", "a"], "got options before 'worker'; accepted: plan worker and its"),
        (["--model", "m", "--vram", "8GB", "--device", "gpu"], "--device: got 'gpu'; accepted: auto, none, cpu, cuda"),
        (["worker"], "--storage: missing; accepted: a journal's file such as "),
        (["worker", "--storage", "a", "--device", "none"], "--device: got 'none'; accepted: auto, cpu, cuda"),
        (["worker", "--storage", "a", "b"], "unexpected extra argument"),
        (["--model", "m", "--vram", "8GB", "--out", ""], "--out: got ''"),
    ],
)
def test_bad_input_ends_with_2(arguments, part, capsys):
    """Whoever finds the problem, click or the request, the exit code is 2 and the message names it."""
    assert 2 == cli.run(arguments)
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("word", ["bert", "wroker", "--", "a b", "[x]"])
def test_an_unknown_command_is_one_line(word, capsys):
    """A first word that is no command is told in one line, with what may stand there."""
    assert 2 == cli.run([word, "--vram", "8GB"] if word != "--" else ["--", "x"])
    out, err = capsys.readouterr()
    assert ("", 1, True) == (out, len(err.splitlines()), err.startswith("Error: got "))


def test_a_value_may_be_a_commands_name(monkeypatch):
    """--model worker is a model."""
    got = {}
    monkeypatch.setattr("planner.plan", lambda **a: got.update(a) or handmade_plan(), raising=False)
    assert 0 == cli.run(["--model", "worker", "--vram", "8GB"])
    assert "worker" == got["model"]


def test_repeated_restrictions_add_up(monkeypatch):
    """--precision fp32 --precision bf16 is --precision fp32,bf16."""
    got = {}
    run_with(monkeypatch, lambda **a: got.update(a) or handmade_plan(), "--precision", "fp32", "--precision", "bf16")
    assert ("fp32", "bf16") == got["precision"]


def test_plan_gets_exactly_the_request(monkeypatch):
    """The command passes on what was asked for, checked, and where to tell what goes on; the rest stays left out."""
    got = {}
    run_with(monkeypatch, lambda **a: got.update(a) or handmade_plan(), "--seq-len", "128", "--trust-remote-code")
    expected = make_request(model="bert-base-uncased", vram="8GB", seq_len=128, trust_remote_code=True)
    assert isinstance(got.pop("progress"), NoProgress)
    assert {name: value for name, value in expected if name in expected.model_fields_set} == got
    assert {"model", "vram", "seq_len", "trust_remote_code"} == got.keys()


# Where the plan goes


@pytest.mark.parametrize(
    ("model", "vram", "expected"),
    [
        ("bert-base-uncased", "8GB", "bert-base-uncased-8GB"),
        ("meta-llama/Llama-2-7b", "7.5 GiB", "meta-llama--Llama-2-7b-7.5GiB"),
        ("bert-base-uncased", 2**33, "bert-base-uncased-8589934592B"),
        ("../$HOME; rm", "8GB", "HOME-rm-8GB"),
    ],
)
def test_default_folder(model, vram, expected):
    """The default folder is named after the model and the memory, and stays below plans/."""
    assert Path("plans") / expected == cli.default_folder(make_request(model=model, vram=vram))


@pytest.mark.parametrize("inside", ["", "config.json"])
def test_default_folder_of_a_local_model(inside, tmp_path):
    """A local model's plan is named after its folder, not after the whole path."""
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").write_text("{}")
    request = make_request(model=tmp_path / "my model" / inside, vram="8GB")
    assert Path("plans/my-model-8GB") == cli.default_folder(request)


def test_other_files_are_never_replaced(tmp_path, monkeypatch, capsys):
    """A folder with files that are no plan's is refused before anything is planned."""
    (tmp_path / "thesis.tex").write_text("years of work")
    assert 2 == run_with(monkeypatch, raiser(AssertionError("planned")), "--out", str(tmp_path))
    assert "--out: got " in capsys.readouterr().err


def test_default_folder_in_the_way_matters_only_where_it_is_used(tmp_path, monkeypatch):
    """Other files in plans/MODEL-VRAM are kept; with --out elsewhere they are nobody's business."""
    folder = tmp_path / "plans" / "bert-base-uncased-8GB"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert 2 == run_with(monkeypatch, raiser(AssertionError("planned")))
    assert 0 == run_with(monkeypatch, lambda **_: handmade_plan(), "--out", "elsewhere")


@pytest.mark.parametrize("existing", ["nothing", "empty", "plan"])
def test_new_empty_and_earlier_folders_are_accepted(existing, tmp_path, monkeypatch):
    """A plan goes to a new folder, an empty one, or an earlier plan's."""
    folder = tmp_path / "deep" / "out"
    if existing != "nothing":
        folder.mkdir(parents=True)
    if existing == "plan":
        (folder / "plan.json").write_text("{}")
    saved = []
    assert 0 == run_with(monkeypatch, lambda **_: handmade_plan(save=saved.append), "--out", str(folder))
    assert [folder] == saved


def test_an_earlier_plan_that_cannot_be_replaced_is_found_out_before_planning(tmp_path, monkeypatch, capsys):
    """A new plan is written beside the old one first, so the folder above must take it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert 2 == run_with(monkeypatch, raiser(AssertionError("planned")), "--out", "out")
    assert f"; {tmp_path} cannot be written to\n" in capsys.readouterr().err


def test_folder_that_fails_while_saving_is_a_clear_line(monkeypatch, capsys):
    """A full or vanished disk is bad news about --out, not a traceback."""

    def save(_):
        raise OSError(28, "No space left on device")

    assert 2 == run_with(monkeypatch, lambda **_: handmade_plan(save=save), "--out", "new")
    out, err = capsys.readouterr()
    assert ("", True) == (out, err.startswith("--out: got 'new'; "))
    assert err.endswith("No space left on device\n")


# Exit codes


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError([Problem(argument="gpu", message="got 'x'")]), 2, "--gpu: got 'x'\n"),
        (NothingFitsError("needs 16GB", smallest_vram_bytes=2**34), 3, "needs 16GB\n"),
        (TrialError("the device is gone"), 4, "the device is gone\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_each_error_has_its_exit_code_and_message(error, code, message, monkeypatch, capsys):
    """Errors raised on purpose are printed as they are, on standard error alone."""
    assert code == run_with(monkeypatch, raiser(error))
    assert ("", message) == tuple(capsys.readouterr())


def test_unexpected_error_is_one_line(monkeypatch, capsys):
    """An error nobody foresaw is one line that asks for a report and says how to see more."""
    monkeypatch.delenv(cli.DEBUG_VARIABLE, raising=False)
    assert 1 == run_with(monkeypatch, raiser(ZeroDivisionError("first\nsecond")))
    err = capsys.readouterr().err
    assert err.startswith("internal error: ZeroDivisionError: first second; please report it")
    assert 1 == len(err.splitlines())
    assert f"{cli.DEBUG_VARIABLE}=1" in err


def test_debug_variable_shows_the_traceback(monkeypatch, capsys):
    """With the variable set, the traceback comes first."""
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "1")
    assert 1 == run_with(monkeypatch, raiser(ZeroDivisionError("x")))
    assert capsys.readouterr().err.startswith("Traceback")


# Interrupted


@pytest.mark.parametrize(
    ("trials", "source", "said"),
    [
        (7, "measured", "interrupted after 7 trials: the plan is the best so far\n"),
        (1, "measured", "interrupted after 1 trial: the plan is the best so far\n"),
        (0, "measured", "interrupted before a trial had ended: the plan is the best so far\n"),
        (0, "simulated", "interrupted before a trial had ended: the plan is simulated, not measured\n"),
        (3, "simulated", "interrupted after 3 trials: the plan is simulated, not measured\n"),
    ],
)
@pytest.mark.parametrize("output", [["--quiet"], ["--quiet", "--json"]])
def test_an_interrupted_plan_is_written_printed_and_said_to_be_one(trials, source, said, output, monkeypatch, capsys):
    """The best so far is there, in every form of output; what was not measured is not called so; 130."""
    saved, time_of = [], SimpleNamespace(step_ms=1.0, tokens_per_s=1.0, source=source)

    def plan(progress, **_):
        for number in range(trials):
            progress.trial_ended(f"micro-batch {number}", problem="the device ran out of memory")
        return handmade_plan(interrupted=True, time=time_of, save=saved.append)

    assert 130 == run_with(monkeypatch, plan, *output)
    out, err = capsys.readouterr()
    assert (1, True, said) == (len(saved), bool(out), err)
    assert "--json" not in output or json.loads(out)


def test_an_interrupted_plans_report_comes_before_the_line_that_says_so(monkeypatch, capsys):
    """Without --quiet trials have their lines, then the report is printed."""

    def plan(progress, **_):
        progress.trial_ended("micro-batch 8", tokens_per_s=10.0)
        return handmade_plan(interrupted=True)

    assert 130 == run_with(monkeypatch, plan)
    out, err = capsys.readouterr()
    assert "accelerate launch" in out
    assert ["trial 1: ", "interrupt"] == [line[:9] for line in err.splitlines()]


def test_what_the_search_could_not_do_is_told_at_the_end(monkeypatch, capsys):
    """Such as a storage that failed on the way: the plan is made all the same."""
    search = {"problems": ["trials can't be kept (No space left on device)"]}
    assert 0 == run_with(monkeypatch, lambda **_: handmade_plan(search=search), "--quiet")
    assert "trials can't be kept (No space left on device)\n" == capsys.readouterr().err


STOPPED = """
import signal, sys, time, weakref, gc
import planner
from planner import cache, cli
def plan(**_):
{body}
planner.plan = plan
sys.argv = ["plan", "--model", "bert-base-uncased", "--vram", "8GB"]
cli.main()
"""
WAIT = "    print('ready', flush=True); time.sleep(30)"
GO_ON = """
    try:
        print('ready', flush=True); time.sleep(30)
    except KeyboardInterrupt:
        print('the best so far is looked for', flush=True); time.sleep(30)
"""
HOLD_ON = """
    for _ in range(9):
        try:
            print('ready', flush=True); time.sleep(30)
        except BaseException: pass
"""
IN_A_CALLBACK = """
    class Block: pass
    def freed(_):
        print('ready', flush=True); time.sleep(30)
    block = Block(); watch = weakref.ref(block, freed)
    del block
    cache.remembered('steps', {}, lambda: 'a recording that misses a free')
    time.sleep(30)
"""


def stopped(body, *signals, ignored=False, folder):
    """Exit code, standard output and standard error of a command that gets the signals, one for each line it prints."""
    ignore = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None
    environment = os.environ | {"VRAMPLAN_CACHE": str(folder / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, "cwd": folder, "text": True}
    command = [sys.executable, "-c", STOPPED.format(body=body)]
    process = subprocess.Popen(command, preexec_fn=ignore, **pipes)  # noqa: PLW1509 - no threads here
    lines = []
    for number in signals:
        lines.append(process.stdout.readline())
        process.send_signal(number)
    out, err = process.communicate(timeout=20)
    return process.returncode, "".join(lines) + out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_before_there_is_anything_is_one_line(number, tmp_path):
    """130, one line, nothing written; a polite kill is the same."""
    assert (130, "ready\n", "interrupted\n") == stopped(WAIT, number, folder=tmp_path)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_at_once(second, tmp_path):
    """Whatever is still to be made of what there is."""
    code, out, err = stopped(GO_ON, signal.SIGINT, second, folder=tmp_path)
    assert (130, 2, "interrupted\n") == (code, len(out.splitlines()), err)
    assert [] == list(tmp_path.iterdir())


def test_a_third_kills_what_holds_on(tmp_path):
    """A library that swallows interrupts can't keep the process."""
    assert -signal.SIGINT == stopped(HOLD_ON, *[signal.SIGINT] * 3, folder=tmp_path)[0]


def test_an_interrupt_inside_a_callback_is_not_lost(tmp_path):
    """Python drops it there. It comes again, and a recording that may miss a free because of it is not kept."""
    start = time.monotonic()
    assert (130, "ready\n", "interrupted\n") == stopped(IN_A_CALLBACK, signal.SIGINT, folder=tmp_path)
    assert 15 >= time.monotonic() - start
    assert [] == list(tmp_path.iterdir())


def test_a_background_job_leaves_ctrl_c_to_others(tmp_path):
    """Shells start those with the signal ignored; SIGTERM still ends them."""
    body = "    print('ready', flush=True); time.sleep(0.5); print('still here', flush=True); time.sleep(30)"
    code, out, err = stopped(body, signal.SIGINT, signal.SIGTERM, ignored=True, folder=tmp_path)
    assert (130, "ready\nstill here\n", "interrupted\n") == (code, out, err)


# The cache's troubles, and a worker


@pytest.mark.parametrize("output", [[], ["--json"], ["--quiet"]])
def test_what_the_cache_could_not_keep_is_told_once_at_the_end(output, tmp_path, monkeypatch, capsys):
    """A plan is made all the same; the line names the folder and the reason, and is no part of standard output."""
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("VRAMPLAN_CACHE", "file")
    monkeypatch.setattr(cache, "_state", cache._State())

    def plan(**_):
        return [cache.remembered("steps", {"n": n}, str) for n in range(3)] and handmade_plan()

    assert 0 == run_with(monkeypatch, plan, *output)
    problem = "nothing could be kept in file: that is no folder; VRAMPLAN_CACHE names another folder\n"
    assert problem == capsys.readouterr().err


def test_a_plan_that_fails_tells_of_the_cache_too(tmp_path, monkeypatch, capsys):
    """After what went wrong with the plan nothing else is lost."""
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("VRAMPLAN_CACHE", "file")
    monkeypatch.setattr(cache, "_state", cache._State())

    def plan(**_):
        raise NothingFitsError(str(cache.remembered("steps", {}, lambda: "needs 16GB")), smallest_vram_bytes=2**34)

    assert 3 == run_with(monkeypatch, plan)
    assert ["nothing could be kept in file", "needs 16GB"] == [
        line.split(":")[0] for line in capsys.readouterr().err.splitlines()
    ]


def worker_with(monkeypatch, worker, *arguments):
    """Exit code of ``plan worker`` where ``planner.api.worker`` is the given function."""
    monkeypatch.setattr("planner.api.worker", worker, raising=False)
    return cli.run(["worker", "--storage", "trials.log", *arguments])


def test_a_worker_gets_its_request_and_says_how_many_trials_it_ran(monkeypatch, capsys):
    """Storage, device and timeout as they were checked; one line at the end, none when quiet."""
    got = {}
    assert 0 == worker_with(monkeypatch, lambda **a: got.update(a) or 3, "--device", "CUDA:1", "--timeout", "60")
    assert isinstance(got.pop("progress"), NoProgress)
    assert {"storage": "trials.log", "device": "cuda:1", "timeout": 60.0} == got
    assert ("ran 3 trials\n", "") == tuple(capsys.readouterr())
    assert 0 == worker_with(monkeypatch, lambda **_: 0)
    assert capsys.readouterr().out.startswith("ran 0 trials: no search there has trials left for this device")
    assert 0 == worker_with(monkeypatch, lambda **_: 1, "--quiet")
    assert ("", "") == tuple(capsys.readouterr())


def test_a_workers_errors_have_the_plans_exit_codes(monkeypatch, capsys):
    """Bad input is told by its options, a device's failure as it is, an interrupt as interrupted."""
    problem = Problem(argument="storage", message="got 'trials.log': no search there")
    for error, code, said in (
        (InputError([problem]), 2, "--storage: got 'trials.log': no search there\n"),
        (TrialError("the device is gone"), 4, "the device is gone\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ):
        assert code == worker_with(monkeypatch, raiser(error))
        assert ("", said) == tuple(capsys.readouterr())


# What is printed


def test_json_is_all_of_standard_output(monkeypatch, capsys):
    """--json prints plan.json and nothing else."""
    run_with(monkeypatch, lambda **_: handmade_plan(), "--json")
    assert {"schema_version": 1} == json.loads(capsys.readouterr().out)


def test_quiet_prints_the_folder(monkeypatch, capsys):
    """--quiet prints the folder's path and nothing else."""
    run_with(monkeypatch, lambda **_: handmade_plan(), "--quiet")
    assert f"{Path('plans/bert-base-uncased-8GB')}\n" == capsys.readouterr().out


def test_report_is_plain_in_a_pipe(monkeypatch, capsys):
    """Without a terminal there are no colour codes, and the report says what is to be run."""
    run_with(monkeypatch, lambda **_: handmade_plan())
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "accelerate launch --config_file plans/bert-base-uncased-8GB/accelerate.yaml" in out


def test_headline_echoes_card_ceiling_and_label_in_bytes():
    """The first lines say what is planned, on which card, and each size to the byte."""
    head = report(handmade_plan()).split("\nChoice")[0].replace("\n", " ")
    assert "bert-base-uncased, sequence-classification, on RTX 4060 [8 GB]" in head
    assert "needs 5.88 GiB of 7.77 GiB (6,308,233,216 of 8,342,973,972 bytes)" in head
    assert "--vram 8GB is 8,589,934,592 bytes" in head
    assert "1,234 ms a step, 13,266 tokens/s (simulated)" in head


def rows(text, section):
    """The lines of a section, whitespace squeezed."""
    body = text.split(f"\n{section}\n")[1].split("\n\n")[0]
    return [" ".join(line.split()) for line in body.splitlines()]


def test_choice_lists_every_field_with_its_reason():
    """Each field of the configuration is there, with its reason where there is one, then the other choices."""
    got = rows(report(handmade_plan()), "Choice")
    assert "precision bf16-amp the card has bf16 [cc 8.9]" in got
    assert "max tokens per micro batch 8,192" in got
    assert "gpu RTX 4060 a typical card with 8 GB" == got[-1]


def test_adapter_settings_are_shown_where_there_are_any():
    """LoRA's numbers are part of the choice; without adapters there is no such row."""
    plain = handmade_plan()
    adapted = plain.config.model_copy(update={"method": "lora", "lora": LoraSettings()})
    assert not [row for row in rows(report(plain), "Choice") if row.startswith("lora ")]
    assert [row for row in rows(report(handmade_plan(config=adapted)), "Choice") if row.startswith("lora r 16,")]


def test_memory_rows_add_up_to_the_total():
    """Parts, what the allocator holds beyond them, context and margin; rows of nothing are left out."""
    got = rows(report(handmade_plan()), "Memory at the peak")
    assert "held by the allocator beyond that 128 MiB 1.6%" in got
    assert "total 5.88 GiB 75.6% ██████████████████" in got
    assert "left under the ceiling 1.89 GiB 24.4%" == got[-1]
    assert not [row for row in got if row.startswith("temporaries")]


def test_at_most_three_alternatives_with_what_differs():
    """An alternative is what it changes, what that needs and why it was not taken."""
    got = rows(report(handmade_plan()), "Next best")
    assert 4 == len(got)
    assert "micro batch size 8, checkpointing full 4 GiB 9,000 slower (0)" == got[1]


@pytest.mark.parametrize(("saves", "shown"), [(2**31, "-2 GiB"), (-(2**20), "+1 MiB"), (0, "0 B")])
def test_levers_show_memory_as_a_change(saves, shown):
    """A saving is a minus, a cost is a plus."""
    lever = {"lever": "optimizer", "change": "a -> b", "saves_bytes": saves, "speed_ratio": 0.5, "reason": "why"}
    assert f"optimizer a -> b {shown} 0.50x why" in rows(
        report(handmade_plan(levers=[lever])), "What each lever would buy"
    )


def test_sections_without_rows_are_left_out():
    """A plan with no alternatives and no levers has no empty headings."""
    text = report(handmade_plan(alternatives=[], levers=[]))
    assert not [title for title in ("Next best", "What each lever would buy") if title in text]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_commands_are_never_broken(width):
    """Commands can be pasted from a terminal of any width, whatever is in the path."""
    text = report(handmade_plan(), folder="my plans/[x]", width=width)
    assert [] == [line for _, line in next_commands(Path("my plans/[x]")) if f"  {line}\n" not in text]
    assert "'my plans/[x]/train.py'" in text


def test_terminal_without_unicode_gets_ascii(tmp_path):
    """Where a character cannot be written the report still comes, in what the terminal has."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_cli, pathlib; from planner.render import render; "
        "render(test_cli.handmade_plan(), pathlib.Path('p'))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert b" 75.6%  ##################" in done.stdout
