"""kill -9 at random moments of a run: what a resumed run loses, and whether it ends where an undisturbed one does.

    python benchmarks/interruptions.py --out FILE.csv [--kills 10] [--seed 0]

An emitted train.py fine-tunes a tiny BERT on the documentation of Python's standard library and saves often; every
second kill falls into a save. Each row of the csv file is one kill: the steps done by then, the step that the resumed
run went on from, and the steps lost; the last row is the end: number of steps, and the largest relative difference of
a step's loss and of a weight to those of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from planner import plan

STEPS = 60
SAVE_EVERY = 3
COLUMNS = ["kill", "steps_done", "while_saving", "went_on_from", "steps_lost"]


def texts(count: int) -> list[str]:
    """Documentation of classes and functions of the standard library."""
    found = set()
    for name in ("logging", "decimal", "asyncio", "tarfile", "argparse", "pathlib"):
        for member in vars(importlib.import_module(name)).values():
            if inspect.isclass(member) or inspect.isfunction(member):
                found.add(" ".join((member.__doc__ or "").split()))
    return sorted(text for text in found if len(text) > 40)[:count]


def tiny_model(folder: Path, corpus: list[str]) -> None:
    """A two-layer BERT with dropout and new weights, and a tokenizer made from the texts."""
    import transformers as hf
    from tokenizers import BertWordPieceTokenizer

    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator(corpus, vocab_size=400, show_progress=False)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
    hf.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **special).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    hf.set_seed(0)
    hf.BertForMaskedLM(hf.BertConfig(vocab_size=400, **sizes)).save_pretrained(folder)


def prepare(folder: Path) -> None:
    """train.py as the planner writes it for the tiny model, and its data."""
    corpus = texts(120)
    tiny_model(folder / "model", corpus)
    (folder / "data.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in corpus))
    found = plan(
        model=str(folder / "model"),
        task="masked-lm",
        vram="8GB",
        seq_len=32,
        batch_size=8,
        precision="fp32",
    )
    found.save(folder / "plan")
    (folder / "plan" / "train.py").rename(folder / "train.py")


def start(folder: Path, output: str, *more: str) -> subprocess.Popen[bytes]:
    """train.py in a process of its own."""
    flags = ["--data", "data.jsonl", "--eval-data", "data.jsonl", "--max-steps", str(STEPS)]
    flags += ["--save-every", str(SAVE_EVERY), "--learning-rate", "0.002", "--output-dir", output, *more]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / f"{output}.txt").open("ab") as told:
        command = [sys.executable, "train.py", *flags]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=told, stderr=told)


def read_log(folder: Path) -> list[dict[str, str]]:
    """Rows of log.csv that are whole."""
    path = folder / "log.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def steps_done(folder: Path) -> int:
    """The last step in log.csv."""
    rows = read_log(folder)
    return int(rows[-1]["step"]) if rows else 0


def last_saved(folder: Path) -> int:
    """The step of the last checkpoint, 0 before the first."""
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)


def is_saving(output: Path) -> bool:
    """Whether a checkpoint is half written."""
    return (output / "partial").exists() or (output / "partial-best").exists()


def kill_at(process: subprocess.Popen[bytes], output: Path, step: int, wait: float, *, in_a_save: bool) -> bool:
    """Kill the run so many seconds after it has logged a step, or in its next save; whether it was in a save."""
    while process.poll() is None and steps_done(output) < step:
        time.sleep(0.002)
    while in_a_save and process.poll() is None and not is_saving(output):
        time.sleep(0.0005)
    time.sleep(wait / 10 if in_a_save else wait)
    saving = is_saving(output)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return saving


def run_killed(folder: Path, kills: int, draw: random.Random) -> list[dict[str, Any]]:
    """A run that is killed so many times at random moments and goes on each time; a row for each kill."""
    output, rows = folder / "killed", []
    for kill, step in enumerate(sorted(draw.sample(range(1, STEPS), kills)), start=1):
        process = start(folder, "killed", *(["--resume"] if kill > 1 else []))
        while_saving = kill_at(process, output, step, draw.uniform(0, 0.1), in_a_save=kill % 2 == 0)
        done, saved = steps_done(output), last_saved(output)
        rows.append(dict(zip(COLUMNS, (kill, done, int(while_saving), saved, done - saved), strict=True)))
        print(f"kill {kill}: after step {done}, goes on from {saved}", flush=True)
    if start(folder, "killed", "--resume").wait():
        raise SystemExit((folder / "killed.txt").read_text())
    return rows


def difference(folder: Path) -> dict[str, float]:
    """Largest relative difference of losses, and of weights (to the largest weight), of both runs."""
    from safetensors.torch import load_file

    logs = [[float(row["loss"]) for row in read_log(folder / run)] for run in ("whole", "killed")]
    weights = [load_file(folder / run / f"checkpoint-{STEPS}" / "model.safetensors") for run in ("whole", "killed")]
    largest = max(float(weight.abs().max()) for weight in weights[0].values())
    apart = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    return {
        "loss": max(abs(a - b) / a for a, b in zip(*logs, strict=True)),
        "weight": apart / largest,
    }


def run(out: Path, kills: int, seed: int) -> list[dict[str, Any]]:
    """The whole benchmark; the csv file's rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        if start(folder, "whole").wait():
            raise SystemExit((folder / "whole.txt").read_text())
        rows = run_killed(folder, kills, random.Random(seed))
        apart, steps = difference(folder), [int(row["step"]) for row in read_log(folder / "killed")]
    whole = steps == list(range(1, STEPS + 1))
    rows.append({"kill": "end", "steps_done": steps[-1] if whole else -1, "went_on_from": "", **apart})
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "loss", "weight"])
        writer.writeheader()
        writer.writerows(rows)
    print(f"ends at step {rows[-1]['steps_done']}; differences: loss {apart['loss']:.1e}, weight {apart['weight']:.1e}")
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="csv file")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    run(args.out, args.kills, args.seed)


if __name__ == "__main__":
    main()
