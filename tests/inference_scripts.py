"""What tests of emitted infer.py scripts share: plans, and a way to run a script here."""

from __future__ import annotations

from typing import Any

from planner.config import InferenceConfig
from planner.request import make_request

CPU = {"kind": "cpu", "name": "a CPU"}
CARD = {"kind": "cuda", "name": "NVIDIA GeForce RTX 3070", "compute_capability": [8, 6]}


def make_inference_plan(
    task: str,
    model: str = "bert-base-uncased",
    *,
    hardware: dict[str, Any] = CPU,
    workload: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """A plan as plan.json holds it; ``config`` replaces fields of the inference configuration."""
    fields: dict[str, Any] = {
        "micro_batch_size": 4,
        "seq_len": 32,
        "max_tokens_per_micro_batch": 128,
        "precision": "fp32",
    }
    if task in ("causal-lm", "seq2seq-lm"):
        fields |= {"max_new_tokens": 8, "kv_cache": "dynamic", "max_tokens_per_micro_batch": 160}
    settings = InferenceConfig(**(fields | config))
    return {
        "schema_version": 1,
        "request": make_request(model=model, vram="8GB", mode="infer", task=task).model_dump(mode="json"),
        "hardware": hardware,
        "workload": {
            "model": model,
            "task": task,
            "max_new_tokens": settings.max_new_tokens,
            "layers": 2,
            "layers_name": None,
            **(workload or {}),
        },
        "config": settings.model_dump(mode="json"),
        "memory": {
            "peak_reserved_bytes": 6_500_000_000,
            "context_bytes": 450_000_000,
            "margin_bytes": 200_000_000,
            "total_bytes": 7_150_000_000,
            "ceiling_bytes": 8_350_000_000,
        },
        "time": {
            "step_ms": 812.3,
            "tokens_per_s": 20_170.0,
            "sequences_per_s": 40.0,
            "prefill_ms": None,
            "prefill_tokens_per_s": None,
            "decode_ms_per_token": None,
            "decode_tokens_per_s": None,
            "source": "simulated",
        },
    }
