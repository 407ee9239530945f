"""Which beginnings that prompts share are kept, computed, for the prompts to come. Tokens are ids."""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """Whatever was computed of shared beginnings, at most `limit_bytes` together: the least recently used go first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self.kept: OrderedDict[tuple[int, ...], tuple[object, int]] = OrderedDict()

    def get(self, prefix: tuple[int, ...]) -> object | None:
        """What is kept of a prefix, which is the most recently used one then; None where nothing is."""
        if prefix not in self.kept:
            return None
        self.kept.move_to_end(prefix)
        return self.kept[prefix][0]

    def make_room(self, size_bytes: int) -> bool:
        """Whether so many bytes may be kept; what was not used for the longest time goes for them."""
        if size_bytes > self.limit_bytes:
            return False
        while self.held_bytes + size_bytes > self.limit_bytes:
            _, (_, freed) = self.kept.popitem(last=False)
            self.held_bytes -= freed
        return True

    def put(self, prefix: tuple[int, ...], value: object, size_bytes: int) -> None:
        """Keep a prefix, unless it alone is larger than all that may be kept."""
        if prefix in self.kept:
            self.held_bytes -= self.kept.pop(prefix)[1]
        if self.make_room(size_bytes):
            self.kept[prefix], self.held_bytes = (value, size_bytes), self.held_bytes + size_bytes


def shared_prefixes(prompts: list[list[int]], tokens: int) -> list[tuple[int, ...]]:
    """The beginning that each prompt shares with another one, of at most `tokens` tokens; empty where with none.

    Prompts with the same first half of so many tokens go together, and share what all of them begin with. Of each at
    least one token is left, from which the model goes on.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    least = max(1, tokens // 2)
    for i, prompt in enumerate(prompts):
        if len(prompt) > least:
            groups.setdefault(tuple(prompt[:least]), []).append(i)
    shared: list[tuple[int, ...]] = [()] * len(prompts)
    for group in groups.values():
        if len(group) < 2:
            continue
        first, last = min(prompts[i] for i in group), max(prompts[i] for i in group)
        longest = min(tokens, *(len(prompts[i]) - 1 for i in group))
        same = next((i for i in range(longest) if first[i] != last[i]), longest)
        for i in group:
            shared[i] = tuple(first[:same])
    return shared
