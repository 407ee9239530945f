"""PyTorch's allocator settings as they are typed: ``expandable_segments:True,roundup_power2_divisions:8``.

The syntax of ``PYTORCH_ALLOC_CONF`` (``c10/core/AllocatorConfig.cpp``, torch 2.11 to 2.14), with the keys that
change how much is reserved on the card. Sizes are in MiB there. What a text means for the simulation is
:meth:`AllocatorOptions.settings`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.units import MIB, shown

if TYPE_CHECKING:
    from planner.memory.block_sizes import AllocatorSettings

DEFAULT_ALLOCATOR = "expandable_segments:True"
"""What plans assume and emitted scripts set when the user says nothing."""
DEFAULT_REASON = (
    "segments that grow have no holes between batches of changing shapes; the script sets it. Windows ignores it and "
    "WSL may fail with it (the script leaves it off): plan for those with --allocator expandable_segments:False"
)
CPU_REASON = (
    "not used on a processor: there the script has glibc give tensors from 64 KiB on back when they are freed "
    "(mallopt, M_MMAP_THRESHOLD), as the trials do: less memory for some more time"
)
KEYS = (
    "expandable_segments",
    "large_segment_size_mb",
    "roundup_power2_divisions",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
)
"""Keys that decide how much is reserved."""
_OTHER_KEYS = re.compile(
    r"backend|pinned_\w+|release_lock_on_\w+|graph_capture_\w+|per_process_memory_fraction|throw_on_\w+"
)
"""Keys of torch that plans don't take: they change speed, host memory or the limit, or replace the allocator."""
SMALLEST_LARGE_SEGMENT_MB, LARGE_SEGMENT_MB = 11, 20
_INTERVALS = 16
_LARGEST_MB = 2**30
Intervals = tuple[int, ...]


class AllocatorSyntaxError(ValueError):
    """A text that is no allocator setting; ``messages`` has one line for each thing that is wrong."""

    def __init__(self, messages: list[str]) -> None:
        self.messages = messages
        super().__init__("\n".join(messages))


@dataclass(frozen=True, kw_only=True)
class AllocatorOptions:
    """The options that a text sets, torch's defaults where it says nothing."""

    text: str
    """As it goes into ``PYTORCH_CUDA_ALLOC_CONF``, without white space."""
    expandable_segments: bool = False
    """Each pool is one segment that grows."""
    large_segment_size_mb: int = LARGE_SEGMENT_MB
    """Segment for requests between 1 and 10 MiB."""
    roundup_power2_divisions: int | Intervals = 0
    """Steps between powers of two: one number, or one for each interval from 1 MiB to 64 GiB."""
    max_split_size_mb: int | None = None
    """Blocks of this size or more are never split."""
    max_non_split_rounding_mb: int | None = None
    """What a block that is never split may exceed a request by."""
    garbage_collection_threshold: float | None = None
    """Share of what the process may have from which free segments are given back."""

    def settings(self, allowed_bytes: int) -> AllocatorSettings:
        """For the simulation, where the process may have ``allowed_bytes`` on the card."""
        from planner.memory.block_sizes import AllocatorSettings

        threshold = self.garbage_collection_threshold
        return AllocatorSettings(
            expandable_segments=self.expandable_segments,
            large_segment_size_bytes=self.large_segment_size_mb * MIB,
            roundup_power2_divisions=self.roundup_power2_divisions,
            max_split_size_bytes=_bytes(self.max_split_size_mb),
            max_non_split_rounding_bytes=_bytes(self.max_non_split_rounding_mb),
            garbage_collection_bytes=None if threshold is None else int(threshold * allowed_bytes),
        )


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes * MIB


def parse_allocator(text: object) -> AllocatorOptions:
    """Read a setting in PyTorch's syntax. Raises AllocatorSyntaxError with every problem."""
    if not isinstance(text, str) or not text.strip():
        raise AllocatorSyntaxError([f"got {shown(text)}; accepted: settings such as {DEFAULT_ALLOCATOR}"])
    text = re.sub(r"\s", "", text)
    options: dict[str, Any] = {}
    messages: list[str] = []
    for item in _items(text):
        key, _, value = item.partition(":")
        try:
            if key in options:
                raise ValueError(f"got {key} twice; accepted: each key once; leave one out")
            options[key] = _read(key, value)
        except ValueError as error:
            messages.append(str(error))
    messages += _too_small(options)
    if messages:
        raise AllocatorSyntaxError(messages)
    return AllocatorOptions(text=text, **options)


def _items(text: str) -> list[str]:
    """Split at the commas outside of brackets; a last comma says nothing."""
    return re.split(r",(?![^\[]*\])", text.removesuffix(","))


def _read(key: str, value: str) -> Any:
    """The value of one key. Raises ValueError with the problem."""
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, n=1)
        remedy = f"; did you mean {near[0]}?" if near else ""
        if _OTHER_KEYS.fullmatch(key):
            remedy = "; it isn't simulated: set PYTORCH_CUDA_ALLOC_CONF yourself when you train"
        raise ValueError(f"got {shown(key)}; accepted: {', '.join(KEYS)}, each as key:value{remedy}")
    if key == "expandable_segments":
        return _true_or_false(key, value)
    if key == "garbage_collection_threshold":
        return _share(key, value)
    if key == "roundup_power2_divisions":
        return _divisions(key, value)
    smallest = SMALLEST_LARGE_SEGMENT_MB if key == "large_segment_size_mb" else 0
    return _whole(key, value, smallest, "a whole number of MiB")


def _true_or_false(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        word = value.capitalize()
        remedy = f"; did you mean {word}?" if word in ("True", "False") else ""
        raise _refusal(key, value, f"True or False{remedy}")
    return value == "True"


def _share(key: str, value: str) -> float:
    if re.fullmatch(r"0?\.[0-9]{1,9}", value) is None or not float(value):
        raise _refusal(key, value, "a number above 0 and below 1")
    return float(value)


def _whole(key: str, value: str, smallest: int, accepted: str) -> int:
    if re.fullmatch(r"[0-9]{1,10}", value) is None or not smallest <= int(value) <= _LARGEST_MB:
        raise _refusal(key, value, f"{accepted} from {smallest} to {_LARGEST_MB}")
    return int(value)


def _divisions(key: str, value: str) -> int | Intervals:
    """One number for all sizes, or ``[256:1,512:2,>:4]``: for sizes from so many MiB on, and above."""
    accepted = "a power of two such as 8, or a list such as [256:1,512:2,>:4] of sizes in MiB, each a power of two"
    if _is_power_of_two(value):
        return int(value)
    pairs = [pair.partition(":") for pair in value.removeprefix("[").removesuffix("]").split(",")]
    in_brackets = value.startswith("[") and value.endswith("]")
    right = all((size == ">" or _is_power_of_two(size)) and _is_power_of_two(n, zero=True) for size, _, n in pairs)
    if not in_brackets or not right:
        raise _refusal(key, value, accepted)
    return _intervals((size, int(number)) for size, _, number in pairs)


def _intervals(pairs: Iterator[tuple[str, int]]) -> Intervals:
    """The first pair holds below its size too, ``>`` above the last (parseRoundUpPower2Divisions)."""
    divisions, last = [0] * _INTERVALS, None
    for size, number in pairs:
        if size == ">":
            first = (last or 0) + 1
            divisions[first:] = [number] * (_INTERVALS - first)
            continue
        index = min(int(size).bit_length() - 1, _INTERVALS - 1)
        if last is None:
            divisions[:index] = [number] * index
        divisions[index] = number
        last = index
    return tuple(divisions)


def _is_power_of_two(digits: str, *, zero: bool = False) -> bool:
    if re.fullmatch(r"[0-9]{1,10}", digits) is None:
        return False
    number = int(digits)
    return number.bit_count() == 1 or (zero and number == 0)


def _too_small(options: dict[str, Any]) -> Iterator[str]:
    """A limit of splitting is at least a large segment (parseMaxSplitSize, parseMaxNonSplitRoundingSize)."""
    large = options.get("large_segment_size_mb", LARGE_SEGMENT_MB)
    for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        if key in options and options[key] < large:
            yield str(_refusal(key, str(options[key]), f"{large} (large_segment_size_mb) or more"))


def _refusal(key: str, value: str, accepted: str) -> ValueError:
    return ValueError(f"got {shown(f'{key}:{value}')}; accepted: {accepted}")


def gives_back(memory: Mapping[str, Any]) -> bool:
    """Whether glibc must give large tensors back to the system for a plan to hold on a processor.

    ``memory`` as in plan.json. Left alone, malloc keeps what is freed for later: that saves the page faults of new
    pages, a quarter of a small model's time, and held up to 1.8 times what tensors took (MALLOC_KEEPS).
    """
    room = memory["ceiling_bytes"] - memory["context_bytes"] - memory["margin_bytes"]
    return bool(MALLOC_KEEPS * memory["peak_reserved_bytes"] > room)


MALLOC_KEEPS = 2.0
"""More than glibc's malloc held of what tensors took, by its defaults, in any trial (1.3 to 1.8 times)."""
LEFT_ALONE = "there is room for what glibc's malloc keeps of freed tensors (up to 1.8 times as much): faster as it is"
"""Reason where it need not give back."""


def reason_for(options: AllocatorOptions, *, device: str = "cuda") -> str:
    """Why a plan has these settings, in a clause."""
    if device == "cpu":
        return CPU_REASON
    reason = DEFAULT_REASON if options.text == DEFAULT_ALLOCATOR else "as asked for; the script sets it"
    if options.garbage_collection_threshold is not None:
        reason += ", and the limit that garbage collection needs"
        if options.expandable_segments:
            reason += " (which passes over expandable segments)"
    return reason
