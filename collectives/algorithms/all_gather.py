"""All-gather: every rank gets the blocks of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms import gather, reduce_scatter
from collectives.algorithms.registry import algorithm, costs_of
from collectives.schedule import Block, Piece, Recv, Round, Send, Topology, dual, trees
from collectives.schedule import circulant as graph


@algorithm(
    **costs_of(reduce_scatter.ring),
    scratch_bytes="0",
    source="Patarasuk and Yuan 2009",
    use="Use it for large blocks on any number of ranks: every message goes to a neighbour.",
)
def ring(rank: int, size: int) -> Iterator[Round]:
    """Send every block once around the ring."""
    return dual(reduce_scatter.ring(rank, size), rank, combine=False)


@algorithm(
    rounds="p // 2",
    startups="p - 1",
    messages="p * (p - 1)",
    max_bytes_per_rank="f * n",
    total_bytes="(p - 1) * n",
    scratch_bytes="0",
    source="Chan et al. 2007",
    use="Use it for large blocks where links carry messages both ways at full speed: half the "
    "rounds of the ring.",
)
def bidirectional_ring(rank: int, size: int) -> Iterator[Round]:
    """Send every block half-way around the ring in both directions."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size // 2):
        from_left = [Send(right, [(rank - k) % size]), Recv(left, [(rank - k - 1) % size])]
        from_right = [Send(left, [(rank + k) % size]), Recv(right, [(rank + k + 1) % size])]
        is_met = 2 * (k + 1) == size  # one block is left, which may come from either side
        yield (*from_left, *(() if is_met else from_right))


@algorithm(
    rounds="p // 2",
    messages="p * p // 2",
    max_bytes_per_rank="f * n",
    total_bytes="(p - 1) * n",
    scratch_bytes="0",
    ranks="even",
    source="Chen et al. 2005",
    use="Use it for blocks of middle size on an even number of ranks: half the rounds of the "
    "ring, with neighbours only.",
)
def neighbour_exchange(rank: int, size: int) -> Iterator[Round]:
    """Exchange blocks with neighbours on alternating sides.

    First partners exchange one block each, then the last two each.
    """
    ahead = 1 if rank % 2 == 0 else -1

    def pair(number: int, who: int = rank, ahead: int = ahead) -> list[Block]:
        """Return the two blocks that `who` gets in a round."""
        way = number // 2 if number % 2 == 0 else -(number + 1) // 2
        first = who - who % 2 + 2 * ahead * way
        return [first % size, (first + 1) % size]

    for number in range(size // 2):
        partner = (rank + (ahead if number % 2 == 0 else -ahead)) % size
        if number == 0:
            yield Send(partner, [rank]), Recv(partner, [partner])
        else:
            yield Send(partner, pair(number - 1)), Recv(partner, pair(number))


@algorithm(
    **costs_of(reduce_scatter.recursive_halving),
    scratch_bytes="0",
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for small to middle blocks on a power of two of ranks.",
)
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Exchange all blocks of two partners, so that every round doubles them.

    When p is not a power of two, some pairs of ranks act as one.
    """
    return dual(reduce_scatter.recursive_halving(rank, size), rank, combine=False)


@algorithm(
    rounds="log(p, r)",
    startups="children(p, r)",
    messages="p * children(p, r)",
    max_bytes_per_rank="f * n",
    total_bytes="(p - 1) * n",
    scratch_bytes="n",
    options={"radix": 2},
    source="Bruck et al. 1997",
    use="Use it for small blocks on any number of ranks; it moves blocks in memory at the end.",
)
def bruck(rank: int, size: int, radix: int = 2) -> Iterator[Round]:
    """Collect the blocks r, r+1, ... on rank r.

    Every round multiplies the number of blocks by the radix.
    """
    for held in trees.powers(size, radix):
        fetches = [
            (distance, range(min(held, size - distance)))
            for distance in range(held, min(radix * held, size), held)
        ]
        yield (
            *(Send((rank - d) % size, [(rank + i) % size for i in own]) for d, own in fetches),
            *(Recv((rank + d) % size, [(rank + d + i) % size for i in own]) for d, own in fetches),
        )


@algorithm(
    **costs_of(reduce_scatter.circulant),
    scratch_bytes="n",
    source="Loch and Koslovski 2021",
    use="Use it for small to middle blocks on any number of ranks: as few rounds as Bruck's, "
    "and blocks stay in place.",
)
def sparbit(rank: int, size: int) -> Iterator[Round]:
    """Exchange the fewest blocks first, with far partners; every block stays in its place."""
    for distance in reversed(trees.powers(size)):
        steps = range((-(-size // distance)) // 2)
        yield (
            Send((rank + distance) % size, [(rank - 2 * t * distance) % size for t in steps]),
            Recv((rank - distance) % size, [(rank - (2 * t + 1) * distance) % size for t in steps]),
        )


@algorithm(
    **costs_of(reduce_scatter.circulant),
    scratch_bytes="n / 2",
    source="Traff 2024b",
    use="Use it for small to middle blocks on any number of ranks: the fewest rounds and the "
    "fewest bytes.",
)
def circulant(rank: int, size: int) -> Iterator[Round]:
    """Double, or almost double, a rank's blocks in every round, with blocks of the ranks ahead."""
    return dual(reduce_scatter.circulant(rank, size), rank, combine=False)


@algorithm(
    **costs_of(reduce_scatter.swing),
    scratch_bytes="n",
    source="De Sensi et al. 2024",
    use="Use it on a network that is a torus: partners are near each other.",
)
def swing(rank: int, size: int) -> Iterator[Round]:
    """Exchange at distances ..., 21, 11, 5, 3, 1, 1 on alternating sides: near on a torus."""
    return dual(reduce_scatter.swing(rank, size), rank, combine=False)


@algorithm(
    **costs_of(reduce_scatter.bine),
    scratch_bytes="n / p * ceil(p / 2)",
    source="De Sensi et al. 2025",
    use="Use it for small to middle blocks on an even number of ranks: the fewest rounds and "
    "bytes, and what is sent lies together. On a power of two of ranks, partners are about p/3 "
    "apart at most.",
)
def bine(rank: int, size: int) -> Iterator[Round]:
    """Exchange all blocks that the partner does not have, at distances 1, 1, 3, 5, 11, ...

    Swing has the opposite order: fewer bytes go far, but the blocks that are sent lie apart.  When
    p is odd, two ranks act as one.
    """
    return dual(reduce_scatter.bine(rank, size), rank, combine=False)


@algorithm(
    **costs_of(reduce_scatter.pat),
    scratch_bytes="2 * n / p * ceil(p / ceil(p / A)) * (A > 1)",
    source="Jeaugey 2025",
    use="Use it on many ranks where memory is short: it needs scratch for twice `aggregation` "
    "blocks. Let `aggregation` be as many blocks as make a long message: the more, the fewer "
    "rounds, down to q.",
)
def pat(rank: int, size: int, aggregation: int = 8) -> Iterator[Round]:
    """Broadcast each block by a binomial tree; the trees advance in turn, some at a time.

    `aggregation` is the most blocks in a message.
    """
    return dual(reduce_scatter.pat(rank, size, aggregation), rank, combine=False)


@algorithm(
    **costs_of(reduce_scatter.direct),
    scratch_bytes="0",
    source="Chan et al. 2007",
    use="Use it for small blocks on few ranks of one host: all messages are in flight at once.",
)
def direct(rank: int, size: int) -> Iterator[Round]:
    """Send every block directly to all other ranks, all at once."""
    return dual(reduce_scatter.direct(rank, size), rank, combine=False)


@algorithm(
    rounds="2 * q",
    messages="2 * (p - 1)",
    max_bytes_per_rank="q * n",
    total_bytes="(p - 1) * n + n / p * hops(p, 2)",
    critical_bytes="(q + f) * n",
    scratch_bytes="0",
    source="Chan et al. 2007",
    use="Use it to compare with: it is a gather and a broadcast.",
)
def gather_broadcast(rank: int, size: int) -> Iterator[Round]:
    """Gather to rank 0, then broadcast from it, by binomial trees."""
    yield from gather.binomial(rank, size, 0)
    for edges in trees.knomial(rank, size, radix=2):
        yield tuple(trees.down(rank, edge, range(size)) for edge in edges)


@algorithm(
    rounds="N - 1 + q",
    messages="p * (N - 1 + q)",
    max_bytes_per_rank="f * n",
    total_bytes="(p - 1) * n",
    scratch_bytes="n",
    pieces="N",
    options={"segments": 4},
    source="Traff 2024a",
    use="Use it where blocks differ much in size: the largest one is cut into segments.",
)
def all_broadcast(rank: int, size: int, segments: int = 4) -> Iterator[Round]:
    """Broadcast the blocks of all ranks at once, cut into segments, by the circulant algorithm.

    All pieces that a rank sends to the same peer in a round are one message.
    """

    def name(root: int, piece: int) -> Block:
        return root if segments == 1 else Piece(root, piece)

    plans = [graph.transfers((rank - root) % size, size, segments) for root in range(size)]
    for number in range(len(plans[0][0])):
        moves = [
            [(root, sides[side][number]) for root, sides in enumerate(plans)] for side in (0, 1)
        ]
        come, go = ([(root, t) for root, t in some if t is not None] for some in moves)
        distance = (come or go)[0][1].distance
        yield (
            Recv((rank - distance) % size, [name(root, t.piece) for root, t in come]),
            Send((rank + distance) % size, [name(root, t.piece) for root, t in go]),
        )


@algorithm(
    **costs_of(reduce_scatter.hierarchical),
    scratch_bytes="n",
    source="Traff and Hunold 2020",
    use="Use it on several hosts: hosts receive from each other the least possible.",
)
def hierarchical(rank: int, size: int, hosts: Topology) -> Iterator[Round]:
    """All-gather among ranks with the same place on their hosts, then within every host.

    A host receives each block of other hosts once: the least possible, n (H-1)/H bytes if H hosts
    have equally many ranks.
    """
    return dual(reduce_scatter.hierarchical(rank, size, hosts), rank, combine=False)
