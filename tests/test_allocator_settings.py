"""PyTorch's allocator settings: read as torch reads them, refused where torch refuses them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.allocator_settings import (
    DEFAULT_ALLOCATOR,
    AllocatorSyntaxError,
    parse_allocator,
    reason_for,
)
from planner.errors import InputError
from planner.memory.block_sizes import AllocatorSettings, round_size
from planner.request import make_request

MIB = 1 << 20


def torch_reads(text: str) -> None:
    """Torch's own parser; raises ValueError where it refuses. The settings concern no CPU tensor."""
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    finally:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")


RIGHT = {
    "expandable_segments:True": {"expandable_segments": True},
    "expandable_segments:False": {},
    " expandable_segments : True , max_split_size_mb:64,": {
        "expandable_segments": True,
        "max_split_size_bytes": 64 * MIB,
    },
    "large_segment_size_mb:12": {"large_segment_size_bytes": 12 * MIB},
    "max_split_size_mb:15,large_segment_size_mb:15": {
        "large_segment_size_bytes": 15 * MIB,
        "max_split_size_bytes": 15 * MIB,
    },
    "max_split_size_mb:128,max_non_split_rounding_mb:32": {
        "max_split_size_bytes": 128 * MIB,
        "max_non_split_rounding_bytes": 32 * MIB,
    },
    "garbage_collection_threshold:0.8": {"garbage_collection_bytes": 800},
    "roundup_power2_divisions:8": {"roundup_power2_divisions": 8},
    "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True": {
        "expandable_segments": True,
        "roundup_power2_divisions": (*[1] * 9, 2, *[4] * 6),
    },
    "roundup_power2_divisions:[4:8,16:0]": {"roundup_power2_divisions": (8, 8, 8, 0, 0, *[0] * 11)},
}

WRONG = {
    "expandable_segments:true": "got 'expandable_segments:true'; accepted: True or False; did you mean True?",
    "expandable_segments": "got 'expandable_segments:'; accepted: True or False",
    "large_segment_size_mb:10": "got 'large_segment_size_mb:10'; accepted: a whole number of MiB from 11 to",
    "max_split_size_mb:19": "got 'max_split_size_mb:19'; accepted: 20 (large_segment_size_mb) or more",
    "max_split_size_mb:25,large_segment_size_mb:30": "accepted: 30 (large_segment_size_mb) or more",
    "max_non_split_rounding_mb:5": "got 'max_non_split_rounding_mb:5'; accepted: 20 (large_segment_size_mb) or more",
    "max_split_size_mb:abc": "got 'max_split_size_mb:abc'; accepted: a whole number of MiB",
    "garbage_collection_threshold:1.0": "accepted: a number above 0 and below 1",
    "garbage_collection_threshold:0.0": "accepted: a number above 0 and below 1",
    "roundup_power2_divisions:3": "got 'roundup_power2_divisions:3'; accepted: a power of two such as 8, or a list",
    "roundup_power2_divisions:0": "accepted: a power of two such as 8, or a list",
    "roundup_power2_divisions:[300:2]": "accepted: a power of two such as 8, or a list",
    "roundup_power2_divisions:[256:3]": "accepted: a power of two such as 8, or a list",
}

# Torch reads these (it looks for unknown keys only where there is a CUDA device, and takes the first of two digits).
WRONG_HERE = {
    "expandable_segment:True": "got 'expandable_segment'; accepted: expandable_segments, ",
    "backend:cudaMallocAsync": "it isn't simulated: set PYTORCH_CUDA_ALLOC_CONF yourself when you train",
    "max_split_size_mb:64.5": "got 'max_split_size_mb:64.5'; accepted: a whole number of MiB",
    "expandable_segments:True,expandable_segments:False": "got expandable_segments twice; accepted: each key once",
    "": "got ''; accepted: settings such as expandable_segments:True",
}


class TestReading:
    """What a text sets."""

    @pytest.mark.parametrize("text", RIGHT)
    def test_what_torch_reads_is_read(self, text):
        """Torch's own parser agrees that each is a setting; 1,000 bytes may be had."""
        torch_reads(text)
        assert AllocatorSettings(**RIGHT[text]) == parse_allocator(text).settings(1000)

    @pytest.mark.parametrize("text", WRONG)
    def test_what_torch_refuses_is_refused(self, text):
        """With the value, what is accepted and, where there is one, the near match."""
        with pytest.raises((ValueError, RuntimeError)):
            torch_reads(text)
        with pytest.raises(AllocatorSyntaxError) as caught:
            parse_allocator(text)
        assert WRONG[text] in str(caught.value)

    @pytest.mark.parametrize("text", WRONG_HERE)
    def test_mistakes_that_torch_does_not_see_are_refused(self, text):
        """A key that torch would only miss on the card, or that plans can't foresee."""
        with pytest.raises(AllocatorSyntaxError) as caught:
            parse_allocator(text)
        assert WRONG_HERE[text] in str(caught.value)

    def test_a_near_match_is_offered(self):
        """For keys as for values."""
        with pytest.raises(AllocatorSyntaxError, match=r"did you mean max_split_size_mb\?"):
            parse_allocator("max_split_size:64")

    def test_every_problem_is_reported(self):
        """Three keys, three lines, in the order in which they were typed."""
        with pytest.raises(AllocatorSyntaxError) as caught:
            parse_allocator("foo:1,expandable_segments:yes,max_split_size_mb:3")
        assert ["'foo'", "'expandable_segments:yes'", "'max_split_size_mb:3'"] == [
            message.split()[1].rstrip(";") for message in caught.value.messages
        ]

    @given(st.text(alphabet="expandabl_sgmtTrue:[],>0123456789 .-", max_size=60))
    def test_any_text_is_read_or_refused(self, text):
        """No other exception."""
        try:
            options = parse_allocator(text)
        except AllocatorSyntaxError as error:
            assert error.messages
        else:
            assert options == parse_allocator(options.text)


class TestIntervals:
    """The list of divisions, against the function of libc10 that the allocator asks."""

    @pytest.fixture
    def divisions(self):
        """``AcceleratorAllocatorConfig::roundup_power2_divisions(size)`` as torch has read a text."""
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
        function = getattr(library, name, None)
        if function is None:
            pytest.skip("this torch exports no roundup_power2_divisions")
        function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_size_t

        def asked(text: str, size: int) -> int:
            torch._C._accelerator_setAllocatorSettings(text)
            answer = function(size)
            torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
            return int(answer)

        return asked

    @pytest.mark.parametrize(
        "value", ["8", "[256:1,512:2,>:4]", "[64:8,128:2,256:4,512:2,1024:4,>:1]", "[>:4]", "[4:8,2:2]", "[131072:2]"]
    )
    def test_every_size_has_the_divisions_that_torch_gives_it(self, value, divisions):
        """Below, at and above each power of two from 512 B to 128 GiB."""
        text = f"roundup_power2_divisions:{value}"
        steps = parse_allocator(text).settings(0).roundup_power2_divisions
        for exponent in range(9, 38):
            for size in (2**exponent - 1, 2**exponent, 2**exponent + 1):
                expected = divisions(text, size)
                assert round_size(size, expected) == round_size(size, steps), (size, expected)


class TestRequest:
    """The option of plans."""

    def test_the_default_is_expandable_segments(self):
        """And the reason says where it doesn't work and what to do there."""
        request = make_request(model="any", vram="8GB")
        assert DEFAULT_ALLOCATOR == request.allocator
        reason = reason_for(parse_allocator(request.allocator))
        assert "the script sets it" in reason
        assert "--allocator expandable_segments:False" in reason

    def test_what_was_asked_for_is_kept_without_white_space(self):
        """As it goes into the environment."""
        request = make_request(model="any", vram="8GB", allocator="max_split_size_mb: 64, expandable_segments: False")
        assert "max_split_size_mb:64,expandable_segments:False" == request.allocator

    def test_each_mistake_is_a_problem_of_its_own_beside_others(self):
        """The argument is named each time."""
        with pytest.raises(InputError) as caught:
            make_request(model="any", vram="eight", allocator="foo:1,max_split_size_mb:3")
        assert ["vram", "allocator", "allocator"] == [problem.argument for problem in caught.value.problems]

    def test_garbage_collection_says_that_it_needs_a_limit(self):
        """Which train.py sets; it does nothing with expandable segments."""
        options = parse_allocator("garbage_collection_threshold:0.9,expandable_segments:True")
        assert "limit that garbage collection needs (which passes over expandable segments)" in reason_for(options)
