"""What a training run will send, read off the list of actions of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from collectives import Communicator
from parallel.accounts import PredictedCall, merged
from parallel.actions import Action
from parallel.nn import ArraySpec
from parallel.placement import length, span
from parallel.runtime import agreement
from parallel.runtime.state import State
from parallel.sharding import AllGather, AllReduce, CommHook, Gather

SCALAR_ALGORITHM = "recursive_doubling"  # the all-reduce of a few numbers
SCALARS = {"UNUSED": (0, 1), "LOSS": (2, 8), "NORM": (1, 8)}  # elements (0: layers), itemsize


class RunSize(NamedTuple):
    """What traffic is predicted for.  `batch_shape`: see `batch` in `Trainer.traffic`."""

    num_steps: int
    num_updates: int
    batch_shape: tuple[int, int] | None = None


def gather_of(state: State, axes: tuple[str, ...]) -> Gather:
    """Return what gathers parameters along `axes`: that of the sharding, or of secondary parts."""
    return state.sharding.gather if axes == state.sharding.shard_axes else AllGather()


def reduction_of(state: State, axes: tuple[str, ...]) -> CommHook:
    """Return what sums gradients along `axes`: that of the sharding, or of replicas."""
    return state.sharding.reduction if axes == state.sharding.shard_axes else AllReduce()


def start_traffic(
    state: State, num_options: int, *, is_resumed: bool = False
) -> list[PredictedCall]:
    """Return what `Trainer.start` sends, or `Trainer.resume`; ranks compare so many options."""
    comm, sharding = state.mesh.comm, state.sharding
    axis = "" if comm is None else comm.name
    check = agreement.check_same_traffic(
        "start/check", state.mesh.size, len(state.model.units), num_options
    )
    check = [replace(call, axis=axis) for call in check]
    if is_resumed or sharding.broadcast_algorithm is None:
        return check
    return check + [
        each.predicted("start/broadcast", "broadcast", n, sharding.axes, algorithm=algorithm)
        for each in model_parts(state)
        for n in each.unit_sizes.values()
        for algorithm in [sharding.broadcast_algorithm]
    ]


def step_traffic(
    actions: Iterable[Action],
    calls_of: Callable[[Action, tuple[int, int] | None], Iterable[PredictedCall]],
    run: RunSize,
    every: int | None = None,
) -> list[PredictedCall]:
    """Return what the steps of `run` send: the calls of every action.

    Actions after an update are done as often as updates are made; or, with `every`, once in so
    many steps, and at the end.
    """
    found, times = [], run.num_steps
    num_updates = run.num_updates if every is None else math.ceil(run.num_steps / every)
    for action in actions:
        calls = calls_of(action, run.batch_shape)
        found += [replace(call, num_calls=call.num_calls * times) for call in calls]
        times = num_updates if action.kind == "UPDATE" else times
    return merged(found)


def model_parts(state: State) -> Iterator[State]:
    """Yield the run as seen by one rank of each part of the model."""
    if not state.model.split_axes:
        yield state
        return
    first = {state.model_part(rank): rank for rank in reversed(range(state.mesh.size))}
    yield from map(state.as_of, first.values())


def calls_of(
    state: State, action: Action, batch: tuple[int, int] | None = None
) -> Iterator[PredictedCall]:
    """Yield the calls that all ranks make in one action; `batch` is as in `Trainer.traffic`."""
    if action.kind in ("F", "B"):
        yield from layer_calls(state, action, batch)
    elif action.kind in SCALARS:
        if action.axes:
            counts, itemsize = SCALARS[action.kind]
            yield state.predicted(
                action.phase, "all_reduce", counts or len(state.model.layers_with_parameters),
                action.axes, itemsize=itemsize, algorithm=SCALAR_ALGORITHM, in_place=True,
                groups=tuple(state.mesh.ranks(action.axes)),
            )  # fmt: skip
    else:
        for each in model_parts(state):
            yield from unit_calls(each, action)


def unit_calls(state: State, action: Action) -> Iterator[PredictedCall]:
    """Yield the calls of an action that gathers a unit or sums a bucket, of one model part."""
    sharding, axes = state.sharding, action.axes
    phase = f"{action.phase}/{action.part}"
    if action.kind == "UNSHARD":
        label = f"{phase}/within" if axes == sharding.secondary_axes else phase
        yield from gather_of(state, axes).traffic(state, action.part, label, axes)
    elif action.kind in ("REDUCE", "AVERAGE") and axes == sharding.shard_axes:
        yield from sharding.reduction.traffic(state, action.part, phase, axes)
    elif action.kind == "REDUCE":
        counts_by_shard = state.counts(action.part, sharding.shard_axes)
        options = {"itemsize": state.reduce_dtype.itemsize, "in_place": True}
        for group in state.groups(axes):  # replicas of different parts, of different sizes
            n = counts_by_shard[state.mesh.index(sharding.shard_axes, group[0])]
            yield state.predicted(phase, "all_reduce", n, axes, groups=(group,), **options)


def layer_calls(
    state: State, action: Action, batch: tuple[int, int] | None
) -> Iterator[PredictedCall]:
    """Yield what a layer itself sends, for each part of the batch."""
    if state.model.mesh.size == 1:
        return
    if batch is None:
        raise ValueError("layers of this model send messages: pass batch=(rows, context)")
    assert action.micro_batch is not None
    mesh, axes, num_micro_batches = state.mesh, state.sharding.axes, state.recipe.num_micro_batches
    for index in range(mesh.size_of(axes)):
        mine = length(span(batch[0], mesh.size_of(axes), index))
        rows = length(span(mine, num_micro_batches, action.micro_batch))
        tokens = ArraySpec.tokens(rows, batch[1], state.dtype.itemsize)
        traffic = state.model.traffic(tokens)[action.part]
        for call in traffic.forward if action.kind == "F" else traffic.backward:
            along = mesh.ranks(call.axis.split(","))
            groups = tuple(g for g in along if mesh.index(axes, g[0]) == index)
            if groups:
                yield replace(call, phase=f"{action.phase}/{action.part}", groups=groups)


def with_checks(calls: list[PredictedCall], comm: Communicator) -> list[PredictedCall]:
    """Return the calls, and what checked mode sends before them."""
    return calls + merged(check for call in calls for check in call.check(comm.check, comm.size))
