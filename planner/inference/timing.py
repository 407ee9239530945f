"""How long a batch takes to be answered: planner.timing's roofline over one pass, or over all that write a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from planner.achievable import Achievable, reached_on
from planner.config import InferenceConfig
from planner.hardware import Card
from planner.levers.precision import width_multiple
from planner.memory.model import Int64s
from planner.memory.polynomials import Shape
from planner.parts import batching, serving
from planner.recording.record import Op
from planner.timing import Operators, Pass


def pass_seconds(
    ops: Sequence[Op],
    amounts: tuple[Int64s, Int64s],
    config: InferenceConfig,
    card: Card,
    reached: Achievable | None = None,
) -> float:
    """One pass from an idle card to an idle card: answers are waited for. ``amounts``: FLOPs and moved bytes."""
    reached = reached or reached_on(card)
    operators = Operators.of(ops)
    tf32 = config.precision == "tf32" and "tf32" in card.dense_flops_per_s
    kernels = operators.kernel_seconds(*amounts, card, tf32=tf32, reached=reached)
    return Pass.of(kernels, operators.launch_seconds(reached)).alone_s


def batch_shapes(lengths: Sequence[int], config: InferenceConfig) -> Counter[Shape]:
    """How many batches of each shape (rows, padded tokens) infer.py makes of texts with these lengths."""
    multiple = width_multiple(config.precision)
    widths = [batching.padded(tokens, config.seq_len, multiple) for tokens in lengths]
    rows = config.max_sequences or len(widths)
    batches = serving.budget_batches(widths, config.max_tokens_per_micro_batch, rows, config.max_new_tokens)
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
