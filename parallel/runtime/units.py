"""Gather parameters before layers use them, and sum gradients when they are complete."""

from __future__ import annotations

import time
from collections.abc import Mapping

import collectives
from parallel.actions import Action
from parallel.nn import Array
from parallel.runtime.overlap import Overlap
from parallel.runtime.prediction import gather_of, reduction_of
from parallel.runtime.state import State
from parallel.sharding import Completion


class Units:
    """The calls in progress that gather parameters and sum gradients, and the arrays they need.

    Parameters
    ----------
    state : State
        Of the rank that has the units.
    masters : dict of str to array
        What this rank updates of each unit.
    overlap : Overlap
        Is told how long this rank waits for a gather, and whether calls may go on by themselves.

    Attributes
    ----------
    secondary : dict of str to array
        The parts of gathered units that this rank keeps for backward.
    """

    def __init__(self, state: State, masters: Mapping[str, Array], overlap: Overlap) -> None:
        self.state, self.masters, self.overlap = state, masters, overlap
        self.secondary: dict[str, Array] = {}
        self._gathers: dict[str, Completion] = {}  # of units that are not complete yet
        self._pending: list[tuple[str, Completion]] = []  # sums of buckets, and gathers of updates
        self._reducing: list[str] = []  # units whose full gradients `wait` frees

    # Parameters

    def unshard(self, action: Action) -> None:
        """Start to gather the unit of an `action`, into a new array or where ranks keep it."""
        state, unit, axes = self.state, action.part, action.axes
        is_secondary = axes == state.sharding.secondary_axes
        if "parameters" in state.sharding.divided:
            full = state.new_buffer("buffers", state.unit_sizes[unit])
            source = self.secondary[unit] if is_secondary else state.parameters[unit]
            full[state.part(unit, axes)] = source
            state.full_parameters[unit] = full
        gather = gather_of(state, action)
        with collectives.phase(f"{unit}/within" if is_secondary else unit):
            done = self._started(gather.start(state, unit, state.full_parameters[unit], axes))
        if "parameters" in state.sharding.divided:
            self._gathers[unit] = done
        else:
            self._pending.append((unit, done))

    def complete(self, layer: str) -> None:
        """Wait for the parameters of a layer, and keep the secondary part of them."""
        state = self.state
        for unit in state.model.units_of(layer) if self._gathers else ():
            if unit in self._gathers:
                began = time.perf_counter()
                self._gathers.pop(unit)()
                self.overlap.add(time.perf_counter() - began)
                axes = state.sharding.secondary_axes
                if axes and unit not in self.secondary:
                    kept = state.full_parameters[unit][state.part(unit, axes)].copy()
                    self.secondary[unit] = state.memory.track("buffers", kept)

    def reshard(self, action: Action) -> None:
        """Free the gathered parameters of the unit of an `action`."""
        del self.state.full_parameters[action.part]

    def average(self, action: Action) -> None:
        """Start to make the parameters of the unit of an `action` equal on all ranks."""
        state, unit = self.state, action.part
        master, parameters = self.masters[unit], state.parameters[unit]
        with collectives.phase(unit):
            done = state.sharding.reduction.start(state, unit, master, action.axes)

        def finish() -> None:
            done()
            if master is not parameters:
                parameters[...] = master

        self._pending.append((unit, finish))

    # Gradients

    def open_gradients(self, layer: str) -> None:
        """Make the gradients of a layer's units, if they exist only while they are computed."""
        state = self.state
        for unit in state.model.units_of(layer):
            if unit not in state.full_gradients:
                state.full_gradients[unit] = state.new_buffer("buffers", state.unit_sizes[unit])

    def reduce(self, action: Action) -> None:
        """Start to sum the bucket of an `action`: whole gradients, or parts that replicas have."""
        state, bucket, axes = self.state, action.part, action.axes
        hook, gradient = reduction_of(state, action), self._gradient_of(bucket, axes)
        with collectives.phase(bucket):
            done = self._started(hook.start(state, bucket, gradient, axes))
        self._pending.append((bucket, done))
        sharding = state.sharding_of(bucket)
        if axes == sharding.shard_axes and "gradients" in sharding.divided:
            self._reducing.append(bucket)

    def _gradient_of(self, bucket: str, axes: tuple[str, ...]) -> Array:
        state, sharding = self.state, self.state.sharding_of(bucket)
        if axes != sharding.shard_axes:
            return state.gradient_shards[bucket]
        if "gradients" in sharding.divided:
            return state.full_gradients[bucket]
        return state.flats[bucket]

    # Both

    def wait(self) -> None:
        """Complete what was started, until no hook starts another call."""
        while self._pending:
            label, done = self._pending.pop(0)
            with collectives.phase(label):
                rest = done()
            if callable(rest):
                self._pending.append((label, rest))
        state = self.state
        while self._reducing:
            unit = self._reducing.pop()
            full = state.full_gradients.pop(unit)
            state.gradients[unit] += full[state.shard_slice(unit)]
            self.secondary.pop(unit, None)

    def _started(self, done: Completion) -> Completion:
        """Return `done`; in a step without overlap, complete the call first."""
        rest: object = done
        while self.overlap.is_reference and callable(rest):
            rest = rest()
        return done if callable(rest) else lambda: None
