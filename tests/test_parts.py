"""What the planner runs and the emitted script contains: batches of similar length, and where long texts are cut."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.parts.batching import epoch_steps, micro_batches, padded
from planner.parts.segmentation import cut, strengths_of_text, strengths_of_words

widths_of_rows = st.lists(st.integers(1, 64), min_size=1, max_size=60)
strengths_of_tokens = st.lists(st.sampled_from([0, 0, 0, 1, 1, 1, 2, 3, 4]), min_size=1, max_size=200)


def spread_widths(count: int = 2000) -> list[int]:
    """Many short texts and some long ones."""
    return [min(512, int(random.Random(i).lognormvariate(4, 1)) + 2) for i in range(count)]


# -- an epoch's steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "multiple", "expected"), [(1, 8, 8), (8, 8, 8), (9, 8, 16), (61, 8, 60), (61, 1, 60)]
)
def test_a_length_is_padded_to_a_multiple_and_never_beyond_the_longest(
    tokens: int, multiple: int, expected: int
) -> None:
    """Here the longest is 60 tokens."""
    assert expected == padded(tokens, 60, multiple)


@settings(deadline=None)
@given(widths=widths_of_rows, size=st.integers(1, 20), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_an_epoch_has_every_sample_in_full_steps(widths: list[int], size: int, seed: int, epoch: int) -> None:
    """Once each, but for the few that fill the last step up; longest first within a step."""
    steps = epoch_steps(widths, size, seed, epoch)
    assert {size} == {len(step) for step in steps}
    drawn = [i for step in steps for i in step]
    assert set(range(len(widths))) == set(drawn)
    assert len(drawn) - len(widths) < size
    for step in steps:
        assert sorted((widths[i] for i in step), reverse=True) == [widths[i] for i in step]


@settings(deadline=None)
@given(widths=widths_of_rows, size=st.integers(1, 20), seed=st.integers(0, 3))
def test_a_run_begins_with_its_longest_sample(widths: list[int], size: int, seed: int) -> None:
    """If memory runs out, then in the first step."""
    assert max(widths) == widths[epoch_steps(widths, size, seed, 0)[0][0]]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    """A resumed run goes on in the same order; another epoch or seed has another one."""
    widths = spread_widths(500)
    first = epoch_steps(widths, 8, 0, 1)
    assert first == epoch_steps(list(widths), 8, 0, 1)
    assert first != epoch_steps(widths, 8, 0, 2)
    assert first != epoch_steps(widths, 8, 1, 1)


def test_long_and_short_steps_are_mixed() -> None:
    """Sorted lengths would drift: the mean width of an epoch's halves is about the same."""
    widths = spread_widths()
    steps = epoch_steps(widths, 16, 0, 1)
    means = [sum(widths[i] for i in step) / 16 for step in steps]
    half = len(means) // 2
    assert sum(means[:half]) / half == pytest.approx(sum(means[half:]) / (len(means) - half), rel=0.25)


def test_similar_lengths_go_together() -> None:
    """Padding of a step to its longest is far below that of steps in random order."""
    widths = spread_widths()
    grouped = sum(16 * widths[step[0]] for step in epoch_steps(widths, 16, 0, 1))
    mixed = sum(16 * max(widths[i : i + 16]) for i in range(0, len(widths), 16))
    assert grouped < 1.15 * sum(widths) < 0.5 * mixed


# -- a step's micro-batches ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(widths=widths_of_rows, budget=st.integers(1, 300), world=st.integers(1, 4))
def test_a_step_is_dealt_out_whole_and_evenly(widths: list[int], budget: int, world: int) -> None:
    """Every row once; as many micro-batches for every process, as many rows but one, none over the budget."""
    widths = sorted(widths, reverse=True)
    parts = micro_batches(widths, budget, world)
    assert list(range(len(widths))) == sorted(i for part in parts for rows in part for i in rows)
    for part in parts:
        assert world == len(part)
        counts = [len(rows) for rows in part]
        assert 1 >= max(counts) - min(counts)
        assert counts[0] == max(counts) >= 1
        width = max(widths[i] for rows in part for i in rows)
        assert width == widths[part[0][0]]
        assert counts[0] == 1 or counts[0] * width <= budget


@settings(deadline=None)
@given(widths=widths_of_rows, budget=st.integers(1, 300), world=st.integers(1, 4))
def test_no_fewer_micro_batches_would_do(widths: list[int], budget: int, world: int) -> None:
    """As few as taking as many rows as fit, again and again; and no process has more to do than that leaves."""
    widths = sorted(widths, reverse=True)
    greedy, tokens, start = 0, 0, 0
    while start < len(widths):
        end = min(len(widths), start + max(1, budget // widths[start]) * world)
        greedy, tokens, start = greedy + 1, tokens + widths[start] * -(-(end - start) // world), end
    parts = micro_batches(widths, budget, world)
    assert greedy == len(parts)
    assert tokens >= sum(widths[part[0][0]] * len(part[0]) for part in parts)


def test_cuts_lie_where_lengths_change() -> None:
    """Two micro-batches either way: not three long texts and a short one, but what is alike together."""
    assert [[[2, 3, 4, 5]], [[0, 1]]] == micro_batches([64, 64, 33, 32, 32, 32], 192)


def test_a_process_without_a_row_has_an_empty_micro_batch() -> None:
    """Three rows for two processes, one at a time."""
    assert [[[0], [1]], [[2], []]] == micro_batches([8, 8, 8], 8, 2)


def test_the_largest_micro_batch_comes_first() -> None:
    """Whatever the lengths, as the card sees it: rows times width."""
    widths = sorted(spread_widths(64), reverse=True)
    sizes = [len(part[0]) * widths[part[0][0]] for part in micro_batches(widths, 1024, 2)]
    assert sorted(sizes, reverse=True) == sizes


# -- where texts may be cut ------------------------------------------------------------------------------------------


def words_of(text: str) -> list[tuple[int, int]]:
    """Offsets of single characters but spaces: the finest tokens there are."""
    return [(i, i + 1) for i, character in enumerate(text) if not character.isspace()]


def strength_before(text: str, tail: str) -> int:
    """Of the place where `tail` begins."""
    offsets = words_of(text)
    return strengths_of_text(text, offsets)[[start for start, _ in offsets].index(text.index(tail))]


@pytest.mark.parametrize(
    ("text", "tail", "expected"),
    [
        ("One thing.\n\nAnother.", "Another", 4),
        ("One thing.\n \nAnother.", "Another", 4),
        ("It ends. It begins.", "It begins", 3),
        ("Does it end? It does!", "It does", 3),
        ("He said “it ends.” It begins.", "It begins", 3),
        ("It ends (at last.) It begins.", "It begins", 3),
        ("It ends ... It begins.", "It begins", 3),
        ("他走了。她来了。", "她", 3),
        ("他说：“走吧！”她来了。", "她", 3),
        ("終わった。「次」", "「", 3),
        ("هل انتهى؟ نعم انتهى", "نعم", 3),
        ("यह समाप्त हुआ। वह आया", "वह", 3),
        ("First this, then that", "then", 2),
        ("先这样，再那样", "再", 2),
        ("one two", "two", 1),
        ("他走了", "走", 1),
        ("It is 3.14 or so", "14", 0),
        ("It is 1,000 or so", "000", 0),
        ("fruit, e.g. apples", "apples", 1),
        ("tools, e.g. Python", "Python", 1),
        ("by J. Smith", "Smith", 1),
        ("inside", "side", 0),
    ],
)
def test_boundaries_of_many_scripts(text: str, tail: str, expected: int) -> None:
    """Paragraph 4, sentence 3, clause 2, word 1, within a word 0."""
    assert expected == strength_before(text, tail)


def test_a_token_that_carries_its_space_begins_a_word() -> None:
    """Sentencepiece and byte-level tokens have the space before them in their own characters."""
    assert [1, 0, 3] == strengths_of_text(" One. It", [(0, 4), (4, 5), (5, 8)])


def test_words_that_are_given_are_judged_by_their_ends() -> None:
    """Sub-words never; after a full stop, also within quotes, a sentence begins."""
    words = ["It", "ends.”", "Next,", "this"]
    assert [1, 1, 0, 3, 0, 2] == strengths_of_words(words, [0, 1, 1, 2, 2, 3])


def test_a_full_stop_that_is_a_word_ends_a_sentence() -> None:
    """As in corpora of words."""
    assert [1, 1, 3] == strengths_of_words(["ends", ".", "Next"], [0, 1, 2])
    assert [1, 1, 3] == strengths_of_words(["结束", "。", "下"], [0, 1, 2])


# -- where they are cut ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@example(strengths=[0, 1, 1, 0, 0], window=3, overlap=0.375)
@given(strengths=strengths_of_tokens, window=st.integers(1, 50), overlap=st.floats(0, 0.45))
def test_segments_cover_every_token_and_go_forward(strengths: list[int], window: int, overlap: float) -> None:
    """None longer than the window; the next begins within the last one's end, at most `overlap` windows before it."""
    ranges = cut(strengths, window, overlap)
    assert (0, len(strengths)) == (ranges[0][0], ranges[-1][1])
    assert all(0 < end - start <= window for start, end in ranges)
    for (start, end), (again, later) in pairwise(ranges):
        assert start < again <= end < later
        assert end - again <= int(overlap * window)


@settings(deadline=None)
@given(strengths=strengths_of_tokens, window=st.integers(1, 50))
def test_without_overlap_every_token_is_in_one_segment(strengths: list[int], window: int) -> None:
    """Each begins where the one before it ends."""
    assert all(end == again for (_, end), (again, _) in pairwise(cut(strengths, window)))


@settings(deadline=None)
@given(
    words=st.lists(st.integers(1, 10), min_size=1, max_size=60), window=st.integers(22, 60), overlap=st.floats(0, 0.45)
)
def test_no_word_is_cut(words: list[int], window: int, overlap: float) -> None:
    """Where words are shorter than half a window, segments end and begin between them."""
    strengths = [int(i == 0) for tokens in words for i in range(tokens)]
    ranges = cut(strengths, window, overlap)
    assert all(strengths[start] for start, _ in ranges)
    assert all(end == len(strengths) or strengths[end] for _, end in ranges)


def test_the_strongest_place_of_the_second_half_is_taken() -> None:
    """A paragraph's end before a sentence's, and the later of two alike."""
    strengths = [1] * 30
    strengths[12], strengths[15], strengths[18] = 3, 4, 3
    assert [(0, 15), (15, 30)] == cut(strengths, 20)
    strengths[15] = 1
    assert [(0, 18), (18, 30)] == cut(strengths, 20)


def test_an_overlap_begins_at_a_sentence() -> None:
    """Up to four tokens earlier: where one begins, three are repeated."""
    strengths = [1] * 30
    strengths[15], strengths[18] = 3, 4
    assert [(0, 18), (15, 30)] == cut(strengths, 20, 0.2)


def test_a_text_without_places_is_cut_at_the_window() -> None:
    """One enormous word."""
    assert [(0, 20), (20, 40), (40, 45)] == cut([0] * 45, 20)
    assert [(0, 20), (16, 36), (32, 45)] == cut([0] * 45, 20, 0.2)
