"""Runs algorithms on two levels: within every host at once, and among the hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from collectives.schedule.rounds import Block, Operation, Round
from collectives.schedule.topology import Topology
from collectives.schedule.transform import Expand, RankAlgorithm, nested, one

Holder = Callable[[Any, int], int]


def within_hosts(
    algorithm: RankAlgorithm, rank: int, topology: Topology, expand: Expand = one
) -> Iterator[Round]:
    """Return the rounds of `algorithm(rank, size)` among the ranks of this rank's host.

    What it calls a block stands for all of `expand(block)`; an operation on no block is left out.
    Smaller hosts have idle rounds at the end, so that all hosts have equally many.
    """
    mates, most = topology.mates(rank), topology.max_per_host
    rounds = list(nested(algorithm, rank, mates, expand))
    num_rounds = len(rounds) if len(mates) == most else len(list(algorithm(0, most)))
    yield from (tuple(op for op in operations if op.blocks) for operations in rounds)
    yield from ((),) * (num_rounds - len(rounds))


def among_hosts(
    rounds: Iterable[Round], rank: int, topology: Topology, expand: Expand, holder: Holder
) -> Iterator[Round]:
    """Return the rounds of `rank` if its host has these `rounds`, in which hosts are the ranks.

    What they call a block stands for all of `expand(block)`.  These are divided among the ranks of
    a host: `holder(block, host)` is the one that sends and receives the block.  All blocks for the
    same rank are one message.
    """
    host = topology.host_of[rank]

    def divided(op: Operation) -> Iterator[Operation]:
        assert op.peer is not None, "hosts exchange messages"
        with_peer: dict[int, list[Block]] = {}
        for block in (name for each in op.blocks for name in expand(each)):
            if holder(block, host) == rank:
                with_peer.setdefault(holder(block, op.peer), []).append(block)
        return (op._replace(peer=peer, blocks=tuple(names)) for peer, names in with_peer.items())

    return (tuple(part for op in operations for part in divided(op)) for operations in rounds)
