"""What a step did, as plain data: nothing here knows torch, and everything after recording reads only this."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PARAMETERS, INPUTS, ACTIVATIONS, TEMPORARIES, GRADIENTS, OPTIMIZER, WORKSPACE = range(7)
CATEGORY_NAMES = (
    "parameters",
    "inputs",
    "activations",
    "temporaries",
    "gradients",
    "optimizer",
    "workspace",
)
"""Names of the block categories, indexed by the constants above."""

OUTSIDE_LAYERS = -1
"""Layer tag of an event that belongs to no repeated layer."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator, with what a roofline needs."""

    name: str
    """ATen name, for example ``aten.mm``."""
    flops: int
    """Floating-point operations (a multiply-add counts two)."""
    moved_bytes: tuple[int, ...]
    """Bytes of each operand that is read or written, if each crosses the memory bus once."""
    kind: str
    """``matmul:<dtype>``, ``attention:<dtype>`` or ``elementwise``: which rate bounds it."""
    position: int
    """Number of allocation events recorded before it."""
    in_backward: bool
    """Whether it ran in the backward pass (recomputation included)."""
    layer: int = OUTSIDE_LAYERS
    """The repeated layer it ran in."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The ordered allocations, frees and operators of one step.

    Blocks are numbered from 1 in the order of their allocation; an event ``+k`` allocates block ``k`` and ``-k``
    frees it. Blocks that no event frees are still alive at the end.
    """

    sizes: list[int]
    """``sizes[k]`` is the size of block ``k`` in bytes as requested; ``sizes[0]`` is unused (0)."""
    categories: list[int]
    """``categories[k]`` indexes CATEGORY_NAMES."""
    events: list[int]
    """Signed block numbers in order."""
    layers: list[int]
    """For each event, the repeated layer it happened in, or OUTSIDE_LAYERS."""
    phases: dict[str, int]
    """Phase name to the index of its first event; phases follow each other in this order."""
    gradients: list[tuple[int, int]] = field(default_factory=list)
    """``(event index, block)``: by that event the block had become the gradient of a parameter."""
    gates: list[tuple[int, int, int]] = field(default_factory=list)
    """``(block, count, threshold)``: the block is only needed when ``count``, a size like any other, is above it."""
    ops: list[Op] = field(default_factory=list)
    """Operators in order."""

    @property
    def structure(self) -> tuple[object, ...]:
        """Everything but the sizes: equal structures have corresponding blocks and operators."""
        return (
            tuple(self.events),
            tuple(self.categories),
            tuple(self.phases.items()),
            tuple(self.gradients),
            tuple((block, threshold) for block, _, threshold in self.gates),
            tuple((op.name, op.kind, op.position, op.in_backward, len(op.moved_bytes)) for op in self.ops),
        )

    def save(self, path: Path) -> None:
        """Write as JSON (gzipped when the name ends in ``.gz``)."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        data = text.encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what ``save`` wrote."""
        data = path.read_bytes()
        return cls.from_json(json.loads(gzip.decompress(data) if path.suffix == ".gz" else data))

    def to_json(self) -> dict[str, object]:
        """Plain lists and numbers."""
        document = {name: getattr(self, name) for name in ("sizes", "categories", "events", "layers", "phases")}
        document["gradients"] = [list(pair) for pair in self.gradients]
        document["gates"] = [list(gate) for gate in self.gates]
        document["ops"] = [list(asdict(op).values()) for op in self.ops]
        return document

    @classmethod
    def from_json(cls, document: dict[str, object]) -> Recording:
        """Rebuild from ``to_json``'s document."""
        fields: dict[str, Any] = dict(document)
        for name, make in (("gradients", tuple), ("gates", tuple), ("ops", _op_from_row)):
            fields[name] = [make(row) for row in fields[name]]
        return cls(**fields)


class Origin(NamedTuple):
    """What made a block."""

    module: str
    """The module's name in the model, or the tensor's that an optimizer's state belongs to; empty outside."""
    kind: str
    """The module's class; empty outside."""
    operator: str
    """The operator (``aten::mm``), or the name of a tensor that was there before any ran."""


@dataclass(frozen=True, kw_only=True)
class NamedRecording(Recording):
    """A recording that knows where its blocks come from; its layers are indices of modules."""

    origins: list[Origin]
    """``origins[k]`` made block ``k``; ``origins[0]`` is unused."""


def _op_from_row(row: list[Any]) -> Op:
    name, flops, moved_bytes, *rest = row
    return Op(name, flops, tuple(moved_bytes), *rest)
