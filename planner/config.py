"""One point of the search space: the configuration object that users get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypeVar

Precision = Literal["fp32", "tf32", "fp16-amp", "bf16-amp", "bf16", "bf16-master"]
Checkpointing = str
"""``none``, ``full`` (every layer) or ``every-N`` (layers 0, N, 2N, ...)."""
Optimizer = Literal["adamw_fused", "adamw_foreach", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"]
Attention = Literal["eager", "sdpa", "flash2"]
Loss = Literal["standard", "fused-linear"]
Offload = Literal["none", "optimizer", "parameters", "activations"]
Quantization = Literal["none", "int8", "nf4"]
Method = Literal["full", "lora", "qlora"]
Task = Literal[
    "sequence-classification",
    "token-classification",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
    "multi-label-classification",
    "regression",
    "embedding",
    "reranking",
]
Parallelism = Literal["none", "ddp", "fsdp2"]
InferencePrecision = Literal["fp32", "tf32", "fp16", "bf16"]
InferenceOffload = Literal["none", "parameters", "disk"]
InferenceQuantization = Literal["none", "int8", "nf4", "int8-weight-only", "int8-dynamic"]
KvCache = Literal["none", "dynamic", "static", "quantized", "offloaded"]

PRECISIONS: tuple[str, ...] = get_args(Precision)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
ATTENTIONS: tuple[str, ...] = get_args(Attention)
LOSSES: tuple[str, ...] = get_args(Loss)
OFFLOADS: tuple[str, ...] = get_args(Offload)
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
METHODS: tuple[str, ...] = get_args(Method)
TASKS: tuple[str, ...] = get_args(Task)
PARALLELISMS: tuple[str, ...] = get_args(Parallelism)
INFERENCE_PRECISIONS: tuple[str, ...] = get_args(InferencePrecision)
INFERENCE_OFFLOADS: tuple[str, ...] = get_args(InferenceOffload)
INFERENCE_QUANTIZATIONS: tuple[str, ...] = get_args(InferenceQuantization)
KV_CACHES: tuple[str, ...] = tuple(word for word in get_args(KvCache) if word != "none")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LoraSettings(_Frozen):
    """What the adapters look like (arguments of ``peft.LoraConfig``)."""

    r: int = Field(default=16, ge=1)
    """Rank of the adapter matrices."""
    alpha: int = Field(default=32, ge=1)
    """Scaling numerator: the adapter's output is multiplied by ``alpha / r``."""
    dropout: float = Field(default=0.05, ge=0, lt=1)
    """Dropout before the first adapter matrix."""
    target_modules: str = "all-linear"
    """As peft reads it: every linear layer but the head."""


class TrainingConfig(_Frozen):
    """One training configuration, complete: what a step holds in memory and how long it takes follow from it."""

    micro_batch_size: int = Field(ge=1)
    """Sequences in one forward and backward pass."""
    seq_len: int = Field(ge=1)
    """Longest sequence of a micro-batch, in tokens."""
    max_tokens_per_micro_batch: int = Field(ge=1)
    """Padded tokens that one micro-batch may hold; shorter sequences go in larger batches up to this budget."""
    gradient_accumulation_steps: int = Field(ge=1)
    """Micro-batches for each optimizer step."""
    effective_batch_size: int = Field(ge=1)
    """Sequences for each optimizer step: micro-batch times accumulation (times devices)."""
    precision: Precision
    """Arithmetic: fp32, tf32 matmuls, autocast to fp16 or bf16, weights in bf16 (-master: and fp32 copies of them)."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing: none, full, or every-N layers."""
    offload: Offload = "none"
    """What lives in host memory instead of on the card."""
    quantization: Quantization = "none"
    """How the frozen base weights are stored."""
    optimizer: Optimizer = "adamw_fused"
    """The optimizer and its implementation."""
    attention: Attention = "sdpa"
    """The attention implementation that transformers is asked for."""
    loss: Loss = "standard"
    """Over all logits at once, or fused with the output layer."""
    method: Method = "full"
    """Which parameters are trained."""
    lora: LoraSettings | None = None
    """Adapter settings; only with method lora or qlora."""
    gpus: int = Field(default=1, ge=1)
    """Cards, each with a process of its own; micro-batch and accumulation are each card's."""
    parallelism: Parallelism = "none"
    """What the cards share: ddp, nothing but gradients' sums; fsdp2, weights, gradients and state in shards."""


class InferenceConfig(_Frozen):
    """One inference configuration, complete: what a batch holds in memory and how long it takes follow from it."""

    micro_batch_size: int = Field(ge=1)
    """Sequences of the longest length in one pass; of a generating task, requests that are generated together."""
    seq_len: int = Field(ge=1)
    """Longest sequence of a batch, in tokens; of a generating task the longest prompt, its shared prefix included."""
    max_tokens_per_micro_batch: int = Field(ge=1)
    """Padded tokens that one batch may hold, new tokens included; shorter sequences go in larger batches."""
    max_sequences: int | None = Field(default=None, ge=1)
    """Sequences that one batch may have, however short they are; None: as many as the tokens allow."""
    overhead_tokens: int = Field(default=0, ge=0)
    """What a batch costs beside its tokens, in tokens: the cut of sorted texts weighs it against padding; 0:
    batches are as full as the tokens allow."""
    precision: InferencePrecision
    """Type of weights and arithmetic; tf32: fp32 weights, products on tf32 tensor cores."""
    quantization: InferenceQuantization = "none"
    """How weights of linear layers are stored: as they are; int8 or nf4 by bitsandbytes; int8-weight-only by torchao;
    int8-dynamic by torch.ao, on processors alone."""
    attention: Attention = "sdpa"
    """The attention implementation that transformers is asked for."""
    offload: InferenceOffload = "none"
    """Where the weights of layers that are not on the card wait: host memory (parameters) or disk."""
    layers_on_card: int | None = Field(default=None, ge=0)
    """With offload: how many of the model's layers, the first ones, stay on the card; None: all."""
    embedding_on_card: bool = True
    """Whether the table of token embeddings is on the card; in host memory the processor looks tokens up in it."""
    kv_cache: KvCache = "none"
    """Where keys and values of earlier tokens are kept; none for tasks that generate nothing."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Tokens generated for each request, at most."""
    prefill_chunk_tokens: int = Field(default=0, ge=0)
    """Tokens of a prompt in one pass; 0: the whole prompt at once."""
    prefix_tokens: int = Field(default=0, ge=0)
    """Tokens at the beginning of prompts that requests share: computed once, and kept."""
    prefix_cache_bytes: int = Field(default=0, ge=0)
    """What keys and values of shared beginnings may take together; beyond it the least recently used go."""


Config = TrainingConfig | InferenceConfig
"""Either."""
C = TypeVar("C", TrainingConfig, InferenceConfig, default=TrainingConfig)
"""The one that a search is about."""


def read_config(values: Mapping[str, Any]) -> Config:
    """From ``model_dump``'s fields, by which the two are told apart. Raises ValueError (pydantic's)."""
    kind = TrainingConfig if "gradient_accumulation_steps" in values else InferenceConfig
    return kind.model_validate(values)


def passes_of(config: Config) -> int:
    """Passes of a step: micro-batches of an optimizer step; at inference a batch is one."""
    return 1 if isinstance(config, InferenceConfig) else config.gradient_accumulation_steps
