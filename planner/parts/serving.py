"""How texts go to a model that answers them: which of them share a batch. Lengths and widths are in tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise


def budget_batches(widths: list[int], budget: int, rows: int, more: int = 0, overhead: int = 0) -> list[list[int]]:
    """Batches of texts of similar width, by index, the widest first: if memory runs out, then at once.

    A batch has at most `rows` texts, and at most `budget` tokens when each is padded to the batch's widest and `more`
    tokens follow (those that are written); a text that is over it goes alone. Batches are as full as that allows. With
    `overhead`, which is what a batch costs beside its tokens, in tokens, they end where the width changes if that saves
    more padding than a further batch costs: of such cuts the cheapest one (of at most about 512 places).
    """
    order = sorted(range(len(widths)), key=lambda i: -widths[i])
    sizes = [widths[i] for i in order]
    fulls = [min(i + max(1, min(rows, budget // (width + more))), len(order)) for i, width in enumerate(sizes)]
    changes = [i for i in range(1, len(order)) if sizes[i] != sizes[i - 1]] if overhead else []
    changes = changes[:: len(changes) // 512 + 1]
    starts = {0, *changes}  # where a batch may start
    for start in range(len(order)):
        if start in starts:
            starts.add(fulls[start])
    cost, ends, later = [0] * (len(order) + 1), [0] * len(order), len(changes)
    for start in sorted(starts - {len(order)}, reverse=True):
        full, width = fulls[start], sizes[start]
        later = bisect_right(changes, start, hi=later)
        inside = changes[later : bisect_left(changes, full, lo=later)]
        best, ends[start] = min([(width * end + cost[end], end) for end in (full, *inside)])
        cost[start] = best - width * start + overhead
    batches, start = [], 0
    while start < len(order):
        batches.append(order[start : ends[start]])
        start = ends[start]
    return batches


def shares(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens that each of a text's segments answers for, of token ranges in order that may overlap.

    An overlap is shared in its middle: every token is answered where it stands further inside.
    """
    middles = [(end + start) // 2 for (_, end), (start, _) in pairwise(ranges)]
    return list(pairwise([ranges[0][0], *middles, ranges[-1][1]]))
