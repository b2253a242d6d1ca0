"""Windows of ranks that grow by doubling: the common part of an exscan and a census."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.schedule import Block, Copy, CopyReduce, Operation, Recv, RecvReduce, Round, Send

# What a rank knows besides 0, its own vector, into which it combines the whole window.
OTHERS: Block = ("others", 0)  # the combination of the ranks behind, without this one
ARRIVED: Block = ("arrived", 0)


def windows(rank: int, size: int, plan: Sequence[bool], is_ring: bool) -> Iterator[Round]:
    """Every rank gets the combination of a growing window of ranks behind it.

    In each round a rank sends what it knows as far ahead as it knows ranks behind: of the others
    only, or (where the plan says so) with its own part, one further.  On a ring (a census) the
    result is the window and its own part, on a line (an exscan) the window alone.
    """
    reach = 0  # how many ranks the window has
    for number, is_whole in enumerate(plan):
        distance = reach + is_whole
        sent: Block = 0 if is_whole else OTHERS
        needs_whole = is_ring or any(plan[number + 1 :])
        needs_others = not is_ring or not all(plan[number + 1 :])
        ahead, behind, first = rank + distance, rank - distance, 0 if is_whole else 1
        operations: list[Operation] = []
        if is_ring or (ahead < size and rank >= first):
            operations.append(Send(ahead % size, [sent]))
        if is_ring or behind >= first:
            operations += _arrival(behind % size, sent, number == 0, needs_whole, needs_others)
        reach += distance
        if number == len(plan) - 1 and not is_ring and rank > 0:
            operations.append(Copy([OTHERS], [0]))
        yield tuple(operations)


def _arrival(
    peer: int, sent: Block, is_first: bool, needs_whole: bool, needs_others: bool
) -> list[Operation]:
    """Receive a window, and combine it with the values that need it."""
    if is_first:
        whole = [CopyReduce([OTHERS], [0])] * needs_whole
        return [Recv(peer, [sent], into=[OTHERS]), *whole]
    if not (needs_whole and needs_others):
        return [RecvReduce(peer, [sent], into=[0 if needs_whole else OTHERS])]
    both = [CopyReduce([ARRIVED], [OTHERS]), CopyReduce([ARRIVED], [0])]
    return [Recv(peer, [sent], into=[ARRIVED]), *both]
