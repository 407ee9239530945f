"""What all tests share: no network, one thread, and a cache that isn't the user's."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # read by torch when it is imported; most tests here never import it

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ("emitted",)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Recordings of a test session lie in a temporary folder."""
    before = os.environ.get("VRAMPLAN_CACHE")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["VRAMPLAN_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["VRAMPLAN_CACHE"]
    else:
        os.environ["VRAMPLAN_CACHE"] = before


@pytest.fixture(autouse=True)
def _no_earlier_problems_of_the_cache() -> None:
    """A process tells each problem of its cache once, at its end; a test is not told those of the tests before it."""
    from planner import cache

    cache._state.problems.clear()
    cache._state.closed = False
