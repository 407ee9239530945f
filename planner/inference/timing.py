"""How long a batch takes to be answered: planner.timing's roofline over one pass, or over all that write a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from planner.achievable import Achievable, reached_on
from planner.config import InferenceConfig
from planner.hardware import Card
from planner.levers.precision import width_multiple
from planner.measure.protocol import Measurement
from planner.memory.model import Int64s
from planner.memory.polynomials import Shape
from planner.parts import batching, serving
from planner.timing import InferenceTime, Operators, Pass


def pass_seconds(
    operators: Operators,
    amounts: tuple[Int64s, Int64s],
    config: InferenceConfig,
    card: Card,
    reached: Achievable | None = None,
) -> float:
    """One pass from an idle card to an idle card: answers are waited for. ``amounts``: FLOPs and moved bytes."""
    reached = reached or reached_on(card)
    tf32 = config.precision == "tf32" and "tf32" in card.dense_flops_per_s
    kernels = operators.kernel_seconds(*amounts, card, tf32=tf32, reached=reached)
    return Pass.of(kernels, operators.launch_seconds(without_gradients(reached))).alone_s


def without_gradients(reached: Achievable) -> Achievable:
    """What is reached where operators make no autograd nodes."""
    return replace(reached, operator_us=reached.inference_operator_us)


def window_texts(micro_batch_size: int, *, writes: bool) -> int:
    """Texts that infer.py sorts by length together: enough for little of a batch to be padding.

    Fewer where writing takes long: a killed run has no more than that to do again.
    """
    return 16 * micro_batch_size if writes else max(4096, 64 * micro_batch_size)


def batch_shapes(lengths: Sequence[int], config: InferenceConfig) -> Counter[Shape]:
    """How many batches of each shape (rows, padded tokens) infer.py makes of texts with these lengths."""
    size = window_texts(config.micro_batch_size, writes=config.max_new_tokens > 0)
    windows = (lengths[start : start + size] for start in range(0, len(lengths), size))
    return sum((_batches_of_window(window, config) for window in windows), Counter())


def _batches_of_window(lengths: Sequence[int], config: InferenceConfig) -> Counter[Shape]:
    multiple = width_multiple(config.precision)
    widths = [batching.padded(tokens, config.seq_len, multiple) for tokens in lengths]
    rows = config.max_sequences or len(widths)
    batches = serving.budget_batches(
        widths, config.max_tokens_per_micro_batch, rows, config.max_new_tokens, config.overhead_tokens
    )
    return Counter((len(batch), max(widths[i] for i in batch)) for batch in batches)


def seconds_over(lengths: Sequence[int], config: InferenceConfig, seconds_of: Callable[[Shape], float]) -> float:
    """All of these texts, batch after batch."""
    return sum(count * seconds_of(shape) for shape, count in batch_shapes(lengths, config).items())


def mean_over_tokens(seconds_of: Callable[[int], float], first: int, tokens: int, points: int = 5) -> float:
    """The mean time of a token over a generation that finds ``first`` tokens in the cache and writes ``tokens``.

    By the trapezoidal rule: a token's kernels are each bound by FLOPs, bytes or their launch, all linear in the past.
    """
    if tokens <= 1:
        return seconds_of(first)
    past = np.unique(np.linspace(first, first + tokens - 1, points).round().astype(int))
    values = np.array([seconds_of(int(p)) for p in past])
    return float(np.trapezoid(values, past) / (past[-1] - past[0])) if len(past) > 1 else float(values[0])


def typical_shape(config: InferenceConfig, seq_len: int) -> Shape:
    """The batch that fills the token budget with texts of a length."""
    rows = config.max_tokens_per_micro_batch // (seq_len + config.max_new_tokens)
    return max(1, min(rows, config.max_sequences or rows)), seq_len


def measured_time(predicted: InferenceTime, measured: Measurement) -> InferenceTime:
    """Times of a batch as a trial measured them."""
    assert measured.step_ms is not None and measured.tokens_per_s is not None
    found = {"step_ms": measured.step_ms, "micro_batch_ms": measured.step_ms, "tokens_per_s": measured.tokens_per_s}
    found["sequences_per_s"] = predicted.sequences_per_s * measured.tokens_per_s / predicted.tokens_per_s
    if measured.prefill_ms and predicted.prefill_ms and predicted.prefill_tokens_per_s:
        found["prefill_ms"] = measured.prefill_ms
        found["prefill_tokens_per_s"] = predicted.prefill_tokens_per_s * predicted.prefill_ms / measured.prefill_ms
    if measured.token_ms and predicted.decode_ms_per_token and predicted.decode_tokens_per_s:
        found["decode_ms_per_token"] = token_ms = fmean(measured.token_ms)
        found["decode_tokens_per_s"] = predicted.decode_tokens_per_s * predicted.decode_ms_per_token / token_ms
    return replace(predicted, source="measured", **found)
