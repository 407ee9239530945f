"""Which samples make an optimizer step, and how a step is cut into micro-batches. Lengths and widths are in tokens."""

from __future__ import annotations

import math
import random


def padded(tokens: int, seq_len: int, multiple: int) -> int:
    """The width that a length is padded to: tensor cores like multiples of 8."""
    return min(math.ceil(tokens / multiple) * multiple, seq_len)


def epoch_steps(widths: list[int], size: int, seed: int, epoch: int, pool: int = 50) -> list[list[int]]:
    """The samples of each optimizer step of an epoch, by index, longest first within a step.

    Shuffled by seed and epoch; then of every `pool` steps' samples those of similar length go together, and the steps
    are shuffled. The last step is filled up from the epoch's beginning. The longest sample's step is the very first of
    a run: if memory runs out, then now and not in some hours. Neither the token budget nor the number of processes
    changes what a step is made of.
    """
    shuffled = random.Random(f"{seed} {epoch}")
    order = shuffled.sample(range(len(widths)), len(widths))
    order = [order[i % len(order)] for i in range(math.ceil(len(order) / size) * size)]
    steps = []
    for start in range(0, len(order), pool * size):
        alike = sorted(order[start : start + pool * size], key=lambda i: -widths[i])
        steps += [alike[i : i + size] for i in range(0, len(alike), size)]
    shuffled.shuffle(steps)
    if epoch == 0:
        longest = max(steps, key=lambda step: widths[step[0]])
        steps.insert(0, steps.pop(steps.index(longest)))
    return steps


def micro_batches(widths: list[int], budget: int, world: int = 1) -> list[list[list[int]]]:
    """Cut a step's rows, longest first, into micro-batches for each of `world` processes: row indices.

    As few as the token budget allows when rows are padded to the longest of their micro-batch, and among those the
    ones with the least padding, of cuts where the width changes or the budget is full. Every process has as many
    micro-batches, padded to the same width, with as many rows but one; a process may have none in one of them. The
    largest comes first: if memory runs out, then at once, and not in the last one, in which the processes exchange
    their gradients.
    """
    n = len(widths)
    changes = [i for i in range(1, n) if widths[i] != widths[i - 1]]
    best = [(0, 0, n)] * (n + 1)  # of the rows from here on: micro-batches, a process's tokens, end of the first one
    for start in reversed(range(n)):
        full = min(start + max(1, budget // widths[start]) * world, n)
        ends = [end for end in changes if start < end < full] + [full]
        costs = [widths[start] * math.ceil((end - start) / world) for end in ends]
        best[start] = min((best[e][0] + 1, best[e][1] + cost, e) for e, cost in zip(ends, costs, strict=True))
    parts, start = [], 0
    while start < n:
        end = best[start][2]
        parts.append([list(range(start + rank, end, world)) for rank in range(world)])
        start = end
    return sorted(parts, key=lambda part: -len(part[0]) * widths[part[0][0]])
