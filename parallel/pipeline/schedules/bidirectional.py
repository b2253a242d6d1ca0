"""Schedules that feed micro-batches from both ends of the pipeline.  DeepSeek-AI 2024.

A rank has two stages, one of each direction.  DualPipe has two copies of the model: rank r has
stage r for one half of the micro-batches and stage P - 1 - r for the other half.  DualPipe-V has
one copy in a V: rank r has the stages r and 2 P - 1 - r for all.  Both do the same, step by step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import TypeAlias

from parallel.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Computation,
    Forward,
    Overlap,
)

Move: TypeAlias = tuple[type[Computation], int]
"""A kind of computation, and the direction: 0 or 1."""


def dualpipe(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of DualPipe.

    Raises ValueError unless there are an even number of ranks, and an even number of micro-batches,
    at least twice as many as ranks.
    """
    if num_ranks % 2:
        raise ValueError(f"dualpipe needs an even number of ranks, not {num_ranks}")
    if num_micro_batches % 2 or num_micro_batches < 2 * num_ranks:
        raise ValueError(
            f"dualpipe on {num_ranks} ranks needs an even number of micro-batches, at least"
            f" {2 * num_ranks}, not {num_micro_batches}"
        )
    half, lists = num_micro_batches // 2, []
    for rank in range(num_ranks):
        other = num_ranks - 1 - rank
        moves = _moves(min(rank, other), num_ranks // 2, half)
        ends = [(rank, 0), (other, half)]  # stage and first micro-batch of each direction
        lists.append(_actions(moves, ends if rank < other else ends[::-1]))
    return lists


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of DualPipe-V.

    Raises ValueError unless there are at least twice as many micro-batches as ranks.
    """
    if num_micro_batches < 2 * num_ranks:
        raise ValueError(
            f"dualpipe-v on {num_ranks} ranks needs at least {2 * num_ranks} micro-batches, not"
            f" {num_micro_batches}"
        )
    return [
        _actions(
            _moves(rank, num_ranks, num_micro_batches), [(rank, 0), (2 * num_ranks - 1 - rank, 0)]
        )
        for rank in range(num_ranks)
    ]


def _moves(distance: int, middle: int, number: int) -> Iterator[tuple[Move, ...]]:
    """Yield what a rank does; two moves overlap.

    `distance` is the rank's distance from its end of the pipeline, which has `middle` ranks up to
    the middle.  Direction 0 enters at this end.  Each direction has `number` micro-batches.
    """
    ahead = middle - distance - 1
    forward, backward, first_half = (
        [(kind, 0), (kind, 1)] for kind in (Forward, Backward, BackwardInput)
    )
    weight = BackwardWeight, 0  # of what has waited longest, in either direction
    yield from [(forward[0],)] * (2 * ahead)
    yield from [(forward[0],), (forward[1],)] * (distance + 1)
    yield from [(first_half[1],), (weight,), (forward[1],)] * ahead
    for i in range(number - 2 * middle + distance + 1):
        is_apart = i == 0 and ahead == 0  # in the middle: the one is the input of the other
        yield from [(forward[0],), (backward[1],)] if is_apart else [(forward[0], backward[1])]
        yield forward[1], backward[0]
    yield from [(backward[1],), (forward[1], backward[0])] * ahead
    for i in range(2 * (distance + 1)):  # the second half of these leaves weights for later
        kinds = first_half if i > distance else backward
        yield (kinds[1 - i % 2],)
    yield from [(weight,), (first_half[0],)] * ahead
    yield from [(weight,)] * (distance + 1)


def _actions(moves: Iterator[tuple[Move, ...]], ends: list[tuple[int, int]]) -> list[Action]:
    """Return the actions of moves; `ends` are the stage and first micro-batch of each direction."""
    done: Counter[tuple[str, int]] = Counter()
    waiting: deque[Computation] = deque()

    def computation(kind: type[Computation], direction: int) -> Computation:
        if kind is BackwardWeight:
            return waiting.popleft()
        stage, first = ends[direction]
        number = first + done[kind.makes, direction]
        done[kind.makes, direction] += 1
        if kind is BackwardInput:
            waiting.append(BackwardWeight(stage, number))
        return kind(stage, number)

    actions: list[Action] = []
    for move in moves:
        match [computation(*part) for part in move]:
            case [Forward() as forward, Backward() as backward]:
                actions.append(Overlap.of(forward, backward))
            case [single]:
                actions.append(single)
    return actions
