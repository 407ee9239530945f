"""The emitted train.py at work: real models, real text, on the CPU."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from emitted import Train, evaluations, load_script, minilm, read_log, small, write_jsonl
from test_emit import FUSED, LANGUAGE_TASKS, LEVERS, make_plan

from planner.emit import render_training_files

pytestmark = pytest.mark.usefixtures("one_thread")

TASK_MODELS = {
    "sequence-classification": "bert",
    "token-classification": "bert",
    "masked-lm": "bert",
    "causal-lm": "gpt2",
    "seq2seq-lm": "t5",
}


@pytest.fixture
def data(tmp_path: Path, rows: list[dict[str, str]]) -> Callable[[str], Path]:
    """A file of sixteen rows as the task wants them."""

    def write(task: str) -> Path:
        some = rows[:16]
        if task == "token-classification":
            words = [row["text"].split()[:20] for row in some]
            tags = [["NAME" if word[0].isupper() else "O" for word in line] for line in words]
            return write_jsonl(
                tmp_path / "words.jsonl",
                [{"tokens": line, "ner_tags": marks} for line, marks in zip(words, tags, strict=True)],
            )
        if task == "seq2seq-lm":
            pairs = [{"text": row["text"], "target": f"about {row['label']}"} for row in some]
            return write_jsonl(tmp_path / "pairs.jsonl", pairs)
        return write_jsonl(tmp_path / "texts.jsonl", some)

    return write


# ----- every task and every lever -----


@pytest.mark.parametrize("task", TASK_MODELS)
def test_every_task_trains(task: str, tiny: Any, train: Train, data: Any) -> None:
    """Each task's script runs to its last step, writes a log, and leaves a model that loads."""
    import transformers as hf

    plan = small(task, tiny(TASK_MODELS[task]))
    run = train(plan, "--data", data(task), "--max-steps", "12", "--learning-rate", "0.005")
    assert run.code == 0, run.out
    assert list(range(1, 13)) == run.steps
    assert sum(run.losses[:2]) > sum(run.losses[-2:])
    assert all(row["allocated_bytes"] > 0 and row["tokens"] > 0 for row in run.log)
    from planner.tasks import TASK_FACTS

    auto_class = getattr(hf, TASK_FACTS[task].auto_class)
    assert auto_class.from_pretrained(run.folder / "checkpoint-12").config.architectures


@pytest.mark.parametrize("lever", [lever for lever in LEVERS if lever != "flash2"])
def test_every_lever_trains(lever: str, tiny: Any, train: Train, data: Any) -> None:
    """Each lever's script runs, resumes from its own checkpoint, and keeps the loss finite."""
    plan = small("sequence-classification", tiny("bert"), **LEVERS[lever])
    path = data("sequence-classification")
    first = train(plan, "--data", path, "--max-steps", "2")
    assert first.code == 0, first.out
    again = train(plan, "--data", path, "--max-steps", "3", "--resume")
    assert again.code == 0, again.out
    assert [1, 2, 3] == again.steps
    assert all(map(math.isfinite, again.losses))
    assert 0 < min(row["grad_norm"] for row in again.log)


def test_a_missing_flash_attn_is_one_line_and_code_2(tiny: Any, train: Train, data: Any) -> None:
    """The script doesn't fall back to another attention, whose memory the plan doesn't know."""
    run = train(small("masked-lm", tiny("bert"), **LEVERS["flash2"]), "--data", data("masked-lm"))
    assert 2 == run.code
    assert "pip install flash-attn" in run.out
    assert not run.folder.exists()


@pytest.mark.parametrize("lever", FUSED)
@pytest.mark.parametrize("task", LANGUAGE_TASKS)
def test_a_fused_loss_trains_as_the_standard_one(lever: str, task: str, tiny: Any, train: Train, data: Any) -> None:
    """The same losses and gradients, to the rounding of the arithmetic; held-out data and a resumed run as well."""
    path, model = data(task), tiny(TASK_MODELS[task])
    fused = small(task, model, **FUSED[lever])
    options = ("--data", path, "--eval-data", path, "--max-steps", "2")
    ours = train(fused, *options, output="fused")
    assert ours.code == 0, ours.out
    theirs = train(small(task, model, **FUSED[lever] | {"loss": "standard"}), *options, output="standard")
    tolerance = 1e-4 if lever == "fused" else 2e-2
    assert pytest.approx(theirs.losses, rel=tolerance) == ours.losses
    assert pytest.approx([row["grad_norm"] for row in theirs.log], rel=5 * tolerance) == [
        row["grad_norm"] for row in ours.log
    ]
    assert pytest.approx(evaluations(theirs)[0]["loss"], rel=tolerance) == evaluations(ours)[0]["loss"]
    again = train(fused, "--data", path, "--max-steps", "3", "--resume", output="fused")
    assert [1, 2, 3] == again.steps, again.out


def test_master_weights_keep_what_bf16_loses(tmp_path: Path) -> None:
    """A hundred steps of 0.0002 from 1.0, where bf16 knows nothing between 0.996 and 1.0."""
    import torch

    script, reached = plain(tmp_path, precision="bf16-master"), {}
    makers: dict[str, Callable[[list[Any]], Any]] = {
        "bf16": lambda weights: torch.optim.SGD(weights, lr=0.0002),
        "masters": lambda weights: script.MasterWeights(weights, 0.0002, torch.optim.SGD),
    }
    for name, make in makers.items():
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = make([weight])
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        reached[name] = weight[0].item()
    assert {"bf16": 1.0, "masters": pytest.approx(0.98, abs=0.002)} == reached


def test_master_weights_resume_exactly(tiny: Any, train: Train, data: Any) -> None:
    """The fp32 copies are in the checkpoint: a resumed run makes the steps of one that was never stopped."""
    plan, path = small("masked-lm", tiny("bert"), precision="bf16-master"), data("masked-lm")
    options = ("--data", path, "--learning-rate", "0.005")
    whole = train(plan, *options, "--epochs", "3", output="whole")
    train(plan, *options, "--epochs", "3", "--max-steps", "6", "--save-every", "3", output="part")
    checkpoint = whole.folder.parent / "part"
    assert whole.code == 0, whole.out
    import torch

    state = torch.load(next(checkpoint.glob("checkpoint-*")) / "training_state.pt")["optimizer"]
    assert {torch.float32} == {master.dtype for master in state["masters"]}
    again = train(plan, *options, "--max-steps", "8", "--resume", output="part")
    assert [1, 2, 3, 4, 5, 6, 7, 8] == again.steps, again.out


@pytest.mark.parametrize("method", ["lora", "qlora", "int8"])
@pytest.mark.parametrize("task", [task for task in TASK_MODELS if task != "sequence-classification"])
def test_adapters_train_on_every_task(task: str, method: str, tiny: Any, train: Train, data: Any) -> None:
    """Adapters go on every task's model, with a head that is trained whole where it is new."""
    plan = small(task, tiny(TASK_MODELS[task]), **LEVERS[method])
    run = train(plan, "--data", data(task), "--max-steps", "1")
    assert run.code == 0, run.out
    assert (run.folder / "checkpoint-1" / "adapter_model.safetensors").exists()


# ----- what one optimizer step is -----


def plain(tmp_path: Path, task: str = "sequence-classification", **config: Any) -> ModuleType:
    """The functions of an emitted script."""
    return load_script(small(task, Path("any"), **config), tmp_path)


def fake_samples(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of 1 to 32 tokens, as read_samples() returns them."""
    import torch

    draw = random.Random(seed)
    return [{"input_ids": torch.arange(draw.randint(1, 32)), "labels": torch.tensor(i)} for i in range(count)]


def test_every_step_takes_the_effective_batch(tmp_path: Path) -> None:
    """Each step has the plan's number of sequences, each epoch all samples, and the last step is filled up."""
    script, samples = plain(tmp_path), fake_samples(21)
    steps = list(script.optimizer_steps(samples, 0, 0, 6))
    assert [0, 1, 2, 3, 4, 5] == [number for number, _ in steps]
    assert [8] * 6 == [len(step) for _, step in steps]
    for epoch in (steps[:3], steps[3:]):
        assert set(range(21)) == {int(sample["labels"]) for _, step in epoch for sample in step}


def test_longest_sample_comes_first_and_order_changes(tmp_path: Path) -> None:
    """Step one holds the longest sample; later epochs and other seeds are shuffled otherwise."""
    script, samples = plain(tmp_path), fake_samples(40)

    def labels(seed: int, first: int, total: int) -> list[list[int]]:
        steps = script.optimizer_steps(samples, seed, first, total)
        return [[int(sample["labels"]) for sample in step] for _, step in steps]

    longest = max(len(sample["input_ids"]) for sample in samples)
    for seed in range(5):
        _, step = next(script.optimizer_steps(samples, seed, 0, 5))
        assert longest == len(step[0]["input_ids"])
    assert labels(0, 0, 5) != labels(0, 5, 10)
    assert labels(0, 0, 5) != labels(1, 0, 5)
    assert labels(0, 0, 10)[7:] == labels(0, 7, 10)


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp"])
@pytest.mark.parametrize("budget", [1, 33, 64, 100, 10_000])
def test_micro_batches_stay_within_the_budget(tmp_path: Path, precision: str, budget: int) -> None:
    """Padded tokens never exceed the budget unless one sequence alone does; the largest is first, no sample is lost."""
    script = plain(tmp_path, precision=precision, max_tokens_per_micro_batch=budget)
    samples = sorted(fake_samples(30), key=script.length, reverse=True)
    parts = script.deal(samples, budget, 0, 1)
    assert list(range(30)) == sorted(int(sample["labels"]) for part in parts for sample in part)
    tokens = [len(part) * script.length(part[0]) for part in parts]
    assert tokens == sorted(tokens, reverse=True)
    for part in parts:
        width = max(script.length(sample) for sample in part)
        assert len(part) == 1 or width * len(part) <= budget
        assert precision == "fp32" or width % 8 == 0
    fewest, left = 0, samples
    while left:  # filled up one after the other
        fewest, left = fewest + 1, left[max(1, budget // script.length(left[0])) :]
    assert fewest == len(parts)


def test_padding_never_exceeds_the_plan(tmp_path: Path) -> None:
    """Rounding up to a multiple of 8 stops at a seq_len that is none."""
    script = plain(tmp_path, precision="bf16", seq_len=30)
    samples = [{"input_ids": [0] * n} for n in (1, 8, 9, 25, 30)]
    assert [8, 8, 16, 30, 30] == [script.length(sample) for sample in samples]


def test_long_targets_count_against_the_budget(tmp_path: Path) -> None:
    """A short text with a long target counts as its target does, in the plan's proportion of lengths."""
    import torch

    script = plain(tmp_path, "seq2seq-lm")
    sample = {"input_ids": torch.arange(3), "labels": torch.arange(8)}
    assert 32 == script.length(sample)


def test_learning_rate_rises_and_falls(tmp_path: Path) -> None:
    """Linear warm-up over 5 % of the steps to the highest rate, then linear decay that never reaches zero."""
    script = plain(tmp_path)
    rates = [script.learning_rate(step, 100, 1.0) for step in range(100)]
    assert pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) == rates[:5]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 0.02
    assert 1.0 == script.learning_rate(0, 1, 1.0)


def test_masks_fall_on_text_alone(tmp_path: Path) -> None:
    """About 15 % of the tokens are guessed, never special ones, and 80 % of them are hidden by the mask."""
    import torch
    from transformers import AutoTokenizer

    script, tokenizer = plain(tmp_path, "masked-lm"), AutoTokenizer.from_pretrained(minilm())
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.cls_token_id, *[2000] * 4000, tokenizer.sep_token_id])
    masked = script.mask_tokens({"input_ids": ids}, tokenizer)
    guessed = masked["labels"] != -100
    assert pytest.approx(0.15, abs=0.02) == guessed.float().mean().item()
    assert not guessed[0] and not guessed[-1]
    assert {2000} == set(masked["labels"][guessed].tolist())
    hidden = masked["input_ids"][guessed] == tokenizer.mask_token_id
    assert pytest.approx(0.8, abs=0.05) == hidden.float().mean().item()
    assert torch.equal(ids[~guessed], masked["input_ids"][~guessed])


def test_causal_labels_are_the_next_tokens(tmp_path: Path) -> None:
    """The label of each position is the token after it; the last has none; long texts become pieces."""
    import pandas as pd
    from transformers import AutoTokenizer

    script, tokenizer = plain(tmp_path, "causal-lm", seq_len=5), AutoTokenizer.from_pretrained(minilm())
    args = type("Args", (), {"text_column": None})
    bad: Any = defaultdict(list)
    (samples,) = script.read_samples(pd.DataFrame({"text": ["a b c d e f g", ""]}), args, tokenizer, bad)
    assert {"no text": [1]} == bad
    assert 3 == len(samples)
    for sample in samples:
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert [*ids[1:], -100] == labels


# ----- the same training, whatever the levers -----


def first_steps(train: Train, plan: dict[str, Any], path: Path, output: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of three steps."""
    run = train(plan, "--data", path, "--max-steps", "3", output=output)
    assert run.code == 0, run.out
    return run.losses, [row["grad_norm"] for row in run.log]


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "masked-lm"])
def test_gradients_do_not_depend_on_the_budget(task: str, tiny: Any, train: Train, data: Any) -> None:
    """One sequence at a time or all eight at once: the same loss and the same gradient norm."""
    path, results = data(task), []
    for budget in (1, 64, 10_000):
        plan = small(task, tiny("bert"), max_tokens_per_micro_batch=budget)
        results.append(first_steps(train, plan, path, f"budget-{budget}"))
    for losses, norms in results[1:]:
        assert pytest.approx(results[0][0], rel=1e-3) == losses
        assert pytest.approx(results[0][1], rel=1e-3) == norms


@pytest.mark.parametrize(
    "lever", ["full", "every-2", "foreach", "eager", "parameters", "activations", "activations-half"]
)
def test_lossless_levers_change_nothing(lever: str, tiny: Any, train: Train, data: Any) -> None:
    """Checkpointing, another kernel or another implementation of AdamW give the same training."""
    path, model = data("masked-lm"), tiny("bert")
    config = LEVERS[lever] | {"precision": "fp32"}
    expected = first_steps(train, small("masked-lm", model), path, "plain")
    got = first_steps(train, small("masked-lm", model, **config), path, lever)
    assert pytest.approx(expected[0], rel=1e-4) == got[0]
    assert pytest.approx(expected[1], rel=1e-3) == got[1]


def test_host_adamw_is_adamw(tiny: Any, train: Train, data: Any) -> None:
    """The optimizer in host memory makes the same steps as AdamW beside the weights."""
    path, model = data("masked-lm"), tiny("bert")
    rate = ("--learning-rate", "0.01", "--max-steps", "4")
    here = train(small("masked-lm", model), "--data", path, *rate, output="here")
    host = train(small("masked-lm", model, offload="optimizer"), "--data", path, *rate, output="host")
    assert pytest.approx(here.losses, rel=1e-5) == host.losses


def test_every_n_checkpoints_each_nth_layer(tmp_path: Path) -> None:
    """every-2 checkpoints layers 0, 2, 4, ... of the model, counted across stacks."""
    import transformers as hf

    script = plain(tmp_path, checkpointing="every-2")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 3, "num_heads": 2, "vocab_size": 50}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes))
    script.checkpoint_activations(model)
    stacks = [[layer.gradient_checkpointing for layer in stack.block] for stack in (model.encoder, model.decoder)]
    assert [[True, False, True], [False, True, False]] == stacks


# ----- data as people have it -----


def test_every_file_type_is_read_alike(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    """The same rows come out of jsonl, csv and parquet; a txt file has a text on each line."""
    script, some = plain(tmp_path), rows[:5]
    frame = pd.DataFrame(some)
    frame.to_csv(tmp_path / "d.csv", index=False)
    frame.to_parquet(tmp_path / "d.parquet")
    write_jsonl(tmp_path / "d.jsonl", some)
    (tmp_path / "d.txt").write_text("\n\n".join(row["text"] for row in some), encoding="utf-8")
    for kind in ("jsonl", "csv", "parquet"):
        bad: Any = defaultdict(list)
        table = script.read_table(tmp_path / f"d.{kind}", bad)
        assert (some, {}) == (table.to_dict("records"), bad)
    assert [row["text"] for row in some] == list(script.read_table(tmp_path / "d.txt", bad)["text"])


def test_bad_rows_are_counted_in_one_line(tmp_path: Path, tiny: Any, train: Train, rows: Any) -> None:
    """Broken lines, missing columns and empty texts are left out; the rest is trained on."""
    path = write_jsonl(tmp_path / "bad.jsonl", rows[:16])
    with path.open("a") as file:
        file.write('{"text": ""}\n{"text": "no label"}\n{"label": "decimal"}\n[1]\n{"text": "broken\n')
        file.write('{"text": 7, "label": "decimal"}\n{"text": "x", "label": null}\n{"text": "x", "label": [1]}\n')
    run = train(small("sequence-classification", tiny("bert")), "--data", path, "--max-steps", "1")
    assert run.code == 0, run.out
    assert "16 texts from" in run.out
    assert "8 rows left out; no JSON object: 2 (line 20, 21); no text: 3 (line 17, 19, 22)" in run.out


def test_ragged_csv_rows_are_counted(tmp_path: Path) -> None:
    """A line with too many fields is left out and counted; one with too few has no label."""
    path = tmp_path / "ragged.csv"
    path.write_text('text,label\na,1\nb,2,3\nc\n"d, e",NA\n', encoding="utf-8")
    bad: Any = defaultdict(list)
    table = plain(tmp_path).read_table(path, bad)
    assert {"more fields than columns": [3]} == bad
    assert ["a", "c", "d, e"] == list(table["text"])
    assert ["1", "", "NA"] == [plain(tmp_path).label_name(label) for label in table["label"]]


def test_labels_are_sorted_as_people_would(tmp_path: Path) -> None:
    """Numbers come in order and before words; 1, 1.0 and "1" are one label."""
    from transformers import AutoTokenizer

    script, tokenizer = plain(tmp_path), AutoTokenizer.from_pretrained(minilm())
    labels = [10, 2, 1.0, "1", "spam", 0, float("nan"), None]
    table = pd.DataFrame({"review": ["text"] * 8, "label": pd.Series(labels, dtype=object)})
    args = type("Args", (), {"text_column": None, "label_column": None})
    bad: Any = defaultdict(list)
    samples, names = script.read_samples(table, args, tokenizer, bad)
    assert ["0", "1", "2", "10", "spam"] == names
    assert [3, 2, 1, 1, 4, 0] == [int(sample["labels"]) for sample in samples]
    assert {"no label": [6, 7]} == bad


def test_csv_holds_words_with_spaces_between(tmp_path: Path) -> None:
    """Token classification reads words and tags from a csv file too; a word's label is on its first token."""
    from transformers import AutoTokenizer

    script, tokenizer = plain(tmp_path, "token-classification"), AutoTokenizer.from_pretrained(minilm())
    (tmp_path / "w.csv").write_text("tokens,ner_tags\nAda untranslatable,B O\nAda is,B\n", encoding="utf-8")
    args = type("Args", (), {"text_column": None, "label_column": None})
    bad: Any = defaultdict(list)
    samples, names = script.read_samples(script.read_table(tmp_path / "w.csv", bad), args, tokenizer, bad)
    assert (["B", "O"], {"not a label for each word": [3]}) == (names, bad)
    labels = samples[0]["labels"].tolist()
    assert [-100, 0, 1] == labels[:3]
    assert {-100} == set(labels[3:]) and len(labels) > 4


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.txt", "one text\nanother\n", "no column label or labels or target or score among: text"),
        ("t.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 1}\n', "holds one label only (1)"),
        ("t.jsonl", '{"body": 1, "label": 1}\n', "no column text or sentence or content or document or "),
        ("t.jsonl", '{"text": "", "label": 1}\n', "nothing to train on"),
        ("t.jsonl", "", "no row in"),
        ("t.csv", "", "no row in"),
        ("t.parquet", "no parquet", "--data"),
        ("t.xlsx", "", "accepted: a file that ends in .jsonl, .csv, .parquet or .txt"),
        ("", "", "--data"),
    ],
)
def test_bad_data_is_one_line_and_code_2(
    tmp_path: Path, tiny: Any, train: Train, name: str, text: str, said: str
) -> None:
    """What can't be trained on ends with exit code 2 and one line that says why."""
    path = tmp_path / name
    if name:
        path.write_text(text, encoding="utf-8")
    run = train(small("sequence-classification", tiny("bert")), "--data", path)
    assert 2 == run.code
    errors = [line for line in run.out.splitlines() if "error" in line]
    assert 1 == len(errors)
    assert said in errors[0]
    assert not run.folder.exists()


@pytest.mark.parametrize(
    "arguments", [(), ("--data", "x.jsonl", "--max-steps", "0"), ("--data", "x.jsonl", "--epochs", "many")]
)
def test_bad_flags_are_code_2(train: Train, arguments: tuple[str, ...]) -> None:
    """Missing and wrong flags end with argparse's message and exit code 2."""
    run = train(small("causal-lm", Path("any")), *arguments)
    assert 2 == run.code
    assert "error: " in run.out


def test_model_without_pad_token_trains(tmp_path: Path, tiny: Any, train: Train, data: Any) -> None:
    """A tokenizer without padding token pads with its end token, and the model's configuration knows it."""
    import transformers as hf

    folder = tmp_path / "gpt2"
    hf.AutoModel.from_pretrained(tiny("gpt2")).save_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny("gpt2"))
    tokenizer.pad_token, tokenizer.eos_token = None, "[SEP]"
    tokenizer.save_pretrained(folder)
    run = train(small("sequence-classification", folder), "--data", data("sequence-classification"), "--max-steps", "1")
    assert run.code == 0, run.out
    config = hf.AutoConfig.from_pretrained(run.folder / "checkpoint-1")
    assert tokenizer.eos_token_id == config.pad_token_id


# ----- checkpoints -----


def stop_after(steps: int, log: Path) -> threading.Thread:
    """Send this process a SIGTERM, as a cluster does, once the log has so many steps."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if log.exists() and len(log.read_text().splitlines()) > steps:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.fixture
def with_dropout(tmp_path: Path, tiny: Any, tokenizer: Any) -> Path:
    """A tiny BERT with dropout, so that the random state shows in the losses."""
    import transformers as hf

    folder = tmp_path / "with-dropout"
    hf.AutoModelForMaskedLM.from_pretrained(tiny("bert"), hidden_dropout_prob=0.1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_stopped_run_resumes_as_if_never_stopped(tmp_path: Path, with_dropout: Path, train: Train, data: Any) -> None:
    """After a SIGTERM the step is finished and saved; --resume alone gives the losses of an uninterrupted run."""
    plan, path = small("masked-lm", with_dropout), data("masked-lm")
    whole = train(plan, "--data", path, "--max-steps", "20", "--seed", "7", output="whole")
    watcher = stop_after(3, tmp_path / "part" / "log.csv")
    stopped = train(plan, "--data", path, "--max-steps", "20", "--seed", "7", output="part")
    watcher.join()
    assert 128 + signal.SIGTERM == stopped.code, stopped.out
    assert 3 <= len(stopped.steps) < 20
    assert f"stopped at step {len(stopped.steps)} of 20" in stopped.out
    resumed = train(plan, "--data", path, "--resume", output="part")
    assert resumed.code == 0, resumed.out
    assert list(range(1, 21)) == resumed.steps
    assert stopped.log == resumed.log[: len(stopped.log)]
    assert pytest.approx(whole.losses, rel=1e-5) == resumed.losses


def test_finished_run_has_nothing_to_resume(tiny: Any, train: Train, data: Any) -> None:
    """--resume after the last step ends at once and leaves the model and the log as they are."""
    plan, path = small("masked-lm", tiny("bert")), data("masked-lm")
    done = train(plan, "--data", path, "--max-steps", "2")
    again = train(plan, "--data", path, "--resume")
    assert 0 == again.code
    assert done.log == again.log
    assert (again.folder / "checkpoint-2").is_dir()


def test_resume_wants_the_same_data(tmp_path: Path, tiny: Any, train: Train, data: Any) -> None:
    """Other data would be another order: it is refused with one line."""
    plan, path = small("masked-lm", tiny("bert")), data("masked-lm")
    train(plan, "--data", path, "--max-steps", "1")
    other = tmp_path / "other.txt"
    other.write_text("one text alone\n", encoding="utf-8")
    run = train(plan, "--data", other, "--max-steps", "2", "--resume")
    assert 2 == run.code
    assert "gives 1 samples; the run to resume had" in run.out


def test_new_run_keeps_an_earlier_one(tiny: Any, train: Train, data: Any) -> None:
    """Without --resume a run starts anew; what an earlier one left is moved aside, not overwritten."""
    plan, path = small("masked-lm", tiny("bert")), data("masked-lm")
    train(plan, "--data", path, "--max-steps", "2")
    run = train(plan, "--data", path, "--max-steps", "1")
    assert [1] == run.steps
    (earlier,) = run.folder.glob("earlier-*")
    assert {"checkpoint-2", "log.csv"} == {entry.name for entry in earlier.iterdir()}


def test_half_written_checkpoint_is_not_resumed(tiny: Any, train: Train, data: Any) -> None:
    """What a killed save left behind is no checkpoint, and is gone after the next save."""
    plan, path = small("masked-lm", tiny("bert")), data("masked-lm")
    run = train(plan, "--data", path, "--max-steps", "2")
    (run.folder / "partial").mkdir()
    (run.folder / "partial" / "training_state.pt").write_bytes(b"half")
    again = train(plan, "--data", path, "--max-steps", "3", "--resume")
    assert [1, 2, 3] == again.steps
    assert {"checkpoint-3", "log.csv"} == {entry.name for entry in again.folder.iterdir()}


# ----- when training goes wrong -----


def test_steps_without_finite_gradients_are_skipped(tiny: Any, train: Train, data: Any) -> None:
    """A step whose gradients are not finite is left out, counted and reported; weights stay as they were."""
    plan = small("masked-lm", tiny("bert"), optimizer="sgd")
    run = train(plan, "--data", data("masked-lm"), "--max-steps", "4", "--learning-rate", "1e38")
    assert run.code == 0, run.out
    skipped = sum(not math.isfinite(row["grad_norm"]) for row in run.log)
    assert 0 < skipped < 4
    assert f"{skipped} steps were skipped" in run.out


def test_adapters_without_gradient_are_found(tmp_path: Path) -> None:
    """Where no gradient reached the adapters, the script stops instead of training nothing."""
    import torch
    from peft import LoraConfig, get_peft_model

    script = plain(tmp_path, **LEVERS["lora"])
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    with pytest.raises(RuntimeError, match="no gradient for 2 of 2 trained parameters"):
        script.check_gradients(model)
    model(torch.ones(1, 4)).sum().backward()
    script.check_gradients(model)


# ----- the real thing: all-MiniLM-L6-v2 on the documentation of Python, as a user runs it -----


def command(folder: Path, *arguments: str | Path) -> list[str]:
    """The command line of the emitted script, in its own process."""
    return [sys.executable, str(folder / "train.py"), *map(str, arguments)]


@pytest.mark.slow
def test_real_model_learns_and_survives_a_kill(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    """MiniLM learns to tell packages apart; killed and resumed, it ends at the plan's number of steps."""
    sizes = {"seq_len": 32, "max_tokens_per_micro_batch": 128, "effective_batch_size": 8}
    plan = make_plan("sequence-classification", str(minilm()), **sizes)
    for name, text in render_training_files(plan).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    some = [row for row in rows if row["label"] in ("decimal", "asyncio")][:61]
    path = write_jsonl(tmp_path / "docs.jsonl", some)
    steps = math.ceil(len(some) / plan["config"]["effective_batch_size"]) * 2
    flags = ("--data", path, "--epochs", "2", "--save-every", "6", "--learning-rate", "2e-4")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(
            command(tmp_path, *flags), cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        while process.poll() is None and len(read_log(tmp_path / "output")) < 7:
            time.sleep(0.1)
        process.kill()
        process.wait()
    assert -signal.SIGKILL == process.returncode, (tmp_path / "out.txt").read_text()
    before = read_log(tmp_path / "output")
    done = subprocess.run(
        command(tmp_path, *flags, "--resume"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert 0 == done.returncode, done.stderr
    log = read_log(tmp_path / "output")
    assert list(range(1, steps + 1)) == [int(row["step"]) for row in log]
    assert before[:6] == log[:6]
    losses = [row["loss"] for row in log]
    assert 0.8 * sum(losses[:4]) > sum(losses[-4:])
    assert len(losses) == steps == 16


# ----- held-out data -----


@pytest.mark.parametrize("task", TASK_MODELS)
def test_held_out_data_is_evaluated_with_every_checkpoint(task: str, tiny: Any, train: Train, data: Any) -> None:
    """A loss for each save, an accuracy where there are classes; the model of the lowest loss is kept, and loads."""
    path = data(task)
    options = ("--save-every", "2", "--max-steps", "5", "--learning-rate", "0.005")
    run = train(small(task, tiny(TASK_MODELS[task])), "--data", path, "--eval-data", path, *options)
    assert run.code == 0, run.out
    rows = evaluations(run)
    assert [2, 4, 5] == [row["step"] for row in rows]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(("accuracy" in row) == task.endswith("classification") for row in rows)
    assert all(0 <= row.get("accuracy", 0) <= 1 for row in rows)
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(run.folder / "best").architectures
    assert not (run.folder / "best" / "training_state.pt").exists()


def test_the_loss_of_held_out_data_is_the_mean_over_its_labels(tiny: Any, train: Train, data: Any) -> None:
    """Whatever the micro-batches: what the model itself computes sample by sample."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path, losses = data("sequence-classification"), []
    for budget in (32, 10_000):
        plan = small("sequence-classification", tiny("bert"), max_tokens_per_micro_batch=budget)
        run = train(plan, "--data", path, "--eval-data", path, "--max-steps", "1", output=f"budget-{budget}")
        losses.append(evaluations(run)[0])
    model = AutoModelForSequenceClassification.from_pretrained(run.folder / "best").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "best")
    expected, right = [], []
    for row in map(json.loads, path.read_text().splitlines()):
        label = torch.tensor([model.config.label2id[row["label"]]])
        outputs = model(**tokenizer(row["text"], truncation=True, max_length=32, return_tensors="pt"), labels=label)
        expected.append(outputs.loss.item())
        right.append(outputs.logits.argmax(-1).item() == label.item())
    assert (
        pytest.approx(sum(expected) / len(expected), rel=1e-4)
        == losses[0]["loss"]
        == pytest.approx(losses[1]["loss"], rel=1e-5)
    )
    assert pytest.approx(sum(right) / len(right)) == losses[0]["accuracy"]


def test_evaluation_changes_no_step_and_a_resumed_run_goes_on_in_it(
    tmp_path: Path, with_dropout: Path, train: Train, data: Any
) -> None:
    """The same losses with and without held-out data; a stopped run has the evaluations of one that was not."""
    path, plan = data("masked-lm"), small("masked-lm", with_dropout)
    options = ("--data", path, "--max-steps", "12", "--save-every", "2")
    plain_run = train(plan, *options, output="plain")
    whole = train(plan, *options, "--eval-data", path, output="whole")
    watcher = stop_after(3, tmp_path / "part" / "log.csv")
    stopped = train(plan, *options, "--eval-data", path, output="part")
    watcher.join()
    assert 128 + signal.SIGTERM == stopped.code, stopped.out
    again = train(plan, "--data", path, "--eval-data", path, "--resume", output="part")
    assert plain_run.losses == whole.losses == pytest.approx(again.losses, rel=1e-5)
    expected = {row["step"]: row["loss"] for row in evaluations(whole)}
    assert list(range(2, 13, 2)) == list(expected)
    got = {row["step"]: row["loss"] for row in evaluations(again)}
    missed = set(expected) - set(got)  # the step in which a stopped run saves and doesn't evaluate
    assert missed <= {stopped.steps[-1]}
    assert {step: expected[step] for step in got} == pytest.approx(got, rel=1e-5)


def test_a_label_that_training_never_saw_is_left_out(tmp_path: Path, tiny: Any, train: Train, data: Any) -> None:
    """And counted; held-out data with such labels alone ends the run."""
    path = data("sequence-classification")
    unknown = write_jsonl(tmp_path / "unknown.jsonl", [{"text": "a word", "label": "never seen"}])
    run = train(small("sequence-classification", tiny("bert")), "--data", path, "--eval-data", unknown)
    assert 2 == run.code
    assert "1 rows left out" in run.out
