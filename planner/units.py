"""Bytes and tokens: what people type, read as integers; integers, written for people.

Sizes are binary throughout, as on a card's label: 8GB = 8GiB = 8192MiB = 8,589,934,592 bytes.
"""

from __future__ import annotations

import re
from fractions import Fraction

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
SMALLEST_VRAM_BYTES = 64 * MIB
"""Less than this cannot hold a CUDA context: nobody means it."""
LARGEST_VRAM_BYTES = 16 * TIB
"""More than this is no single device: nobody means it."""

_SIZE = re.compile(r"(?P<number>[0-9]{1,20}(?:\.[0-9]{1,20})?) *(?P<unit>[A-Za-z]*)")
_UNIT = re.compile(r"(?P<prefix>[kmgt])i?b?|b", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
# The word, or a lower-case b after an upper-case prefix: Gb and Gib are bits, gb is a GB typed in a hurry.
_BITS = re.compile(r"(?i:[kmgt]?i?bits?)|[KMGT]i?b")
_PLAIN_BYTES_DIGITS = 7
"""Digits that a number without a unit must have to be read as bytes; "8" and "8192" could be any unit."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def parse_bytes(
    text: str | int,
    *,
    minimum_bytes: int = SMALLEST_VRAM_BYTES,
    maximum_bytes: int = LARGEST_VRAM_BYTES,
) -> int:
    """Read a byte size: ``8GB``, ``8GiB``, ``8g``, ``8192MiB``, ``7.5 GB``, or bytes as digits or an int.

    A fraction of a byte is dropped, so the result is never more than what was asked for. Raises ValueError
    with one line: what was got, what is accepted, and what to write instead where that can be told.
    """
    try:
        size = _read(text, zero_accepted=minimum_bytes == 0)
        if size < minimum_bytes:
            raise ValueError("that is too little")
        if size > maximum_bytes:
            raise ValueError("that is too much")
    except ValueError as error:
        span = f"from {compact_bytes(minimum_bytes)} to {compact_bytes(maximum_bytes)}"
        accepted = f"accepted: a size such as 8GB, 8GiB, 8192MiB, 7.5GB or plain bytes, {span}"
        remedy = f"; {error}" if str(error) else ""
        raise ValueError(f"got {shown(text)}; {accepted}{remedy}") from None
    return size


def _read(text: str | int, *, zero_accepted: bool) -> int:
    """Size in bytes, whatever the size; the ValueError's text is a remedy, or empty where there is none."""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError
    if isinstance(text, int):
        return _without_unit(Fraction(text), zero_accepted)
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size is positive" if text.strip().startswith("-") else "")
    number, unit = Fraction(match["number"]), match["unit"]
    if not unit:
        return _without_unit(number, zero_accepted)
    if _BITS.fullmatch(unit):
        prefix = unit[0].upper() if unit[0] in "kmgtKMGT" else "G"
        raise ValueError(f"{unit} counts bits; write {match['number']}{prefix}B")
    known = _UNIT.fullmatch(unit)
    if known is None:
        raise ValueError(f"{shown(unit)} is no unit of bytes")
    return int(number * _UNIT_BYTES[(known["prefix"] or "").lower()])


def _without_unit(number: Fraction, zero_accepted: bool) -> int:
    """Plain bytes, where there are so many of them that no other unit can be meant."""
    if number.denominator == 1 and (number >= 10 ** (_PLAIN_BYTES_DIGITS - 1) or (zero_accepted and number == 0)):
        return int(number)
    if number <= 0:
        raise ValueError("a size is positive")
    written = f"{float(number):.12g}"
    raise ValueError(f"add the unit: write {written}{'GB' if number <= 1024 else 'MiB'}")


def shown(value: object) -> str:
    """A value as an error message shows it: on one line and not too long."""
    # Python refuses to print integers of more than 4,300 digits.
    huge = isinstance(value, int) and value.bit_length() > 256
    text = "a huge integer" if huge else repr(value)
    return text if len(text) <= 60 else f"{text[:56]}...{text[-1]}"


def format_bytes(n: int) -> str:
    """Bytes for people: ``7.77 GiB``, ``512 MiB``, ``-1.25 GiB``; whole numbers without decimals."""
    sign, size = ("-" if n < 0 else ""), abs(n)
    for name, unit, decimals in (("TiB", TIB, 2), ("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", KIB, 1)):
        # The next lower unit would be written as 1024 of it: 1,048,575 bytes are 1 MiB, not 1024 KiB.
        if size >= unit - unit // 2048:
            value = size / unit
            places = 0 if size % unit == 0 or value >= 100 * 10 ** (decimals - 1) else decimals
            return f"{sign}{value:.{places}f} {name}"
    return f"{sign}{size} B"


def compact_bytes(n: int) -> str:
    """Bytes as one word that :func:`parse_bytes` reads back exactly: ``8GiB``, ``7936MiB``, ``8300001B``."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if n and n % unit == 0:
            return f"{n // unit}{name}"
    return f"{n}B"


def format_tokens(n: int) -> str:
    """Tokens for people: ``16,384 tokens``."""
    return f"{n:,} token{'' if n == 1 else 's'}"
