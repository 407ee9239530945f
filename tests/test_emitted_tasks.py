"""Every task's emitted script learns from real text, and its gradients don't depend on how a step is cut."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emitted import Train, evaluations, load_script, minilm, small, write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")

TASKS = (
    "sequence-classification",
    "multi-label-classification",
    "regression",
    "token-classification",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
    "embedding",
    "reranking",
)
MODELS = {"causal-lm": "gpt2", "seq2seq-lm": "t5"}
WORDS = ("return", "raise", "value", "object")


def task_rows(task: str, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Real texts with labels that follow from them."""
    makers: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
        "multi-label-classification": lambda r: {**r, "label": [w for w in WORDS if w in r["text"].lower()]},
        "regression": lambda r: {**r, "label": min(2.0, len(r["text"]) / 200)},
        "token-classification": lambda r: with_tags(r["text"].split()[:20]),
        "reranking": lambda r: {
            "query": "Returns?",
            "document": r["text"],
            "label": int("return" in r["text"].lower()),
        },
        "seq2seq-lm": lambda r: {**r, "target": f"about {r['label']}"},
    }
    if task != "embedding":
        return [makers.get(task, dict)(row) for row in rows]
    halves = [re.split(r"(?<=[.,]) ", r["text"], maxsplit=1) for r in rows]
    return [{"anchor": half[0], "positive": half[1]} for half in halves if len(half) == 2]


def with_tags(words: list[str]) -> dict[str, Any]:
    """Words that begin with a capital letter are names."""
    return {"tokens": words, "ner_tags": ["NAME" if word[0].isupper() else "O" for word in words]}


@pytest.fixture
def data(tmp_path: Path, rows: list[dict[str, str]]) -> Callable[..., Path]:
    """A file of a task's rows."""

    def write(task: str, count: int = 48, first: int = 0) -> Path:
        return write_jsonl(tmp_path / f"{task}-{first}.jsonl", task_rows(task, rows)[first : first + count])

    return write


CONSTANT = {
    "sequence-classification": 0.46,
    "token-classification": 0.8,
    "multi-label-classification": 0.8,
    "reranking": 0.65,
}
"""What always the same answer is right in at most, on these rows."""


@pytest.mark.parametrize("task", TASKS)
def test_every_task_learns(task: str, tiny: Any, train: Train, data: Any) -> None:
    """Sixty steps on a few real texts: the loss falls by a twentieth at least, and better answers than a constant's."""
    plan = small(task, tiny(MODELS.get(task, "bert")))
    path = data(task)
    steps = ("--max-steps", "60", "--save-every", "20", "--learning-rate", "0.005")
    run = train(plan, "--data", path, "--eval-data", path, *steps)
    assert run.code == 0, run.out
    measured = evaluations(run)
    assert 0.95 * sum(run.losses[:5]) > sum(run.losses[-5:])
    assert measured[-1]["loss"] < measured[0]["loss"]
    if task in CONSTANT:
        assert CONSTANT[task] < measured[-1]["accuracy"]


def vectors(folder: Path, texts: list[str]) -> Any:
    """Vectors of texts of at most 32 tokens, as the script makes them."""
    import torch
    import transformers as hf

    from planner.parts.losses import mean_pool

    model, words = hf.AutoModel.from_pretrained(folder), hf.AutoTokenizer.from_pretrained(folder)
    inputs = words(texts, truncation=True, max_length=32, padding=True, return_tensors="pt")
    with torch.no_grad():
        return pytest.approx(mean_pool(model(**inputs).last_hidden_state, inputs["attention_mask"]).numpy(), abs=1e-5)


def test_minilm_finds_partners_and_learns_more(train: Train, data: Any) -> None:
    """The real encoder finds most partners at once and learns more; sentence-transformers makes the same vectors."""
    path = data("embedding", 16)
    run = train(small("embedding", minilm()), "--data", path, "--eval-data", path, "--max-steps", "6")
    assert run.code == 0, run.out
    assert 0.8 < evaluations(run)[-1]["accuracy"]
    assert sum(run.losses[:3]) > sum(run.losses[3:])
    from sentence_transformers import SentenceTransformer

    texts = ["Return the value. " * 30, "An object."]  # the first is cut
    theirs = SentenceTransformer(str(run.folder / "checkpoint-6"), device="cpu").encode(texts)
    assert vectors(run.folder / "checkpoint-6", texts) == theirs


# ----- the same gradients, however a step is cut -----


NO_ROOM = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
"""What torch says on a CPU."""


def gradients(
    task: str, model: Path, path: Path, folder: Path, *, budget: int, fail_at: int = 0, error: Exception = NO_ROOM
) -> tuple[float, list[Any], int]:
    """Loss, gradients and token budget of the script's first step of 32 samples.

    ``fail_at``: the pass in which memory runs out for once, which ``error`` says.
    """
    import torch
    from accelerate import Accelerator

    folder.mkdir(exist_ok=True)
    sizes = {"effective_batch_size": 32, "micro_batch_size": 1, "gradient_accumulation_steps": 32}
    script = load_script(small(task, model, **sizes, max_tokens_per_micro_batch=budget), folder)
    args = type("Args", (), {"text_column": None, "label_column": None, "seed": 0, "model": str(model)})
    words = script.AutoTokenizer.from_pretrained(str(model), **({"add_prefix_space": True} if "token" in task else {}))
    samples, *names, _ = script.load_samples("--data", path, args, words)
    accelerator = Accelerator(mixed_precision="no")
    network = accelerator.prepare(script.build_model(args, None, words, accelerator, *names))
    network.eval()  # no dropout
    passes = []

    def count(*_: Any) -> None:
        passes.append(1)
        if len(passes) == fail_at:
            raise error

    network.register_forward_pre_hook(count)
    torch.manual_seed(0)
    [(_, batch)] = script.optimizer_steps(samples, 0, 0, 1)
    if task == "masked-lm":
        batch = [script.mask_tokens(sample, words) for sample in batch]
    optimizer = script.build_optimizer(list(network.parameters()), type("A", (), {"learning_rate": 0.1}))
    more = {"start_token_id": network.config.decoder_start_token_id} if task == "seq2seq-lm" else {}

    def step(samples: Any, budget: int) -> Any:
        return script.run_step(network, samples, budget, 0, words, accelerator, **more)

    loss, budget = script.run_guarded(step, batch, budget, optimizer, accelerator)
    return loss.item(), [p.grad for p in network.parameters() if p.grad is not None], budget


def difference(ours: list[Any], theirs: list[Any]) -> float:
    """Largest difference of two sets of gradients, relative to the largest gradient."""
    largest = max(float(g.abs().max()) for g in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / largest


@pytest.mark.parametrize("task", TASKS)
def test_gradients_do_not_depend_on_the_cuts(
    task: str,
    tiny: Any,
    data: Any,
    tmp_path: Path,
    capfd: Any,
    record_property: Callable[[str, object], None],
) -> None:
    """1 x 32, about 4 x 8 and 32 x 1 sequences, and a step in which memory ran out: equal to float rounding."""
    model, path = tiny(MODELS.get(task, "bert")), data(task)
    loss, expected, _ = gradients(task, model, path, tmp_path / "whole", budget=10**6)
    for name, budget, fail_at in (("4 x 8", 8 * 32, 0), ("32 x 1", 1, 0), ("split within the step", 8 * 32, 2)):
        other, got, left = gradients(task, model, path, tmp_path / "parts", budget=budget, fail_at=fail_at)
        record_property(name, difference(got, expected))  # benchmarks/gradient_agreement.py makes a table of these
        assert pytest.approx(loss, rel=1e-5) == other
        assert 1e-4 > difference(got, expected)
        assert (left < budget) == bool(fail_at)
    assert "memory ran out: from now on at most 128 tokens in a micro-batch, not 256" in capfd.readouterr().out


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("could not create a primitive"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
        MemoryError("bad_alloc"),
    ],
    ids=["oneDNN", "cuBLAS", "C++"],
)
def test_libraries_say_in_their_own_words_that_memory_ran_out(
    error: Exception, tiny: Any, data: Any, tmp_path: Path
) -> None:
    """Each of them splits the step; any other error is raised."""
    where = ("masked-lm", tiny("bert"), data("masked-lm"), tmp_path)
    assert 128 == gradients(*where, budget=256, fail_at=2, error=error)[2]
    with pytest.raises(RuntimeError, match="another"):
        gradients(*where, budget=256, fail_at=2, error=RuntimeError("another"))


# ----- long documents -----


def read(task: str, tokenizer: Any, rows: list[dict[str, Any]], folder: Path, **workload: Any) -> list[Any]:
    """What the script makes of some rows."""
    import pandas as pd

    plan = small(task, Path("any"))
    plan["workload"] |= workload
    script = load_script(plan, folder)
    args = type("Args", (), {"text_column": None, "label_column": None, "seed": 0})
    samples: list[Any] = script.read_samples(pd.DataFrame(rows), args, tokenizer, defaultdict(list))[0]
    return samples


def test_a_long_text_becomes_segments_that_count_once(tokenizer: Any, rows: Any, tmp_path: Path) -> None:
    """Each segment has its text's label and a share of its weight, and fits; no token is lost."""
    long, short = " ".join(row["text"] for row in rows[:4]), "Return it."
    given = [{"text": long, "label": "a"}, {"text": short, "label": "b"}]
    samples = read("sequence-classification", tokenizer, given, tmp_path, long_texts="segment")
    pieces = [sample for sample in samples if sample["text"] == 0]
    assert len(pieces) > 3 and len(samples) == len(pieces) + 1
    assert pytest.approx([1, 1]) == [sum(sample["weight"] for sample in pieces), samples[-1]["weight"]]
    assert {0} == {int(sample["labels"]) for sample in pieces}
    assert all(len(sample["input_ids"]) <= 32 for sample in samples)
    special = set(tokenizer.all_special_ids)
    kept = [t for sample in pieces for t in sample["input_ids"].tolist() if t not in special]
    assert [t for t in tokenizer(long)["input_ids"] if t not in special] == kept


def test_every_word_is_learned_once(tokenizer: Any, rows: Any, tmp_path: Path) -> None:
    """Segments of a long sentence repeat words for context; a word's label is in the loss of one of them alone."""
    words = " ".join(row["text"] for row in rows[:3]).split()
    given = [{"tokens": words, "ner_tags": [str(i % 7) for i in range(len(words))]}]
    options = {"long_texts": "segment", "overlap": 0.25}
    samples = read("token-classification", tokenizer, given, tmp_path, **options)
    learned = [int(label) for sample in samples for label in sample["labels"] if label >= 0]
    assert [i % 7 for i in range(len(words))] == learned
    assert sum(len(sample["input_ids"]) for sample in samples) > len(words) * 1.1
    cut = read("token-classification", tokenizer, given, tmp_path, long_texts="truncate")
    assert 1 == len(cut) and len(cut[0]["input_ids"]) <= 32


def test_packed_samples_are_full(tokenizer: Any, rows: Any, tmp_path: Path) -> None:
    """Joined texts fill every sample but the last, and no token is lost."""
    given = [{"text": row["text"]} for row in rows[:6]]
    samples = read("causal-lm", tokenizer, given, tmp_path, long_texts="pack")
    assert {32} == {len(sample["input_ids"]) for sample in samples[:-1]}
    total = sum(len(tokenizer(row["text"])["input_ids"]) for row in rows[:6])
    assert total - 1 <= sum(len(sample["input_ids"]) for sample in samples) <= total


def test_a_prompt_is_read_and_not_learned(tokenizer: Any, tmp_path: Path) -> None:
    """With a prompt and a completion only the completion's tokens and its end are labels."""
    tokenizer.eos_token = tokenizer.sep_token
    given = [{"prompt": "Return the value of", "completion": "the object"}]
    [sample] = read("causal-lm", tokenizer, given, tmp_path)
    answer = [*tokenizer("the object", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert answer == [int(label) for label in sample["labels"] if label >= 0]


def test_pooled_segments_are_evaluated_as_one_text(
    tiny: Any,
    train: Train,
    rows: Any,
    tmp_path: Path,
) -> None:
    """A long text's segments are pooled: the accuracy is a share of texts, not of segments."""
    texts = [{"text": " ".join(r["text"] for r in rows[i : i + 4]), "label": i % 2} for i in range(3)]
    path = write_jsonl(tmp_path / "long.jsonl", texts)
    plan = small("sequence-classification", tiny("bert"))
    plan["workload"]["long_texts"] = "segment"
    run = train(plan, "--data", path, "--eval-data", path, "--max-steps", "2")
    assert run.code == 0, run.out
    assert any(pytest.approx(k / 3) == evaluations(run)[0]["accuracy"] for k in range(4))


def test_pooled_segments_have_all_their_labels(tiny: Any, train: Train, rows: Any, tmp_path: Path) -> None:
    """Segments of a text with several labels are pooled as one text, too: answers are shares of texts times labels."""
    texts = [{"text": " ".join(r["text"] for r in rows[i : i + 4]), "label": ["a", "bc"[i % 2]]} for i in range(3)]
    path = write_jsonl(tmp_path / "long.jsonl", texts)
    plan = small("multi-label-classification", tiny("bert"))
    plan["workload"]["long_texts"] = "segment"
    run = train(plan, "--data", path, "--eval-data", path, "--max-steps", "1")
    assert run.code == 0, run.out
    assert any(pytest.approx(k / 9) == evaluations(run)[0]["accuracy"] for k in range(10))


# ----- what people do with it -----


@pytest.mark.parametrize(
    ("task", "columns", "how", "said"),
    [
        ("masked-lm", "a,b", None, "got 2 columns; accepted: 1"),
        ("causal-lm", "a,b,c", None, "got 3 columns; accepted: 1 or 2"),
        ("embedding", "a", None, "got 1 columns; accepted: 2 or 3"),
        ("reranking", "a", None, "got 1 columns; accepted: 2"),
        ("sequence-classification", "a,b,c", None, "got 3 columns; accepted: 1 or 2"),
        ("sequence-classification", "a,b", "segment", "got 2 columns; accepted: 1"),
    ],
)
def test_a_wrong_number_of_columns_is_refused(
    task: str, columns: str, how: str | None, said: str, tiny: Any, train: Train, tmp_path: Path
) -> None:
    """As many text columns as the task has texts, and one alone where texts are cut: else one line and code 2."""
    path = write_jsonl(tmp_path / "d.jsonl", [{"a": "x", "b": "y", "c": "z", "label": 1}])
    plan = small(task, tiny(MODELS.get(task, "bert")))
    plan["workload"] |= {"long_texts": how} if how else {}
    run = train(plan, "--data", path, "--text-column", columns)
    assert 2 == run.code
    assert f"error: --text-column: {said}\n" in run.out


def test_numbers_and_lines_no_machine_can_hold_are_bad_rows(tokenizer: Any, tmp_path: Path) -> None:
    """A number beyond floats, half a character, other bytes and endless brackets are named by line; nothing raises."""
    path = tmp_path / "d.jsonl"
    good = b'{"text": "fine", "label": 1}\n'
    lines = [good, b'{"text": "x", "label": 1' + b"0" * 400 + b"}\n", b'{"text": "\\ud800", "label": 1}\n']
    path.write_bytes(b"".join([*lines, b"\xff\xfe\n", b"[" * 200_000 + b"\n", b'{"label": 1}\n', good]))
    script = load_script(small("regression", Path("any")), tmp_path)
    args = type("Args", (), {"text_column": None, "label_column": None, "seed": 0})
    samples, said = script.load_samples("--data", path, args, tokenizer)
    assert 2 == len(samples)
    assert "5 rows left out; not UTF-8: 2 (line 3, 4); no JSON object: 1 (line 5)" in said
    assert "the label is no number: 1 (line 2)" in said and "no text: 1 (line 6)" in said


def test_a_missing_file_is_no_dataset(tokenizer: Any, tmp_path: Path, capfd: Any) -> None:
    """A file's name that is not there is said to be missing, whether or not the datasets library is installed."""
    script = load_script(small("masked-lm", Path("any")), tmp_path)
    with pytest.raises(SystemExit, match="2"):
        script.load_samples("--data", tmp_path / "gone.jsonl", None, tokenizer)
    assert "No such file" in capfd.readouterr().err


def test_numbers_of_a_dataset_get_their_labels_names(tokenizer: Any, tmp_path: Path) -> None:
    """A dataset's own names of its labels are the model's; -1 is no label; the held-out part is another one."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    parts = {"train": (["a", "b", "c"], [1, 0, -1]), "validation": (["d"], [1])}
    made = {k: datasets.Dataset.from_dict({"text": t, "label": n}, features=features) for k, (t, n) in parts.items()}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    script = load_script(small("sequence-classification", Path("any")), tmp_path)
    args = type("Args", (), {"text_column": None, "label_column": None, "seed": 0})
    samples, names, said = script.load_samples("--data", tmp_path / "saved", args, tokenizer)
    assert (2, ["bad", "good"]) == (len(samples), names)
    assert "no label: 1 (line 3)" in said
    held_out, *_ = script.load_samples("--eval-data", tmp_path / "saved", args, tokenizer, names)
    assert [1] == [int(sample["labels"]) for sample in held_out]


def test_dry_run_trains_nothing(tiny: Any, train: Train, data: Any) -> None:
    """--dry-run tells steps and micro-batches, and writes nothing."""
    run = train(small("masked-lm", tiny("bert")), "--data", data("masked-lm", 16), "--dry-run")
    assert run.code == 0, run.out
    assert "step 1: micro-batches of 2 x 32 tokens" in run.out
    assert not run.folder.exists()


@pytest.mark.parametrize("lever", ["lora", "qlora"])
def test_merged_adapters_load_without_peft(lever: str, tiny: Any, train: Train, data: Any) -> None:
    """--merge writes a plain model with the task's head and labels."""
    import transformers as hf
    from test_emit import LEVERS

    plan = small("sequence-classification", tiny("bert"), **LEVERS[lever])
    run = train(plan, "--data", data("sequence-classification"), "--max-steps", "2", "--merge")
    assert run.code == 0, run.out
    model = hf.AutoModelForSequenceClassification.from_pretrained(run.folder / "merged")
    assert {"asyncio", "decimal", "logging", "tarfile"} == set(model.config.id2label.values())
    assert not [name for name, _ in model.named_parameters() if "lora" in name]
