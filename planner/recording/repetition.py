"""Recordings of deep models from recordings of shallow ones: the events of a middle layer, repeated.

The layers of a stack do the same things in the same order. A model with four units (a unit is a layer, or as many
layers as the pattern needs) shows the first, two middle ones, and the last; a deeper model has more middle ones. In
the forward pass they follow each other, in the backward pass in reverse; an event of one refers to blocks of its
own unit, of a neighbour, or of none. What doesn't follow these rules is refused, and recorded in full instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.recording.record import OUTSIDE_LAYERS, Op, Recording

TEMPLATE_UNITS = 4
_REPEATED, _NEXT = 1, 2
"""The middle unit that is repeated, and its neighbour that shows what a middle unit refers to."""

Unit = tuple[int, int] | None
"""Stack and index in the template; None outside of all stacks."""
Copy = tuple[int, int]
"""A template block and the copy of its unit."""


class NotRegularError(Exception):
    """The layers don't repeat as they should."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One run of equal layers."""

    layers: int
    """In the model that is asked for."""
    period: int = 1
    """Layers of a unit."""

    @property
    def repeats(self) -> bool:
        """Whether there is something to gain from a template."""
        return self.layers % self.period == 0 and self.layers > TEMPLATE_UNITS * self.period

    @property
    def template_layers(self) -> int:
        """Layers of the template."""
        return TEMPLATE_UNITS * self.period if self.repeats else self.layers

    @property
    def copies(self) -> int:
        """How often the repeated unit stands in the model that is asked for."""
        return self.layers // self.period - TEMPLATE_UNITS + 1 if self.repeats else 1


@dataclass
class _Run:
    """Consecutive events of one unit in one phase."""

    phase: str
    unit: Unit
    start: int
    end: int
    ops: list[Op]
    gradients: list[tuple[int, int]]
    order: range = range(1)
    """The copies of the run, in the order in which they happen."""
    model: _Run | None = None
    """The same run of the next unit."""


def repeat_layers(recording: Recording, stacks: Sequence[Stack]) -> Recording:
    """The recording of the deep model. Raises NotRegularError.

    ``recording`` is of a model with each stack's ``template_layers``; its layer tags count through all stacks.
    """
    if not any(stack.repeats for stack in stacks):
        return recording
    return _Repetition(recording, stacks).result()


def _moved(op: Op, position: int, layer: int) -> Op:
    """The operator elsewhere; dataclasses.replace takes three times as long, and there are hundreds of thousands."""
    return Op(op.name, op.flops, op.moved_bytes, op.kind, position, op.in_backward, layer)


class _Repetition:
    def __init__(self, recording: Recording, stacks: Sequence[Stack]) -> None:
        self._recording = recording
        self._stacks = stacks
        self._unit_of_layer = {OUTSIDE_LAYERS: None, **dict(_units(stacks))}
        self._unit_of_block: list[Unit] = [None] * len(recording.sizes)
        for event, layer in zip(recording.events, recording.layers, strict=True):
            if event > 0:
                self._unit_of_block[event] = self._unit_of_layer[layer]
        self._runs = self._find_runs()
        self._starts = [run.start for run in self._runs]
        self._place_gradients_and_ops()
        for index, run in enumerate(self._runs):
            if self._is_repeated(run.unit):
                self._order(index, run)
        self._twins = self._find_twins()

    # -- runs ----------------------------------------------------------------------------------------------------

    def _find_runs(self) -> list[_Run]:
        recording = self._recording
        starts = {index: name for name, index in recording.phases.items()}
        runs: list[_Run] = []
        phase = next(iter(recording.phases))
        for index, event in enumerate(recording.events):
            new_phase = index in starts
            phase = starts.get(index, phase)
            unit = self._unit_of_layer[recording.layers[index]]
            if unit is None and event < 0:  # freed outside, in the order of the layers that made them
                unit = self._unit_of_block[-event]
            if not runs or new_phase or runs[-1].unit != unit:
                runs.append(_Run(phase, unit, index, index, [], []))
            runs[-1].end = index + 1
        return runs

    def _place_gradients_and_ops(self) -> None:
        """Give each run the operators that ran and the gradients that were completed in it."""
        for op in self._recording.ops:
            run = self._run_at(op.position, self._unit_of_layer[op.layer])
            run.ops.append(_moved(op, op.position - run.start, op.layer))
        for index, block in self._recording.gradients:
            run = self._run_at(index, self._unit_of_block[block])
            run.gradients.append((index - run.start, block))

    def _run_at(self, position: int, unit: Unit) -> _Run:
        around = [run for run in self._near(position) if run.start <= position <= run.end]
        same = [run for run in around if run.unit == unit]
        if unit is not None and not same:
            raise NotRegularError(f"an event of unit {unit} stands outside its runs")
        return (same or around)[-1]

    def _near(self, position: int) -> list[_Run]:
        found = bisect_right(self._starts, position)
        return self._runs[max(0, found - 3) : found + 1]

    def _is_repeated(self, unit: Unit) -> bool:
        return unit is not None and unit[1] == _REPEATED and self._stacks[unit[0]].repeats

    def _order(self, index: int, run: _Run) -> None:
        """Whether the units of this run's sweep follow each other upwards or downwards, and the next unit's run."""
        assert run.unit is not None
        stack = run.unit[0]
        before = self._runs[index - 1] if index else None
        after = self._runs[index + 1] if index + 1 < len(self._runs) else None
        copies = self._stacks[stack].copies
        if after is not None and after.unit == (stack, _NEXT) and after.phase == run.phase:
            run.order, run.model = range(copies), after
        elif before is not None and before.unit == (stack, _NEXT) and before.phase == run.phase:
            run.order, run.model = range(copies - 1, -1, -1), before
        else:
            raise NotRegularError(f"unit {run.unit} is not beside the next one in phase {run.phase}")
        if run.end - run.start != run.model.end - run.model.start or len(run.ops) != len(run.model.ops):
            raise NotRegularError(f"units of stack {stack} differ in phase {run.phase}")

    def _find_twins(self) -> dict[int, int]:
        """Blocks of the next unit to the blocks at the same place of the repeated unit."""
        twins: dict[int, int] = {}
        for run in self._runs:
            if run.model is None:
                continue
            pairs = zip(self._events(run), self._events(run.model), strict=True)
            for event, other in pairs:
                if (event > 0) != (other > 0):
                    raise NotRegularError(f"units differ in phase {run.phase}")
                if event > 0:
                    if self._recording.sizes[event] != self._recording.sizes[other]:
                        raise NotRegularError(f"sizes of units differ in phase {run.phase}")
                    twins[other] = event
        return twins

    def _events(self, run: _Run) -> list[int]:
        return self._recording.events[run.start : run.end]

    # -- the deep recording --------------------------------------------------------------------------------------

    def result(self) -> Recording:
        """Lay the runs out, the repeated ones once for each copy."""
        recording = self._recording
        numbers: dict[Copy, int] = {}
        events: list[int] = []
        layers: list[int] = []
        gradients: list[tuple[int, int]] = []
        ops: list[Op] = []
        origin: list[int] = [0]
        phases: dict[str, int] = {}
        for run in self._runs:
            phases.setdefault(run.phase, len(events))
            for copy in run.order:
                base = len(events)
                deep = {layer: self._deep_layer(layer, copy) for layer in self._unit_of_layer}
                for offset, event in enumerate(self._events(run)):
                    target = self._target(run, copy, offset, event)
                    if event > 0:
                        numbers[target] = len(origin)
                        origin.append(event)
                    number = numbers.get(target)
                    if number is None:
                        raise NotRegularError("a block is freed before it is allocated")
                    events.append(number if event > 0 else -number)
                    layers.append(deep[recording.layers[run.start + offset]])
                gradients += [(base + i, numbers[block, copy]) for i, block in run.gradients]
                ops += [_moved(op, base + op.position, deep[op.layer]) for op in run.ops]
        return Recording(
            sizes=[recording.sizes[k] for k in origin],
            categories=[recording.categories[k] for k in origin],
            events=events,
            layers=layers,
            phases=self._starts_of_all(phases, len(events)),
            gradients=gradients,
            gates=self._gates(origin),
            ops=ops,
        )

    def _deep_layer(self, layer: int, copy: int) -> int:
        """The layer of the deep model, counted through all stacks, that a copy of a template layer's event is of."""
        unit = self._unit_of_layer[layer]
        if unit is None:
            return OUTSIDE_LAYERS
        stack, index = unit
        before = self._stacks[:stack]
        within = layer - sum(other.template_layers for other in before)
        first = sum(other.layers for other in before)
        if not self._stacks[stack].repeats:
            return first + within
        period = self._stacks[stack].period
        further = copy if index == _REPEATED else (self._stacks[stack].copies - 1) * (index > _REPEATED)
        return first + within + further * period

    def _starts_of_all(self, starts: dict[str, int], end: int) -> dict[str, int]:
        """Starts of all phases: one without events begins where the next one does."""
        found: dict[str, int] = {}
        for name in reversed(self._recording.phases):
            end = found[name] = starts.get(name, end)
        return dict(reversed(found.items()))

    def _gates(self, origin: list[int]) -> list[tuple[int, int, int]]:
        gates = {block: (count, threshold) for block, count, threshold in self._recording.gates}
        return [(number, *gates[block]) for number, block in enumerate(origin) if block in gates]

    def _target(self, run: _Run, copy: int, offset: int, event: int) -> Copy:
        """The block of a deep event: which template block, in which copy of its unit."""
        block = abs(event)
        unit, here = self._unit_of_block[block], run.unit
        if event > 0 or unit == here:
            return block, copy
        if self._is_repeated(here):
            return self._target_from_repeated(run, copy, offset, block)
        if not self._is_repeated(unit):
            return block, 0
        assert unit is not None
        if here is None or here[0] != unit[0] or abs(here[1] - _REPEATED) != 1:
            raise NotRegularError(f"{here} frees a block of the repeated unit")
        return block, 0 if here[1] < _REPEATED else self._stacks[unit[0]].copies - 1

    def _target_from_repeated(self, run: _Run, copy: int, offset: int, block: int) -> Copy:
        unit = self._unit_of_block[block]
        assert run.unit is not None and run.model is not None
        stack, copies = run.unit[0], self._stacks[run.unit[0]].copies
        if unit == (stack, _REPEATED - 1):
            if copy == 0:
                return block, 0
            neighbour = abs(self._recording.events[run.model.start + offset])
            if self._unit_of_block[neighbour] != run.unit:
                raise NotRegularError("a middle unit refers to something else than its neighbour does")
            return neighbour, copy - 1
        if unit == (stack, _NEXT):
            if copy == copies - 1:
                return block, 0
            if block not in self._twins:
                raise NotRegularError("the next unit's block has no twin")
            return self._twins[block], copy + 1
        raise NotRegularError(f"{run.unit} frees a block of {unit}")


def _units(stacks: Sequence[Stack]) -> Iterator[tuple[int, Unit]]:
    """Template layer to unit."""
    layer = 0
    for index, stack in enumerate(stacks):
        for position in range(stack.template_layers):
            yield layer, (index, position // stack.period if stack.repeats else position)
            layer += 1
