"""Gather parameters before layers use them, and sum gradients when they are complete."""

from __future__ import annotations

import time
from collections.abc import Mapping

import collectives
from parallel.nn import Array
from parallel.run.arrays import RankArrays
from parallel.run.computing.overlap import Overlap
from parallel.sharding import Completion
from parallel.step import Average, Reduce, Reshard, Unshard, WaitForCalls


class Units:
    """The calls in progress that gather parameters and sum gradients, and the arrays they need.

    Parameters
    ----------
    arrays : RankArrays
        The arrays of the rank that has the units.
    masters : dict of str to array
        The part of each unit that this rank updates.
    overlap : Overlap
        Is told how long this rank waits for a gather, and whether calls may go on by themselves.

    Attributes
    ----------
    secondary : dict of str to array
        The parts of gathered units that this rank keeps for backward.
    reducing : list of str
        The units whose full gradients `wait` frees.
    """

    def __init__(self, arrays: RankArrays, masters: Mapping[str, Array], overlap: Overlap) -> None:
        self.arrays, self.masters, self.overlap = arrays, masters, overlap
        self.secondary: dict[str, Array] = {}
        self._gathers: dict[str, Completion] = {}  # of units that are not complete yet
        self._pending: list[tuple[str, Completion]] = []  # sums of buckets, and gathers of updates
        self.reducing: list[str] = []

    # Parameters

    def unshard(self, action: Unshard) -> None:
        """Start to gather a unit, into a new array or where ranks keep it."""
        arrays, view, unit = self.arrays, self.arrays.view, action.part
        is_secondary, is_into_buffer = action.is_secondary(view), action.is_into_buffer(view)
        if is_into_buffer:
            full = arrays.new_buffer("buffers", view.unit_sizes[unit])
            source = self.secondary[unit] if is_secondary else arrays.parameters[unit]
            full[view.part(unit, action.axes)] = source
            arrays.full_parameters[unit] = full
        full = arrays.full_parameters[unit]
        with collectives.phase(f"{unit}/within" if is_secondary else unit):
            done = self._started(action.hook(view).start(arrays, unit, full, action.axes))
        if is_into_buffer:
            self._gathers[unit] = done
        else:
            self._pending.append((unit, done))

    def complete(self, layer: str) -> None:
        """Wait for the parameters of a layer, and keep the secondary part of them."""
        arrays, view = self.arrays, self.arrays.view
        for unit in view.model.units_of(layer) if self._gathers else ():
            if unit in self._gathers:
                began = time.perf_counter()
                self._gathers.pop(unit)()
                self.overlap.add(time.perf_counter() - began)
                axes = view.sharding.secondary_axes
                if axes and unit not in self.secondary:
                    kept = arrays.full_parameters[unit][view.part(unit, axes)].copy()
                    self.secondary[unit] = arrays.memory.track("buffers", kept)

    def reshard(self, action: Reshard) -> None:
        """Free the gathered parameters of a unit."""
        del self.arrays.full_parameters[action.part]

    def average(self, action: Average) -> None:
        """Start to make the parameters of a unit equal on all ranks."""
        arrays, unit = self.arrays, action.part
        master, parameters = self.masters[unit], arrays.parameters[unit]
        with collectives.phase(unit):
            done = arrays.view.sharding.reduction.start(arrays, unit, master, action.axes)

        def finish() -> None:
            done()
            if master is not parameters:
                parameters[...] = master

        self._pending.append((unit, finish))

    # Gradients

    def open_gradients(self, layer: str) -> None:
        """Make the gradients of a layer's units, if they exist only while they are computed."""
        arrays, view = self.arrays, self.arrays.view
        for unit in view.model.units_of(layer):
            if unit not in arrays.full_gradients:
                full = arrays.new_buffer("buffers", view.unit_sizes[unit])
                arrays.full_gradients[unit] = full

    def reduce(self, action: Reduce) -> None:
        """Start to sum the gradients of a bucket, or the parts of them that replicas have."""
        arrays, view, bucket = self.arrays, self.arrays.view, action.part
        gradient = self._gradient_of(action)
        with collectives.phase(bucket):
            start = action.hook(view).start
            done = self._started(start(arrays, bucket, gradient, action.axes))
        self._pending.append((bucket, done))
        if action.is_of_sharding(view) and "gradients" in view.sharding_of(bucket).divided:
            self.reducing.append(bucket)

    def _gradient_of(self, action: Reduce) -> Array:
        arrays, bucket = self.arrays, action.part
        if not action.is_of_sharding(arrays.view):
            return arrays.gradient_shards[bucket]
        if "gradients" in arrays.view.sharding_of(bucket).divided:
            return arrays.full_gradients[bucket]
        return arrays.flats[bucket]

    # Both

    def wait(self, action: WaitForCalls | None = None) -> None:
        """Complete what was started, until no hook starts another call."""
        while self._pending:
            label, done = self._pending.pop(0)
            with collectives.phase(label):
                rest = done()
            if callable(rest):
                self._pending.append((label, rest))
        arrays = self.arrays
        while self.reducing:
            unit = self.reducing.pop()
            full = arrays.full_gradients.pop(unit)
            arrays.gradients[unit] += full[arrays.view.shard_slice(unit)]
            self.secondary.pop(unit, None)

    def _started(self, done: Completion) -> Completion:
        """Return `done`; in a step without overlap, complete the call first."""
        rest: object = done
        while self.overlap.is_reference and callable(rest):
            rest = rest()
        return done if callable(rest) else lambda: None
