"""Schedules that feed micro-batches from both ends of the pipeline.  DeepSeek-AI 2024.

A rank has two stages, one of each direction.  DualPipe has two copies of the model: rank r has
stage r for one half of the micro-batches and stage P - 1 - r for the other half.  DualPipe-V has
one copy in a V: rank r has the stages r and 2 P - 1 - r for all.  Both do the same, step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from parallel.actions import Action

Move = tuple[str, int]  # a kind, and the direction, 0 or 1


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
        ways = [(rank, 0), (other, half)]  # stage and first micro-batch of each direction
        lists.append(_actions(moves, ways if rank < other else ways[::-1]))
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


def _moves(place: int, middle: int, number: int) -> Iterator[tuple[Move, ...]]:
    """Yield what a rank does; two moves overlap.

    `place` is its distance from its end of the pipeline, of `middle` ranks up to the middle.
    Direction 0 enters at this end.  Each direction has `number` micro-batches.
    """
    ahead = middle - place - 1
    forward, backward, again = [("F", 0), ("F", 1)], [("B", 0), ("B", 1)], [("I", 0), ("I", 1)]
    weight = ("W", 0)  # of what has waited longest, in either direction
    yield from [(forward[0],)] * (2 * ahead)
    yield from [(forward[0],), (forward[1],)] * (place + 1)
    yield from [(again[1],), (weight,), (forward[1],)] * ahead
    for i in range(number - 2 * middle + place + 1):
        is_apart = i == 0 and ahead == 0  # in the middle: the one is the input of the other
        yield from [(forward[0],), (backward[1],)] if is_apart else [(forward[0], backward[1])]
        yield forward[1], backward[0]
    yield from [(backward[1],), (forward[1], backward[0])] * ahead
    for i in range(2 * (place + 1)):  # the second half of these leaves weights for later
        kinds = again if i > place else backward
        yield (kinds[1 - i % 2],)
    yield from [(weight,), (again[0],)] * ahead
    yield from [(weight,)] * (place + 1)


def _actions(moves: Iterator[tuple[Move, ...]], ways: list[tuple[int, int]]) -> list[Action]:
    """Return the actions of moves; `ways` are the stage and first micro-batch of each direction."""
    done = {(kind, direction): 0 for kind in "FB" for direction in (0, 1)}
    waiting: deque[Action] = deque()

    def action(kind: str, direction: int) -> Action:
        if kind == "W":
            return waiting.popleft()
        (stage, first), key = ways[direction], ("F" if kind == "F" else "B", direction)
        done[key] += 1
        made = Action(kind, stage, first + done[key] - 1)
        if kind == "I":
            waiting.append(made._replace(kind="W"))
        return made

    found = []
    for move in moves:
        parts = tuple(action(*each) for each in move)
        overlapped = Action("OVERLAP_F_B", parts[0].stage, None, parts=parts)
        found.append(overlapped if len(parts) > 1 else parts[0])
    return found
