"""The cache of recordings: made once, and made again whenever that is safer."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from planner import cache


class Counted:
    """Counts how often it had to make its value."""

    def __init__(self, value: object = 42) -> None:
        self.value, self.calls = value, 0

    def __call__(self) -> object:
        """Make the value."""
        self.calls += 1
        return self.value


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for each test."""
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(folder: Path) -> list[Path]:
    """Files of the cache."""
    return [path for path in folder.rglob("*") if path.is_file()]


def test_an_entry_is_made_once() -> None:
    """The second time it is read, and equal."""
    make = Counted({"sizes": [1, 2, 3]})
    first, second = (cache.remembered("steps", {"b": 2, "a": 1}, make) for _ in range(2))
    assert {"sizes": [1, 2, 3]} == first == second
    assert 1 == make.calls


def test_none_is_an_entry() -> None:
    """What is remembered is whether it was made, not what it is."""
    make = Counted(None)
    for _ in range(2):
        assert cache.remembered("facts", {}, make) is None
    assert 1 == make.calls


def test_the_order_of_a_keys_fields_does_not_matter() -> None:
    """Keys are sets of facts."""
    make = Counted()
    cache.remembered("steps", {"a": 1, "b": {"c": 2, "d": 3}}, make)
    cache.remembered("steps", {"b": {"d": 3, "c": 2}, "a": 1}, make)
    assert 1 == make.calls


@pytest.mark.parametrize(
    ("kind", "key"), [("steps", {"a": 2}), ("steps", {"a": 1, "b": None}), ("updates", {"a": 1}), ("steps", {"a": "1"})]
)
def test_another_key_or_kind_is_another_entry(kind: str, key: dict[str, object]) -> None:
    """Nothing is shared by accident."""
    cache.remembered("steps", {"a": 1}, Counted("first"))
    assert "other" == cache.remembered(kind, key, Counted("other"))


def test_another_version_of_a_library_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model code changes between versions of transformers, and with it what a step holds."""
    make = Counted()
    cache.remembered("steps", {}, make)
    made_by = {**cache._made_by(), "transformers": "0.0.0"}
    monkeypatch.setattr(cache, "_made_by", lambda: made_by)
    cache.remembered("steps", {}, make)
    assert 2 == make.calls


def test_keys_cover_the_libraries_and_the_recording_code() -> None:
    """Each that a recording depends on, and a digest of this package's own."""
    made_by = cache._made_by()
    assert {"torch", "transformers", "peft", "vramplan", "code"} <= set(made_by)
    assert "not installed" not in made_by.values()
    assert 64 == len(made_by["code"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.binary(max_size=40))
@example(b"")
@example(b"not a pickle")
@example(pickle.dumps([1, 2, 3])[:-3])
@example(b"cplanner.cache\nNoSuchThing\n.")
@example(b"cno_such_module\nThing\n.")
@example(b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\x7f.")
@example(b"(dp0\n]p1\nI1\ns.")
def test_an_entry_that_cannot_be_read_is_made_again(own_folder: Path, content: bytes) -> None:
    """Whatever stands in the file; afterwards it is whole again."""
    try:
        pickle.loads(content)
    except Exception:
        pass
    else:
        return
    make = Counted("whole")
    cache.remembered("steps", {}, make)
    (path,) = entries(own_folder)
    path.write_bytes(content)
    calls = make.calls
    assert "whole" == cache.remembered("steps", {}, make)
    assert "whole" == cache.remembered("steps", {}, make)
    assert calls + 1 == make.calls


def blocked_by_a_file(folder: Path) -> None:
    """No folder can be made."""
    folder.write_text("a file where the folder should be")


def blocked_entry(folder: Path) -> None:
    """The entry's own name is taken."""
    (folder / "steps").mkdir(parents=True)
    (folder / "steps" / f"{cache._digest({})}.pickle").mkdir()


@pytest.mark.parametrize("block", [blocked_by_a_file, blocked_entry])
def test_a_cache_that_cannot_be_written_is_no_failure(own_folder: Path, block: Callable[[Path], None]) -> None:
    """The value is made every time instead."""
    block(own_folder)
    make = Counted()
    assert [42, 42] == [cache.remembered("steps", {}, make) for _ in range(2)]
    assert 2 == make.calls


def test_nothing_half_written_stays(own_folder: Path) -> None:
    """One file an entry, no temporary ones."""
    for number in range(3):
        cache.remembered("steps", {"number": number}, Counted(number))
    assert 3 == len(entries(own_folder))
    assert {".pickle"} == {path.suffix for path in entries(own_folder)}


def test_a_failure_to_make_is_not_remembered(own_folder: Path) -> None:
    """The next caller tries again."""

    def fail() -> object:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.remembered("steps", {}, fail)
    assert [] == entries(own_folder)
    assert 42 == cache.remembered("steps", {}, Counted())


def test_the_folder_is_the_users_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """VRAMPLAN_CACHE names it; empty or unset, it is the platform's."""
    assert Path(os.environ["VRAMPLAN_CACHE"]) == cache.folder()
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("VRAMPLAN_CACHE")
        else:
            monkeypatch.setenv("VRAMPLAN_CACHE", value)
        assert "vramplan" in cache.folder().name
        assert cache.folder().is_absolute()
