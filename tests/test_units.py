"""Byte sizes as people type them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.units import (
    GIB,
    LARGEST_VRAM_BYTES,
    MIB,
    SMALLEST_VRAM_BYTES,
    compact_bytes,
    format_bytes,
    format_tokens,
    parse_bytes,
    shown,
)

# On a busy machine an example may take long; that is no failure.
no_deadline = settings(deadline=None)
any_vram = st.integers(SMALLEST_VRAM_BYTES, LARGEST_VRAM_BYTES)


LABELS = """8GB 8GiB 8G 8Gi 8g 8gb 8gB 8192MiB 8192MB 8192m 8388608KiB 8.0GB 0.0078125TB 8589934592 8589934592B"""


@pytest.mark.parametrize("text", [*LABELS.split(), "8 GB", " 8GB ", "8589934592 b", 8589934592])
def test_a_card_label_is_binary(text):
    """GB means what a card's label means, however it is written."""
    assert 8 * GIB == parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7.5GB", 8_053_063_680), ("24GB", 25_769_803_776), ("1TB", 2**40), ("64MiB", 2**26), ("16TiB", 2**44)],
)
def test_other_sizes_and_both_bounds(text, expected):
    """Fractions, terabytes and the two bounds themselves are read."""
    assert expected == parse_bytes(text)


def test_a_fraction_of_a_byte_is_dropped():
    """A ceiling is never rounded up over what was asked for."""
    assert 8_342_973_972 == parse_bytes("7.77GiB")  # 8,342,973,972.48


BARE = """8 8192 7.5 0 1234567 nan inf -inf 8e9"""
NEGATIVE_OR_OUT_OF_BOUNDS = """-8GB 0GB 63MiB 1MB 17TB 1e400GB"""
BITS = """8bit 8Gb 8Gib 8Gbit 8gbits"""
NO_UNIT = """GB 8i 8ib 8GBs .5GB 8.GB 8,5GB"""
WORDS = f"{BARE} {NEGATIVE_OR_OUT_OF_BOUNDS} {BITS} {NO_UNIT}".split()
SPACED = ["", "  ", "8 bits", "8 G B", "8 gigs", "8GB 8GB", "8\nGB", "8GB\nGB", "\u0668GB"]
HUGE = ["9" * 5000, "9" * 5000 + "GB", 10**5000, 2**60]
OTHER_TYPES = [8, 8192, 0, -8, True, False, None, 8.0, float("nan"), float("inf"), b"8GB", ["8GB"]]


@pytest.mark.parametrize(
    "text",
    [*WORDS, *SPACED, *HUGE, *OTHER_TYPES],
    ids=lambda text: "huge" if isinstance(text, int) and text > 2**64 else repr(text)[:20],
)
def test_refusal_is_one_line_with_value_and_what_is_accepted(text):
    """Whatever is refused, the message is one line: what was got, then what is accepted."""
    with pytest.raises(ValueError, match=r"\Agot .{1,62}; accepted: a size such as 8GB[^\n]*\Z"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("8", "write 8GB"),
        (8, "write 8GB"),
        ("7.5", "write 7.5GB"),
        ("8192", "write 8192MiB"),
        ("8 bits", "write 8GB"),
        ("8Gb", "write 8GB"),
        ("512Mbit", "write 512MB"),
        ("-8GB", "a size is positive"),
        ("17TB", "that is too much"),
        ("1MB", "that is too little"),
        ("8 gigs", "'gigs' is no unit of bytes"),
    ],
)
def test_refusal_ends_with_the_remedy(text, remedy):
    """Where it can be told what was meant, the message says what to write."""
    with pytest.raises(ValueError) as caught:
        parse_bytes(text)
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize("nothing", [0, "0", "0GB", "0 MiB", "00"])
def test_zero_is_a_size_where_the_caller_accepts_nothing(nothing):
    """Headroom may be zero, with or without a unit."""
    assert 0 == parse_bytes(nothing, minimum_bytes=0)


def test_bare_small_number_stays_ambiguous_where_zero_is_accepted():
    """500 bytes of headroom: nobody means that."""
    with pytest.raises(ValueError, match="write 500GB"):
        parse_bytes("500", minimum_bytes=0)


@no_deadline
@given(any_vram)
def test_compact_form_reads_back_exactly(n):
    """compact_bytes is parse_bytes backwards, to the byte."""
    assert n == parse_bytes(compact_bytes(n))


@no_deadline
@given(any_vram)
def test_plain_bytes_read_back_exactly(n):
    """Bytes are bytes, as an int, digits, or digits with a B."""
    assert [n] * 3 == [parse_bytes(n), parse_bytes(str(n)), parse_bytes(f"{n} B")]


@no_deadline
@given(st.integers(2**27, 2**43))
def test_formatted_form_reads_back_closely(n):
    """What a report prints is within half a percent of the bytes."""
    assert n == pytest.approx(parse_bytes(format_bytes(n)), rel=0.005)


@no_deadline
@given(st.integers(1, 2**14), st.sampled_from(["GB", "GiB", "g", " G", "gb"]))
def test_unit_scales_exactly(count, unit):
    """A whole number of a unit is exactly so many bytes."""
    assert count * GIB == parse_bytes(f"{count}{unit}")


@no_deadline
@given(st.text("0123456789.,-+eEgGbBiItTmMkKs \n\u0668", max_size=12) | st.integers() | st.floats() | st.booleans())
def test_anything_else_is_a_size_in_bounds_or_one_line(value):
    """No input crashes: the answer lies within the bounds, or the refusal is a ValueError of one line."""
    try:
        size = parse_bytes(value)  # type: ignore[arg-type]
    except ValueError as error:
        assert 1 == len(str(error).splitlines())
    else:
        assert SMALLEST_VRAM_BYTES <= size <= LARGEST_VRAM_BYTES


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (512 * MIB, "512 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (8 * GIB, "8 GiB"),
        (8_342_973_972, "7.77 GiB"),
        (-1_342_177_280, "-1.25 GiB"),
        (3 * 2**40, "3 TiB"),
    ],
)
def test_bytes_for_people(n, expected):
    """Binary units, two decimals from GiB up, none for whole numbers, and never 1024 of a unit."""
    assert expected == format_bytes(n)


def test_tokens_for_people():
    """Thousands are separated and one is singular."""
    assert ("16,384 tokens", "1 token") == (format_tokens(16_384), format_tokens(1))


def test_shown_values_are_short_and_on_one_line():
    """An error message never grows with its input."""
    assert ("'a\\nb'", True) == (shown("a\nb"), len(shown("x" * 10_000)) <= 62)
