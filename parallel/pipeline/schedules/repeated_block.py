"""Schedules made of a repeated block: the actions for one micro-batch, again for the next.

Qi et al. 2024 (Pipeline Parallelism with Controllable Memory).  A block says when each rank does F
and I of one micro-batch, if F, I and W take one unit of time each.  How long activations live in
the block decides how many are kept.  While the pipeline fills and drains, fewer are kept and ranks
are idle: there, actions may come earlier than in their block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from parallel.pipeline.actions import Action, BackwardInput, BackwardWeight, Forward, Result
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.simulation import most, simulate

Slots: TypeAlias = dict[int, Action]  # what a rank does in each unit of time


def reordered(blocks: list[Slots], most_kept: int) -> list[list[Action]]:
    """Return the lists of ranks that do F and I in the slots of `blocks`, and W in free slots.

    The actions before the first backward of rank 0, and after its last forward, move to the first
    slot in which they are possible and no rank keeps more than `most_kept`.  In between, ranks do
    what the blocks say.  First each W moves like an F or an I; then, after the last forward, W
    gives way to F and I.
    """
    first = blocks[0]
    fills = min(time for time, x in first.items() if x == BackwardInput(0, x.micro_batch))
    rows = [with_weights(row) for row in blocks]
    _advance(rows, lambda time: time < fills or time > last_forward(rows), kept_in, most_kept)
    rows = in_time([[row[time] for time in sorted(row)] for row in rows])
    drains = last_forward(rows)
    rows = [without_weights(row) for row in rows]
    _advance(rows, lambda time: time > drains, lambda row: kept_in(with_weights(row)), most_kept)
    rows = [with_weights(row) for row in rows]
    return [[row[time] for time in sorted(row)] for row in rows]


def last_forward(rows: list[Slots]) -> int:
    """Return when rank 0 does its last forward of stage 0."""
    return max(time for time, x in rows[0].items() if x == Forward(0, x.micro_batch))


def with_weights(row: Slots) -> Slots:
    """Return slots with a W of an earlier I in each free unit of time."""
    filled, time, end = dict(row), min(row), max(row)
    waiting: list[Action] = []
    while time <= end or waiting:
        if (action := row.get(time)) is None:
            if waiting:
                filled[time] = waiting.pop(0)
        elif isinstance(action, BackwardInput):
            waiting.append(BackwardWeight(action.stage, action.micro_batch))
        time += 1
    return filled


def without_weights(row: Slots) -> Slots:
    """Return slots without any W."""
    return {time: x for time, x in row.items() if not isinstance(x, BackwardWeight)}


def kept_in(row: Slots) -> int:
    """Return the most activations that a rank keeps at a time."""
    actions = (row[time] for time in sorted(row))
    return most(isinstance(x, Forward) - isinstance(x, BackwardWeight) for x in actions)


def in_time(lists: list[list[Action]]) -> list[Slots]:
    """Return the slots of lists whose actions begin as early as they can."""
    spans = simulate(Schedule.of("", lists)).spans
    return [{int(span.begin): span.action for span in row} for row in spans]


def _advance(
    rows: list[Slots],
    is_movable: Callable[[int], bool],
    peak: Callable[[Slots], int],
    most_kept: int,
) -> None:
    """Move actions of movable times to earlier free slots, one after the other, in `rows`."""
    times = {action: (time, rank) for rank, row in enumerate(rows) for time, action in row.items()}
    for action, (time, rank) in sorted(times.items(), key=lambda item: item[1]):
        if not is_movable(time):
            continue
        earliest = 1 + max((times[x][0] for x in _before(action, 2 * len(rows))), default=-1)
        others = {slot: x for slot, x in rows[rank].items() if x != action}
        for slot in range(earliest, time):
            if slot not in others and peak(others | {slot: action}) <= most_kept:
                rows[rank] = others | {slot: action}
                times[action] = slot, rank
                break


def _before(action: Action, num_stages: int) -> Iterable[Action]:
    """Yield what must come before an action, also the same action of the micro-batch before."""
    if action.micro_batch:
        yield replace(action, micro_batch=action.micro_batch - 1)
    yield from map(_made_by, action.needs(num_stages))


def _made_by(result: Result) -> Action:
    """Return the action that makes a result that others need; a block has no whole backward."""
    kind = Forward if result.kind == "F" else BackwardInput
    return kind(result.stage, result.micro_batch)
