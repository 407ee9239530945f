"""How texts go to a model that answers them: which of them share a batch. Lengths and widths are in tokens."""

from __future__ import annotations

from itertools import pairwise


def budget_batches(widths: list[int], budget: int, rows: int, more: int = 0) -> list[list[int]]:
    """Batches of texts of similar width, by index, the widest first: if memory runs out, then at once.

    A batch has at most `rows` texts, and at most `budget` tokens when each is padded to the batch's widest and `more`
    tokens follow (those that are written); a text that is over it goes alone.
    """
    order = sorted(range(len(widths)), key=lambda i: -widths[i])
    batches, start = [], 0
    while start < len(order):
        fitting = budget // (widths[order[start]] + more)
        end = start + max(1, min(rows, fitting))
        batches.append(order[start:end])
        start = end
    return batches


def shares(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens that each of a text's segments answers for, of token ranges in order that may overlap.

    An overlap is shared in its middle: every token is answered where it stands further inside.
    """
    middles = [(end + start) // 2 for (_, end), (start, _) in pairwise(ranges)]
    return list(pairwise([ranges[0][0], *middles, ranges[-1][1]]))
