"""The levers of inference: which values each may have here, and why."""

from __future__ import annotations

from dataclasses import dataclass

from planner.levers.attention import AttentionLever
from planner.levers.base import Choice, Context, Lever, ruled_out_on_cpu
from planner.models import fp16_unsafe

LARGEST_BATCH = 1024
"""Sequences of the longest length above which no card gains speed."""
PREFILL_CHUNKS = (2048, 512)
"""Tokens of a prompt in one pass that are tried when whole prompts don't fit."""


@dataclass(frozen=True, kw_only=True)
class InferenceContext(Context):
    """What the choice of a lever's values depends on."""

    generates: bool
    """Whether the task writes text."""
    seq_len: int
    """Longest text or prompt, in tokens."""
    max_sequences: int | None
    """Sequences that there are at once; None: any number."""
    micro_batch_size: int | None = None
    """Sequences of a batch as asked for; None: to be chosen."""
    sliding_window: bool = False
    """Whether layers of the model keep a window of earlier tokens alone."""
    encoder_decoder: bool = False
    """Whether the model reads with one stack and writes with another."""
    stacks: int = 1
    """Runs of repeated layers; 0 where layers share their weights."""
    plain_linears: bool = True
    """Whether the model's products are ``nn.Linear`` layers (GPT-2's are transformers' Conv1D)."""


class PrecisionLever(Lever):
    """fp32, tf32, or weights and arithmetic in fp16 or bf16."""

    field = "precision"
    lowers_memory = (("tf32", "fp32"), ("fp16", "fp32"), ("bf16", "fp32"))

    def choices(self, context: Context) -> list[Choice]:
        """fp16 rounds eight times as finely as bf16 and takes as long; bf16 where fp16's range may be too small."""
        card, unsafe = context.card, fp16_unsafe(context.spec)
        major, minor = card.compute_capability
        no_bf16 = f"bf16 needs compute capability 8.0, this card has {major}.{minor} and would emulate it"
        on_cpu = card.kind == "cpu"
        choices = [
            Choice(value="fp32", reason="the reference"),
            Choice(
                value="tf32",
                valid=card.supports_tf32,
                reason="fp32 weights, products on tf32 tensor cores"
                if card.supports_tf32
                else f"tf32 needs compute capability 8.0, this card has {major}.{minor}",
            ),
            Choice(
                value="fp16",
                swept=unsafe is None and not on_cpu,
                reason=unsafe or "2 bytes a weight, with 11 bits of each number: finer than bf16",
            ),
            Choice(
                value="bf16",
                valid=card.supports_bf16 or on_cpu,
                swept=unsafe is not None or on_cpu,
                reason="2 bytes a weight, with fp32's range; 8 bits of each number"
                if card.supports_bf16 or on_cpu
                else no_bf16,
            ),
        ]
        return ruled_out_on_cpu(choices, context, {"tf32": "tf32 is a format of CUDA's tensor cores"})


class QuantizationLever(Lever):
    """Weights as they are, or in 8 or 4 bits: never unasked while something else fits."""

    field = "quantization"
    lowers_memory = (("nf4", "int8"), ("int8", "none"), ("int8-weight-only", "none"))

    def choices(self, context: Context) -> list[Choice]:
        """Each changes answers beyond rounding: ``plan compare`` shows by how much."""
        assert isinstance(context, InferenceContext)
        linears = "" if context.plain_linears else f"{context.spec.model_type} has no nn.Linear layers to quantize"
        on_cpu = context.card.kind == "cpu"
        changes = "answers change: plan compare shows by how much"
        rest = {"swept": False, "last_resort": True}
        choices = [
            Choice(value="none", reason="weights as they are"),
            Choice(value="int8", reason=f"LLM.int8 by bitsandbytes, 1 byte a weight; {changes}", **rest),
            Choice(value="nf4", reason=f"4-bit weights by bitsandbytes; {changes}", **rest),
            Choice(
                value="int8-weight-only",
                valid=not linears,
                swept=False,
                reason=linears or f"1 byte a weight by torchao, products in the plan's precision; {changes}",
            ),
            Choice(
                value="int8-dynamic",
                valid=on_cpu and not linears,
                swept=False,
                reason=linears or f"int8 products by torch on the processor; {changes}"
                if on_cpu
                else "torch has dynamic int8 products for processors alone",
            ),
        ]
        if not on_cpu:
            return choices
        return [choice if choice.value == "none" else _only_named(choice) for choice in choices]


def _only_named(choice: Choice) -> Choice:
    return Choice(value=choice.value, reason=choice.reason, valid=choice.valid, swept=False)


class OffloadLever(Lever):
    """Where the weights of layers that find no room on the card wait."""

    field = "offload"
    lowers_memory = (("parameters", "none"), ("disk", "none"), ("disk", "parameters"))

    def choices(self, context: Context) -> list[Choice]:
        """Streaming changes no answer, and costs the link's time for every batch."""
        assert isinstance(context, InferenceContext)
        obstacle = "" if context.stacks == 1 else "layers are streamed of models with one stack of them alone"
        choices = [
            Choice(value="none", reason="all weights stay on the card"),
            Choice(
                value="parameters",
                swept=False,
                last_resort=not obstacle,
                valid=not obstacle,
                reason=obstacle
                or "weights without room on the card wait in host memory: of token embeddings a batch's vectors come, "
                "of layers all for every batch; answers are the same",
            ),
            Choice(
                value="disk",
                swept=False,
                valid=not obstacle,
                reason=obstacle
                or "layers without room come from disk for every batch: only when named; answers are the same",
            ),
        ]
        return ruled_out_on_cpu(choices, context, {"parameters": "everything is in host memory already"})


class KvCacheLever(Lever):
    """How keys and values of earlier tokens are kept."""

    field = "kv_cache"

    def choices(self, context: Context) -> list[Choice]:
        """Quantized and offloaded caches aren't made for every model; a window follows from the model's own."""
        assert isinstance(context, InferenceContext)
        if not context.generates:
            return [Choice(value="none", reason="nothing is written")]
        plain = "" if not context.sliding_window else "transformers quantizes no cache with a window"
        if context.encoder_decoder:
            plain = "transformers quantizes no encoder-decoder cache"
        window = "; layers with a window keep its tokens alone" if context.sliding_window else ""
        choices = [
            Choice(value="dynamic", reason=f"grows with what is written, copied for every token{window}"),
            Choice(
                value="static",
                swept=False,
                reason=f"as long as the longest answer from the start: no copies, but all of it is read{window}",
            ),
            Choice(
                value="quantized",
                valid=not plain,
                swept=False,
                reason=plain or "1 byte a number, by transformers' fp8 cache; answers change",
            ),
            Choice(
                value="offloaded",
                valid=not context.encoder_decoder,
                swept=False,
                last_resort=not context.encoder_decoder,
                reason="waits in host memory, and comes layer by layer for every token; answers are the same"
                if not context.encoder_decoder
                else "not for encoder-decoder models in this version",
            ),
        ]
        return ruled_out_on_cpu(choices, context, {"offloaded": "everything is in host memory already"})


class PrefillLever(Lever):
    """How much of a prompt one pass reads."""

    field = "prefill_chunk_tokens"

    def choices(self, context: Context) -> list[Choice]:
        """Chunks lower what reading a prompt takes at its peak, for a pass each."""
        assert isinstance(context, InferenceContext)
        chunks = [n for n in PREFILL_CHUNKS if n < context.seq_len] if context.generates else []
        if context.encoder_decoder:
            chunks = []
        return [
            Choice(value="0", reason="prompts are read in one pass" if context.generates else "one pass"),
            *(
                Choice(value=str(n), swept=False, last_resort=True, reason=f"prompts are read {n} tokens at a time")
                for n in chunks
            ),
        ]


class BatchLever(Lever):
    """Sequences of the longest length in one batch."""

    field = "micro_batch_size"

    def choices(self, context: Context) -> list[Choice]:
        """Powers of two up to what there is at once, and that itself."""
        assert isinstance(context, InferenceContext)
        if context.micro_batch_size is not None:
            return [Choice(value=str(context.micro_batch_size), reason="as asked for")]
        most = min(context.max_sequences or LARGEST_BATCH, LARGEST_BATCH)
        sizes = sorted({*(2**n for n in range(11) if 2**n <= most), most})
        return [Choice(value=str(n), reason=f"{n} of the longest sequences at once") for n in sizes]


LEVERS: tuple[Lever, ...] = (
    PrecisionLever(),
    AttentionLever(),
    QuantizationLever(),
    OffloadLever(),
    KvCacheLever(),
    PrefillLever(),
    BatchLever(),
)
"""In the order of the configuration's fields."""
