"""How an emitted infer.py goes through its data: every row once and in order, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from emitted import minilm
from inference_scripts import Answered, as_jsonl, infer, make_inference_plan, write_infer

pytestmark = pytest.mark.usefixtures("one_thread")
Hook = Callable[[int, int], None]


@pytest.fixture(scope="module")
def plan(tiny: Any) -> dict[str, Any]:
    """Vectors of texts of at most 32 tokens, four of the longest together."""
    return make_inference_plan("embedding", str(tiny("bert")))


@pytest.fixture(scope="module")
def expected(plan: dict[str, Any], rows: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Vectors of sixty texts, from a run that nothing happened to."""
    return infer(plan, tmp_path_factory.mktemp("whole"), rows[:60]).column("embedding")


def same(vectors: list[Any], run: Answered) -> bool:
    """Whether a run has these answers, each once and in order."""
    assert list(range(len(vectors))) == run.column("index")
    return [pytest.approx(vector, abs=1e-6) for vector in vectors] == run.column("embedding")


def with_hook(hook: Hook, window: int | None = None) -> Callable[[ModuleType], None]:
    """A script whose model calls the hook with each batch's shape, and whose window has so many texts."""

    def change(script: ModuleType) -> None:
        script.WINDOW = window or script.WINDOW
        load = script.load_model

        def watched(*arguments: Any) -> Any:
            model = load(*arguments)
            model.register_forward_pre_hook(lambda _, args, inputs: hook(*inputs["input_ids"].shape), with_kwargs=True)
            return model

        script.load_model = watched

    return change


# ----- reading -----


def test_a_bad_row_has_its_place(tmp_path: Path, plan: Any, rows: Any, expected: list[Any]) -> None:
    """Rows that can't be read or have no text get a line that says why; the others their answers."""
    texts = [row["text"] for row in rows[:4]]
    data = [
        {"text": texts[0]},
        "not json",
        {"text": " "},
        "",
        {"text": texts[1]},
        {"other": "column"},
        {"text": 7},
        '{"text": "half of a pair: \\ud800"}',
        '["a list"]',
        {"text": texts[2]},
    ]
    run = infer(plan, tmp_path, data)
    assert 0 == run.code
    problems = {1: "no JSON object", 2: "no text", 4: "no text", 5: "no text", 6: "not UTF-8", 7: "no JSON object"}
    assert problems == {answer["index"]: answer["error"] for answer in run.answers if "error" in answer}
    assert list(range(9)) == run.column("index")
    assert [pytest.approx(v, abs=1e-6) for v in expected[:3]] == [run.answers[i]["embedding"] for i in (0, 3, 8)]
    assert "9 rows (6 without an answer)" in run.err


def test_other_sources(tmp_path: Path, plan: Any, rows: Any, expected: list[Any]) -> None:
    """csv, parquet, txt and standard input, of JSON lines or of plain ones: the same answers."""
    import pandas as pd

    table = pd.DataFrame(rows[:8])
    texts = "".join(f"{row['text']}\n" for row in rows[:8]).encode()
    table.to_csv(tmp_path / "data.csv", index=False)
    table.to_parquet(tmp_path / "data.parquet")
    (tmp_path / "data.txt").write_bytes(b"\xef\xbb\xbf" + texts)
    for name in ("data.csv", "data.parquet", "data.txt"):
        assert same(expected[:8], infer(plan, tmp_path, tmp_path / name, output=f"{name}.jsonl")), name
    lines = "".join(f"{json.dumps(row)}\n" for row in rows[:8]).encode()
    for name, given in (("plain", texts), ("json", lines)):
        assert same(expected[:8], infer(plan, tmp_path, [], output=f"{name}.jsonl", stdin=given)), name


def test_columns_are_found_or_asked_for(tmp_path: Path, plan: Any, rows: Any, expected: list[Any]) -> None:
    """--text-column names an unusual one; without it the run says what the data has, and exits with 2."""
    data = [{"body": row["text"]} for row in rows[:3]]
    assert same(expected[:3], infer(plan, tmp_path, data, "--text-column", "body"))
    run = infer(plan, tmp_path, data, output="other.jsonl")
    assert 2 == run.code
    assert "no column text or sentence or content or document or anchor or query among: body" in run.err
    run = infer(plan, tmp_path, data, "--text-column", "a,b", output="other.jsonl")
    assert "--text-column: got 2 columns; accepted: 1" in run.err


def test_no_such_data_or_model(tmp_path: Path, plan: Any, rows: Any) -> None:
    """One line and exit code 2."""
    run = infer(plan, tmp_path, rows[:1], "--model", str(tmp_path / "none"), output="new/folder.jsonl")
    assert 2 == run.code and f"--model {tmp_path / 'none'}: " in run.err
    for name, says in (("none.jsonl", "No such file"), ("data.xml", "accepted: a file that ends in .jsonl")):
        run = infer(plan, tmp_path, tmp_path / name)
        assert (2, []) == (run.code, run.answers)
        assert says in run.err


# ----- order -----


def test_windows_and_batches_keep_the_order(tmp_path: Path, plan: Any, rows: Any, expected: list[Any]) -> None:
    """Windows of seven texts, sorted by length within: batches keep to the budget, answers to the order."""
    shapes: list[tuple[int, int]] = []
    run = infer(plan, tmp_path, rows[:60], change=with_hook(lambda *shape: shapes.append(shape), window=7))
    assert same(expected, run)
    assert all(count * width <= 128 for count, width in shapes)
    assert 9 <= len(shapes) and sum(count for count, _ in shapes) == 60


def test_limit_and_a_smaller_budget(tmp_path: Path, plan: Any, rows: Any, expected: list[Any]) -> None:
    """--limit answers the first rows; --max-tokens-per-batch makes smaller batches."""
    shapes: list[tuple[int, int]] = []
    flags = ("--limit", "9", "--max-tokens-per-batch", "40")
    assert same(expected[:9], infer(plan, tmp_path, rows[:60], *flags, change=with_hook(lambda *s: shapes.append(s))))
    assert max(count * width for count, width in shapes) <= 40


# ----- going on -----


@pytest.mark.parametrize(
    "torn", [b"", b'{"ind', b'{"index": 9, "embedding": [0.25, 0.', b'{"index": 9, "embedding": []}']
)
def test_resume_goes_on_after_whole_lines(
    tmp_path: Path, plan: Any, rows: Any, expected: list[Any], torn: bytes
) -> None:
    """Nine whole lines stay as they are, a torn one is cut off, and the run goes on from there."""
    data = as_jsonl(tmp_path, rows[:30])
    first = infer(plan, tmp_path, data, "--limit", "9")
    before = first.output.read_bytes()
    first.output.write_bytes(before + torn)
    counts: list[int] = []
    run = infer(plan, tmp_path, data, "--resume", change=with_hook(lambda count, _: counts.append(count)))
    assert same(expected[:30], run)
    assert run.output.read_bytes().startswith(before)
    assert 21 == sum(counts)
    again = infer(plan, tmp_path, data, "--resume")
    assert again.output.read_bytes() == run.output.read_bytes()


def test_an_output_is_not_written_over(tmp_path: Path, plan: Any, rows: Any) -> None:
    """Without --resume an existing file is refused; with it one that is no output of this data's rows."""
    first = infer(plan, tmp_path, rows[:2])
    before = first.output.read_bytes()
    run = infer(plan, tmp_path, rows[:2])
    assert 2 == run.code and "exists: go on with --resume" in run.err
    assert before == run.output.read_bytes()
    for content in (b'{"index": 1, "embedding": []}\n', b"a text of mine", b"\n"):
        first.output.write_bytes(content)
        run = infer(plan, tmp_path, rows[:2], "--resume")
        assert 2 == run.code and "line 1 is no answer to row 0" in run.err
        assert content == first.output.read_bytes()


def test_an_interrupt_finishes_the_batch(tmp_path: Path, plan: Any, rows: Any, expected: list[Any]) -> None:
    """Ctrl-C: the batch is finished, what is done is written in order, exit code 130; --resume does the rest."""
    seen: list[int] = []

    def interrupt(count: int, _: int) -> None:
        seen.append(count)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    data = as_jsonl(tmp_path, rows[:60])
    run = infer(plan, tmp_path, data, change=with_hook(interrupt, window=10))
    assert 130 == run.code
    assert 4 == len(seen)
    assert 0 < len(run.answers) < 60
    assert f"stopped after {len(run.answers)} rows: --resume goes on" in run.err
    assert same(expected, infer(plan, tmp_path, data, "--resume"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
def test_killed_at_any_moment(tmp_path: Path, tiny: Any, rows: Any) -> None:
    """kill -9 at three moments after some lines were written: in the end every row has its answer once, in order."""
    plan = make_inference_plan("embedding", str(tiny("bert")))
    path, data, output = write_infer(plan, tmp_path), as_jsonl(tmp_path, rows * 8), tmp_path / "answers.jsonl"
    text = path.read_text(encoding="utf-8").replace("WINDOW = 4096", "WINDOW = 200")
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, str(path), "--data", str(data), "--output", str(output), "--quiet", "--resume"]
    chance, written = random.Random(0), [0]
    for _ in range(3):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        while process.poll() is None and (not output.exists() or output.stat().st_size <= written[-1]):
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.5))
        process.kill()
        process.wait()
        written.append(output.stat().st_size)
    assert sorted(set(written)) == written
    run = infer(plan, tmp_path, data, "--resume")
    assert 0 == run.code and written[-1] < output.stat().st_size
    assert list(range(len(rows) * 8)) == run.column("index")
    plain = infer(plan, tmp_path, rows, output="plain.jsonl").column("embedding")
    vectors = run.column("embedding")
    for start in range(0, len(vectors), len(rows)):
        some = vectors[start : start + len(rows)]
        assert all(abs(a - b) < 1e-5 for x, y in zip(plain, some, strict=True) for a, b in zip(x, y, strict=True))


# ----- memory -----


def refuse_above(tokens: int) -> Hook:
    """An allocator, as torch's on a CPU, that has room for so many tokens."""

    def hook(count: int, width: int) -> None:
        if count * width > tokens:
            raise RuntimeError(f"[enforce fail] DefaultCPUAllocator: can't allocate memory: {count * width} tokens")

    return hook


def test_memory_that_runs_out_splits_the_batch(tmp_path: Path, plan: Any, rows: Any, expected: list[Any]) -> None:
    """Half of the tokens from then on, and the same answers; a text that doesn't fit alone gets a line that says so."""
    shapes: list[tuple[int, int]] = []

    def hook(count: int, width: int) -> None:
        shapes.append((count, width))
        refuse_above(64)(count, width)

    run = infer(plan, tmp_path, rows[:60], change=with_hook(hook))
    assert same(expected, run)
    assert 1 == run.err.count("memory ran out: from now on at most 64 tokens in a batch, not 128")
    assert 1 == sum(count * width > 64 for count, width in shapes)
    run = infer(plan, tmp_path, [*rows[:2], {"text": "short"}], output="less.jsonl", change=with_hook(refuse_above(31)))
    failed = [answer for answer in run.answers if "error" in answer]
    assert 0 < len(failed) < 3 and {"memory ran out with 32 tokens"} == {answer["error"] for answer in failed}


DRIVER = """
import importlib.util, pathlib, re, resource, sys

path, headroom, *arguments = sys.argv[1:]
spec = importlib.util.spec_from_file_location("emitted", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
answer = script.answer_batch

def limited(*args, **options):
    data = int(re.search(r"VmData:\\s+([0-9]+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + int(headroom), resource.RLIM_INFINITY))
    try:
        return answer(*args, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

script.answer_batch = limited
sys.argv = [path, *arguments]
script.main()
"""
"""Runs a script whose batches may take so many bytes more than the process holds: the kernel refuses the rest."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_memory_that_really_runs_out(tmp_path: Path, rows: Any) -> None:
    """torch is refused memory by the kernel; batches are split until they fit, and the answers are the same."""
    sizes = {"seq_len": 128, "micro_batch_size": 64, "max_tokens_per_micro_batch": 8192}
    plan = make_inference_plan("embedding", str(minilm()), **sizes)
    path, data, output = write_infer(plan, tmp_path), as_jsonl(tmp_path, rows[:200]), tmp_path / "answers.jsonl"
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "driver.py"), str(path), str(80 * 10**6)]
    done = subprocess.run(
        [*command, "--data", str(data), "--output", str(output), "--quiet"],
        env=os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert 0 == done.returncode, done.stderr
    assert "memory ran out: from now on at most" in done.stderr
    assert "200 rows (0 without an answer)" in done.stderr
    whole = infer(plan, tmp_path, rows[:200], output="whole.jsonl")
    answers = [json.loads(line)["embedding"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert [pytest.approx(vector, abs=1e-5) for vector in whole.column("embedding")] == answers


def test_other_errors_are_not_swallowed(tmp_path: Path, plan: Any, rows: Any) -> None:
    """What isn't a lack of memory ends the run."""

    def fail(*_: int) -> None:
        raise RuntimeError("a kernel is broken")

    with pytest.raises(RuntimeError, match="a kernel is broken"):
        infer(plan, tmp_path, rows[:4], change=with_hook(fail))


# ----- levers -----


@pytest.mark.parametrize("embedding_on_card", [True, False])
def test_layers_on_disk(
    tmp_path: Path, plan: Any, tiny: Any, rows: Any, expected: list[Any], embedding_on_card: bool
) -> None:
    """The second layer is read from disk for its pass: the same answers, and no folder left behind.

    So with the table of token embeddings in host memory, where the script's own lookup takes the place of a hook.
    """
    workload, levers = {"layers_name": "encoder.layer"}, {"offload": "disk", "layers_on_card": 1}
    levers |= {"embedding_on_card": embedding_on_card}
    offloaded = make_inference_plan("embedding", str(tiny("bert")), workload=workload, **levers)
    places: list[Any] = []

    def watch(script: ModuleType) -> None:
        load = script.load_model

        def watched(*arguments: Any) -> Any:
            places.append(load(*arguments))
            return places[-1]

        script.load_model = watched

    run = infer(offloaded, tmp_path, rows[:60], change=watch)
    assert same(expected, run)
    assert {"meta"} == {p.device.type for p in places[0].encoder.layer[1].parameters()}
    assert {"cpu"} == {p.device.type for p in places[0].encoder.layer[0].parameters()}
    assert "cpu" == places[0].get_input_embeddings().weight.device.type
    assert not list(tmp_path.glob("*.offload"))
