"""What a training run will send, read off the list of actions of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from collectives import Communicator
from parallel.accounts import PredictedCall, merged
from parallel.runtime import agreement
from parallel.runtime.state import State
from parallel.schedule import Action
from parallel.sharding import AllGather, AllReduce, CommHook, Gather

SCALAR_ALGORITHM = "recursive_doubling"  # the all-reduce of a few numbers


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
    """Return what `Trainer.start` sends, or `Trainer.resume`.

    `num_options`: how many options the ranks compare.
    """
    comm, sharding = state.mesh.comm, state.sharding
    axis = "" if comm is None else comm.name
    check = agreement.check_same_traffic(
        "start/check", state.mesh.size, len(state.model.units), num_options
    )
    check = [replace(call, axis=axis) for call in check]
    if is_resumed or sharding.broadcast_algorithm is None:
        return check
    one = PredictedCall(
        "start/broadcast", "broadcast", sharding.broadcast_algorithm, 0, state.dtype.itemsize,
        axis=axis,
    )  # fmt: skip
    return check + [replace(one, counts=n) for n in state.model.unit_sizes.values()]


def step_traffic(
    actions: Iterable[Action],
    calls_of: Callable[[Action], Iterable[PredictedCall]],
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
        found += [replace(call, num_calls=call.num_calls * times) for call in calls_of(action)]
        times = num_updates if action.kind == "UPDATE" else times
    return merged(found)


def calls_of(state: State, action: Action) -> Iterator[PredictedCall]:
    """Yield the calls that all ranks make in one action."""
    sharding, axes = state.sharding, action.axes
    phase = f"{action.phase}/{action.part}"
    if action.kind in SCALARS and axes:
        counts, itemsize = SCALARS[action.kind]
        yield state.predicted(
            action.phase, "all_reduce", counts or len(state.model.layers_with_parameters), axes,
            itemsize=itemsize, algorithm=SCALAR_ALGORITHM,
        )  # fmt: skip
    elif action.kind == "UNSHARD":
        label = f"{phase}/within" if axes == sharding.secondary_axes else phase
        yield from gather_of(state, axes).traffic(state, action.part, label, axes)
    elif action.kind in ("REDUCE", "AVERAGE") and axes == sharding.shard_axes:
        yield from sharding.reduction.traffic(state, action.part, phase, axes)
    elif action.kind == "REDUCE":
        counts_by_shard = state.counts(action.part, sharding.shard_axes)
        for group in state.mesh.ranks(axes):  # replicas of different parts, of different sizes
            n = counts_by_shard[state.mesh.index(sharding.shard_axes, group[0])]
            yield state.predicted(
                phase, "all_reduce", n, axes, groups=(group,), itemsize=state.reduce_dtype.itemsize
            )


SCALARS = {"UNUSED": (0, 1), "LOSS": (2, 8), "NORM": (1, 8)}  # elements (0: layers), itemsize


def with_checks(calls: list[PredictedCall], comm: Communicator) -> list[PredictedCall]:
    """Return the calls, and what checked mode sends before them."""
    return calls + merged(check for call in calls for check in call.check(comm.check, comm.size))
