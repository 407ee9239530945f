"""The model of the CUDA caching allocator: its rules by hand, its invariants, and against a literal transcription."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from allocator_reference import Reference
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.memory.allocator import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    Replay,
    replay_events,
)
from planner.memory.block_sizes import round_size, round_sizes

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
DEFAULT = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)
# On a busy machine an example may take long; that is no failure.
no_deadline = settings(deadline=None)


def layout(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """Each segment as its blocks' sizes and whether they are allocated."""
    return [[(b.size_bytes, b.allocated) for b in segment.blocks] for segment in allocator.snapshot()]


def filled(options: AllocatorSettings, *sizes: int, capacity: int | None = None) -> CachingAllocator:
    """An allocator with blocks 1, 2, ... of these sizes."""
    allocator = CachingAllocator(options, capacity)
    for key, size in enumerate(sizes, start=1):
        allocator.malloc(key, size)
    return allocator


class TestSizes:
    """Requests become blocks, blocks need segments."""

    @pytest.mark.parametrize(
        ("expected", "nbytes"),
        [(0, 0), (512, 1), (512, 512), (1024, 513), (MIB, MIB - 1), (MIB + 512, MIB + 1)],
    )
    def test_requests_round_up_to_512_bytes(self, expected, nbytes):
        """Plain rounding; nothing needs nothing."""
        assert expected == round_size(nbytes)

    @pytest.mark.parametrize(
        ("expected", "nbytes", "divisions"),
        [
            # test_cuda.py, test_allocator_settings: 21 Mi floats with 4 and 8 divisions, 100 Mi floats with 2.
            (96 * MIB, 84 * MIB, 4),
            (88 * MIB, 84 * MIB, 8),
            (512 * MIB, 400 * MIB, 2),
            # The comment at roundup_power2_next_division has 1200 with 4 divisions become 1280; here in KiB.
            (1280 * KIB, 1200 * KIB, 4),
            (1024 * KIB, 1024 * KIB, 4),
            (1280 * KIB, 1280 * KIB, 4),
            # Not above 512 B x divisions: plain rounding.
            (1536, 1200, 4),
            (1536, 1200, 1),
        ],
    )
    def test_power_of_two_divisions(self, expected, nbytes, divisions):
        """The expected values of torch's own test and comment."""
        assert expected == round_size(nbytes, divisions)

    @pytest.mark.parametrize("divisions", [0, 4])
    def test_rounding_an_array_is_rounding_each(self, divisions):
        """One rule for single requests and for replays."""
        sizes = np.array([0, 1, 511, 513, 2049, 5000, 3 * MIB + 1, 3 * GIB + 1])
        assert [round_size(n, divisions) for n in sizes.tolist()] == round_sizes(sizes, divisions)

    @pytest.mark.parametrize(
        ("expected", "nbytes"),
        [
            (2 * MIB, 1),
            (2 * MIB, MIB),
            (20 * MIB, MIB + 1),
            (20 * MIB, 10 * MIB - 512),
            (10 * MIB, 10 * MIB),
            (12 * MIB, 10 * MIB + 1),
            (584 * MIB, 583 * MIB),
        ],
    )
    def test_a_first_request_reserves_its_segment(self, expected, nbytes):
        """Segments of 2 MiB, 20 MiB, or the request rounded up to 2 MiB."""
        assert expected == filled(DEFAULT, nbytes).reserved_bytes

    def test_large_segment_size_is_a_setting(self):
        """Only requests between 1 and 10 MiB are affected."""
        options = AllocatorSettings(large_segment_size_bytes=12 * MIB)
        assert (2 + 12 + 30) * MIB == filled(options, 1, 2 * MIB, 30 * MIB).reserved_bytes

    @pytest.mark.parametrize(
        "wrong",
        [
            {"large_segment_size_bytes": 10 * MIB},
            {"large_segment_size_bytes": 20 * MIB + 1},
            {"roundup_power2_divisions": 3},
            {"roundup_power2_divisions": -1},
            {"max_split_size_bytes": 19 * MIB},
            {"max_non_split_rounding_bytes": 19 * MIB},
            {"garbage_collection_bytes": -1},
        ],
    )
    def test_settings_that_torch_rejects_are_rejected(self, wrong):
        """The message names the argument and the value."""
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name}: got {value}; accepted: "):
            AllocatorSettings(**wrong)


class TestSplitting:
    """How much of a found block a request keeps."""

    def test_one_byte_takes_512_of_a_2_mib_segment(self):
        """What torch.ones(1, dtype=torch.uint8, device="cuda") shows in a fresh process."""
        allocator = filled(DEFAULT, 1)
        assert (512, 2 * MIB) == (allocator.allocated_bytes, allocator.reserved_bytes)
        assert [[(512, True), (2 * MIB - 512, False)]] == layout(allocator)

    def test_a_large_block_is_not_split_when_1_mib_would_remain(self):
        """The remainder counts as allocated: torch adds block->size, not the request."""
        allocator = filled(DEFAULT, 11 * MIB)
        assert (12 * MIB, 12 * MIB) == (allocator.allocated_bytes, allocator.reserved_bytes)

    def test_a_large_block_is_split_when_more_than_1_mib_would_remain(self):
        """One rounding step below the case before."""
        assert [[(11 * MIB - 512, True), (MIB + 512, False)]] == layout(filled(DEFAULT, 11 * MIB - 512))

    def test_small_blocks_are_split_to_the_last_512_bytes(self):
        """Two blocks and 512 B beside them fill a small segment without growth."""
        allocator = filled(DEFAULT, MIB, MIB - 512, 512)
        assert [[(MIB, True), (MIB - 512, True), (512, True)]] == layout(allocator)

    def test_expandable_blocks_are_always_split(self):
        """No unsplit remainder in the large pool either."""
        assert [[(11 * MIB, True), (9 * MIB, False)]] == layout(filled(EXPANDABLE, 11 * MIB))


class TestReuse:
    """Which free block serves a request."""

    def test_the_smallest_block_that_fits_is_taken(self):
        """Best fit, not first fit: the 12 MiB hole and not the 14 MiB one before it."""
        allocator = filled(DEFAULT, 14 * MIB, 12 * MIB)
        allocator.free(1)
        allocator.free(2)
        allocator.malloc(3, 12 * MIB)
        assert [[(14 * MIB, False)], [(12 * MIB, True)]] == layout(allocator)

    def test_the_lowest_address_is_taken_among_equals(self):
        """The order of freeing doesn't matter."""
        allocator = filled(DEFAULT, 10 * MIB, 10 * MIB)
        allocator.free(2)
        allocator.free(1)
        allocator.malloc(3, 10 * MIB)
        assert [[(10 * MIB, True)], [(10 * MIB, False)]] == layout(allocator)

    def test_neighbours_merge_in_any_order(self):
        """A segment whose blocks are all free is one block again."""
        allocator = filled(DEFAULT, 4 * MIB, 4 * MIB, 4 * MIB)
        for key in (1, 3, 2):
            allocator.free(key)
        assert [[(20 * MIB, False)]] == layout(allocator)

    def test_fragments_of_different_segments_serve_nobody(self):
        """24 MiB are free, 20 MiB don't fit: the known failure of caching by segment."""
        allocator = filled(DEFAULT, 12 * MIB, 12 * MIB)
        allocator.free(1)
        allocator.free(2)
        allocator.malloc(3, 20 * MIB)
        assert (20 * MIB, 44 * MIB) == (allocator.allocated_bytes, allocator.reserved_bytes)

    def test_expandable_fragments_do(self):
        """The same requests fit in the one segment, which grows to 40 MiB for the first two."""
        allocator = filled(EXPANDABLE, 12 * MIB, 12 * MIB)
        allocator.free(1)
        allocator.free(2)
        allocator.malloc(3, 20 * MIB)
        assert (20 * MIB, 40 * MIB) == (allocator.allocated_bytes, allocator.reserved_bytes)

    def test_the_pools_are_apart(self):
        """A free large block doesn't serve a small request."""
        allocator = filled(DEFAULT, 2 * MIB)
        allocator.free(1)
        allocator.malloc(2, 512)
        assert 22 * MIB == allocator.reserved_bytes

    def test_an_expandable_hole_is_preferred_to_the_growing_end(self):
        """The free end is smaller than the hole, but with the addresses behind it, it is larger."""
        allocator = filled(EXPANDABLE, 15 * MIB, 15 * MIB)
        allocator.free(1)
        allocator.malloc(3, 5 * MIB)
        assert [[(5 * MIB, True), (10 * MIB, False), (15 * MIB, True), (10 * MIB, False)]] == layout(allocator)

    def test_even_when_the_growing_end_fits_exactly(self):
        """15 MiB hole, 13 MiB end, 13 MiB wanted: the hole is split."""
        allocator = filled(EXPANDABLE, 15 * MIB, 12 * MIB)
        allocator.free(1)
        allocator.malloc(3, 13 * MIB)
        assert [[(13 * MIB, True), (2 * MIB, False), (12 * MIB, True), (13 * MIB, False)]] == layout(allocator)

    def test_expandable_segments_grow_by_what_is_missing(self):
        """The free 5 MiB at the end become part of the new block: one granule is mapped, not two."""
        allocator = filled(EXPANDABLE, 15 * MIB, 25 * MIB)
        assert [[(15 * MIB, True), (25 * MIB, True)]] == layout(allocator)

    @pytest.mark.parametrize("options", [DEFAULT, EXPANDABLE])
    @no_deadline
    @given(size=st.integers(1, GIB))
    def test_the_same_size_again_does_not_grow(self, options, size):
        """malloc, free, malloc."""
        allocator = filled(options, size)
        before = allocator.reserved_bytes
        allocator.free(1)
        allocator.malloc(2, size)
        assert before == allocator.reserved_bytes


class TestMaxSplitSize:
    """Oversize blocks are kept whole."""

    SETTINGS = AllocatorSettings(max_split_size_bytes=40 * MIB)

    def test_a_smaller_request_gets_a_segment_of_its_own(self):
        """Without the limit it would be carved from the cached 60 MiB."""
        allocator = filled(self.SETTINGS, 60 * MIB)
        allocator.free(1)
        allocator.malloc(2, 30 * MIB)
        assert [[(60 * MIB, False)], [(30 * MIB, True)]] == layout(allocator)

    def test_an_oversize_request_takes_up_to_20_mib_more(self):
        """Unsplit, so all 60 MiB count as allocated."""
        allocator = filled(self.SETTINGS, 60 * MIB)
        allocator.free(1)
        allocator.malloc(2, 40 * MIB + 512)
        assert (60 * MIB, 60 * MIB) == (allocator.allocated_bytes, allocator.reserved_bytes)

    def test_an_oversize_request_does_not_take_20_mib_more(self):
        """The limit itself is excluded."""
        allocator = filled(self.SETTINGS, 60 * MIB)
        allocator.free(1)
        allocator.malloc(2, 40 * MIB)
        assert [[(60 * MIB, False)], [(40 * MIB, True)]] == layout(allocator)

    def test_oversize_segments_are_given_back_without_a_retry(self):
        """One that is large enough; the other cached segment stays."""
        allocator = filled(self.SETTINGS, 80 * MIB, 20 * MIB, capacity=120 * MIB)
        allocator.free(1)
        allocator.free(2)
        allocator.malloc(3, 60 * MIB - 1)
        assert [[(20 * MIB, False)], [(60 * MIB, True)]] == layout(allocator)
        assert 0 == allocator.num_alloc_retries

    def test_no_more_oversize_segments_are_given_back_than_needed(self):
        """The largest first: 60 and 50 MiB for the 70 that are wanted."""
        allocator = filled(self.SETTINGS, 40 * MIB, 50 * MIB, 60 * MIB, capacity=150 * MIB)
        for key in (1, 2, 3):
            allocator.free(key)
        allocator.malloc(4, 70 * MIB)
        assert [[(40 * MIB, False)], [(70 * MIB, True)]] == layout(allocator)

    def test_several_oversize_segments_make_room_for_a_larger_one(self):
        """As in torch's test_max_split_expandable: three blocks of 40 MiB, then one of 120."""
        allocator = filled(self.SETTINGS, 40 * MIB, 40 * MIB, 40 * MIB, capacity=120 * MIB)
        with pytest.raises(OutOfMemory):
            allocator.malloc(4, 40 * MIB)
        for key in (1, 2, 3):
            allocator.free(key)
        allocator.malloc(5, 120 * MIB)
        assert [[(120 * MIB, True)]] == layout(allocator)

    def test_expandable_blocks_are_split_at_any_size(self):
        """should_split doesn't ask for the limit there."""
        options = AllocatorSettings(expandable_segments=True, max_split_size_bytes=40 * MIB)
        assert [[(45 * MIB, True), (15 * MIB, False)]] == layout(filled(options, 45 * MIB))


class TestGarbageCollection:
    """Segments that were free for long go back before the driver is asked for more."""

    SETTINGS = AllocatorSettings(garbage_collection_bytes=50 * MIB)

    def test_nothing_goes_back_up_to_the_threshold(self):
        """50 MiB are reserved when 11 more are asked for: the free 30 stay, and 61 are reserved then."""
        allocator = filled(self.SETTINGS, 30 * MIB, 20 * MIB)
        allocator.free(2)
        allocator.malloc(3, 21 * MIB)
        assert 72 * MIB == allocator.reserved_bytes

    @pytest.mark.parametrize(("expected", "threshold"), [([14, 34, 40, 42], 95), ([34, 42], 80)])
    def test_the_oldest_go_first_and_all_of_average_age(self, expected, threshold):
        """100 MiB are reserved. 12 have been free for two searches, 14 and 40 for one: the average is 4/3.

        5 too many: only the 12 go. 20 too many: then the others too, which are of average age among themselves.
        """
        options = AllocatorSettings(garbage_collection_bytes=threshold * MIB)
        allocator = filled(options, 12 * MIB, 14 * MIB, 34 * MIB, 40 * MIB)
        allocator.free(1)
        allocator.free(4)
        allocator.malloc(5, 40 * MIB)
        allocator.free(5)
        allocator.free(2)
        allocator.malloc(6, 42 * MIB)
        assert expected == [segment.size_bytes // MIB for segment in allocator.snapshot()]

    def test_what_is_in_use_or_split_stays(self):
        """A segment with one live block can't go, however little of it is used."""
        allocator = filled(self.SETTINGS, 5 * MIB, 5 * MIB, 40 * MIB)
        allocator.free(1)
        allocator.malloc(4, 30 * MIB)
        assert 90 * MIB == allocator.reserved_bytes

    def test_small_segments_stay(self):
        """Only the large pool is looked through."""
        allocator = filled(self.SETTINGS, MIB, 60 * MIB)
        allocator.free(1)
        allocator.malloc(3, 30 * MIB)
        assert 92 * MIB == allocator.reserved_bytes

    def test_expandable_segments_are_passed_over(self):
        """Nothing changes with them, whatever the threshold."""
        options = AllocatorSettings(garbage_collection_bytes=0, expandable_segments=True)
        allocator = filled(options, 20 * MIB, 20 * MIB, 20 * MIB)
        allocator.free(2)
        allocator.malloc(4, 40 * MIB)
        assert 100 * MIB == allocator.reserved_bytes


class TestDriver:
    """What the driver was asked for and given back, for a snapshot."""

    def test_segments(self):
        """One call each, with the address and size of the segment."""
        allocator = filled(DEFAULT, 30 * MIB)
        allocator.free(1)
        allocator.empty_cache()
        assert [("segment_alloc", 0, 30 * MIB), ("segment_free", 0, 30 * MIB)] == list(allocator.driver_calls)

    def test_expandable_segments(self):
        """Mapped by granules of 20 MiB, unmapped where whole granules are free."""
        allocator = filled(EXPANDABLE, 15 * MIB, 25 * MIB)
        allocator.free(2)
        allocator.empty_cache()
        assert [
            ("segment_map", 0, 20 * MIB),
            ("segment_map", 20 * MIB, 20 * MIB),
            ("segment_unmap", 20 * MIB, 20 * MIB),
        ] == list(allocator.driver_calls)

    def test_a_block_knows_where_it_lies(self):
        """None for a key without bytes."""
        allocator = filled(DEFAULT, 512, 1024, 0)
        assert (512, 1024) == (allocator.block(2).address, allocator.block(2).size_bytes)
        assert None is allocator.block(3)


class TestCapacity:
    """What happens when the driver has no more."""

    def test_cached_segments_are_given_back_and_the_retry_is_counted(self):
        """The 10 MiB segment goes, the half-used one can't."""
        allocator = filled(DEFAULT, 10 * MIB, 4 * MIB, 4 * MIB, capacity=40 * MIB)
        allocator.free(1)
        allocator.free(2)
        allocator.malloc(4, 20 * MIB)
        assert 1 == allocator.num_alloc_retries
        assert [[(4 * MIB, False), (4 * MIB, True), (12 * MIB, False)], [(20 * MIB, True)]] == layout(allocator)
        assert (40 * MIB, 40 * MIB) == (allocator.reserved_bytes, allocator.peak_reserved_bytes)

    def test_a_request_that_does_not_fit_says_all_numbers(self):
        """The size asked of the driver, as in torch's message, beside what is held and used."""
        allocator = filled(DEFAULT, 20 * MIB, 512, capacity=30 * MIB)
        with pytest.raises(OutOfMemory) as caught:
            allocator.malloc(3, 9 * MIB + 1)
        error = caught.value
        assert (20 * MIB, 20 * MIB + 512, 22 * MIB, 30 * MIB) == (
            error.requested_bytes,
            error.allocated_bytes,
            error.reserved_bytes,
            error.capacity_bytes,
        )
        assert (
            "out of memory: tried to allocate 20971520 B; of 31457280 B capacity 23068672 B are reserved,"
            " 20972032 B of them allocated" == str(error)
        )

    def test_the_allocator_goes_on_after_running_out(self):
        """The failed attempt counts as a retry and leaves nothing behind."""
        allocator = filled(DEFAULT, 20 * MIB, capacity=30 * MIB)
        with pytest.raises(OutOfMemory):
            allocator.malloc(2, 11 * MIB)
        allocator.malloc(2, 10 * MIB)
        assert (1, 30 * MIB) == (allocator.num_alloc_retries, allocator.allocated_bytes)

    def test_expandable_segments_unmap_whole_granules(self):
        """Of the free 45 MiB at addresses 15 to 60 MiB, the granules at 20 and 40 MiB go."""
        allocator = filled(EXPANDABLE, 15 * MIB, 45 * MIB, 20 * MIB, capacity=100 * MIB)
        allocator.free(2)
        allocator.empty_cache()
        assert 40 * MIB == allocator.reserved_bytes
        assert [[(15 * MIB, True), (5 * MIB, False)], [(20 * MIB, True)]] == layout(allocator)

    def test_expandable_segments_refill_the_gap_before_growing(self):
        """The lowest addresses with room: 5 free MiB and one granule of the gap."""
        allocator = filled(EXPANDABLE, 15 * MIB, 45 * MIB, 20 * MIB, capacity=100 * MIB)
        allocator.free(2)
        allocator.empty_cache()
        allocator.malloc(4, 25 * MIB)
        assert [[(15 * MIB, True), (25 * MIB, True)], [(20 * MIB, True)]] == layout(allocator)

    def test_expandable_segments_use_the_other_pools_pages_after_a_retry(self):
        """A capacity of one large and one small granule goes from one pool to the other."""
        allocator = filled(EXPANDABLE, 15 * MIB, capacity=22 * MIB)
        allocator.free(1)
        for key in range(2, 13):
            allocator.malloc(key, MIB)
            allocator.malloc(key + 100, MIB)
        assert (22 * MIB, 1) == (allocator.allocated_bytes, allocator.num_alloc_retries)

    def test_a_second_expandable_segment_starts_when_the_first_has_no_room(self):
        """80 MiB of memory give 100 MiB of addresses, where no 40 MiB follow each other, though as much is free.

        When everything in the first is free, emptying the cache drops it, and the second one goes on.
        """
        allocator = filled(EXPANDABLE, *[20 * MIB] * 4, capacity=80 * MIB)
        allocator.free(1)
        allocator.free(3)
        allocator.malloc(5, 40 * MIB)
        assert [[(20 * MIB, True)], [(20 * MIB, True)], [(40 * MIB, True)]] == layout(allocator)
        allocator.free(2)
        allocator.free(4)
        allocator.empty_cache()
        allocator.malloc(6, 20 * MIB)
        assert [[(40 * MIB, True), (20 * MIB, True)]] == layout(allocator)

    @pytest.mark.parametrize("options", [DEFAULT, EXPANDABLE])
    def test_more_than_the_whole_card_is_refused(self, options):
        """Also where it exceeds the address space of an expandable segment."""
        with pytest.raises(OutOfMemory):
            filled(options, GIB, capacity=100 * MIB)

    def test_no_capacity_is_an_error(self):
        """None means no limit, not 0."""
        with pytest.raises(ValueError, match="capacity_bytes: got 0"):
            CachingAllocator(DEFAULT, 0)


class TestCalls:
    """Keys, zero bytes, peaks."""

    def test_zero_bytes_allocate_nothing(self):
        """As torch.empty(0); the key is freed like any other."""
        allocator = filled(DEFAULT, 0)
        assert 0 == allocator.reserved_bytes
        allocator.free(1)
        allocator.malloc(1, 512)
        assert 512 == allocator.allocated_bytes

    def test_a_key_in_use_is_refused(self):
        """And nothing is allocated."""
        allocator = filled(DEFAULT, 512, 0)
        for key in (1, 2):
            with pytest.raises(ValueError, match=f"key: got {key}"):
                allocator.malloc(key, 512)
        assert 512 == allocator.allocated_bytes

    def test_freeing_twice_is_refused(self):
        """The second time the key isn't in use."""
        allocator = filled(DEFAULT, 512)
        allocator.free(1)
        with pytest.raises(ValueError, match="key: got 1, which isn't allocated"):
            allocator.free(1)

    @pytest.mark.parametrize(("key", "nbytes"), [(0, 512), (-1, 512), (1, -512)])
    def test_senseless_requests_are_refused(self, key, nbytes):
        """Keys below 1 would read as frees."""
        with pytest.raises(ValueError, match=r"got -?[0-9]+; accepted: "):
            CachingAllocator(DEFAULT).malloc(key, nbytes)

    def test_peaks_stay_until_they_are_reset(self):
        """Allocated falls on free, reserved on empty_cache; the peaks follow on reset."""
        allocator = filled(DEFAULT, 30 * MIB, 20 * MIB)
        allocator.free(1)
        allocator.empty_cache()
        assert (50 * MIB, 50 * MIB) == (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
        allocator.reset_peaks()
        assert (20 * MIB, 20 * MIB) == (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)


class TestReplay:
    """The function over whole event sequences."""

    def test_a_sequence_by_hand(self):
        """Block 2 takes the segment that block 1 left; block 4 needs its own, and the peak is there, at event 5."""
        sizes = np.array([0, 5 * MIB, 20 * MIB, 0, 30 * MIB])
        expected = Replay(peak_allocated_bytes=50 * MIB, peak_reserved_bytes=50 * MIB, peak_event_index=5, retries=0)
        assert expected == replay_events([1, -1, 3, 2, -3, 4, -2, 1, -1], sizes, DEFAULT)

    def test_a_sequence_at_the_ceiling(self):
        """With 60 MiB the first, cached segment of 20 MiB has to go before the 30 MiB fit."""
        sizes = np.array([0, 5 * MIB, 20 * MIB, 0, 30 * MIB])
        expected = Replay(peak_allocated_bytes=50 * MIB, peak_reserved_bytes=50 * MIB, peak_event_index=4, retries=1)
        assert expected == replay_events(np.array([1, 2, -1, 3, 4]), sizes, DEFAULT, 60 * MIB)

    def test_no_events(self):
        """Nothing was allocated: index -1."""
        expected = Replay(peak_allocated_bytes=0, peak_reserved_bytes=0, peak_event_index=-1, retries=0)
        assert expected == replay_events([], np.array([0]), DEFAULT)

    @pytest.mark.parametrize("events", [[0], [2], [-2]])
    def test_events_without_a_block_are_refused(self, events):
        """Blocks are numbered from 1 to the last size."""
        with pytest.raises(ValueError, match="accepted: numbers of blocks from 1 to 1"):
            replay_events(events, np.array([0, 512]), DEFAULT)

    @pytest.mark.parametrize("events", [[-1], [1, 1], [1, -1, -1]])
    def test_events_that_contradict_each_other_are_refused(self, events):
        """Freed before or twice, allocated twice."""
        with pytest.raises(ValueError, match="key: got 1, which is"):
            replay_events(events, np.array([0, 512]), DEFAULT)

    def test_running_out_is_raised(self):
        """The caller reads the numbers from the exception."""
        with pytest.raises(OutOfMemory):
            replay_events([1], np.array([0, GIB]), DEFAULT, 512 * MIB)


# Sizes around every threshold, and any in between.
EDGES = [1, 512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 20 * MIB, 21 * MIB, 40 * MIB, 41 * MIB]
SIZES = st.one_of(st.sampled_from(EDGES), st.integers(1, 3 * MIB), st.integers(1, 90 * MIB))
SETTINGS = st.sampled_from(
    [
        DEFAULT,
        EXPANDABLE,
        AllocatorSettings(large_segment_size_bytes=13 * MIB),
        AllocatorSettings(roundup_power2_divisions=4),
        AllocatorSettings(max_split_size_bytes=20 * MIB),
        AllocatorSettings(max_split_size_bytes=41 * MIB),
        AllocatorSettings(expandable_segments=True, large_segment_size_bytes=12 * MIB),
        AllocatorSettings(expandable_segments=True, max_split_size_bytes=40 * MIB, roundup_power2_divisions=2),
        AllocatorSettings(max_split_size_bytes=20 * MIB, max_non_split_rounding_bytes=33 * MIB),
        AllocatorSettings(roundup_power2_divisions=(2, 8, 0, 4, *[1] * 12)),
        AllocatorSettings(garbage_collection_bytes=0),
        AllocatorSettings(garbage_collection_bytes=60 * MIB),
        AllocatorSettings(garbage_collection_bytes=90 * MIB, max_split_size_bytes=30 * MIB),
        AllocatorSettings(garbage_collection_bytes=60 * MIB, expandable_segments=True),
    ]
)
CAPACITIES = st.sampled_from([None, 100 * MIB, 202 * MIB, 501 * MIB])


@st.composite
def sequences(draw):
    """Events and sizes that make sense: each block once, freed at most once."""
    steps = draw(st.lists(st.one_of(SIZES, st.integers(-1000, -1)), max_size=60))
    events, sizes, live = [], [0], []
    for step in steps:
        if step > 0:
            sizes.append(step)
            live.append(len(sizes) - 1)
            events.append(live[-1])
        elif live:
            events.append(-live.pop(step % len(live)))
    return events, sizes


def apply(allocator, event, sizes):
    """One event; False where it ran out of memory."""
    try:
        if event > 0:
            allocator.malloc(event, sizes[event])
        else:
            allocator.free(-event)
    except (OutOfMemory, MemoryError):
        return False
    return True


class TestProperties:
    """What holds for any sequence, under any settings."""

    @no_deadline
    @given(sequence=sequences(), options=SETTINGS, capacity=CAPACITIES)
    def test_it_does_what_the_transcription_does(self, sequence, options, capacity):
        """Step by step: layout, statistics, and running out of memory. Goes on to the end after that."""
        events, sizes = sequence
        allocator, reference = CachingAllocator(options, capacity), Reference(options, capacity)
        lost = set()
        for event in events:
            if -event in lost:
                continue
            fits = apply(reference, event, sizes)
            assert fits == apply(allocator, event, sizes)
            if not fits:
                lost.add(event)
            assert reference.layout() == layout(allocator)
            assert (reference.allocated, reference.reserved, reference.peak_allocated) == (
                allocator.allocated_bytes,
                allocator.reserved_bytes,
                allocator.peak_allocated_bytes,
            )
            assert (reference.peak_reserved, reference.retries) == (
                allocator.peak_reserved_bytes,
                allocator.num_alloc_retries,
            )

    @no_deadline
    @given(sequence=sequences(), options=SETTINGS, capacity=CAPACITIES)
    def test_a_replay_is_its_steps(self, sequence, options, capacity):
        """The same numbers, or the same exception."""
        events, sizes = sequence
        allocator, peak, peak_index = CachingAllocator(options, capacity), 0, -1
        for index, event in enumerate(events):
            if not apply(allocator, event, sizes):
                with pytest.raises(OutOfMemory):
                    replay_events(events, np.array(sizes), options, capacity)
                return
            if allocator.peak_allocated_bytes > peak:
                peak, peak_index = allocator.peak_allocated_bytes, index
        expected = Replay(
            peak_allocated_bytes=peak,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            peak_event_index=peak_index,
            retries=allocator.num_alloc_retries,
        )
        assert expected == replay_events(events, np.array(sizes), options, capacity)

    @no_deadline
    @given(sequence=sequences(), options=SETTINGS)
    def test_the_books_balance(self, sequence, options):
        """Sums, bounds, granularity, no overlap, no two free neighbours, peaks that never fall."""
        events, sizes = sequence
        allocator = CachingAllocator(options)
        peaks = (0, 0)
        for event in events:
            apply(allocator, event, sizes)
            segments = allocator.snapshot()
            blocks = [block for segment in segments for block in segment.blocks]
            assert sum(b.size_bytes for b in blocks if b.allocated) == allocator.allocated_bytes
            assert sum(b.size_bytes for b in blocks) == allocator.reserved_bytes
            assert 0 == allocator.reserved_bytes % math.gcd(2 * MIB, options.large_segment_size_bytes)
            assert all(a.address + a.size_bytes <= b.address for a, b in pairwise(blocks))
            for segment in segments:
                pairs = pairwise(segment.blocks)
                assert all(a.allocated or b.allocated for a, b in pairs)
            now = (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
            assert all(a <= b for a, b in zip(peaks, now, strict=True))
            assert now >= (allocator.allocated_bytes, allocator.reserved_bytes)
            peaks = now

    @no_deadline
    @given(sequence=sequences(), options=SETTINGS)
    def test_freeing_everything_leaves_whole_segments(self, sequence, options):
        """Nothing is allocated, each segment is one free block, and the cache can be emptied to nothing."""
        events, sizes = sequence
        allocator = CachingAllocator(options)
        for event in events:
            apply(allocator, event, sizes)
        for key in {e for e in events if e > 0} - {-e for e in events if e < 0}:
            allocator.free(key)
        assert 0 == allocator.allocated_bytes
        assert all(1 == len(segment.blocks) for segment in allocator.snapshot())
        allocator.empty_cache()
        assert (0, []) == (allocator.reserved_bytes, allocator.snapshot())
