"""Recordings as plain data: written, read, compared."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.recording.record import CATEGORY_NAMES, OUTSIDE_LAYERS, Op, Recording

SMALL = Recording(
    sizes=[0, 4096, 8519680, 512],
    categories=[0, 0, 6, 4],
    events=[1, 2, 3, -3],
    layers=[OUTSIDE_LAYERS, 0, 1, OUTSIDE_LAYERS],
    phases={"load": 0, "inputs": 1, "forward": 1, "backward": 2, "end": 4},
    gradients=[(3, 3)],
    gates=[(3, 70_000, 65_536)],
    ops=[Op("aten.mm", 1024, (64, 64, 128), "matmul:fp32", 1, False), Op("aten.add_", 0, (), "elementwise", 3, True)],
)


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_saved_recording_is_loaded_as_it_was(tmp_path: Path, name: str) -> None:
    """Every field comes back with its types: tuples where tuples were, and operators as operators."""
    SMALL.save(tmp_path / name)
    loaded = Recording.load(tmp_path / name)
    assert SMALL == loaded
    assert SMALL.structure == loaded.structure
    assert [Op] * 2 == [type(op) for op in loaded.ops]


def test_a_recording_is_json_that_any_program_reads(tmp_path: Path) -> None:
    """The file is a JSON object of lists and numbers; gzipped when its name says so."""
    SMALL.save(tmp_path / "step.json")
    SMALL.save(tmp_path / "step.json.gz")
    document = json.loads((tmp_path / "step.json").read_text())
    assert [0, 4096, 8519680, 512] == document["sizes"]
    assert [[3, 70_000, 65_536]] == document["gates"]
    assert (tmp_path / "step.json").read_bytes() == gzip.decompress((tmp_path / "step.json.gz").read_bytes())


def test_gzipped_recordings_depend_on_their_content_alone(tmp_path: Path) -> None:
    """No time stamp and no file name: shipped recordings don't change when they are made again."""
    SMALL.save(tmp_path / "one.json.gz")
    SMALL.save(tmp_path / "other.json.gz")
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "other.json.gz").read_bytes()


def test_structure_leaves_out_what_depends_on_the_shape() -> None:
    """Sizes, costs and gate counts differ between shapes; everything else is the structure."""
    mm, add = SMALL.ops
    other = replace(
        SMALL,
        sizes=[0, 1, 2, 3],
        gates=[(3, 5, 65_536)],
        ops=[replace(mm, flops=1, moved_bytes=(1, 2, 3)), add],
    )
    assert SMALL.structure == other.structure


@pytest.mark.parametrize(
    "change",
    [
        {"events": [1, 2, -2, 3]},
        {"categories": [0, 0, 6, 3]},
        {"phases": {"load": 0, "inputs": 1, "forward": 1, "backward": 3, "end": 4}},
        {"gradients": [(2, 3)]},
        {"gates": [(3, 70_000, 0)]},
        {"ops": SMALL.ops[:1]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_structure_tells_different_steps_apart(change: dict[str, object]) -> None:
    """A change of any event, category, phase, gradient, gate or operator is another structure."""
    assert SMALL.structure != replace(SMALL, **change).structure  # type: ignore[arg-type]


counts = st.integers(min_value=0, max_value=2**45)
ops = st.builds(
    Op,
    st.sampled_from(["aten.mm", "aten.add"]),
    counts,
    st.lists(counts, max_size=3).map(tuple),
    st.sampled_from(["matmul:bf16", "elementwise"]),
    counts,
    st.booleans(),
)
recordings = st.builds(
    Recording,
    sizes=st.lists(counts, max_size=5),
    categories=st.lists(st.integers(0, len(CATEGORY_NAMES) - 1), max_size=5),
    events=st.lists(st.integers(-99, 99), max_size=5),
    layers=st.lists(st.integers(-1, 99), max_size=5),
    phases=st.dictionaries(st.text(max_size=8), counts, max_size=3),
    gradients=st.lists(st.tuples(counts, counts), max_size=3),
    gates=st.lists(st.tuples(counts, counts, counts), max_size=3),
    ops=st.lists(ops, max_size=3),
)


@given(recordings)
def test_any_recording_survives_the_round_trip(recording: Recording) -> None:
    """Through JSON text and back, nothing is lost and the order of phases is kept."""
    loaded = Recording.from_json(json.loads(json.dumps(recording.to_json())))
    assert recording == loaded
    assert list(recording.phases) == list(loaded.phases)
