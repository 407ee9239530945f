"""Qwen2.5's and Qwen3's speed benchmarks: a prompt, then 2048 generated tokens, on an A100 and an H20.

The script (QwenLM/Qwen2.5, examples/speed-benchmark/speed_benchmark_transformers.py) loads, calls ``generate`` once
and reads ``max_memory_allocated``, never reset; its tables have two digits of GiB, and whole MiB. transformers' own
``generate`` is recorded here for its first tokens, and the others follow as in the planner's own plans
(planner/inference/unrolling.py): how the blocks of a cache that is concatenated anew for each token fit in what earlier
ones left decides the peak (a block of a segment is only split where more than 1 MiB would remain).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flash_attn_stand_in
import torch
from configs import spec_of
from loops import ITERATION, Session
from packed_linears import QUANTIZATIONS, pack
from reproduction import Setup, card_of, structure
from rows import Row
from torch import nn

from planner.inference.generation import generate_watched
from planner.inference.unrolling import PASS, unrolled
from planner.recording.record import Recording
from planner.workload import Workload

_LENGTHS = re.compile(r"prompt (\d+) \+ (\d+) generated")
_RECORDED_PASSES = 5
"""The prompt's, one that finds a cache as the prompt left it, and three alike."""


def setup_of(row: Row) -> Setup | str:
    """How the row was run."""
    lengths = _LENGTHS.fullmatch(row["seq_len"])
    quantization = row["quantization"]
    if lengths is None or row.micro_batch is None:
        return "lengths are not stated"
    if quantization not in (*QUANTIZATIONS, "none"):
        return f"quantization {quantization!r} isn't modelled"
    prompt, new_tokens = (int(text) for text in lengths.groups())
    return Setup(
        workload=GeneratingWorkload(spec=spec_of(row["model_id"]), task="causal-lm", quantization=quantization),
        config=structure(precision="bf16", attention="eager"),  # flash_attn's is the workload's
        weights="bfloat16" if quantization == "none" else "float16",  # torch_dtype="auto": the checkpoints' own
        loop=partial(generate, sampling=_SAMPLING[row.source]),
        loop_name=f"generate {_RECORDED_PASSES} {row.source}",
        card=card_of(row),
        shape=(row.micro_batch, prompt),
        few_shapes=True,
        unrolled=partial(whole_run, new_tokens=new_tokens),
        measured_from=_TOKENS if row.source == "qwen3" else None,
        notes=(
            "flash_attn's accumulators of split keys, below 1 MiB, are left out",
            *((_WITHOUT_PROMPT,) if row.source == "qwen3" else ()),
        ),
    )


_TOKENS = 1
"""The iteration with which the passes of tokens begin; before it is the prompt's."""
_WITHOUT_PROMPT = (
    "read as the peak of the tokens' passes: what is published grows with the prompt by the cache alone, without room "
    "for what a prompt's own pass holds"
)


@dataclass(frozen=True, kw_only=True)
class GeneratingWorkload(Workload):
    """A decoder that attends with flash_attn, its linear layers packed or not."""

    quantization: str = "none"
    """``none``, or a kind of packed weights."""

    def build_model(self, *, attention: str, dtype: torch.dtype, device: str = "meta", **changes: Any) -> nn.Module:
        """The model; ``attention`` is not looked at."""
        model = super().build_model(attention="eager", dtype=dtype, device=device, **changes)
        flash_attn_stand_in.use(model)
        if self.quantization != "none":
            pack(model, self.quantization)
        return model


# -- the loop --------------------------------------------------------------------------------------------------------


_SAMPLING: dict[str, dict[str, float]] = {
    "qwen25": {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
}
"""generation_config.json of Qwen2.5-7B-Instruct (the others have another penalty) and of Qwen3's models."""


def generate(session: Session, sampling: dict[str, float]) -> None:
    """``generate`` as the script calls it, left after the first tokens."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        **{"bos_token_id": 151643, "pad_token_id": 151643, "eos_token_id": [151645, 151643], "do_sample": True},
        **sampling,
        min_length=2048 + session.shape[1],  # the script's, so that no sequence ends early
        max_new_tokens=2048,
    )
    session.begin(0)
    inputs = {"input_ids": session.tokens(), "attention_mask": session.tokens()}
    generate_watched(session.model.eval(), inputs, settings, session.recorder, _RECORDED_PASSES, single=True)


def whole_run(recording: Recording, *, new_tokens: int) -> Recording:
    """All tokens, from the recorded ones. Raises RecordingError."""
    run = unrolled(recording, passes=new_tokens).recording()
    return replace(run, phases={**run.phases, ITERATION.format(_TOKENS): run.phases[PASS.format(_TOKENS)]})
