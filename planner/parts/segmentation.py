"""Where texts that are longer than the model's window are cut. Exact in the model's own tokens."""

from __future__ import annotations

import re
from itertools import pairwise


def strengths_of_text(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """For each token how good a place it is to begin a segment: paragraph 4, sentence 3, clause 2, word 1, else 0.

    `offsets` are the characters of each token, as fast tokenizers give them.
    """
    closing = r"[\"'”’»)\]}」』】）]*"
    # A full stop ends a sentence before a space and no small letter, after more than a letter: not 3.14, e.g., J. Doe.
    sentence = rf"(?<!\W[A-Za-z])[.!?…؟۔।]+{closing}(?=\s+[^\sa-z])|[。！？；｡]+{closing}"
    clause = r"[,;:،؛](?=\s)|[，、：]"
    places = {}
    for strength, pattern in ((2, clause), (3, sentence), (4, r"\n\s*\n")):
        for found in re.finditer(pattern, text):
            places[found.end()] = strength
    strengths = []
    for (_, before), (start, _) in pairwise([(0, 0), *offsets]):
        here = max(places.get(i, 0) for i in range(min(before, start), start + 1))
        space = start > before or text[start : start + 1].isspace()
        wide = bool(re.match(r"[\u3040-\u30ff\u3400-\u9fff]", text[start : start + 1]))  # no spaces between words
        strengths.append(max(here, int(space or wide)))
    return strengths


def strengths_of_words(words: list[str], word_ids: list[int]) -> list[int]:
    """The same for the tokens of a list of words: `word_ids` has each token's word."""
    strengths = []
    for before, word in pairwise([-1, *word_ids]):
        last = words[before].rstrip("\"'”’»)]}」』】）") if before >= 0 else ""
        ends = last.endswith(tuple(".!?…؟۔।。！？；｡")) * 3 or last.endswith(tuple(",;:،؛，、：")) * 2 or 1
        strengths.append(ends if word != before else 0)
    return strengths


def cut(strengths: list[int], window: int, overlap: float = 0.0) -> list[tuple[int, int]]:
    """Token ranges of at most `window` tokens that cover a text, cut at its best places.

    A segment ends at the last of the strongest places in its second half. The next one begins up to `overlap` times
    `window` tokens earlier: at the first of the strongest places there.
    """
    ranges, start, end = [], 0, 0
    while len(strengths) - start > window:
        places = range(max(start + window // 2, end + 1), start + window + 1)  # beyond the last one's end
        end = max(places, key=lambda i: (strengths[i], i))
        ranges.append((start, end))
        again = range(max(start + 1, end - int(overlap * window)), end)
        words = [i for i in again if strengths[i] or not strengths[end]] or [end]  # none within a word that fits
        start = max(words, key=lambda i: (strengths[i], -i))
    return [*ranges, (start, len(strengths))]
