"""Reduce-scatter: rank r gets block r of the combination of all vectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from itertools import pairwise as pairwise_of

from collectives.algorithms.registry import BY_HOST, algorithm, costs_of
from collectives.algorithms.shards import along_fixed_tree
from collectives.schedule import (
    RecvReduce,
    Round,
    Send,
    Topology,
    among_hosts,
    folded,
    negabinary,
    trees,
    within_hosts,
)
from collectives.schedule import circulant as graph


@algorithm(
    rounds="p - 1",
    messages="p * (p - 1)",
    max_bytes_per_rank="f * n",
    total_bytes="(p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="2 * n / p",
    source="Patarasuk and Yuan 2009",
    use="Use it for large vectors on any number of ranks: no algorithm sends or combines "
    "fewer bytes, and every message goes to a neighbour.",
)
def ring(rank: int, size: int) -> Iterator[Round]:
    """Send every block once around the ring; each rank adds its contribution."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(1, size):
        yield Send(right, [(rank - k) % size]), RecvReduce(left, [(rank - k - 1) % size])


@algorithm(
    **costs_of(ring),
    reduction_bytes="f * n",
    scratch_bytes="n / p",
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for large vectors where all ranks reach each other equally well: "
    "contributions travel once, without being kept on the way.",
)
def pairwise(rank: int, size: int) -> Iterator[Round]:
    """Send every contribution directly to its owner, one rank further in every round."""
    for distance in range(1, size):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        yield Send(ahead, [ahead]), RecvReduce(behind, [rank])


@algorithm(
    rounds="1",
    startups="p - 1",
    messages="p * (p - 1)",
    max_bytes_per_rank="f * n",
    total_bytes="(p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="n",
    is_ordered=True,
    source="Chan et al. 2007",
    use="Use it on few ranks of one host, or for an operator that does not commute.",
)
def direct(rank: int, size: int) -> Iterator[Round]:
    """Send every contribution directly to its owner, all at once."""
    below, above = range(rank - 1, -1, -1), range(rank + 1, size)
    if size > 1:
        yield (
            *(RecvReduce(peer, [rank], side="left") for peer in below),
            *(RecvReduce(peer, [rank], side="right") for peer in above),
            *(Send(peer, [peer]) for peer in (*above, *range(rank))),
        )


_FOLDED_HALVING = {
    "rounds": "k + 2 * (p != P)",
    "messages": "P * k + 2 * (p - P)",
    "total_bytes": "(p - 1) * n + (p - P) * n / p",
    "scratch_bytes": "2 * n",
}


@algorithm(
    **_FOLDED_HALVING,
    max_bytes_per_rank="n * (p != P) + n / p * sum(2**i + min(2**i, p - P) for i in range(k))",
    critical_bytes="(n + n / p) * (p != P)"
    " + n / p * sum(2**i + min(2**i, p - P) for i in range(k))",
    reduction_bytes="n * (p != P) + n / p * sum(2**i + min(2**i, p - P) for i in range(k))",
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for vectors of small to middle size, best on a power of two of ranks.",
)
def recursive_halving(rank: int, size: int) -> Iterator[Round]:
    """Split the blocks of partners: each sends the half that the other keeps.

    Far partners come first, so that what is sent lies together.  When p is not a power of two, some
    pairs of ranks fold into one.
    """
    return _halving(rank, size, reversed(trees.powers(1 << trees.floor_log2(size))))


@algorithm(
    **_FOLDED_HALVING,
    max_bytes_per_rank="n * (p != P)"
    " + n / p * sum(2**i + ceil((p - P) * 2**i / P) for i in range(k))",
    critical_bytes="(n + n / p) * (p != P)"
    " + n / p * sum(2**i + ceil((p - P) * 2**i / P) for i in range(k))",
    reduction_bytes="n * (p != P) + n / p * sum(2**i + ceil((p - P) * 2**i / P) for i in range(k))",
    is_ordered=True,
    source="Traff 2005",
    use="Use it where the operator does not commute.",
)
def butterfly(rank: int, size: int) -> Iterator[Round]:
    """Halve recursively with near partners first, so that parts are combined in rank order.

    What is sent lies apart and is packed.
    """
    return _halving(rank, size, trees.powers(1 << trees.floor_log2(size)))


def _halving(rank: int, size: int, distances: Iterable[int]) -> Iterator[Round]:
    core = partial(_halving_core, distances=list(distances))
    core_size = 1 << trees.floor_log2(size)
    return folded(core, rank, size, core_size, range(size), blocks_are_ranks=True)


def _halving_core(rank: int, size: int, distances: list[int]) -> Iterator[Round]:
    """Yield a round for each bit of the blocks that a rank keeps.

    The round settles the bit: in the end the blocks are the rank's own one.
    """
    held = list(range(size))
    for distance in distances:
        partner = rank ^ distance
        theirs = [block for block in held if (block ^ rank) & distance]
        held = [block for block in held if not (block ^ rank) & distance]
        yield (
            Send(partner, theirs),
            RecvReduce(partner, held, "left" if partner < rank else "right"),
        )


@algorithm(
    rounds="q",
    messages="p * q",
    max_bytes_per_rank="f * n",
    total_bytes="(p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="5 * n / 4",
    source="Traff 2024b",
    use="Use it for vectors of small to middle size on any number of ranks: the fewest rounds "
    "and the fewest bytes.",
)
def circulant(rank: int, size: int) -> Iterator[Round]:
    """Halve, or almost halve, a rank's blocks in every round: the ranks ahead get the others."""
    distances = graph.skips(size)[::-1]
    for far, near in pairwise_of(distances):
        yield (
            Send((rank + near) % size, [(rank + i) % size for i in range(near, far)]),
            RecvReduce((rank - near) % size, [(rank + i) % size for i in range(far - near)]),
        )


@algorithm(
    **costs_of(circulant, ranks="even"),
    reduction_bytes="f * n",
    scratch_bytes="5 * n / 4",
    source="De Sensi et al. 2024",
    use="Use it on a network that is a torus: partners are near each other.",
)
def swing(rank: int, size: int) -> Iterator[Round]:
    """Exchange at distances 1, 1, 3, 5, 11, 21, ... on alternating sides: near on a torus.

    A block goes to the partner only if it cannot go there, or get nearer, in a later round.
    """
    num_rounds = trees.ceil_log2(size)
    for step in range(num_rounds):
        partner = negabinary.partner(rank, size, step)
        mine = _swing_reach(rank, size, step + 1, num_rounds)
        theirs = _swing_reach(partner, size, step + 1, num_rounds)
        yield (Send(partner, sorted(theirs - mine)), RecvReduce(partner, sorted(mine - theirs)))


def _swing_reach(rank: int, size: int, step: int, num_rounds: int) -> set[int]:
    """Return the ranks that what `rank` holds can reach from this step on."""
    reached = {rank}
    for later in range(step, num_rounds):
        reached |= {negabinary.partner(r, size, later) for r in reached}
    return reached


@algorithm(
    rounds="log(p - p % 2, 2) + 2 * (p % 2)",
    messages="(p - p % 2) * log(p - p % 2, 2) + 2 * (p % 2)",
    max_bytes_per_rank="f * n * (1 + p % 2)"
    " + n / p * (p % 2) * (log(p - 1, 2) - (3 * (p - 1) <= 4 * power(p - 2, 2)))",
    total_bytes="(p - 1) * n + n / p * (p % 2)",
    critical_bytes="f * n * (1 + p % 2) + n / p * (p % 2) * (1 + log(p - 1, 2))",
    reduction_bytes="f * n * (1 + p % 2)"
    " + n / p * (p % 2) * (log(p - 1, 2) - (3 * (p - 1) <= 4 * power(p - 2, 2)))",
    scratch_bytes="(5 + 2 * (p % 2)) * n / 4",
    source="De Sensi et al. 2025",
    use="Use it for vectors of small to middle size on an even number of ranks: the fewest rounds "
    "and bytes, and what is sent lies together. On a power of two of ranks, partners are about p/3 "
    "apart at most.",
)
def bine(rank: int, size: int) -> Iterator[Round]:
    """Keep the blocks of the ranks around this one; partners are at distances ..., 11, 5, 3, 1, 1.

    Swing has the opposite order: fewer bytes go far, but the blocks that are sent lie apart.  When
    p is odd, two ranks fold into one.
    """
    core_size = max(1, size - size % 2)
    return folded(_bine_core, rank, size, core_size, range(size), blocks_are_ranks=True)


def _bine_core(rank: int, size: int) -> Iterator[Round]:
    for step in reversed(range(trees.ceil_log2(size))):
        partner = negabinary.partner(rank, size, step)
        mine, theirs = negabinary.window(rank, step), negabinary.window(partner, step)
        yield (
            Send(partner, negabinary.without(theirs, mine, size)),
            RecvReduce(partner, negabinary.without(mine, theirs, size)),
        )


@algorithm(
    rounds="ceil(p / A) - 1 + log(ceil(p / ceil(p / A)), 2)",
    messages="p * (ceil(p / A) - 1 + log(ceil(p / ceil(p / A)), 2))",
    max_bytes_per_rank="f * n",
    total_bytes="(p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="n / p * ceil(p / ceil(p / A)) * ((log(ceil(p / A), 2) + 2) / 2 + 4 * (A > 1))",
    options={"aggregation": 8},
    source="Jeaugey 2025",
    use="Use it on many ranks where memory is short: scratch grows with `aggregation` and log2 p "
    "only. Let `aggregation` be as many blocks as make a long message: the more, the fewer rounds, "
    "down to q.",
)
def pat(rank: int, size: int, aggregation: int = 8) -> Iterator[Round]:
    """Reduce each block by a binomial tree; the trees advance in turn, some at a time.

    `aggregation` is the most blocks in a message.
    """
    for distance, ways in _pat_plan(size, aggregation):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        yield (
            Send(ahead, [(rank + way) % size for way in ways]),
            RecvReduce(behind, [(behind + way) % size for way in ways]),
        )


def _pat_plan(size: int, aggregation: int) -> Iterator[tuple[int, range]]:
    """Yield the distance of each round's messages, and how far from their owners the blocks are.

    First partial results go to the next multiple of `spacing`, along one edge of their tree at a
    time: from w they go as far as the lowest binary digit of w.  A rank needs few of them at once,
    because a subtree is finished before the next one begins.  Then the multiples are reduced.
    """
    spacing = -(-size // aggregation)
    for way in reversed(range(1, spacing)):
        yield way & -way, range(way, size, spacing)
    for power in trees.powers(-(-size // spacing)):
        yield power * spacing, range(power * spacing, size, 2 * power * spacing)


@algorithm(
    rounds="log(g, 2) + log(H, 2)",
    messages="p * (log(g, 2) + log(H, 2))",
    max_bytes_per_rank="f * n",
    total_bytes="(p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="3 * n / 2",
    options={"per_host": 2},
    for_even_hosts=BY_HOST,
    source="Cho et al. 2019",
    use="Use it on several hosts: hosts send each other the least possible.",
)
def hierarchical(rank: int, size: int, hosts: Topology) -> Iterator[Round]:
    """Reduce-scatter within every host, then among ranks with the same place on their hosts.

    A host sends each block of other hosts once: the least possible, n (H-1)/H bytes if H hosts have
    equally many ranks.
    """
    host, ranks = hosts.host_of[rank], list(chain(*hosts.hosts))
    parts = [[r for r in ranks if hosts.counterpart(r, host) == mate] for mate in hosts.mates(rank)]
    between = circulant(host, hosts.num_hosts)
    yield from within_hosts(circulant, rank, hosts, parts.__getitem__)
    yield from among_hosts(between, rank, hosts, hosts.hosts.__getitem__, hosts.counterpart)


# The messages and bytes of an exchange in which the ranks that own a part get it from all others.
EXCHANGED = {
    "part": "max((p - 1) * max(parts(p, L)), sum(parts(p, L)) - min(parts(p, L))) * n / p",
    "total": "(p - 1) * sum(parts(p, L)) * n / p",
    "combined": "n * max(within(p, L)) + (sum(parts(p, L)) - 1) * n / p",
    # Pairs of own shards, several subtrees packed in one message, and what arrives.
    "scratch": "n * ((max(within(p, L)) + 1) // 2 + max(parts(p, L)) * (max(parts(p, L)) > 1)"
    " + sum(parts(p, L)) / p)",
}


@algorithm(
    rounds="1 + (L > 0)",
    startups="p - 1",
    messages="p * (p - 1)",
    max_bytes_per_rank=EXCHANGED["part"],
    total_bytes=EXCHANGED["total"],
    reduction_bytes=EXCHANGED["combined"],
    scratch_bytes=EXCHANGED["scratch"],
    ranks="at most shards",
    options={"shards": 0},
    is_ordered=True,
    is_invariant=True,
    source="Stelz, Hubner and Stamatakis 2026",
    use="Use it where results must have the same bits on any number of ranks: pass `shards=`.",
)
def invariant(rank: int, size: int, shards: int = 0) -> Iterator[Round]:
    """Send every part directly to its owner, which combines it along the fixed tree."""
    return along_fixed_tree(rank, size, shards, range(size), lambda owner: [owner])
