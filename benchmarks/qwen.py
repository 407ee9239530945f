"""Qwen's and ms-swift's speed tables: Qwen-7B and its kin under LoRA on an A100, for time alone.

Both train Qwen's own model code, which transformers doesn't have. Qwen2 of transformers with as many key as query
heads has the same operators at the same sizes, but for the one product that gives queries, keys and values in the
original: under adapters it has one adapter instead of three, so it is put in here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from loops import Session, TrainerLoop, optimizer_of
from reproduction import Setup, card_of, known, shape_of, structure
from rows import Row, whole
from torch import Tensor, nn

from planner.config import LoraSettings
from planner.models import ModelSpec
from planner.workload import Workload

_STAND_IN = "Qwen2's code with Qwen's sizes and its one product for queries, keys and values"


class OneProduct(nn.Module):
    """Queries, keys and values by one product, as QWenAttention.c_attn has it (modeling_qwen.py, Qwen/Qwen-7B)."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        projection = attention.q_proj
        self.c_attn = nn.Linear(projection.in_features, 3 * projection.out_features, bias=True)
        self.c_attn.to(projection.weight)
        self._parts: list[Tensor] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Called for queries, then for keys, then for values; all three are made at the first call."""
        if not self._parts:
            self._parts = list(self.c_attn(hidden_states).chunk(3, dim=-1))
        return self._parts.pop(0)


@dataclass(frozen=True, kw_only=True)
class QwenWorkload(Workload):
    """Causal language modelling with a first-generation Qwen."""

    def build_model(self, **options: Any) -> nn.Module:
        """Qwen2 with :class:`OneProduct` in each attention."""
        model = super().build_model(**options)
        for module in list(model.modules()):
            if hasattr(module, "q_proj"):
                module.q_proj = OneProduct(module)
                module.k_proj = module.v_proj = _SharedProduct(module.q_proj)
        return model


class _SharedProduct(nn.Module):
    """Keys and values of a :class:`OneProduct`, whose parameters are no part of this module."""

    def __init__(self, product: OneProduct) -> None:
        super().__init__()
        self._product = (product,)  # in a tuple, so that it isn't registered a second time

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The next part."""
        part: Tensor = self._product[0](hidden_states)
        return part


def qwen(*, hidden: int, layers: int, heads: int, intermediate: int, vocabulary: int) -> QwenWorkload:
    """A first-generation Qwen; the ``intermediate_size`` of its config.json counts both halves, this one a half."""
    config: dict[str, Any] = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    spec = ModelSpec(
        model_id=f"Qwen with {layers} layers",
        config=config,
        source="folder",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        default_task="causal-lm",
        max_seq_len=8192,
    )
    return QwenWorkload(spec=spec, task="causal-lm")


_SIZES: dict[str, dict[str, int]] = {
    "Qwen/Qwen-7B": {"hidden": 4096, "layers": 32, "heads": 32, "intermediate": 11008, "vocabulary": 151936},
    "Qwen/Qwen-72B": {"hidden": 8192, "layers": 80, "heads": 64, "intermediate": 24576, "vocabulary": 152064},
}


def setup_of(row: Row) -> Setup | str:
    """How the row was run."""
    if row.measure != "speed":
        return "for its time alone: how the peak was read, or at which length, is not stated"
    if "gptq" in row["quantization"]:
        return "auto_gptq's kernels dequantize in their own way, which isn't modelled"
    return _qwens_own(row) if row.source == "qwen" else _swift(row)


# -- Qwen's README ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class QwenLoop(TrainerLoop):
    """finetune.py of QwenLM/Qwen: the Trainer under autocast, with adapters in the base's type.

    peft before 0.12 made adapters in the type of the layer that they wrap (LoraLayer.update_layer).
    """

    trains_embeddings: bool = False
    """modules_to_save=["wte", "lm_head"]: both trained, in bf16."""

    def __call__(self, session: Session) -> None:
        """Two optimizer steps; the model, which other rows share, is left as it was found."""
        embeddings = [name for name in ("get_input_embeddings", "get_output_embeddings") if self.trains_embeddings]
        weights = [getattr(session.model, name)().weight for name in embeddings]
        adapters = session.source.trainable
        for adapter in adapters:
            adapter.data = adapter.data.to(torch.bfloat16)
        for weight in weights:
            weight.requires_grad_(True)
        handles = session.recorder.watch_gradients(weights)
        try:
            super().__call__(session)
        finally:
            for handle in handles:
                handle.remove()
            for weight in weights:
                weight.requires_grad_(False)
                weight.grad = None
            for adapter in adapters:
                adapter.grad = None
                adapter.data = adapter.data.to(torch.float32)


_QWEN_LORA = LoraSettings(r=64, alpha=16, dropout=0.05, target_modules="all-linear")
"""c_attn, c_proj, w1 and w2: c_proj names attention's and the MLP's, so these are all linear layers but the head."""


def _qwens_own(row: Row) -> Setup:
    """Samples are padded to the length; memory grows by 2 MB a token, so layers are checkpointed, as in its scripts."""
    embeddings = "wte" in row["finetune_method"]
    return Setup(
        workload=qwen(**_SIZES["Qwen/Qwen-7B"]),
        config=structure(precision="bf16-amp", attention="sdpa", checkpointing="full", method="lora", lora=_QWEN_LORA),
        weights="bfloat16",
        loop=QwenLoop(optimizer=optimizer_of("adamw_foreach"), upcasts_outputs=True, trains_embeddings=embeddings),
        loop_name=f"qwen {embeddings}",
        use_cache=False,
        card=card_of(row),
        shape=shape_of(row),
        caveats=(_STAND_IN, "that layers are checkpointed is inferred from the memory in the same table"),
    )


# -- ms-swift's benchmark --------------------------------------------------------------------------------------------

_MEAN_TOKENS, _DEVIATION_TOKENS, _SHORTEST_TOKENS = 3234.4, 2547.5, 91
"""Of cls-fudan-news-zh by Qwen's tokenizer (docs/source_en/LLM/Benchmark.md)."""


def expected_tokens(longest: int, batch: int) -> int:
    """Padded length of an average batch: the mean of the longest of ``batch`` samples of at most ``longest`` tokens.

    Longer samples are dropped (truncation_strategy="delete"). Of the lengths only mean, deviation and minimum are
    known; they are taken as log-normal. Rows of one ``longest`` and batch share what that leaves open.
    """
    variance = math.log1p((_DEVIATION_TOKENS / _MEAN_TOKENS) ** 2)
    centre = math.log(_MEAN_TOKENS) - variance / 2
    tokens = np.arange(_SHORTEST_TOKENS - 1, longest + 1)
    below = np.array([math.erf((math.log(n) - centre) / math.sqrt(2 * variance)) for n in tokens])
    share = ((below - below[0]) / (below[-1] - below[0])) ** batch
    return round(float(np.sum(tokens[1:] * np.diff(share))))


def for_time(row: Row) -> Row:
    """The row as its time is looked at: with an average batch's length where the source gives a bound alone.

    Its memory is another matter: the longest batch decides that, and Qwen doesn't say how it read its own.
    """
    if row.source not in ("qwen", "swift"):
        return row
    row = replace(row, measure="speed")
    bound = whole(row["seq_len"].removeprefix("<="))
    if row.seq_len is not None or bound is None or row.micro_batch is None:
        return row
    return replace(row, seq_len=expected_tokens(bound, row.micro_batch))


_SLOW_NF4 = "bitsandbytes dequantized more slowly before 0.48 (its pull request 1747: 1.36 to 2.07 times on an A100)"
_DEFAULT_TARGETS = ("c_attn", "q/k/v projection")
"""How the rows write ms-swift's DEFAULT for Qwen; the other value is ``all linear``."""


def _swift(row: Row) -> Setup | str:
    """The Trainer under bf16 autocast over bf16 weights; adapters are fp32 (lora_dtype)."""
    model = row["model_id"].removesuffix("-Chat")
    if model not in _SIZES:
        return "another tokenizer: its lengths aren't known, and no second row shares them"
    method, _, adapters = row["finetune_method"].partition("; ")
    rank, _, target = adapters.partition("; ")
    targets = r".*\.c_attn" if target.startswith(_DEFAULT_TARGETS) else "all-linear"
    lora = LoraSettings(r=int(rank[1:]), alpha=32, dropout=0.05, target_modules=targets) if rank else None
    return Setup(
        workload=qwen(**_SIZES[model]),
        config=structure(
            precision="bf16-amp",
            attention="eager" if row["attention"] == "eager" else "sdpa",
            checkpointing="full" if row["grad_checkpointing"] == "y" else "none",
            method=method,
            quantization="nf4" if method == "qlora" else "none",
            lora=lora,
        ),
        weights="bfloat16",
        loop=TrainerLoop(optimizer=optimizer_of("adamw_foreach"), upcasts_outputs=True),
        loop_name="swift",
        use_cache=False,
        card=card_of(row),
        shape=shape_of(row),
        few_shapes=True,
        caveats=(
            _STAND_IN,
            f"lengths are unknown: an average batch is taken as {row.seq_len} tokens long, and only rows of one "
            "largest length are compared",
            *known(_SLOW_NF4 if method == "qlora" else None),
        ),
    )
