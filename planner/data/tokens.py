"""How many tokens a text has: by the model's own tokenizer, else estimated from its characters."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from planner import hub
from planner.data.rows import Text
from planner.models import ModelSpec
from planner.parts.segmentation import strengths_of_text, strengths_of_words

BATCH = 1000
"""Texts that a tokenizer works on side by side."""
BYTES_PER_TOKEN = 4
"""Of UTF-8, outside of Chinese and Japanese: an English token has about four characters of one byte (OpenAI's help
center, "What are tokens and how to count them"); byte-level tokenizers see two bytes for a letter of the Cyrillic,
Greek, Arabic and Hebrew alphabets and three for one of the Indian ones and Thai, so there tokens are shorter."""
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+")
"""Ideographs and kana: a token each, as BERT's tokenizers cut them (google-research/bert, multilingual.md)."""
ESTIMATED_SPECIALS = 2
"""Special tokens around a text, where no tokenizer says: BERT's two."""


class TokenCounter(Protocol):
    """Counts tokens of texts, special tokens left out."""

    @property
    def said(self) -> str:
        """How tokens are counted, in a clause."""

    @property
    def exact(self) -> bool:
        """Whether by the model's own tokenizer."""

    @property
    def end(self) -> int:
        """Tokens of the end that the script writes after a text of a language model: 0 where there is none."""

    def counts(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of each text; of one given as words, of its words."""

    def specials(self, texts: int) -> int:
        """Special tokens around so many joined texts."""

    def strengths(self, text: Text) -> list[int] | None:
        """How good a place each token is to begin a segment (see ``planner.parts.segmentation``); None: not known."""


@dataclass(frozen=True)
class Estimate:
    """Tokens by the number of characters."""

    why: str
    """Why there is no tokenizer, in a clause."""
    exact: bool = False
    end: int = 1

    @property
    def said(self) -> str:
        """See TokenCounter."""
        return (
            f"estimated from the characters, as {self.why}: {BYTES_PER_TOKEN} bytes of UTF-8 a token, an ideograph or "
            "kana one; pass a folder with the tokenizer as --model, or --lengths FILE"
        )

    def counts(self, texts: Sequence[Text]) -> list[int]:
        """See TokenCounter."""
        return [self._count(text if isinstance(text, str) else " ".join(text)) for text in texts]

    def _count(self, text: str) -> int:
        rest = _WIDE.sub("", text)
        return max(1, len(text) - len(rest) + -(-len(rest.encode()) // BYTES_PER_TOKEN))

    def specials(self, texts: int) -> int:
        """See TokenCounter."""
        return ESTIMATED_SPECIALS + texts - 1

    def strengths(self, text: Text) -> list[int] | None:
        """See TokenCounter."""
        return None


@dataclass(frozen=True)
class Tokenizer:
    """The model's own tokenizer."""

    tokenizer: Any
    exact: bool = True
    said: str = "counted by the model's own tokenizer"

    @property
    def end(self) -> int:
        """See TokenCounter."""
        return int(bool(self.tokenizer.eos_token))

    def counts(self, texts: Sequence[Text]) -> list[int]:
        """See TokenCounter."""
        return [count for start in range(0, len(texts), BATCH) for count in self._some(texts[start : start + BATCH])]

    def _some(self, texts: Sequence[Text]) -> list[int]:
        words = bool(texts) and not isinstance(texts[0], str)
        if not self.tokenizer.is_fast:
            options = {"add_special_tokens": False, "is_split_into_words": words, "verbose": False}
            return [len(ids) for ids in self.tokenizer(list(texts), **options)["input_ids"]]
        rust = self.tokenizer.backend_tokenizer  # no offsets, no lists of numbers: their count is all that is asked
        return [len(e) for e in rust.encode_batch_fast(list(texts), is_pretokenized=words, add_special_tokens=False)]

    def specials(self, texts: int) -> int:
        """See TokenCounter."""
        return int(self.tokenizer.num_special_tokens_to_add(pair=texts == 2))

    def strengths(self, text: Text) -> list[int] | None:
        """See TokenCounter."""
        if not self.tokenizer.is_fast:
            return None
        words = not isinstance(text, str)
        [encoded] = self.tokenizer.backend_tokenizer.encode_batch(
            [text], is_pretokenized=words, add_special_tokens=False
        )
        if isinstance(text, str):
            return strengths_of_text(text, encoded.offsets)
        return strengths_of_words(text, [word or 0 for word in encoded.word_ids])


def token_counter(spec: ModelSpec) -> TokenCounter:
    """The model's tokenizer from its folder, the cache or, within seconds, the hub; else an estimate."""
    try:
        tokenizer = _load(spec)
    except _NoTokenizerError as error:
        return Estimate(str(error))
    if tokenizer.is_fast:  # a saved tokenizer may cut at the length that it was trained with (all-MiniLM-L6-v2: 128)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return Tokenizer(tokenizer)


class _NoTokenizerError(Exception):
    """Why there is no tokenizer."""


def _load(spec: ModelSpec) -> Any:
    from transformers import AutoTokenizer

    kwargs = {"trust_remote_code": spec.remote_code}
    try:
        return AutoTokenizer.from_pretrained(spec.model_id, local_files_only=True, **kwargs)
    except Exception as error:  # a tokenizer's files may be wrong in any way, or need a package
        if Path(spec.model_id).exists():
            raise _NoTokenizerError(f"{spec.model_id} has no tokenizer that loads ({_clause(error)})") from error
    if hub.is_offline():
        raise _NoTokenizerError("the model's tokenizer is not on this machine, and HF_HUB_OFFLINE is set")
    try:
        hub.fetch_config(spec.model_id)  # says within seconds whether the hub answers
        return _within(lambda: AutoTokenizer.from_pretrained(spec.model_id, **kwargs), seconds=60)
    except hub.HubFailureError as error:
        why = f"the model's tokenizer is not on this machine, and the hub has no answer ({error})"
        raise _NoTokenizerError(why) from error
    except Exception as error:
        raise _NoTokenizerError(f"the model's tokenizer can't be loaded ({_clause(error)})") from error


def _within(work: Callable[[], Any], *, seconds: float) -> Any:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"not loaded within {seconds:g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _clause(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 100 else f"{text[:99]}…"
