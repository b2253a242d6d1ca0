"""Make schedules from other schedules, so that no algorithm is written twice.

Composition needs no function here: an algorithm that runs one after another uses
`yield from first(...)` and `yield from second(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import Any

from collectives.schedule import trees
from collectives.schedule.rounds import Block, Operation, Recv, RecvReduce, Round, Send

RankAlgorithm = Callable[..., Iterator[Round]]
Expand = Callable[[Any], Iterable[Block]]


def dual(rounds: Iterable[Round], rank: int, *, combine: bool) -> Iterator[Round]:
    """Yield the schedule of `rank` in reverse order and with every message turned round.

    A broadcast becomes a reduction, a scatter becomes a gather and a reduce-scatter an all-gather.
    An incoming operand stands on the side of its sender's rank, so that a tree whose subtrees are
    intervals of ranks combines in rank order.

    Parameters
    ----------
    rounds : iterable of Round
        The schedule.
    rank : int
    combine : bool
        Whether what is received is combined with what is held.

    Examples
    --------
    >>> from collectives.schedule import Send, dual
    >>> list(dual([(Send(1, [0]),)], rank=0, combine=True))
    [(Operation(kind='recv_reduce', peer=1, blocks=(0,), side='right', into=()),)]
    """
    for operations in reversed(list(rounds)):
        yield tuple(_reversed(op, rank, combine) for op in reversed(operations))


def _reversed(op: Operation, rank: int, combine: bool) -> Operation:
    assert op.peer is not None and not op.into, "what changes its name has no dual"
    if op.kind != "send":
        return Send(op.peer, op.blocks)
    if not combine:
        return Recv(op.peer, op.blocks)
    return RecvReduce(op.peer, op.blocks, side="left" if op.peer < rank else "right")


def one(block: Block) -> tuple[Block]:
    """Return only the block: it is relabelled as itself."""
    return (block,)


def relabelled(
    rounds: Iterable[Round], peer: Callable[[int], int], expand: Expand = one
) -> Iterator[Round]:
    """Return the same `rounds` among other ranks.

    Parameters
    ----------
    rounds : iterable of Round
    peer : function
        Returns the rank that stands for a rank of the rounds.
    expand : function
        Returns the blocks that stand for a block of the rounds; by default, the block itself.
    """

    def every(blocks: Iterable[Block]) -> tuple[Block, ...]:
        return tuple(chain.from_iterable(map(expand, blocks)))

    def rename(op: Operation) -> Operation:
        kind, number, blocks, side, into = op
        renamed = None if number is None else peer(number)
        return Operation(kind, renamed, every(blocks), side, every(into))

    return (tuple(map(rename, operations)) for operations in rounds)


def rooted(*, blocks_are_ranks: bool) -> Callable[[RankAlgorithm], RankAlgorithm]:
    """Return a decorator that makes an algorithm for root 0 one for any root.

    It rotates the ranks, and makes ``f(rank, size)`` a function ``f(rank, size, root)``.

    Parameters
    ----------
    blocks_are_ranks : bool
        Whether blocks are named by rank, as in a scatter.  Such blocks rotate too; the pieces of a
        vector keep their names.

    Examples
    --------
    >>> from collectives.schedule import Recv, Send, grid, rooted
    >>> @rooted(blocks_are_ranks=False)
    ... def to_the_next(rank, size):
    ...     yield {0: (Send(1, [0]),), 1: (Recv(0, [0]),)}.get(rank, ())
    >>> print(grid([list(to_the_next(rank, 3, root=2)) for rank in range(3)]))
    rank  round 0
    0     <2:0
    1     .
    2     >0:0
    """

    def decorate(function: RankAlgorithm) -> RankAlgorithm:
        @wraps(function)
        def at_root(rank: int, size: int, root: int, **options: Any) -> Iterator[Round]:
            def real(vrank: int) -> int:
                return (vrank + root) % size

            schedule = function((rank - root) % size, size, **options)
            return relabelled(schedule, real, (lambda b: (real(b),)) if blocks_are_ranks else one)

        return at_root

    return decorate


def nested(
    algorithm: RankAlgorithm, rank: int, members: Sequence[int], expand: Expand = one
) -> Iterator[Round]:
    """Return the rounds of an algorithm among some ranks.

    Parameters
    ----------
    algorithm : function
        Called with a rank and a size; yields the rounds.
    rank : int
        This rank.
    members : sequence of int
        ``members[i]`` is rank i of the algorithm.
    expand : function
        Returns the blocks for which a block of the algorithm stands; by default, the block itself.
    """
    rounds = algorithm(members.index(rank), len(members))
    return relabelled(rounds, members.__getitem__, expand)


def idle(rounds: Iterable[Round]) -> Iterator[Round]:
    """Return as many empty rounds, for a rank that takes no part in them."""
    return (() for _ in rounds)


def folded(
    core: RankAlgorithm,
    rank: int,
    size: int,
    core_size: int,
    blocks: Sequence[Block],
    *,
    blocks_are_ranks: bool = False,
) -> Iterator[Round]:
    """Yield the rounds of `rank` where `core`, which serves `core_size` ranks only, serves `size`.

    The ranks form groups of neighbours.  The first rank of a group combines the blocks of its
    group, in rank order, takes part in the core, and sends every member the result.

    Parameters
    ----------
    core : function
        Called with a rank and a size; yields the rounds.
    rank, size, core_size : int
    blocks : sequence
        What is combined.
    blocks_are_ranks : bool
        Whether a member gets only its own block; then block i of the core stands for all blocks of
        group i.  Otherwise it gets all blocks.
    """
    groups = trees.groups(size, core_size)
    leader, *members = next(group for group in groups if rank in group)
    if size > core_size:
        combines = tuple(RecvReduce(member, blocks, side="right") for member in members)
        yield combines if rank == leader else (Send(leader, blocks),)
    expand = groups.__getitem__ if blocks_are_ranks else one
    rounds = nested(core, leader, [group[0] for group in groups], expand)
    yield from rounds if rank == leader else idle(rounds)
    if size > core_size:
        results = {member: [member] if blocks_are_ranks else blocks for member in members}
        gives = tuple(Send(member, results[member]) for member in members)
        yield gives if rank == leader else (Recv(leader, results[rank]),)
