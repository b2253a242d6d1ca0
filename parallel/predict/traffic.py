"""What a training run will send, read off the actions of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from collectives import Communicator
from parallel.accounts import PredictedCall, merged
from parallel.layout import BatchSize, Layout, RankView, views_of_parts
from parallel.step import Action, Update, led_by, lower


class RunSize(NamedTuple):
    """The size of a run whose traffic is predicted.

    Attributes
    ----------
    num_steps, num_updates : int
    batch_shape : (rows, context), optional
        The shape of the targets of all ranks.
    first : int
        The number of the first step.
    """

    num_steps: int
    num_updates: int
    batch_shape: tuple[int, int] | None = None
    first: int = 0


def step_traffic(layout: Layout, run: RunSize) -> list[PredictedCall]:
    """Return what the steps of a run send."""
    return merged(
        replace(call, num_calls=call.num_calls * num_calls)
        for view in views_of_parts(layout)
        for action, times in times_of(lower(view), run, layout.sharding.every)
        for batch, num_calls in batches_of(action, layout, run, times)
        for call in action.led(view, batch)
    )


def times_of(
    actions: Iterable[Action], run: RunSize, every: int | None = None
) -> Iterator[tuple[Action, int]]:
    """Yield the actions of a step, and how often the steps of `run` do them.

    Actions after an update are done as often as updates are made; or once in `every` steps
    and at the end.
    """
    times = run.num_steps
    num_updates = run.num_updates if every is None else math.ceil(run.num_steps / every)
    for action in actions:
        yield action, times
        if isinstance(action, Update) and action.micro_batch is None:
            times = num_updates


def batches_of(
    action: Action, layout: Layout, run: RunSize, times: int
) -> Iterator[tuple[BatchSize | None, int]]:
    """Yield the batches for which the calls of an action are predicted, and how often each occurs.

    An action that depends on the rows of its batch is predicted for each step; any other one is
    done `times` times.
    """
    depends = action.depends_on_rows(layout.model)
    for step in range(run.first, run.first + (run.num_steps if depends else 1)):
        batch = None if run.batch_shape is None else BatchSize(*run.batch_shape, step)
        yield batch, 1 if depends else times


def start_traffic(
    layout: Layout, check: Iterable[PredictedCall], *, is_resumed: bool = False
) -> list[PredictedCall]:
    """Return what a run sends before its first step: the `check` that ranks agree, and values."""
    calls = list(check)
    if is_resumed or layout.sharding.broadcast_algorithm is None:
        return calls
    return calls + [
        call for view in views_of_parts(layout) for call in led_by(view, broadcasts(view))
    ]


def broadcasts(view: RankView) -> Iterator[PredictedCall]:
    """Yield the broadcasts of the initial values of the units of one model part."""
    algorithm = view.sharding.broadcast_algorithm
    for unit, size in view.unit_sizes.items():
        if axes := view.sharding_of(unit).axes:
            yield view.predicted("start/broadcast", "broadcast", size, axes, algorithm=algorithm)


def with_checks(calls: list[PredictedCall], comm: Communicator) -> list[PredictedCall]:
    """Return the calls, and what checked mode sends before them."""
    return calls + merged(check for call in calls for check in call.check(comm.check, comm.size))
