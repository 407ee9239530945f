"""The kinds of forward passes that a run of generation has, and what tells one from another.

Passes of one kind do the same things with other sizes. Apart from a prompt's and a token's these are: passes after
which the tokens in the cache are a multiple of 16 (attention.cpp, pad_bias: masks of the memory-efficient kernel need
no padding then), fill the window of sliding attention, or fill a static cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from planner.config import InferenceConfig
from planner.inference.unrolling import BEFORE
from planner.memory.polynomials import Shape

WHOLE, CHUNK, LAST_CHUNK, FIRST_TOKEN, TOKEN = "whole", "chunk", "last_chunk", "first_token", "token"
"""Kinds of passes, besides BEFORE: a prompt in one pass; a prompt's chunk, and its last one; the pass that follows the
prompt's, and the others."""
AT_WINDOW, PAST_WINDOW = 1, 2
"""How many tokens there are, as against the window of sliding attention: as many, or more."""
MASK_ROWS = 16
"""Masks of the memory-efficient kernel are padded to a multiple of these elements."""
MANY_CHUNKS = 4
"""From so many chunks on, a prompt's middle ones are alike."""
ANY_RESIDUE = MASK_ROWS - 3
"""Stands for all lengths of prompts that are no multiple of MASK_ROWS, and not one short of it: the third pass of such
a run is the one that needs no padding."""


class Beginning(NamedTuple):
    """The part of a run that is recorded."""

    batch: int
    """Prompts."""
    prompt: int
    """Tokens of each, padding included."""
    new_tokens: int
    """What generate is told: max_new_tokens; a static cache has room for as many."""
    passes: int
    """Forward passes that are recorded: chunks of the prompt, then one for each token but the first."""
    decoder_tokens: int = 1
    """Tokens that the decoder of an encoder-decoder model begins with."""


@dataclass(frozen=True, kw_only=True)
class GenerationFacts:
    """What decides which kinds of passes a run has."""

    chunk: int = 0
    """Tokens of a prompt in one pass; 0: all."""
    prefix: int = 0
    """Tokens at the prompts' beginning that are in the cache already."""
    has_room: bool = False
    """The cache has its last size from the start (static)."""
    window: int = 0
    """Tokens that layers with sliding attention see; 0 where there are none."""
    encodes: bool = False
    """Encoder-decoder: the prompt is the encoder's, and tokens are the decoder's."""
    max_positions: int | None = None
    """Positions that the model has, where they are limited."""

    @classmethod
    def of(cls, config: InferenceConfig, *, window: int, encodes: bool, max_positions: int | None) -> GenerationFacts:
        """Of a configuration of a model whose attention is known."""
        return cls(
            chunk=config.prefill_chunk_tokens,
            prefix=config.prefix_tokens,
            has_room=config.kv_cache == "static",
            window=window,
            encodes=encodes,
            max_positions=max_positions,
        )


class Label(NamedTuple):
    """A kind of pass."""

    kind: str
    """One of BEFORE, WHOLE, ..."""
    aligned: bool
    """The tokens in the cache after it are a multiple of MASK_ROWS."""
    beyond: int
    """They are fewer than the window of sliding attention (0), as many (AT_WINDOW), or more (PAST_WINDOW)."""
    full: bool = False
    """They fill a static cache: its mask needs no padding then."""


class Start(NamedTuple):
    """What a run's beginning depends on besides the batch and the prompt's length: each is fitted apart."""

    single: bool
    """One prompt: no padding, so no mask."""
    residue: int
    """The prompt's length beyond a multiple of MASK_ROWS: 0, 15 (the first token completes one), or one for all others
    where there is no shared beginning."""
    beyond: int
    """As a Label's: how the prompt compares with the window of sliding attention."""
    chunks: int
    """Passes that the prompt takes; MANY_CHUNKS: so many or more."""
    remainder: int
    """Tokens of the prompt's last chunk; 0 where it is one pass."""
    room: int
    """Tokens that a static cache has room for; 0 for other caches."""
    prompt: int
    """The encoder's tokens of an encoder-decoder model; 0 for others."""


Step = tuple[Label, Shape]
"""A pass of a run: its kind, the batch, and the tokens in the cache after it."""


def run_steps(facts: GenerationFacts, beginning: Beginning) -> Iterator[Step]:
    """What comes before a run's passes, and its passes."""
    batch, prompt, new_tokens, passes, decoder_tokens = beginning
    room = prompt + new_tokens - 1 if facts.has_room else 0
    yield Label(BEFORE, False, 0), (batch, prompt)
    chunks = prompt_chunks(facts, prompt)
    for index, cached in enumerate(chunks):
        kind = WHOLE if len(chunks) == 1 else LAST_CHUNK if index == len(chunks) - 1 else CHUNK
        if kind == CHUNK and index < 2:
            kind += f"_{index}"  # the first finds no cache, and the second finds it as the first has left it
        yield label_of(facts, kind, cached, room), (batch, cached)
    first = decoder_tokens if facts.encodes else prompt
    for index in range(passes - len(chunks)):
        cached = first + 1 + index
        # an encoder-decoder's first token has one before it, so only the prompt's length is left to vary
        point = (batch, prompt if facts.encodes and not index else cached)
        yield label_of(facts, TOKEN if index else FIRST_TOKEN, cached, room), point


def label_of(facts: GenerationFacts, kind: str, cached: int, room: int = 0) -> Label:
    """The kind of a pass that leaves so many tokens in a cache; ``room``: of a static one."""
    return Label(kind, cached % MASK_ROWS == 0, beyond(facts, cached), bool(room) and cached == room)


def beyond(facts: GenerationFacts, cached: int) -> int:
    """How many tokens there are, as against the window of sliding attention."""
    if not facts.window or cached < facts.window:
        return 0
    return PAST_WINDOW if cached > facts.window else AT_WINDOW


def prompt_chunks(facts: GenerationFacts, prompt: int) -> list[int]:
    """Tokens in the cache after each pass of a prompt."""
    if not facts.chunk or facts.encodes:
        return [prompt]
    return [*range(facts.prefix + facts.chunk, prompt, facts.chunk), prompt]


def start_of(facts: GenerationFacts, shape: Shape, new_tokens: int) -> Start:
    """What a run's beginning depends on."""
    batch, prompt = shape
    chunks = len(prompt_chunks(facts, prompt))
    residue = prompt % MASK_ROWS
    return Start(
        single=batch == 1,
        # behind a shared beginning, a mask's rows are fewer than its padded columns: no monomial for all residues
        residue=residue if residue in (0, MASK_ROWS - 1) or facts.prefix else ANY_RESIDUE,
        beyond=beyond(facts, prompt),
        chunks=min(chunks, MANY_CHUNKS),
        remainder=(prompt - facts.prefix - 1) % facts.chunk + 1 if chunks > 1 else 0,
        room=prompt + new_tokens - 1 if facts.has_room else 0,
        prompt=prompt if facts.encodes else 0,
    )
