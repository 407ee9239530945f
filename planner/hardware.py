"""The target card: what it is, what it can hold, and why it was chosen. No GPU and no torch needed.

The numbers live in ``profiles/gpus.json``, each with its source. Sizes called labels are what the box says,
in binary GB (8 GB = 8 GiB); a card reports a little less to programs.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from planner.errors import InputError, Problem
from planner.units import GIB, MIB, compact_bytes, format_bytes, round_up, shown

if TYPE_CHECKING:
    from planner.measure.protocol import DeviceFacts


@dataclass(frozen=True, kw_only=True)
class Card:
    """One graphics card, as its specifications have it."""

    name: str
    """As in the catalogue: ``RTX 3060 12GB``."""
    label_bytes: int
    """Memory on the label, in binary GB."""
    reported_bytes: int
    """Total memory that torch reports; what programs can use, the CUDA context included."""
    compute_capability: tuple[int, int]
    """Major and minor: (8, 6)."""
    memory_bandwidth_bytes_per_s: float
    """Peak bandwidth of the card's memory."""
    dense_flops_per_s: Mapping[str, float] = field(hash=False)
    """Peak rates without sparsity by fp32, tf32, fp16, bf16 (the last two with fp32 accumulation); a type
    that the hardware lacks is absent."""
    pcie_bytes_per_s: float
    """To or from the host, one direction, theoretical."""
    nvlink_bytes_per_s: float | None = None
    """To other cards by NVLink, one direction, all links together; None where they meet on PCIe."""
    has_tensor_cores: bool
    """False before compute capability 7.0 and on the GTX 16 series, which is 7.5 without them."""
    source: str
    """Where each value comes from."""
    kind: str = "cuda"
    """torch's device type: ``cuda``, or ``cpu`` where the processor and its memory are the card."""
    operator_us: float | None = None
    """What an operator with its autograd node takes beyond its arithmetic and memory traffic, where it was measured."""

    @property
    def label(self) -> str:
        """The memory as the box has it: ``8 GB``."""
        return f"{self.label_bytes // GIB} GB"

    @property
    def link_bytes_per_s(self) -> float:
        """To another card of the same machine, one direction, theoretical."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s

    @property
    def supports_bf16(self) -> bool:
        """Whether bf16 runs in hardware; torch also says yes to cards that emulate it. CPUs without it widen it."""
        return self.kind == "cpu" or self.compute_capability >= (8, 0)

    @property
    def supports_tf32(self) -> bool:
        """Whether fp32 matmuls can use tf32 tensor cores."""
        return self.compute_capability >= (8, 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        return {
            "name": self.name,
            "label_bytes": self.label_bytes,
            "reported_bytes": self.reported_bytes,
            "compute_capability": list(self.compute_capability),
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
            "dense_flops_per_s": dict(self.dense_flops_per_s),
            "pcie_bytes_per_s": self.pcie_bytes_per_s,
            "link_bytes_per_s": self.link_bytes_per_s,
            "has_tensor_cores": self.has_tensor_cores,
            "source": self.source,
            "kind": self.kind,
        }


@cache
def _catalogue() -> dict[str, Any]:
    text = resources.files("planner.profiles").joinpath("gpus.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@cache
def all_cards() -> tuple[Card, ...]:
    """Every card of the catalogue, by name."""
    return tuple(_card(entry) for entry in _catalogue()["cards"])


def _card(entry: Mapping[str, Any]) -> Card:
    major, minor = entry["compute_capability"]
    return Card(
        name=entry["name"],
        label_bytes=entry["label_bytes"],
        reported_bytes=entry["reported_bytes"],
        compute_capability=(major, minor),
        memory_bandwidth_bytes_per_s=float(entry["memory_bandwidth_bytes_per_s"]),
        dense_flops_per_s=MappingProxyType({k: float(v) for k, v in entry["dense_flops_per_s"].items()}),
        pcie_bytes_per_s=float(entry["pcie_bytes_per_s"]),
        nvlink_bytes_per_s=float(entry["nvlink_bytes_per_s"]) if "nvlink_bytes_per_s" in entry else None,
        has_tensor_cores=entry["tensor_cores"],
        source="; ".join(f"{key}: {text}" for key, text in entry["source"].items()),
    )


# Names ------------------------------------------------------------------------------------------------

_NOISE = re.compile(
    r"\b(nvidia|geforce|rtx|gtx|tesla|gpu|graphics|card|generation|workstation|server|edition|with|design"
    r"|gb|hbm\de?)\b"
)
_VARIANTS = frozenset({"ti", "super", "laptop", "maxq"})
"""Words that make another card of a model: a name without them never means the card with them."""
_REWRITES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"[^a-z0-9]+", " "),
        (r"(nvidia|geforce|tesla|quadro|rtx|gtx|titan|pro)(?=[a-z0-9])", r"\1 "),
        (r"tisuper", "ti super"),
        (r"(?<=\d)(ti|super|laptop|ada|sxm\d?|pcie|nvl)(?![a-z])", r" \1 "),
        (r"\btitan (rtx|xp|x|v)\b", r"titan\1"),
        (r"\bmax q\b", "maxq"),
        (r"\bsxm\d\b", "sxm"),
    )
)
_MEMORY = re.compile(r"\b(\d{1,4}) ?g(?:i?b)?\b")


@dataclass(frozen=True)
class _Name:
    """A card's name taken apart."""

    words: tuple[str, ...]
    memory_gib: int | None
    form: str | None

    @property
    def model(self) -> frozenset[str]:
        return frozenset(self.words)


def _read_name(text: str) -> _Name:
    text = text.lower()
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    sizes = _MEMORY.findall(text)
    words = _NOISE.sub(" ", _MEMORY.sub(" ", text)).split()
    form = next((word for word in words if word in {"sxm", "pcie"}), None)
    return _Name(
        words=tuple(word for word in words if word not in {"sxm", "pcie"}),
        memory_gib=int(sizes[-1]) if sizes else None,
        form=form,
    )


@cache
def _names() -> tuple[tuple[_Name, frozenset[int | None], Card], ...]:
    """Each card under its own name and its aliases, with the sizes that may be said with that name.

    None stands for no size said. An alias always has one: a 2060 of 8 GB is a 2060 Super, but a 2060 is not.
    """
    names: list[tuple[_Name, frozenset[int | None], Card]] = []
    for entry, card in zip(_catalogue()["cards"], all_cards(), strict=True):
        own, gib = _read_name(card.name), card.reported_bytes / GIB
        # People also say what a card reports: a T4 of 15 GB, an A10G of 22.
        names.append((own, frozenset({None, own.memory_gib, math.ceil(gib), round(gib)}), card))
        aliases = [_read_name(alias) for alias in entry.get("aliases", ())]
        names += [(alias, frozenset({alias.memory_gib}), card) for alias in aliases]
    return tuple(names)


def _read_request(text: str) -> _Name:
    """As a card's name, but a bare number that is no model's is a size: ``a100 80``."""
    name = _read_name(text)
    models = frozenset().union(*(known.model for known, _, _ in _names()))
    bare = [word for word in name.words if word.isdecimal() and len(word) < 4 and word not in models]
    if len(bare) != 1 or name.memory_gib is not None:
        return name
    words = tuple(word for word in name.words if word != bare[0])
    return _Name(words=words, memory_gib=int(bare[0]), form=name.form)


def _matches(wanted: _Name) -> list[Card]:
    """Cards that the name can mean: those of exactly that model, else those whose model it abbreviates."""
    exact, abbreviated = [], []
    for name, sizes_gib, card in _names():
        if wanted.memory_gib not in sizes_gib or (name.form and wanted.form not in {None, name.form}):
            continue
        if name.model == wanted.model:
            exact.append(card)
        elif wanted.model and wanted.model < name.model and not (name.model - wanted.model) & _VARIANTS:
            abbreviated.append(card)
    return _one_form_each(exact or abbreviated)


def _one_form_each(cards: Iterable[Card]) -> list[Card]:
    """Where only the form factor is left open keep the SXM card: it is the usual one, and memory is the same."""
    by_model: dict[tuple[frozenset[str], int], Card] = {}
    for card in cards:
        name = _read_name(card.name)
        key = (name.model, card.label_bytes)
        if key not in by_model or name.form == "sxm":
            by_model[key] = card
    return list(by_model.values())


def find_card(name: str, *, vram_bytes: int | None = None) -> Card:
    """The card that a loosely written name means: ``rtx3060``, ``a100 80``, ``Tesla V100-SXM2-16GB``.

    torch's device names work. ``vram_bytes`` (asked for, or reported by the device) decides between sizes of
    one model that the name leaves open. Raises InputError for the argument ``gpu`` with the candidates when
    the name stays ambiguous, with near matches when it is unknown; each in one line.
    """
    found = _matches(_read_request(name))
    if not found:
        raise InputError([Problem(argument="gpu", message=_unknown(name))])
    chosen = _of_size(found, vram_bytes) if len(found) > 1 and vram_bytes is not None else found
    if len(chosen) > 1:
        names = ", ".join(card.name for card in chosen)
        message = f"got {shown(name)}, which several cards are called; accepted: one of {names}"
        raise InputError([Problem(argument="gpu", message=message)])
    return chosen[0]


def _of_size(cards: Sequence[Card], vram_bytes: int) -> Sequence[Card]:
    """Those with just that label; else, of one model, the smallest that holds it, or the largest there is."""
    same = [card for card in cards if card.label_bytes == vram_bytes]
    if same or len({_read_name(card.name).model for card in cards}) > 1:
        return same or cards
    enough = [card for card in cards if card.label_bytes >= vram_bytes]
    if enough:
        return [min(enough, key=lambda card: card.label_bytes)]
    return [max(cards, key=lambda card: card.label_bytes)]


def _unknown(name: str) -> str:
    """One line for a name that no card has."""
    known: dict[str, list[str]] = {}
    for card in all_cards():
        known.setdefault(" ".join(_read_name(card.name).words), []).append(card.name)
    close = difflib.get_close_matches(" ".join(_read_request(name).words), known, n=3, cutoff=0.6)
    near = [card for key in close for card in known[key]][:4]
    message = f"got {shown(name)}; accepted: a card such as RTX 3060, A100 80GB or Tesla T4"
    if near:
        return f"{message}; near: {', '.join(near)}"
    return f"{message}; none is near: leave it out for a typical card of the size"


# Devices of this machine ------------------------------------------------------------------------------


def card_of_device(facts: DeviceFacts, vram_bytes: int) -> Card:
    """The card that a device of this machine is.

    A CUDA device is the catalogue's card of its name (``vram_bytes`` or its own size decide between sizes), with the
    memory that it reports itself; one that isn't listed is what was found. The CPU's card is the processor with its
    memory. Rates that were found are achieved ones.
    """
    if facts.device == "cpu":
        threads = f"{facts.threads} thread{'s' * (facts.threads != 1)}"
        return _found_card(facts, name=f"{facts.name}, {threads}", kind="cpu")
    for size in (facts.total_bytes, vram_bytes):
        try:
            listed = find_card(facts.name, vram_bytes=size)
        except InputError:
            continue
        label = max(listed.label_bytes, facts.total_bytes)
        return replace(listed, reported_bytes=facts.total_bytes, label_bytes=label)
    return _found_card(facts, name=facts.name, kind="cuda")


def _found_card(facts: DeviceFacts, *, name: str, kind: str) -> Card:
    return Card(
        name=name,
        label_bytes=round_up(facts.total_bytes, GIB) if kind == "cuda" else facts.total_bytes,
        reported_bytes=facts.total_bytes,
        compute_capability=facts.compute_capability,
        memory_bandwidth_bytes_per_s=facts.bandwidth_bytes_per_s,
        dense_flops_per_s=MappingProxyType(dict(facts.flops_per_s)),
        pcie_bytes_per_s=_PCIE_BYTES_PER_S if kind == "cuda" else facts.bandwidth_bytes_per_s,
        has_tensor_cores=facts.compute_capability >= (7, 0),
        source="found on this machine: memory as it reports it, rates as achieved",
        kind=kind,
        operator_us=facts.operator_us,
    )


_PCIE_BYTES_PER_S = 16e9
"""PCI Express 3.0 with 16 lanes: what a card that isn't listed has at least, but for laptops and external boxes."""


# Choosing and sizing ----------------------------------------------------------------------------------


@cache
def _typical() -> Mapping[int, tuple[Card, str]]:
    """Label in bytes -> the typical card of that label, and why that one; by size."""
    by_name = {card.name: card for card in all_cards()}
    table = {int(gib) * GIB: (by_name[e["card"]], str(e["why"])) for gib, e in _catalogue()["typical"].items()}
    return MappingProxyType(dict(sorted(table.items())))


def typical_card(vram_bytes: int) -> tuple[Card, str]:
    """The card to plan for when only a size is known, with the reason.

    The typical card of just that label; else of the next larger label; above all of them the largest.
    """
    table = _typical()
    if vram_bytes in table:
        card, why = table[vram_bytes]
        return card, f"no card was named; typical for {vram_bytes // GIB} GB: {why}"
    asked = format_bytes(vram_bytes)
    larger = [label for label in table if label > vram_bytes]
    if larger:
        card, _ = table[larger[0]]
        return card, f"no card was named and no typical one has {asked}; {card.name} is the next larger"
    card = max((card for card, _ in table.values()), key=lambda card: card.label_bytes)
    return card, f"no card was named and no single one has {asked}; {card.name} is the largest"


def ceiling_bytes(vram_bytes: int, card: Card, *, named: bool = True) -> tuple[int, str]:
    """Memory that a plan may use on the card, context included, with the reason.

    The smaller of what was asked for and what such a card reports. Asking for more than the label of a card
    that the user named raises InputError; pass ``named=False`` for a card that :func:`typical_card` chose. On a CPU
    it is the memory that the whole process may take.
    """
    if card.kind == "cpu":
        return _ram_ceiling(vram_bytes, card)
    reported = format_bytes(card.reported_bytes)
    if vram_bytes > card.label_bytes and named:
        remedy = f"ask for {compact_bytes(card.label_bytes)} or less, or name another card"
        message = f"got {format_bytes(vram_bytes)}, but {card.name} has {card.label}; {remedy}"
        raise InputError([Problem(argument="vram", message=message)])
    if vram_bytes > card.label_bytes:
        return card.reported_bytes, f"{format_bytes(vram_bytes)} asked for; {card.name} reports {reported}"
    if vram_bytes >= card.reported_bytes:
        kept = format_bytes(card.label_bytes - card.reported_bytes)
        reason = f"{card.name} reports {reported} to programs: driver and error correction keep {kept}"
        return card.reported_bytes, reason
    return vram_bytes, f"as asked for; {card.name} would report {reported}"


def _ram_ceiling(vram_bytes: int, card: Card) -> tuple[int, str]:
    held = format_bytes(card.reported_bytes)
    if vram_bytes > card.reported_bytes:
        message = f"got {format_bytes(vram_bytes)}, but this machine has {held} of memory; ask for that or less"
        raise InputError([Problem(argument="vram", message=message)])
    return vram_bytes, f"as asked for, of the {held} of memory here: all that the process may take"


def context_bytes(card: Card) -> tuple[int, str]:
    """Memory that CUDA holds on the card outside torch's allocator with kernels loaded, with the reason.

    From published figures for the compute capability (``context`` in gpus.json says how they were read); a
    newer major than any listed takes the last one's.
    """
    table = _catalogue()["context"]["by_compute_capability_major"]
    major = min(card.compute_capability[0], max(int(key) for key in table))
    # The last tier of each major has no limit.
    tiers = ((tier["up_to_label_gib"], tier) for tier in table[str(major)])
    tier = next(tier for limit, tier in tiers if limit is None or card.label_bytes <= limit * GIB)
    return int(tier["mib"]) * MIB, f"CUDA context on compute capability {major}.x: {tier['source']}"


def nccl_bytes(card: Card) -> tuple[int, str]:
    """Memory that NCCL's communicator holds outside torch's allocator, with the reason (``nccl`` in gpus.json)."""
    if card.nvlink_bytes_per_s:
        return _NVLINK_COMMUNICATOR_BYTES, "NCCL's communicator over NVLink: 688 MiB among 4 A100 (NVIDIA/nccl#964)"
    held = _PCIE_CHANNELS * _RING_CONNECTIONS * _CONNECTION_BYTES
    return held, "NCCL's communicator over PCIe: 4 channels, 2 connections each, 12 MiB of buffers (NVIDIA/nccl#1685)"


_NVLINK_COMMUNICATOR_BYTES = 688 * MIB
_PCIE_CHANNELS, _RING_CONNECTIONS, _CONNECTION_BYTES = 4, 2, 12 * MIB
