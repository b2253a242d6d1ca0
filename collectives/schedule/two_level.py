"""Run algorithms on two levels: within every host at once, and among the hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from collectives.schedule.rounds import Block, Operation, Round
from collectives.schedule.topology import Topology
from collectives.schedule.transform import Expand, RankAlgorithm, nested, one

Holder = Callable[[Any, int], int]


def within_hosts(
    algorithm: RankAlgorithm, rank: int, topology: Topology, expand: Expand = one
) -> Iterator[Round]:
    """Yield the rounds of an algorithm that runs on every host, among the ranks of that host.

    Smaller hosts have idle rounds at the end, so that all hosts have equally many.

    Parameters
    ----------
    algorithm : function
        Called with the place of a rank on its host and the number of ranks there; yields the
        rounds.
    rank : int
        This rank.
    topology : Topology
        The hosts of all ranks.
    expand : function
        Returns the blocks for which a block of the algorithm stands, on this host; an operation on
        no block is left out.
    """
    mates, most = topology.mates(rank), topology.max_per_host
    rounds = list(nested(algorithm, rank, mates, expand))
    num_rounds = len(rounds) if len(mates) == most else len(list(algorithm(0, most)))
    yield from (tuple(op for op in operations if op.blocks) for operations in rounds)
    yield from ((),) * (num_rounds - len(rounds))


def among_hosts(
    rounds: Iterable[Round], rank: int, topology: Topology, expand: Expand, holder: Holder
) -> Iterator[Round]:
    """Return the rounds of an algorithm that runs among hosts, whose ranks divide its blocks.

    All blocks for the same rank are one message.

    Parameters
    ----------
    rounds : iterable of Round
        The rounds of this rank's host, in which hosts are the ranks.
    rank : int
        This rank.
    topology : Topology
        The hosts of all ranks.
    expand : function
        Returns the blocks for which a block of the algorithm stands.
    holder : function
        Called with such a block and a host; returns the rank of the host that sends and receives
        it.
    """
    host = topology.host_of[rank]

    def divided(op: Operation) -> Iterator[Operation]:
        assert op.peer is not None, "hosts exchange messages"
        with_peer: dict[int, list[Block]] = {}
        for block in chain.from_iterable(map(expand, op.blocks)):
            if holder(block, host) == rank:
                with_peer.setdefault(holder(block, op.peer), []).append(block)
        return (op._replace(peer=peer, blocks=tuple(names)) for peer, names in with_peer.items())

    return (tuple(part for op in operations for part in divided(op)) for operations in rounds)
