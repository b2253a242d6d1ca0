"""Schedules made from schedules, so that no algorithm is written twice.

Composition needs no function of its own: an algorithm that runs one after another says
`yield from first(...)` and `yield from second(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from collectives.schedule import Block, Operation, Recv, RecvReduce, Round, Send

RankAlgorithm = Callable[..., Iterator[Round]]


def dual(rounds: Iterable[Round], rank: int, *, combine: bool) -> Iterator[Round]:
    """The schedule of `rank` run backwards in time, with every message turned round.

    A broadcast becomes a reduction (`combine=True`), a scatter becomes a gather and a
    reduce-scatter an all-gather (`combine=False`).  An incoming operand stands on the side of its
    sender's rank, so that a tree whose subtrees are intervals of ranks combines in rank order.
    """
    for operations in reversed(list(rounds)):
        yield tuple(_reversed(op, rank, combine) for op in reversed(operations))


def _reversed(op: Operation, rank: int, combine: bool) -> Operation:
    assert op.peer is not None, "a copy has no dual"
    if op.kind != "send":
        return Send(op.peer, op.blocks)
    if not combine:
        return Recv(op.peer, op.blocks)
    return RecvReduce(op.peer, op.blocks, side="left" if op.peer < rank else "right")


def relabelled(
    rounds: Iterable[Round],
    peer: Callable[[int], int],
    block: Callable[[Block], Block] = lambda b: b,
) -> Iterator[Round]:
    """The same schedule with other names for ranks and blocks."""

    def rename(op: Operation) -> Operation:
        return op._replace(
            peer=None if op.peer is None else peer(op.peer),
            blocks=tuple(map(block, op.blocks)),
            into=tuple(map(block, op.into)),
        )

    return (tuple(map(rename, operations)) for operations in rounds)


def rooted(*, blocks_are_ranks: bool) -> Callable[[RankAlgorithm], RankAlgorithm]:
    """Make `f(rank, size)`, written for root 0, into `f(rank, size, root)` by rotating the ranks.

    Where blocks are named by rank (scatter) they rotate too; pieces of a vector keep their names.
    """

    def decorate(function: RankAlgorithm) -> RankAlgorithm:
        @wraps(function)
        def at_root(rank: int, size: int, root: int, **options: Any) -> Iterator[Round]:
            def real(vrank: Any) -> int:
                return int(vrank + root) % size

            schedule = function((rank - root) % size, size, **options)
            if blocks_are_ranks:
                return relabelled(schedule, real, real)
            return relabelled(schedule, real)

        return at_root

    return decorate
