"""How long a pass takes whose weights come to the card while it runs, and what emptying the cache does to it."""

from dataclasses import replace

import numpy as np
import pytest
from test_inference_offload import CARD, record
from test_repetition import LLAMA

from planner.achievable import achievable
from planner.inference.streaming_time import (
    DRIVER_CALL_US,
    HOOK_US,
    SLOW_DRIVER_CALL_US,
    HostRates,
    StreamingTime,
    emptied,
    streaming_time,
)
from planner.memory.allocator import AllocatorSettings, CachingAllocator
from planner.recording.record import OUTSIDE_LAYERS, PARAMETERS, Op, Recording

REACHED = replace(achievable(), bandwidth_fraction=1.0, kernel_us=0.0, inference_operator_us=10.0, pcie_fraction=0.5)


def op_of(name, nbytes, position=0, layer=0):
    """An operator that is bound by the bytes that it moves."""
    return Op(name, 0, (nbytes,), "elementwise", position, False, layer)


def time_of(*ops, **options):
    """Of a pass of these operators."""
    moved = np.array([op.moved_bytes[0] for op in ops], dtype=np.int64)
    flops = np.zeros(len(ops), dtype=np.int64)
    options = {"tf32": False, "offload": "parameters", "reached": REACHED, **options}
    return streaming_time(ops, flops, moved, CARD, **options)


WEIGHT, KERNEL = op_of("vramplan.to_card", 10**9), op_of("aten.add", int(CARD.memory_bandwidth_bytes_per_s * 1e-3))


def test_a_copy_is_waited_for():
    """Its hook, the slower of staging and link, then each kernel after its launch: nothing is launched ahead."""
    link, staging = 1e9 / (CARD.pcie_bytes_per_s * 0.5), 0.1
    assert staging > link / 2
    found = time_of(WEIGHT, KERNEL, WEIGHT, KERNEL)
    once = HOOK_US * 1e-6 + max(link, staging) + 10e-6 + 1e-3
    assert 2 * once == pytest.approx(found.expected_s, rel=1e-6)
    assert 2 * (HOOK_US * 1e-6 + link + staging + 10e-6 + 1e-3) == pytest.approx(found.upper_s, rel=1e-6)
    assert 2 * (1e9 / CARD.pcie_bytes_per_s + 1e-3) == pytest.approx(found.lower_s, rel=1e-6)
    assert (2 * 10**9, 2) == (found.copied_bytes, found.copies)


@pytest.mark.parametrize("kind", ["parameters", "disk"])
def test_vectors_are_gathered_before_they_come(kind):
    """In host memory, wherever layers wait: what is no weight is gathered first, then copied as one is."""
    link, staging = 1e9 / (CARD.pcie_bytes_per_s * 0.5), 0.1
    found = time_of(op_of("vramplan.to_card", 10**9, layer=OUTSIDE_LAYERS), offload=kind, tensors_in_file=50)
    assert HOOK_US * 1e-6 + staging + max(link, staging) == pytest.approx(found.expected_s, rel=1e-6)
    assert HOOK_US * 1e-6 + staging + link + staging == pytest.approx(found.upper_s, rel=1e-6)
    assert 1e9 / CARD.pcie_bytes_per_s == pytest.approx(found.lower_s, rel=1e-6)
    assert (10**9, 0) == (found.copied_bytes, found.copies)


def test_without_copies_the_cpu_runs_ahead():
    """As the time model has it: only the first launch is waited for."""
    assert 10e-6 + 3e-3 == pytest.approx(time_of(KERNEL, KERNEL, KERNEL).expected_s, rel=1e-6)


def test_disk_is_slower_and_bounds_hold():
    """From disk a weight takes its file's page faults; the page cache may have it, and the disk may be slow."""
    host = HostRates(mapped_file_bytes_per_s=0.5e9, slow_disk_bytes_per_s=0.25e9)
    found = time_of(WEIGHT, KERNEL, offload="disk", host=host, tensors_in_file=100)
    assert 2.0 < found.expected_s < 2.01
    assert 4.1 < found.upper_s < 4.3
    assert time_of(WEIGHT, KERNEL).lower_s == found.lower_s


def test_an_emptied_cache_costs_driver_calls():
    """Each at its usual time in what is expected, at a slow host's in the upper bound."""
    plain, calling = time_of(WEIGHT), time_of(WEIGHT, driver_calls=7)
    assert 7 * DRIVER_CALL_US * 1e-6 == pytest.approx(calling.expected_s - plain.expected_s)
    assert 7 * SLOW_DRIVER_CALL_US * 1e-6 == pytest.approx(calling.upper_s - plain.upper_s)
    assert plain.lower_s == calling.lower_s


def test_times_add_up():
    """One pass after another."""
    one = StreamingTime(lower_s=1, expected_s=2, upper_s=4, copied_bytes=8, copies=16)
    assert StreamingTime(lower_s=2, expected_s=4, upper_s=8, copied_bytes=16, copies=32) == one + one


def test_emptying_gives_segments_back():
    """A weight's segment goes with the next weight's arrival, and the peak with it."""
    sizes = [0, 30 << 20, 40 << 20]
    recording = Recording(
        sizes=sizes,
        categories=[PARAMETERS] * 3,
        events=[1, -1, 2, -2],
        layers=[0, 0, 1, 1],
        phases={"load": 0, "pass": 0, "end": 4},
        ops=[op_of("vramplan.to_card", sizes[1], 1), op_of("vramplan.to_card", sizes[2], 3)],
    )
    kept = CachingAllocator(AllocatorSettings())
    kept.run(recording.events, np.array(sizes))
    found = emptied(recording)
    assert 70 << 20 == kept.peak_reserved_bytes == found.peak_reserved_bytes
    assert 3 == found.driver_calls  # both segments are asked for; the first one is given back when the second is there


@pytest.mark.parametrize("count", [0, 5])
def test_emptying_never_needs_more(count):
    """Of a whole model: what the allocator holds at most is no more than with its cache kept."""
    recording = record(LLAMA, "causal-lm", offload="parameters", layers_on_card=count, shape=(64, 256))
    kept = CachingAllocator(AllocatorSettings())
    kept.run(recording.events, np.array(recording.sizes))
    assert emptied(recording).peak_reserved_bytes <= kept.peak_reserved_bytes
