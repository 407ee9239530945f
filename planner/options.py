"""The options of ``plan``: those that are fields of a request, and those that say where the plan goes."""

from __future__ import annotations

import click

REQUEST_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("model", "NAME", "Hub id (bert-base-uncased), folder or config.json.  [required]"),
    ("vram", "SIZE", "Memory on the card's label: 8GB = 8GiB = 8192MiB, or bytes.  [required]"),
    (
        "task",
        "TASK",
        "sequence-classification, multi-label-classification, regression, token-classification, masked-lm, causal-lm, "
        "seq2seq-lm, embedding or reranking.  [default: from the model's architecture]",
    ),
    ("mode", "MODE", "train, or infer: run the model.  [default: train]"),
    (
        "method",
        "METHOD",
        "auto, full, lora or qlora; auto trains all weights if that fits, else adapters, else adapters "
        "on a quantized base.  [default: auto]",
    ),
    ("gpu", "NAME", "The card, by loose name (rtx 4060).  [default: a typical card of that size]"),
    (
        "device",
        "DEVICE",
        "Where trials run: cuda, cuda:1 or cpu; none: everything is simulated; auto: cuda where there is one, "
        "else none.  [default: auto]",
    ),
    ("seq_len", "TOKENS", "Longest sequence.  [default: chosen for the model]"),
    ("target_seq_len", "TOKENS", "Longest target sequence of a sequence-to-sequence task."),
    ("num_labels", "N", "Labels of a classification task.  [default: 2]"),
    ("lengths", "FILE", "Lengths of the data's texts: one token count a line.  [default: assumed, see the plan]"),
    ("data", "PATH", "Plan for this data: jsonl, csv, parquet, txt, a datasets folder or a hub dataset."),
    ("text_column", "NAME", "Column of the texts; NAME,NAME for pairs.  [default: the usual names]"),
    ("label_column", "NAME", "Column of the labels.  [default: the usual names]"),
    (
        "long_texts",
        "HOW",
        "Texts longer than the sequence: truncate; segment them between sentences; pack texts into full sequences.  "
        "[default: as the task usually has it]",
    ),
    ("overlap", "SHARE", "Share of a segment that the next one repeats, such as 0.1.  [default: 0]"),
    ("batch_size", "N", "Effective batch: sequences for each optimizer step; to infer, sequences of one batch."),
    ("batch_tokens", "TOKENS", "Effective batch in tokens; to infer, tokens of one batch; instead of --batch-size."),
    (
        "precision",
        "WORDS",
        "Restrict to some of fp32, tf32, fp16-amp, bf16-amp, bf16, bf16-master; to infer to some of fp32, tf32, fp16, "
        "bf16.",
    ),
    ("checkpointing", "WORDS", "Restrict to some of none, full, every-2, every-4, ..."),
    (
        "offload",
        "WORDS",
        "Restrict to some of none, optimizer, parameters, activations; to infer to some of none, parameters, disk.",
    ),
    (
        "quantization",
        "WORDS",
        "Restrict to some of none, int8, nf4; to infer also int8-weight-only, and on the CPU int8-dynamic.",
    ),
    (
        "optimizer",
        "WORDS",
        "Restrict to some of adamw_fused, adamw_foreach, adamw_8bit, paged_adamw_8bit, adafactor, sgd.",
    ),
    ("attention", "WORDS", "Restrict to some of eager, sdpa, flash2."),
    ("loss", "WORDS", "Restrict to some of standard, fused-linear.  [default: standard]"),
    ("gpus", "N", "Cards of this kind that train together.  [default: 1]"),
    ("parallelism", "WORDS", "Restrict several cards to some of ddp, fsdp2."),
    ("max_new_tokens", "TOKENS", "To infer: tokens written for each request, at most.  [default: a usual number]"),
    (
        "concurrency",
        "N",
        "To infer: sequences there are at once (a query's documents, requests).  [default: as many as fit]",
    ),
    ("kv_cache", "WORDS", "To infer: restrict to some of dynamic, static, quantized, offloaded."),
    ("prefill_chunk", "TOKENS", "To infer: tokens of a prompt in one pass.  [default: all, if that fits]"),
    ("prefix_tokens", "TOKENS", "To infer: tokens at the beginning of prompts that requests share.  [default: 0]"),
    ("headroom", "SIZE", "Memory to keep free for other uses of the card, such as 500MB.  [default: 0]"),
    ("risk", "P", "Probability, at most, that a run needs more than planned.  [default: 0.01]"),
    ("host_ram", "SIZE", "Host memory that offloading may fill.  [default: what this machine has]"),
    (
        "allocator",
        "SETTINGS",
        "PyTorch's allocator settings, as in PYTORCH_CUDA_ALLOC_CONF.  [default: expandable_segments:True]",
    ),
    (
        "trials",
        "N",
        "Measured trials, at most; without a device configurations to look at.  [default: as many as the search needs]",
    ),
    ("timeout", "SECONDS", "Time for the measured trials; without a device for the search.  [default: no limit]"),
    ("trial_timeout", "SECONDS", "Time for one measured trial.  [default: what the planner allows]"),
    (
        "storage",
        "URL",
        "Where trials are kept, and shared with plan worker: a journal's file or a database's URL.  "
        "[default: a file in the user's cache]",
    ),
    ("seed", "N", "Seed of the search and of the emitted script.  [default: 0]"),
)
"""Name of the PlanRequest field, what the help calls its value, help."""


def plan_options() -> list[click.Parameter]:
    """All of them, in the help's order."""
    options: list[click.Parameter] = [
        # A restriction may be given twice: the words add up instead of the last one winning silently.
        click.Option([flag(name)], metavar=metavar, help=text, multiple=metavar == "WORDS")
        for name, metavar, text in REQUEST_OPTIONS
    ]
    return [
        *options,
        click.Option(["--trust-remote-code"], is_flag=True, help="Let the model's own code run here."),
        click.Option(["--out"], metavar="DIR", help="The plan's folder.  [default: plans/MODEL-VRAM]"),
        click.Option(["--snapshot"], metavar="FILE", help="Also write the simulated run, for pytorch.org/memory_viz."),
        click.Option(["as_json", "--json"], is_flag=True, help="Print plan.json instead of the report."),
        click.Option(["--quiet"], is_flag=True, help="Print only the folder's path."),
    ]


def flag(argument: str) -> str:
    """The option of an API argument: ``seq_len`` -> ``--seq-len``."""
    return f"--{argument.replace('_', '-')}"
