"""The cache of recordings: made once, and made again whenever that is safer."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
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
    """A cache folder, and a process that has met no problem, for each test."""
    monkeypatch.setenv("VRAMPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_state", cache._State())
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


def in_a_process(code: str, **options: object) -> subprocess.Popen[str]:
    """A planner of its own that runs this code, with the cache and a limit on files at hand."""
    setup = "import resource, sys, warnings; from planner import cache; warnings.simplefilter('ignore')\n"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", setup + code], text=True, **pipes, **options)  # type: ignore


def finished(process: subprocess.Popen[str]) -> str:
    """What a process printed; it must end well."""
    stdout, stderr = process.communicate(timeout=60)
    assert (0, "") == (process.returncode, stderr)
    return stdout


def blocked_by_a_file(folder: Path) -> None:
    """No folder can be made."""
    folder.write_text("a file where the folder should be")


def blocked_entry(folder: Path) -> None:
    """The entry's own name is taken."""
    (folder / "steps").mkdir(parents=True)
    (folder / "steps" / f"{cache._version()}-{cache._digest({})}.pickle").mkdir()


def below_a_file(folder: Path) -> None:
    """The folder's parent is none."""
    folder.write_text("a file where a folder should be")
    os.environ["VRAMPLAN_CACHE"] = str(folder / "deep" / "er")


@pytest.mark.parametrize(
    ("block", "why"),
    [(blocked_by_a_file, "that is no folder"), (blocked_entry, "Is a directory"), (below_a_file, "Not a directory")],
)
def test_a_cache_that_cannot_be_written_is_no_failure(
    own_folder: Path, block: Callable[[Path], None], why: str
) -> None:
    """The value is made every time instead; the reason is told once, with what to do, and nothing is left behind."""
    block(own_folder)
    make = Counted()
    with pytest.warns(cache.CacheWarning, match=why):
        assert [42, 42] == [cache.remembered("steps", {}, make) for _ in range(2)]
    assert 2 == make.calls
    (problem,) = cache.problems()
    remedy = "VRAMPLAN_CACHE names another folder"
    assert f"nothing could be kept in {cache.folder()}: {why}; {remedy}" == problem
    assert [] == [path for path in own_folder.parent.rglob("*") if path.is_file() and path != own_folder]


def test_a_cache_that_works_has_no_problems() -> None:
    """Neither for an entry that is made nor for one that is read."""
    for _ in range(2):
        cache.remembered("steps", {}, Counted())
    assert [] == cache.problems()


FULL = """
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for number in range(3):
    assert 30_000 == len(cache.remembered("steps", {"number": number}, lambda: bytes(30_000)))
assert 5 == cache.remembered("steps", {"small": True}, lambda: 5)
print(*cache.problems(), sep="\\n")
"""


def test_a_file_that_cannot_be_finished_leaves_nothing(own_folder: Path) -> None:
    """Past the limit of a file's size, which is met in the middle of writing: no part of it stays."""
    printed = finished(in_a_process(FULL))
    assert [f"nothing could be kept in {own_folder}: File too large"] == [
        line.split(";")[0] for line in printed.splitlines()
    ]
    assert 1 == len(entries(own_folder))
    assert 5 == cache.remembered("steps", {"small": True}, Counted())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of 64 KiB, filled: planning goes on, and what was there before is still whole."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        monkeypatch.setenv("VRAMPLAN_CACHE", str(disk / "cache"))
        kept = bytes(20_000)
        assert kept == cache.remembered("steps", {}, Counted(kept))
        with pytest.warns(cache.CacheWarning, match="No space left on device"):
            assert 90_000 == len(cache.remembered("steps", {"large": True}, lambda: bytes(90_000)))
        assert 1 == len(entries(disk))
        assert kept == cache.remembered("steps", {}, Counted("made again"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_what_cannot_be_pickled_is_an_error_and_leaves_nothing(own_folder: Path) -> None:
    """That is a mistake in this package, not the disk's fault."""
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        cache.remembered("steps", {}, lambda: lambda: None)
    assert [] == entries(own_folder)


# Several planners at once

TOGETHER = """
import time
while time.time() < float(sys.argv[1]): pass
for number in range(40):
    got = cache.remembered("steps", {"number": number}, lambda: [number] * 50_000)
    assert [number] * 50_000 == got, number
    cache.shrink(1_000_000 if number % 7 == 0 else cache.LARGEST_BYTES)
print(len(cache.problems()))
"""


def test_two_planners_at_once_do_each_other_no_harm(own_folder: Path) -> None:
    """Both make, read and remove the same entries at the same moment: each gets every value whole."""
    start = str(time.time() + 1)
    both = [in_a_process(TOGETHER.replace("sys.argv[1]", start)) for _ in range(2)]
    assert ["0\n", "0\n"] == [finished(process) for process in both]
    assert {".pickle"} == {path.suffix for path in entries(own_folder)}


def test_a_planner_that_is_killed_while_writing_leaves_no_entry(own_folder: Path) -> None:
    """What it began is no entry; a day later the next one to write removes it."""
    code = "from pathlib import Path; Path.replace = lambda *_: os.kill(os.getpid(), 9)\n"
    process = in_a_process(f"import os\n{code}cache.remembered('steps', {{}}, lambda: 1)")
    assert -9 == (process.communicate(timeout=60), process.returncode)[1]
    (left,) = entries(own_folder)
    assert 42 == cache.remembered("steps", {}, Counted())
    assert left.exists()
    os.utime(left, (time.time() - 2 * 24 * 3600,) * 2)
    cache.shrink(cache.LARGEST_BYTES)
    assert [".pickle"] == [path.suffix for path in entries(own_folder)]


# How much is kept


def test_too_much_is_brought_down_to_the_limit_others_first(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of other versions go first, whatever their age; then this version's older ones; no more than needed."""
    versions = {"other": "0" * 12, "this": cache._version()}
    for age, (name, version) in enumerate([("this", 1), ("other", 1), ("this", 2), ("other", 2)]):
        monkeypatch.setattr(cache, "_version", lambda name=name: versions[name])
        cache.remembered("steps", {"number": version}, Counted(bytes(10_000)))
        newest = max(entries(own_folder), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (1_000_000 + age,) * 2)
    monkeypatch.setattr(cache, "_version", lambda: versions["this"])
    sizes = []
    for largest in (35_000, 25_000, 15_000, 0):
        cache.shrink(largest)
        sizes.append([path.name[:12] for path in sorted(entries(own_folder), key=lambda path: path.stat().st_mtime)])
    this, other = versions["this"], versions["other"]
    assert [[this, this, other], [this, this], [this], []] == sizes


def test_only_entries_are_removed(own_folder: Path) -> None:
    """What else lies in the folder, such as measurements, is nobody's to remove."""
    for place in ("measurements/a.jsonl", "environments/x/y.pickle", "notes.txt"):
        (own_folder / place).parent.mkdir(parents=True, exist_ok=True)
        (own_folder / place).write_text("mine")
    cache.remembered("steps", {}, Counted())
    cache.shrink(0)
    assert {"a.jsonl", "y.pickle", "notes.txt"} == {path.name for path in entries(own_folder)}


def test_the_first_entry_of_a_process_looks_after_the_limit(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to ask for it."""
    monkeypatch.setattr(cache, "LARGEST_BYTES", 0)
    cache.remembered("steps", {}, Counted())
    assert [] == entries(own_folder)


# Whose it is


@pytest.mark.skipif(os.name != "posix", reason="files have no owner that can be asked for")
def test_folders_and_entries_are_the_users_own(own_folder: Path) -> None:
    """Nobody else can put a pickle there, or read one."""
    before = os.umask(0)
    try:
        cache.remembered("steps", {}, Counted())
    finally:
        os.umask(before)
    (entry,) = entries(own_folder)
    assert [0o700, 0o700, 0o600] == [path.stat().st_mode & 0o777 for path in (own_folder, own_folder / "steps", entry)]


@pytest.mark.skipif(os.name != "posix", reason="files have no owner that can be asked for")
def test_what_belongs_to_another_user_is_neither_read_nor_written(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle of somebody else's could run their code; the plan goes on without a cache and says why."""
    cache.remembered("steps", {}, Counted("theirs"))
    (entry,) = entries(own_folder)
    monkeypatch.setattr(os, "geteuid", lambda: own_folder.stat().st_uid + 1)
    with pytest.warns(cache.CacheWarning, match="belongs to another user"):
        assert "ours" == cache.remembered("steps", {}, Counted("ours"))
    assert [entry] == entries(own_folder)
    assert "theirs" == pickle.loads(entry.read_bytes())
    assert [f"nothing could be kept in {own_folder}: it belongs to another user, who could put code there"] == [
        problem.split(";")[0] for problem in cache.problems()
    ]


# An interrupt that came at a bad moment


def test_a_closed_cache_is_read_and_not_written(own_folder: Path) -> None:
    """What is made after that may be wrong, and is not kept."""
    cache.remembered("steps", {"a": 1}, Counted("before"))
    cache.close()
    assert "before" == cache.remembered("steps", {"a": 1}, Counted("again"))
    assert "after" == cache.remembered("steps", {"a": 2}, Counted("after"))
    assert 1 == len(entries(own_folder))


def test_write_whole_replaces_a_file_or_leaves_it(tmp_path: Path) -> None:
    """For other files than entries: folders are made, the old content stays until the new is complete."""
    path = tmp_path / "a" / "b.json"
    cache.write_whole(path, b"old")
    with pytest.raises(TypeError):
        cache.write_whole(path, "no bytes")  # type: ignore[arg-type]
    assert (b"old", ["b.json"]) == (path.read_bytes(), [file.name for file in path.parent.iterdir()])
    cache.write_whole(path, b"new")
    assert b"new" == path.read_bytes()


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
