"""What a training run will send, read off the list of actions of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, TypeVar

from collectives import Communicator
from parallel.accounts import PredictedCall, merged
from parallel.actions import Action
from parallel.mesh import Mesh
from parallel.nn import ArraySpec, Model
from parallel.placement import length, span
from parallel.runtime import agreement
from parallel.runtime.state import BatchSize, State
from parallel.sharding import AllGather, AllReduce, CommHook, Gather

S = TypeVar("S", bound=State)
SCALAR_ALGORITHM = "recursive_doubling"  # the all-reduce of a few numbers
# Elements (as a function of the model) and itemsize.
SCALARS: dict[str, tuple[Callable[[Model], int], int]] = {
    "UNUSED": (lambda model: len(model.layers_with_parameters), 1), "LOSS": (lambda _: 2, 8),
    "NORM": (lambda _: 1, 8), "COUNT": (attrgetter("num_counts"), 8),
}  # fmt: skip


class RunSize(NamedTuple):
    """What traffic is predicted for.  `batch_shape`: see `batch` in `Trainer.traffic`."""

    num_steps: int
    num_updates: int
    batch_shape: tuple[int, int] | None = None
    first: int = 0  # the number of the first step


def gather_of(state: State, action: Action) -> Gather:
    """Return what gathers the unit of an action: that of the sharding, or of secondary parts."""
    sharding = state.sharding_of(action.part)
    return sharding.gather if action.axes == sharding.shard_axes else AllGather()


def reduction_of(state: State, action: Action) -> CommHook:
    """Return what sums the bucket of an action: that of the sharding, or of replicas."""
    sharding = state.sharding_of(action.part)
    return sharding.reduction if action.axes == sharding.shard_axes else AllReduce()


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
        call for part in model_parts(state) for call in led_here(part, broadcasts(part))
    ]


def broadcasts(state: State) -> Iterator[PredictedCall]:
    """Yield the broadcasts of initial values of the units of one model part."""
    for unit, size in state.unit_sizes.items():
        sharding = state.sharding_of(unit)
        if sharding.axes:
            yield state.predicted(
                "start/broadcast", "broadcast", size, sharding.axes,
                algorithm=sharding.broadcast_algorithm,
            )  # fmt: skip


def times_of(
    actions: Iterable[Action], run: RunSize, every: int | None = None
) -> Iterator[tuple[Action, int]]:
    """Yield the actions of a step, and how often the steps of `run` do them.

    Actions after an update are done as often as updates are made; or, with `every`, once in so
    many steps, and at the end.
    """
    times = run.num_steps
    num_updates = run.num_updates if every is None else math.ceil(run.num_steps / every)
    for action in actions:
        yield action, times
        is_last = action.kind == "UPDATE" and action.micro_batch is None
        times = num_updates if is_last else times


def in_steps(
    state: State, action: Action, run: RunSize, times: int
) -> Iterator[tuple[BatchSize | None, int]]:
    """Yield the batches for which the calls of an action are predicted, and how often each occurs.

    An action of a layer that depends on the rows of its batch is predicted for each step; any other
    is done `times` times.
    """
    is_of_layer = action.kind in ("F", "B", "I", "W")
    needs_rows = is_of_layer and state.model.layers[action.part].needs_rows
    num_steps = run.num_steps if needs_rows else 1
    for step in range(run.first, run.first + num_steps):
        batch = None if run.batch_shape is None else BatchSize(*run.batch_shape, step)
        yield batch, 1 if needs_rows else times


def model_parts(state: S) -> list[S]:
    """Return the run as seen by one rank of each part of the model."""
    if not state.is_divided:
        return [state]
    first = {state.model_part(rank): rank for rank in reversed(range(state.mesh.size))}
    return [state.as_of(rank) for rank in sorted(first.values())]


def led_here(state: State, calls: Iterable[PredictedCall]) -> Iterator[PredictedCall]:
    """Yield the calls of those groups whose first rank has this part: each group is of one part."""
    mine = state.model_part(state.place)
    for call in calls:
        groups = tuple(g for g in call.groups or () if state.model_part(g[0]) == mine)
        if groups:
            yield replace(call, groups=groups)


def calls_of(
    state: State, action: Action, batch: BatchSize | None = None
) -> Iterator[PredictedCall]:
    """Yield the calls in one action of all groups that have a rank with this part of the model.

    `batch` is that of all ranks, needed if layers send messages.
    """
    if action.kind in ("F", "B", "I"):
        yield from layer_calls(state, action, batch)
    elif action.kind in ("SEND_F", "SEND_B"):
        yield from messages(state, action, batch)
    elif action.kind in SCALARS:
        if action.axes:
            num_elements, itemsize = SCALARS[action.kind]
            yield state.predicted(
                action.phase, "all_reduce", num_elements(state.model), action.axes,
                itemsize=itemsize, algorithm=SCALAR_ALGORITHM, in_place=True,
            )  # fmt: skip
    elif action.kind in ("UNSHARD", "REDUCE", "AVERAGE"):
        yield from unit_calls(state, action)


def unit_calls(state: State, action: Action) -> Iterator[PredictedCall]:
    """Yield the calls of an action that gathers a unit or sums a bucket, of one model part."""
    sharding, axes = state.sharding_of(action.part), action.axes
    phase = f"{action.phase}/{action.part}"
    if action.kind == "UNSHARD":
        label = f"{phase}/within" if axes == sharding.secondary_axes else phase
        yield from gather_of(state, action).traffic(state, action.part, label, axes)
    elif axes == sharding.shard_axes:
        yield from sharding.reduction.traffic(state, action.part, phase, axes)
    else:
        options = {"itemsize": state.reduce_dtype.itemsize, "in_place": True}
        for group in state.groups(axes):  # of different shards, of different sizes
            size = shard_size(state, action.part, group[0])
            yield state.predicted(phase, "all_reduce", size, axes, groups=(group,), **options)


def shard_size(state: State, unit: str, rank: int) -> int:
    """Return how many elements of a unit a `rank` with this part of the model updates."""
    sharding = state.sharding_of(unit)
    if "optimizer" not in sharding.divided:
        return state.unit_sizes[unit]
    axes = sharding.shard_axes
    return state.counts(unit, axes)[state.mesh.index(axes, rank)]


def layer_calls(state: State, action: Action, batch: BatchSize | None) -> Iterator[PredictedCall]:
    """Yield what a layer itself sends, in each group of ranks."""
    if state.model.mesh.size == 1:
        return
    for rank in ranks_here(state):
        tokens = tokens_of(state, action, batch, rank)
        traffic = state.layer_traffic_of(tokens)[action.part]
        calls = traffic.forward if action.kind == "F" else traffic.backward
        yield from in_groups(calls, state.mesh, rank, action.phase, action.part)


def in_groups(
    calls: Iterable[PredictedCall], mesh: Mesh, rank: int, *phases: str
) -> Iterator[PredictedCall]:
    """Yield the calls of a layer on a `rank` that groups of which it is the first rank make.

    Those with groups of their own are made by these.  Their phases are inside of `phases`.
    """
    for call in calls:
        along = call.axis.split(",")
        groups = call.groups or tuple(group for group in mesh.ranks(along) if group[0] == rank)
        if groups:
            phase = "/".join(filter(None, (*phases, call.phase)))
            yield replace(call, phase=phase, groups=groups)


def ranks_here(state: State) -> list[int]:
    """Return the ranks with the stages of this one."""
    place = state.pipe_place
    return [rank for rank in range(state.mesh.size) if state.pipe_place_of(rank) == place]


def tokens_of(state: State, action: Action, batch: BatchSize | None, rank: int) -> ArraySpec:
    """Return the tokens of the micro-batch of an action on a `rank`."""
    if batch is None:
        raise ValueError("layers of this model send messages: pass batch=(rows, context)")
    assert action.micro_batch is not None
    mesh, axes = state.mesh, state.sharding.row_axes
    mine = length(span(batch.rows, mesh.size_of(axes), mesh.index(axes, rank)))
    return state.tokens_of(mine, batch.context, action.micro_batch, rank, whole=batch)


def messages(state: State, action: Action, batch: BatchSize | None) -> Iterator[PredictedCall]:
    """Yield the messages of ranks with this part of the model to those of another stage."""
    message = state.stages.message(action)
    for group in state.mesh.ranks("pipe"):
        source = group[state.pipe_place]
        if state.model_part(source) == state.model_part(state.place):
            tokens = tokens_of(state, action, batch, source)
            size = state.inputs_of(tokens)[message.layer].size
            yield state.predicted(
                f"{action.phase}/{message.label}", "send", size, action.axes, algorithm="",
                groups=((source, group[message.peer]),),
            )  # fmt: skip


def with_checks(calls: list[PredictedCall], comm: Communicator) -> list[PredictedCall]:
    """Return the calls, and what checked mode sends before them."""
    return calls + merged(check for call in calls for check in call.check(comm.check, comm.size))
