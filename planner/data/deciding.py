"""What the lengths of the data decide: the sequence length, and which samples the texts become."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.data.sampling import margin, rule_of_three
from planner.data.survey import Drawn, Survey
from planner.data.tokens import TokenCounter
from planner.models import ModelSpec, default_seq_len
from planner.parts.segmentation import cut
from planner.tasks import LongTexts, TaskFacts
from planner.units import round_up

EXACTLY_CUT_TOKENS = 2_000_000
"""Tokens of long texts whose segments are found as the script finds them; further texts have full windows."""
TOGETHER = 1000
"""Texts that the script packs together."""
LONGEST_TARGET = 512
"""Target tokens that data may ask for; longer ones are cut unless the request says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The data, and what becomes of it."""

    survey: Survey
    """What the data is."""
    counted_by: str
    """How tokens were counted, in a clause."""
    facts: TaskFacts
    """Of the task."""
    seq_len: int
    """Longest sequence, in tokens."""
    seq_len_reason: str
    """Why, in a clause."""
    target_seq_len: int | None
    """Longest target, in tokens; None where the task has none."""
    target_reason: str
    """Why, in a clause; empty where it was asked for."""
    long_texts: LongTexts
    """What becomes of longer ones."""
    overlap: float
    """Share of a segment that the next one repeats."""
    counter: TokenCounter
    """What counted them, for other cuts."""

    @cached_property
    def lengths(self) -> list[tuple[int, ...]]:
        """Tokens of each row's sequences, special tokens counted, nothing cut."""
        return [sequences(tokens, self.facts, self.counter) for tokens in self.survey.tokens]

    @property
    def flat(self) -> list[int]:
        """Tokens of each sequence."""
        return [count for row in self.lengths for count in row]

    @property
    def options(self) -> tuple[LongTexts, ...]:
        """What may be done with long texts of this data: a pair of texts is only ever cut."""
        single = len(self.survey.columns.texts) == 1
        return self.facts.long_texts if single else ("truncate",)

    @cached_property
    def longer(self) -> float:
        """Share of the sequences that are longer than ``seq_len``."""
        return sum(count > self.seq_len for count in self.flat) / len(self.flat)

    @cached_property
    def longer_margin(self) -> float:
        """Half of the 95 % interval of that share; where none was longer, what it may be at most."""
        if not self.longer:
            return rule_of_three(len(self.lengths), share=self.survey.share)
        shares = [sum(count > self.seq_len for count in row) / len(row) for row in self.lengths]
        return margin(shares, self.parts, share=self.survey.share)

    @cached_property
    def lost(self) -> float:
        """Share of all tokens that truncation at ``seq_len`` cuts off."""
        return sum(max(0, count - self.seq_len) for count in self.flat) / sum(self.flat)

    @property
    def mean(self) -> float:
        """Tokens of a sequence on average."""
        return sum(self.flat) / len(self.flat)

    @cached_property
    def mean_margin(self) -> float:
        """Half of the 95 % interval of the mean."""
        return margin([sum(row) / len(row) for row in self.lengths], self.parts, share=self.survey.share)

    @property
    def parts(self) -> list[int]:
        """Of each row the block that it was drawn with."""
        return [drawn.part for drawn in self.survey.sample]

    def quantile(self, share: float) -> int:
        """The length that so many of the sequences don't exceed, from 0 to 1."""
        ordered = sorted(self.flat)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def samples(self, long_texts: LongTexts | None = None) -> list[tuple[int, ...]]:
        """Tokens of the sequences of each sample that the script makes of the sampled rows, in the data's order."""
        how = long_texts or self.long_texts
        if how not in self._made:
            if how == "truncate":
                self._made[how] = [tuple(min(count, self.seq_len) for count in row) for row in self.lengths]
            else:
                self._made[how] = list(self._packed() if how == "pack" else self._segments())
        return self._made[how]

    @cached_property
    def _made(self) -> dict[LongTexts, list[tuple[int, ...]]]:
        return {}

    def _packed(self) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(self.lengths), TOGETHER):
            for length in windows(sum(count for row in self.lengths[start : start + TOGETHER] for count in row), self):
                yield (length,)

    def _segments(self) -> Iterator[tuple[int, ...]]:
        around = self.counter.specials(1)
        window = max(1, self.seq_len - around)
        left = EXACTLY_CUT_TOKENS
        for drawn, (count,) in zip(self.survey.sample, self.lengths, strict=True):
            strengths = None
            if count > self.seq_len and left > 0 and drawn.cuts == (1.0,):
                strengths = _strengths(drawn, self.counter, count - around)
                left -= count
            ranges = cut(strengths or [0] * (count - around), window, self.overlap) if count > self.seq_len else ()
            for start, end in ranges or ((0, count - around),):
                yield (end - start + around,)


def _strengths(drawn: Drawn, counter: TokenCounter, count: int) -> list[int] | None:
    """Of the text's tokens; an end token that the script appends is one more."""
    found = counter.strengths(drawn.sample.texts[0])
    return None if found is None else [*found, *[0] * (count - len(found))]


def windows(count: int, decided: Decided) -> list[int]:
    """Tokens of the full windows of a stream of tokens, and of what is left."""
    full, rest = divmod(count, decided.seq_len)
    return [decided.seq_len] * full + ([rest] if rest > 1 else [])


def sequences(tokens: Sequence[int], facts: TaskFacts, counter: TokenCounter) -> tuple[int, ...]:
    """Tokens of the sequences that a row's texts become, special tokens counted."""
    if facts.labels == "tokens":  # the last text is the target
        return (tokens[0] + counter.specials(1),)
    if not facts.joined:
        return tuple(count + counter.specials(1) for count in tokens)
    if facts.name == "causal-lm":  # an end follows
        return (sum(tokens) + counter.specials(1) + (counter.end if len(tokens) == 1 else 1),)
    return (sum(tokens) + counter.specials(len(tokens)),)


def decide(
    found: Survey,
    counter: TokenCounter,
    facts: TaskFacts,
    spec: ModelSpec,
    *,
    seq_len: int | None,
    target_seq_len: int | None,
    long_texts: LongTexts | None,
    overlap: float,
) -> Decided:
    """What becomes of the data, as far as the request leaves it open."""
    how = long_texts or facts.long_texts[0]
    if len(found.columns.texts) > 1:
        how = "truncate"
    lengths = [count for tokens in found.tokens for count in sequences(tokens, facts, counter)]
    length, why = (seq_len, "as asked for") if seq_len else _seq_len(lengths, found, spec, facts, how)
    target, target_why = target_seq_len, ""
    if facts.labels == "tokens" and target is None:
        target, target_why = _target(found, counter, spec)
    return Decided(
        survey=found,
        counted_by=counter.said,
        facts=facts,
        seq_len=length,
        seq_len_reason=why,
        target_seq_len=target,
        target_reason=target_why,
        long_texts=how,
        overlap=overlap,
        counter=counter,
    )


def _seq_len(
    lengths: Sequence[int], found: Survey, spec: ModelSpec, facts: TaskFacts, how: LongTexts
) -> tuple[int, str]:
    """No longer than the data needs, at most what is usual for the model; multiples of 8, as tensor cores like it."""
    usual, why = default_seq_len(spec, facts.name)
    longest = max(lengths)
    if how == "pack":
        return usual, f"{why}; texts are packed into full windows"
    if longest > usual:
        more = sum(count > usual for count in lengths) / len(lengths)
        return usual, f"{why}; {more:.1%} of the data's texts are longer, up to {longest:,} tokens"
    least = max(8, round_up(longest, 8))
    where = "of the sampled rows" if found.drawn or found.share < 1 else "of the data"
    rest = rule_of_three(len(found.sample), share=found.share)
    beyond = f"; at most {rest:.2%} of the others are longer (95 %)" if rest else ""
    return min(least, usual), f"holds the longest text {where}, {longest:,} tokens{beyond}"


def _target(found: Survey, counter: TokenCounter, spec: ModelSpec) -> tuple[int, str]:
    targets = [tokens[-1] + counter.specials(1) for tokens in found.tokens]
    longest, limit = max(targets), min(LONGEST_TARGET, spec.max_seq_len or LONGEST_TARGET)
    if longest <= limit:
        return min(limit, round_up(longest, 8)), f"holds the longest target, {longest:,} tokens"
    more = sum(count > limit for count in targets) / len(targets)
    return limit, f"{more:.1%} of the targets are longer, and cut; --target-seq-len changes it"
