"""Qwen2.5's speed benchmark: a prompt, then 2048 generated tokens, on an A100.

The script (QwenLM/Qwen2.5, examples/speed-benchmark/speed_benchmark_transformers.py) loads, calls ``generate`` once
and reads ``max_memory_allocated``, never reset; its table has two digits of GiB. transformers' own ``generate`` is
recorded here for its first tokens. From the second on, a token's events are the last one's with sizes that grow by
equal steps: the cache is concatenated anew for each, and how its blocks fit in what earlier ones left decides the peak
(a block of a segment is only split where more than 1 MiB would remain).
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import flash_attn_stand_in
import numpy as np
import torch
from configs import spec_of
from loops import ITERATION, Session
from numpy.typing import NDArray
from packed_linears import QUANTIZATIONS, pack
from reproduction import Setup, card_of, structure
from rows import Row
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from planner.errors import RecordingError
from planner.memory.block_sizes import SMALL_SIZE_BYTES
from planner.recording.record import OUTSIDE_LAYERS, Recording
from planner.workload import Workload

_LENGTHS = re.compile(r"prompt (\d+) \+ (\d+) generated")
_RECORDED_TOKENS = 5
"""The prompt's own, one that finds a cache as the prompt left it, and three alike."""


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
        loop=generate,
        loop_name=f"generate {_RECORDED_TOKENS}",
        card=card_of(row),
        shape=(row.micro_batch, prompt),
        few_shapes=True,
        unrolled=partial(unrolled, new_tokens=new_tokens),
        notes=("flash_attn's accumulators of split keys, below 1 MiB, are left out",),
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


class _EnoughError(Exception):
    """The tokens that are to be recorded are there."""


def generate(session: Session) -> None:
    """``generate`` as the script calls it, left after the first tokens."""
    from transformers import GenerationConfig, StoppingCriteria

    class Count(StoppingCriteria):  # called when a token is chosen
        tokens = 0

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            self.tokens += 1
            session.begin(self.tokens)
            if self.tokens == _RECORDED_TOKENS:
                raise _EnoughError
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    settings = GenerationConfig(
        # Qwen2.5-7B-Instruct's generation_config.json; the others have another penalty
        **{"bos_token_id": 151643, "pad_token_id": 151643, "eos_token_id": [151645, 151643], "do_sample": True},
        **{"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
        min_length=2048 + session.shape[1],  # the script's, so that no sequence ends early
        max_new_tokens=2048,
    )
    session.begin(0)
    inputs = {"input_ids": session.tokens(), "attention_mask": session.tokens()}
    with _NothingIsSo(), torch.no_grad(), suppress(_EnoughError):
        session.model.eval().generate(**inputs, generation_config=settings, stopping_criteria=[Count()])


class _NothingIsSo(TorchFunctionMode):
    """``generate`` asks whether every sequence has ended, and whether its special tokens are unusual ones."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0].device.type == "meta":
            return False
        return func(*args, **(kwargs or {}))


# -- the tokens that are not recorded --------------------------------------------------------------------------------


def unrolled(recording: Recording, *, new_tokens: int) -> Recording:
    """The whole run: the last recorded token's events again for each further one.

    Blocks of a token alone that the small pool serves (up to 1 MiB, never more than their own size) are left out of
    all but the last tokens: they are nine events in ten, and what they need is reserved by the first tokens.

    Raises RecordingError where the last two recorded tokens' events differ, or sizes don't grow by equal steps.
    """
    tokens = _Tokens.of(recording)
    further = range(1, new_tokens - _RECORDED_TOKENS + 1)
    reduced = tokens.events[tokens.outlive(tokens.sizes + tokens.growth * len(further))]
    whole_from = len(further) - _WHOLE_TOKENS
    later = [_shifted(tokens.events if k > whole_from else reduced, tokens.blocks * k) for k in further]
    end, kinds = recording.phases[ITERATION.format(_RECORDED_TOKENS)], np.array(recording.categories)
    made = tokens.first + tokens.blocks
    events = [*recording.events[:end], *np.concatenate(later or [np.zeros(0, np.int64)]).tolist()]
    return replace(
        recording,
        events=events,
        sizes=np.concatenate(
            [recording.sizes[:made], *(tokens.sizes + tokens.growth * k for k in further)], dtype=np.int64
        ).tolist(),
        categories=np.concatenate([kinds[:made], np.tile(kinds[tokens.first : made], len(further))]).tolist(),
        layers=[*recording.layers[:end], *[OUTSIDE_LAYERS] * (len(events) - end)],
        phases={name: index for name, index in recording.phases.items() if index < end},
        gradients=[],
        ops=[],
    )


_WHOLE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """The last recorded token, and how the next ones differ from it."""

    events: NDArray[np.int64]
    """Its own; it frees blocks of the token before."""
    first: int
    """Its first block."""
    sizes: NDArray[np.int64]
    """Of its blocks."""
    growth: NDArray[np.int64]
    """By how much each block is larger than that of the token before."""

    @classmethod
    def of(cls, recording: Recording) -> _Tokens:
        """Read them off. Raises RecordingError."""
        all_events, all_sizes = (np.array(values, dtype=np.int64) for values in (recording.events, recording.sizes))
        begins = [recording.phases[ITERATION.format(index)] for index in range(_RECORDED_TOKENS + 1)]
        before, older, last = (all_events[a:b] for a, b in pairwise(begins[-4:]))
        sizes = [all_sizes[events[events > 0]] for events in (before, older, last)]
        alike = np.array_equal(_shifted(older, int((last > 0).sum())), last)
        if not alike or not np.array_equal(sizes[2] - sizes[1], sizes[1] - sizes[0]):
            raise RecordingError("the events of one generated token are not those of the next")
        return cls(events=last, first=int(last[last > 0][0]), sizes=sizes[2], growth=sizes[2] - sizes[1])

    @property
    def blocks(self) -> int:
        """How many a token makes."""
        return len(self.sizes)

    def outlive(self, largest: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which events are of blocks that another token frees, or that come to be too large for the small pool."""
        numbers = np.abs(self.events)
        own = numbers[self.events < 0]
        freed = np.isin(numbers, own[own >= self.first]) & (numbers >= self.first)
        large = np.isin(numbers, self.first + np.flatnonzero(largest > SMALL_SIZE_BYTES))
        kept: NDArray[np.bool_] = ~freed | large
        return kept


def _shifted(events: NDArray[np.int64], blocks: int) -> NDArray[np.int64]:
    """The same events on blocks that were made so many later."""
    return events + np.sign(events) * blocks
