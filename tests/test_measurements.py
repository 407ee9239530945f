"""What is kept of measurements, and what it makes of predictions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from worlds import TARGET, make_space

from planner import cache
from planner.measure.protocol import ABOUT_THE_CONFIGURATION, STATUSES, DeviceFacts, Measurement
from planner.measurements import (
    Corrections,
    Measured,
    MeasurementStore,
    device_key,
    log_noise,
    workload_key,
)
from planner.models import resolve_model
from planner.workload import Workload

CONFIGS = list(make_space().configurations())
DONE = Measurement(
    status="ok", step_ms=12.0, tokens_per_s=100.0, peak_reserved_bytes=600, context_bytes=100, process_bytes=700
)
FACTS = DeviceFacts(device="cpu", name="a processor", total_bytes=2**34, free_bytes=2**33, context_bytes=2**28)


def make_row(config=CONFIGS[0], measurement=DONE, *, ceiling=1000, workload="w", reserved=500, step_ms=10.0):
    """A row to keep."""
    return Measured(
        workload=workload,
        config=config,
        ceiling_bytes=ceiling,
        predicted_reserved_bytes=reserved,
        predicted_step_ms=step_ms,
        measurement=measurement,
    )


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return MeasurementStore({"device": "a"}, folder=tmp_path / "measurements")


def test_what_is_kept_comes_back(store):
    """Field by field, in order; also to another planner."""
    rows = [make_row(config) for config in CONFIGS[:3]]
    assert ["", "", ""] == [store.append(row) for row in rows]
    assert rows == MeasurementStore(store.key, folder=store.path.parent).rows()


@pytest.mark.parametrize("status", STATUSES)
def test_only_what_would_come_out_again_is_kept(store, status):
    """What a trial says about the moment is not worth keeping."""
    store.append(make_row(measurement=Measurement(status=status)))
    assert (status in ABOUT_THE_CONFIGURATION) == bool(store.rows())


def test_other_versions_and_devices_are_other_stores(monkeypatch):
    """Measurements of another torch, driver, device or number of threads are not used."""
    keys = [device_key(FACTS)]
    keys += [device_key(replace(FACTS, **{name: value})) for name, value in OTHERS.items()]
    versions = cache.library_versions()
    for name in ("torch", "transformers", "vramplan"):
        monkeypatch.setattr(cache, "library_versions", lambda name=name: {**versions, name: "0.0"})
        keys.append(device_key(FACTS))
    paths = {MeasurementStore(key).path for key in keys}
    assert len(keys) == len(paths)


OTHERS = {"name": "another", "total_bytes": 1, "driver": "1.0", "threads": 7, "device": "cuda:0"}


def test_free_memory_is_no_part_of_the_key():
    """What changes from minute to minute doesn't make another device."""
    assert device_key(FACTS) == device_key(replace(FACTS, free_bytes=1, context_bytes=2, bandwidth_bytes_per_s=3.0))


def test_lines_that_can_not_be_read_are_skipped(store):
    """They are counted; what is around them is used."""
    store.append(make_row(CONFIGS[0]))
    good = store.path.read_bytes()
    bad = [b"\xff\xfe", b"{}", b"[]", b'"x"', good[: len(good) // 2], json.dumps({"config": {}}).encode()]
    store.path.write_bytes(good + b"\n".join(bad) + b"\n\n" + good)
    assert [make_row().config] * 2 == [row.config for row in store.rows()]
    assert len(bad) == store.unreadable


def test_a_line_that_was_cut_off_spoils_no_other(store):
    """A planner killed while it wrote leaves half a line: the next one begins on a line of its own."""
    store.append(make_row(CONFIGS[0]))
    with store.path.open("ab") as file:
        file.write(b'{"workload": "w", "conf')
    store.append(make_row(CONFIGS[1]))
    assert CONFIGS[:2] == [row.config for row in store.rows()]
    assert 1 == store.unreadable


def test_two_planners_at_once_lose_nothing(store):
    """Two processes that append 200 rows each leave 400."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[3]); from pathlib import Path; from test_measurements import *\n"
        "store = MeasurementStore({'device': 'a'}, folder=Path(sys.argv[1]))\n"
        "for i in range(200): store.append(make_row(workload=sys.argv[2] * (i % 50 + 1)))"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", code, str(store.path.parent)]
    both = [subprocess.Popen([*command, name, here], env=dict(os.environ)) for name in "ab"]
    assert [0, 0] == [process.wait(timeout=60) for process in both]
    rows = store.rows()
    assert 400 == len(rows)
    assert 0 == store.unreadable
    assert {"a": 200, "b": 200} == {name: sum(row.workload[0] == name for row in rows) for name in "ab"}


def test_a_folder_that_can_not_be_written_is_a_reason(tmp_path):
    """No exception: the plan goes on."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    store = MeasurementStore({}, folder=tmp_path / "file" / "measurements")
    assert "measurements are not kept" in store.append(make_row())
    assert [] == store.rows()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_reason(store):
    """No exception, and no half line."""
    store.path.parent.mkdir(parents=True)
    store.path.symlink_to("/dev/full")
    assert "No space left on device" in store.append(make_row())


def test_a_write_that_was_cut_short_is_taken_back(store):
    """A disk that fills up in the middle of a line leaves the lines before as they were."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    store.append(make_row(CONFIGS[0]))
    before = store.path.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
        problem = store.append(make_row(CONFIGS[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert problem
    assert before == store.path.read_bytes()


@pytest.mark.parametrize(
    ("measurement", "ran_under", "asked_for", "answers"),
    [
        (DONE, 1000, 700, True),
        (DONE, 1000, 5000, True),
        (DONE, 1000, 699, False),
        (DONE, None, 5000, True),
        (replace(DONE, process_bytes=None), 1000, 5000, False),
        (Measurement(status="oom"), 1000, 1000, True),
        (Measurement(status="oom"), 1000, 999, True),
        (Measurement(status="oom"), 1000, 1001, False),
        (Measurement(status="oom"), None, 10**15, True),
        (Measurement(status="thrashing"), 1000, 1001, False),
        (Measurement(status="nan-loss"), 1000, 1001, True),
    ],
)
def test_what_a_measurement_says_of_another_ceiling(measurement, ran_under, asked_for, answers):
    """What fits does so wherever it has room; what doesn't, doesn't in less."""
    assert answers == make_row(measurement=measurement, ceiling=ran_under).answers(asked_for)


def test_workloads_differ_by_model_task_and_labels():
    """And by nothing that comes and goes."""
    bert, gpt = resolve_model("bert-base-uncased"), resolve_model("gpt2")
    workloads = [
        Workload(spec=bert, task="masked-lm"),
        Workload(spec=bert, task="sequence-classification"),
        Workload(spec=bert, task="sequence-classification", num_labels=3),
        Workload(spec=gpt, task="sequence-classification"),
    ]
    assert 4 == len(set(map(workload_key, workloads)))
    assert workload_key(workloads[0]) == workload_key(
        Workload(spec=resolve_model("bert-base-uncased"), task="masked-lm")
    )


# -- noise and corrections ---------------------------------------------------------------------------------------------


def test_noise_of_a_median_of_passes():
    """Two micro-batches of 10 ms, spread by a known deviation, and a steady update."""
    passes = (9.0, 9.5, 10.0, 10.5, 11.0)
    expected = 2 * 1.2533 * 1.4826 * 0.5 / math.sqrt(5) / 25
    measured = Measurement(status="ok", step_ms=25.0, micro_batch_ms=passes, update_ms=(5.0, 5.0, 5.0))
    assert expected == pytest.approx(log_noise(measured, 2))
    assert 0.0 == log_noise(Measurement(status="ok", step_ms=25.0), 2)


def test_corrections_of_what_was_measured():
    """The very factors for what was measured; for the rest towards them; the context is the median."""
    measured = [
        make_row(CONFIGS[0]),
        make_row(CONFIGS[1], replace(DONE, context_bytes=130)),
        make_row(CONFIGS[2], replace(DONE, context_bytes=110)),
    ]
    found = Corrections.of(measured, workload="w", kind="cpu", context_bytes=100)
    assert 110 == found.context_bytes
    assert 1.2 == pytest.approx(found.time(CONFIGS[0]).factor, rel=1e-4)
    assert 1.2 == pytest.approx(found.memory(CONFIGS[0]).factor, rel=1e-4)
    assert 1.2 == pytest.approx(found.time(CONFIGS[-1]).factor, rel=1e-2)
    assert 1.0 < found.memory(CONFIGS[-1]).factor < 1.2
    assert found.memory(CONFIGS[0]).log_standard_deviation < found.memory(CONFIGS[-1]).log_standard_deviation


def test_corrections_of_nothing():
    """Predictions stand; nothing is known of times on this device."""
    found = Corrections.of([], workload="w", kind=TARGET.kind, context_bytes=100)
    assert found.context_bytes is None
    assert (1.0, math.inf) == (found.time(CONFIGS[0]).factor, found.time(CONFIGS[0]).log_standard_deviation)
    assert 1.0 == found.memory(CONFIGS[0]).factor


def test_running_out_of_memory_corrects_upwards():
    """What had 900 bytes beside the context and was predicted to need 850 needs more."""
    out = make_row(CONFIGS[0], Measurement(status="oom"), ceiling=1000, reserved=850)
    assert Corrections.of([out], workload="w", kind="cpu", context_bytes=100).memory(CONFIGS[0]).factor > 900 / 850
