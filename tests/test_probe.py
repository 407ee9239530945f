"""What a device is: facts found on this machine, and the card and the environment that follow from facts."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from planner.errors import InputError
from planner.hardware import card_of_device, ceiling_bytes, find_card
from planner.measure.environment import CPU_MALLOC, trial_environment
from planner.measure.probe import container_limit_bytes, cuda_notes, probe
from planner.measure.protocol import DeviceFacts
from planner.memory.host import HostSettings

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def found() -> DeviceFacts:
    """The processor, as a trial's process sees it."""
    return probe("cpu")


def make_facts(**values: Any) -> DeviceFacts:
    """Of a CUDA device."""
    fields = {
        "device": "cuda:0",
        "name": "NVIDIA GeForce RTX 3060",
        "total_bytes": 12 * GIB - 300 * MIB,
        "free_bytes": 11 * GIB,
        "context_bytes": 300 * MIB,
        "compute_capability": (8, 6),
        "flops_per_s": {"fp32": 9e12, "fp16": 40e12},
        "bandwidth_bytes_per_s": 3e11,
    }
    return DeviceFacts(**{**fields, **values})


# -- the processor ---------------------------------------------------------------------------------------------------


def test_the_processor_is_described(found: DeviceFacts) -> None:
    """Memory of the machine, at most; a context of a process that has torch and transformers loaded."""
    assert 0 < found.free_bytes <= found.total_bytes <= psutil.virtual_memory().total
    assert 100 * MIB < found.context_bytes <= psutil.Process().memory_info().rss + 100 * MIB
    assert torch.get_num_threads() == found.threads
    assert found.name
    assert found == DeviceFacts.from_json(found.to_json())


def test_the_processors_rates_are_those_of_a_processor(found: DeviceFacts) -> None:
    """Between a slow core under load and a large server; an operator takes microseconds."""
    assert 1e8 < found.flops_per_s["fp32"] < 1e14
    assert 1e6 < found.flops_per_s["bf16"] < 1e15
    assert 1e8 < found.bandwidth_bytes_per_s < 2e12
    assert 0.5 < found.operator_us < 20_000


def test_a_containers_limit_is_the_least_of_its_groups(tmp_path: Path) -> None:
    """Of both versions, those above it included; ``max`` and version 1's number for none are no limits."""
    for path, text in (
        ("a/b/memory.max", "max"),
        ("a/memory.max", f"{3 * GIB}"),
        ("memory/job/memory.limit_in_bytes", f"{2 * GIB}"),
        ("memory/memory.limit_in_bytes", "9223372036854771712"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    groups = tmp_path / "groups"
    groups.write_text("4:memory:/job\n3:cpu:/\n0::/a/b\n")
    assert 2 * GIB == container_limit_bytes(tmp_path, groups)
    groups.write_text("0::/a/b\n")
    assert 3 * GIB == container_limit_bytes(tmp_path, groups)
    groups.write_text("0::/other\n")
    assert container_limit_bytes(tmp_path, groups) is None
    assert container_limit_bytes(tmp_path, tmp_path / "missing") is None


def test_there_is_no_other_device() -> None:
    """A card that isn't there is torch's error, which the caller reports."""
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises((RuntimeError, AssertionError)):
        probe("cuda")


def test_what_is_unusual_about_a_card_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices, memory of others, and systems that put what doesn't fit into host memory."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-generic")
    assert [] == list(cuda_notes("NVIDIA H200", 0, known=True))
    assert "MIG" in " ".join(cuda_notes("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 0, known=True))
    assert "2 GiB" in " ".join(cuda_notes("NVIDIA H200", 2 * GIB, known=True))
    assert "NVML" in " ".join(cuda_notes("NVIDIA H200", 0, known=False))
    monkeypatch.setattr(platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2")
    assert "WSL" in " ".join(cuda_notes("NVIDIA H200", 0, known=True))


# -- cards of devices ------------------------------------------------------------------------------------------------


def test_a_listed_card_has_its_own_memory() -> None:
    """Specifications from the catalogue, memory as the device reports it."""
    facts = make_facts()
    card, listed = card_of_device(facts, 8 * GIB), find_card("RTX 3060 12GB")
    assert (listed.name, listed.dense_flops_per_s) == (card.name, card.dense_flops_per_s)
    assert facts.total_bytes == card.reported_bytes
    assert "cuda" == card.kind


def test_a_card_that_is_not_listed_is_what_was_found() -> None:
    """Rates as achieved; the label is the next whole GiB."""
    card = card_of_device(make_facts(name="NVIDIA Unheard Of 77"), 8 * GIB)
    assert ("NVIDIA Unheard Of 77", 12 * GIB, 9e12) == (card.name, card.label_bytes, card.dense_flops_per_s["fp32"])
    assert card.compute_capability == (8, 6)
    assert card.has_tensor_cores


def test_the_processor_is_a_card(found: DeviceFacts) -> None:
    """Named with its threads; its memory is the ceiling's limit."""
    card = card_of_device(found, GIB)
    assert "cpu" == card.kind
    assert f"{found.name}, {found.threads} thread" in card.name
    assert (found.total_bytes, found.operator_us) == (card.reported_bytes, card.operator_us)
    assert GIB == ceiling_bytes(GIB, card)[0]
    with pytest.raises(InputError, match=r"1024 TiB, but this machine has"):
        ceiling_bytes(2**50, card)


# -- the environment -------------------------------------------------------------------------------------------------


def test_a_trial_on_the_processor_gets_mallocs_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the simulated malloc has; no card is visible, and threads are the user's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = trial_environment("cpu", "expandable_segments:True")
    assert str(HostSettings().mmap_threshold_bytes) == environment["MALLOC_MMAP_THRESHOLD_"]
    assert ("3", "") == (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"])
    assert {**os.environ, **CPU_MALLOC, "CUDA_VISIBLE_DEVICES": ""} == environment


@pytest.mark.parametrize(
    ("allocator", "expected"), [("expandable_segments:True", "expandable_segments:True"), ("", None)]
)
def test_a_trial_on_a_card_gets_the_runs_allocator(
    allocator: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the planner's own process has set, under either of the variable's names."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    environment = trial_environment("cuda:1", allocator)
    assert expected == environment.get("PYTORCH_CUDA_ALLOC_CONF")
    assert "PYTORCH_ALLOC_CONF" not in environment
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == environment.get("CUDA_VISIBLE_DEVICES")
