"""What all tests share: no network, one thread, and a cache that isn't the user's."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402


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
