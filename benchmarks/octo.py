"""Octocoder under transformers' text-generation pipeline: bf16, and bitsandbytes' int8 and 4-bit weights.

docs/source/en/llm_tutorial_optimization.md (first a blog of September 2023: bitsandbytes 0.41, transformers 4.33) loads
the model, has it answer a question of one sentence with 60 new tokens and reads ``max_memory_allocated``. The load
decides int8's peak, and the products of the prompt 4-bit's: both did more then than bitsandbytes does today.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from configs import spec_of
from loops import Session
from reproduction import Setup, structure
from rows import Row
from torch import Tensor, nn

from planner.hardware import find_card
from planner.inference.generation import generate_watched
from planner.inference.quantized import gemm_4bit, places
from planner.inference.unrolling import unrolled
from planner.levers.quantization import exchange
from planner.recording.stand_ins import Int8Linear, dequantized, features, mixed_product
from planner.workload import Workload

NEW_TOKENS = 60
PROMPT_TOKENS = 20
"""Of "Question: Please write a function in Python that transforms bytes to Giga bytes.\\n\\nAnswer:", about: the
tokenizer isn't here, and ten tokens more are 0.02 % of any row."""
_RECORDED_PASSES = 5
_CARD = "A100-80GB"
_QUANTIZATIONS = {"none": "none", "bnb int8": "int8", "bnb 4bit": "nf4"}
"""The rows' words; 4-bit's type was fp4, as large as nf4."""


def setup_of(row: Row) -> Setup | str:
    """How the row was run."""
    quantization = _QUANTIZATIONS.get(row["quantization"])
    if quantization is None:
        return f"quantization {row['quantization']!r} isn't modelled"
    return Setup(
        workload=OctoWorkload(spec=spec_of(row["model_id"]), task="causal-lm", quantization=quantization),
        config=structure(precision="bf16", attention="eager", quantization=quantization),
        weights="bfloat16" if quantization == "none" else "float16",  # what load_in_8bit and load_in_4bit chose then
        loop=generate,
        loop_name=f"octo {_RECORDED_PASSES}",
        card=find_card(_CARD),
        shape=(1, PROMPT_TOKENS),
        few_shapes=True,
        unrolled=lambda recording: unrolled(recording, passes=NEW_TOKENS).recording(),
        caveats=("GPTBigCode's attention of that time differs",),
        notes=(f"the card isn't stated: {_CARD}; the prompt's tokens neither: {PROMPT_TOKENS}",),
    )


@dataclass(frozen=True, kw_only=True)
class OctoWorkload(Workload):
    """GPTBigCode with a causal mask of its own, its linear layers as bitsandbytes 0.41 kept them."""

    quantization: str = "none"
    """``none``, ``int8`` or ``nf4``."""

    def build_model(self, *, attention: str, dtype: torch.dtype, device: str = "meta", **changes: Any) -> nn.Module:
        """The model of transformers 4.33."""
        model: Any = super().build_model(attention=attention, dtype=dtype, device=device, **changes)
        positions = model.config.n_positions
        model.transformer.register_buffer("bias", torch.empty(positions, positions, dtype=torch.bool, device=device))
        if self.quantization != "none":
            exchange(list(places(model, self.quantization)), EARLIER[self.quantization])
        return model  # type: ignore[no-any-return]


def generate(session: Session) -> None:
    """The pipeline's call of ``generate``, left after its first passes."""
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=0)
    session.begin(0)
    inputs = {"input_ids": session.tokens(), "attention_mask": session.tokens()}
    generate_watched(session.model.eval(), inputs, settings, session.recorder, _RECORDED_PASSES, single=True)


# -- bitsandbytes 0.41 -----------------------------------------------------------------------------------------------


class FourBitLinear(nn.Module):
    """nn/modules.py, Linear4bit: fp4 with an fp32 scale for each 64 elements; it computes in fp32 unless told."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = features(linear)
        elements, device = linear.weight.numel(), linear.weight.device
        self.loaded_from = (2 * elements,)  # Params4bit.cuda: an fp16 copy
        packed = torch.empty((elements + 1) // 2, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias: Any = linear.bias
        self.register_buffer("absmax", torch.empty(-(-elements // 64), device=device))
        self.register_buffer("code", torch.empty(16, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """autograd/_functions.py, matmul_4bit: a vector by the packed weight, more by a copy of fp16 cast to fp32."""
        x, bias = input.to(torch.float32), self.bias.to(torch.float32)
        if x.numel() == self.in_features:
            out: Any = gemm_4bit(x, self.weight, self.absmax, self.out_features)
            out += bias
            return out.to(input.dtype)  # type: ignore[no-any-return]
        shape = [self.out_features, self.in_features]
        return nn.functional.linear(x, dequantized(self.weight, shape, torch.float16).to(x.dtype), bias).to(input.dtype)


class EightBitLinear(Int8Linear):
    """nn/modules.py, Linear8bitLt: the first pass puts the weight in the tensor cores' own order."""

    def __init__(self, linear: Any) -> None:
        super().__init__(linear)
        elements = linear.weight.numel()
        self.loaded_from = (2 * elements, elements)  # Int8Params.cuda: an fp16 copy, double_quant's transposed codes
        self._ordered = False

    def forward(self, input: Tensor) -> Tensor:
        """autograd/_functions.py, MatMul8bitLt: rows are quantized both ways."""
        ordered = self.weight if self._ordered else nn.Parameter(torch.empty_like(self.weight), requires_grad=False)
        x = input.reshape(-1, self.in_features)
        _columns = torch.empty_like(x, dtype=torch.int8)
        out, _, _ = mixed_product(x, ordered, self.scales, self.bias)
        self.weight, self._ordered = ordered, True
        return out.view(*input.shape[:-1], -1).clone()


EARLIER: dict[str, Any] = {"nf4": FourBitLinear, "int8": EightBitLinear}
