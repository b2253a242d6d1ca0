"""All-reduce: every rank gets the combination of the vectors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from collectives.algorithms import all_gather, broadcast, reduce, reduce_scatter
from collectives.algorithms.registry import BY_HOST, algorithm, costs_of
from collectives.algorithms.shards import along_fixed_tree
from collectives.algorithms.windows import windows
from collectives.schedule import (
    Block,
    Copy,
    CopyReduce,
    Operation,
    RecvReduce,
    Round,
    Send,
    Topology,
    among_hosts,
    dual,
    folded,
    negabinary,
    nested,
    relabelled,
    trees,
    within_hosts,
)


@algorithm(
    rounds="2 * (p - 1)",
    messages="2 * p * (p - 1)",
    max_bytes_per_rank="2 * f * n",
    total_bytes="2 * (p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="0",
    pieces="p",
    source="Patarasuk and Yuan 2009",
    use="Use it for large vectors on any number of ranks: no algorithm sends or combines "
    "fewer bytes, and every message goes to a neighbour.",
)
def ring(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter around a ring, then all-gather around it; no algorithm sends fewer bytes."""
    yield from reduce_scatter.ring(rank, size)
    yield from all_gather.ring(rank, size)


@algorithm(
    rounds="(p - 1) * (N + 1)",
    messages="p * (p - 1) * (N + 1)",
    max_bytes_per_rank="2 * f * n",
    total_bytes="2 * (p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="0",
    pieces="p * N",
    options={"segments": 2},
    source="Pjesivac-Grbovic et al. 2007",
    use="Use it instead of the ring where a block is larger than the cache: received data is "
    "combined while it is still there.",
)
def segmented_ring(rank: int, size: int, segments: int = 2) -> Iterator[Round]:
    """Reduce around a ring with blocks cut into small segments, one segment after the other."""

    def block(number: int) -> range:
        return range(number * segments, (number + 1) * segments)

    def segment(place: int) -> Callable[[int], list[Block]]:
        return lambda number: [block(number)[place]]

    for place in range(segments):
        yield from relabelled(reduce_scatter.ring(rank, size), int, segment(place))
    yield from relabelled(all_gather.ring(rank, size), int, block)


@algorithm(
    rounds="2 * (p - 1)",
    messages="2 * (p - 1)",
    max_bytes_per_rank="(p - 1) * n",
    total_bytes="2 * (p - 1) * n",
    critical_bytes="2 * (p - 1) * n",
    reduction_bytes="(p - 1) * n",
    scratch_bytes="n",
    is_ordered=True,
    source="Chan et al. 2007",
    use="Use it for two ranks, or as the simplest thing to compare others with.",
)
def linear(rank: int, size: int) -> Iterator[Round]:
    """Receive all vectors on rank 0 one after the other, and send the result in the same way."""
    yield from reduce.linear(rank, size, 0)
    yield from broadcast.linear(rank, size, 0)


@algorithm(
    rounds="2 * q",
    messages="2 * (p - 1)",
    max_bytes_per_rank="q * n",
    total_bytes="2 * (p - 1) * n",
    critical_bytes="2 * q * n",
    reduction_bytes="q * n",
    scratch_bytes="n",
    is_ordered=True,
    is_invariant=True,
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for short vectors on many ranks where the bits of `invariant` are needed, with one "
    "array from each rank: it is a reduce and a broadcast.",
)
def reduce_broadcast(rank: int, size: int) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast from it, by binomial trees."""
    yield from reduce.binomial(rank, size, 0)
    yield from broadcast.binomial(rank, size, 0)


@algorithm(
    rounds="log(power(p, r), r) + 2 * (p != power(p, r))",
    startups="log(power(p, r), r) * (r - 1) + 2 * (ceil(p / power(p, r)) - 1)",
    messages="power(p, r) * log(power(p, r), r) * (r - 1) + 2 * (p - power(p, r))",
    max_bytes_per_rank="n * (log(power(p, r), r) * (r - 1) + ceil(p / power(p, r)) - 1)",
    total_bytes="n * (power(p, r) * log(power(p, r), r) * (r - 1) + 2 * (p - power(p, r)))",
    critical_bytes="n * (log(power(p, r), r) * (r - 1) + 2 * (ceil(p / power(p, r)) - 1))",
    reduction_bytes="n * (log(power(p, r), r) * (r - 1) + ceil(p / power(p, r)) - 1)",
    scratch_bytes="n * max(r - 1, ceil(p / power(p, r)) - 1)",
    is_ordered=True,
    is_bitwise=False,
    options={"radix": 3},
    source="Ruefenacht, Bull and Booth 2017",
    use="Use it for short vectors where a rank can exchange with several partners at once.",
)
def recursive_multiplying(rank: int, size: int, radix: int = 3) -> Iterator[Round]:
    """Exchange and combine vectors in groups; every round multiplies the number of ranks combined.

    When p is not a power of the radix, neighbours fold: one takes part for all of them.
    """
    core_size = trees.power_within(size, radix)
    return folded(partial(_multiplying_core, radix=radix), rank, size, core_size, [0])


def _multiplying_core(rank: int, size: int, radix: int) -> Iterator[Round]:
    for distance in trees.powers(size, radix):
        digit = rank // distance % radix
        below = [rank - i * distance for i in range(1, digit + 1)]
        above = [rank + i * distance for i in range(1, radix - digit)]
        yield (
            *(RecvReduce(peer, [0], side="left") for peer in below),
            *(RecvReduce(peer, [0], side="right") for peer in above),
            *(Send(peer, [0]) for peer in (*below, *above)),
        )


@algorithm(
    rounds="k + 2 * (p != P)",
    messages="P * k + 2 * (p - P)",
    max_bytes_per_rank="(k + (p != P)) * n",
    total_bytes="(P * k + 2 * (p - P)) * n",
    critical_bytes="(k + 2 * (p != P)) * n",
    reduction_bytes="(k + (p != P)) * n",
    scratch_bytes="n",
    is_ordered=True,
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for short vectors, also where the operator does not commute: one exchange of "
    "the whole vector in each round.",
)
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Exchange and combine vectors in pairs; every round doubles the number of ranks combined.

    When p is not a power of two, some neighbours fold: one takes part for both.
    """
    return recursive_multiplying(rank, size, radix=2)


@algorithm(
    rounds="1",
    startups="p - 1",
    messages="p * (p - 1)",
    max_bytes_per_rank="(p - 1) * n",
    total_bytes="p * (p - 1) * n",
    reduction_bytes="(p - 1) * n",
    scratch_bytes="(p - 1) * n",
    is_ordered=True,
    is_bitwise=False,
    source="Cowan et al. 2023",
    use="Use it for very short vectors on few ranks of one host: all messages are in flight at "
    "once.",
)
def one_shot(rank: int, size: int) -> Iterator[Round]:
    """Send the vector to all other ranks at once, and combine the vectors that arrive."""
    return recursive_multiplying(rank, size, radix=max(2, size))


@algorithm(
    rounds="2",
    startups="2 * (p - 1)",
    messages="2 * p * (p - 1)",
    max_bytes_per_rank="2 * f * n",
    total_bytes="2 * (p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="n",
    pieces="p",
    is_ordered=True,
    source="Cowan et al. 2023",
    use="Use it on few ranks of one host, or for large vectors with an operator that does not "
    "commute: it sends as little as the ring, in two rounds of many messages.",
)
def two_shot(rank: int, size: int) -> Iterator[Round]:
    """Send every part directly to the rank that combines it, and from there to all ranks."""
    yield from reduce_scatter.direct(rank, size)
    yield from all_gather.direct(rank, size)


@algorithm(
    rounds="2 * k + 2 * (p != P)",
    messages="2 * P * k + 2 * (p - P)",
    max_bytes_per_rank="n * (2 * (P - 1) / P + (p != P))",
    total_bytes="2 * (p - 1) * n",
    critical_bytes="n * (2 * (P - 1) / P + 2 * (p != P))",
    reduction_bytes="n * ((P - 1) / P + (p != P))",
    scratch_bytes="n / 2",
    pieces="P",
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for vectors of middle size, best on a power of two of ranks: as few bytes as "
    "the ring in few rounds.",
)
def rabenseifner(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

    When p is not a power of two, some neighbours fold: one takes part for both.
    """
    core_size = 1 << trees.floor_log2(size)
    return folded(_rabenseifner_core, rank, size, core_size, range(core_size))


def _rabenseifner_core(rank: int, size: int) -> Iterator[Round]:
    yield from reduce_scatter.recursive_halving(rank, size)
    yield from all_gather.recursive_doubling(rank, size)


@algorithm(
    rounds="2 * q",
    messages="2 * p * q",
    max_bytes_per_rank="2 * f * n",
    total_bytes="2 * (p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="2 * n / 3",
    pieces="p",
    source="Traff 2024b",
    use="Use it for vectors of middle to large size on any number of ranks: as few bytes as "
    "the ring, in the fewest rounds of any such algorithm here.",
)
def circulant(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather, by the circulant algorithm.

    It takes few rounds and the fewest bytes, for any p.
    """
    yield from reduce_scatter.circulant(rank, size)
    yield from all_gather.circulant(rank, size)


@algorithm(
    **costs_of(circulant, options={"per_host": 2}),
    reduction_bytes="f * n",
    scratch_bytes="2 * n / 3",
    source="Traff 2024b",
    use="Use it on several hosts whose ranks are the same power of two: most bytes stay within a "
    "host.",
)
def circulant_strided(rank: int, size: int, hosts: Topology) -> Iterator[Round]:
    """Run the circulant all-reduce in another order of ranks, so that far hops stay in a host.

    If each of H hosts has the same power of two of ranks, it sends 2n (H-1)/H bytes to other hosts:
    the least possible.
    """
    order = sorted(range(size), key=lambda r: (hosts.place(r), hosts.host_of[r]))
    return nested(circulant, rank, order)


@algorithm(
    **costs_of(circulant, ranks="even"),
    reduction_bytes="f * n",
    scratch_bytes="n",
    source="De Sensi et al. 2024",
    use="Use it for vectors of middle size on a network that is a torus: partners are near "
    "each other.",
)
def swing(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather, by the swing algorithm.

    It sends the fewest bytes, between ranks that are near on a torus.
    """
    yield from reduce_scatter.swing(rank, size)
    yield from all_gather.swing(rank, size)


@algorithm(
    rounds="q",
    messages="p * q",
    max_bytes_per_rank="q * n",
    total_bytes="p * q * n",
    reduction_bytes="q * n",
    scratch_bytes="n",
    ranks="power of two",
    is_bitwise=False,
    source="De Sensi et al. 2024",
    use="Use it for short vectors on a network that is a torus.",
)
def swing_latency(rank: int, size: int) -> Iterator[Round]:
    """Exchange whole vectors at distances 1, 1, 3, 5, 11, ... on alternating sides."""
    for step in range(trees.ceil_log2(size)):
        partner = negabinary.partner(rank, size, step)
        yield Send(partner, [0]), RecvReduce(partner, [0])


@algorithm(
    **costs_of(rabenseifner),
    reduction_bytes="n * ((P - 1) / P + (p != P))",
    scratch_bytes="n / 2",
    source="De Sensi et al. 2025",
    use="Use it for vectors of middle to large size on networks where far messages share few "
    "links, best on a power of two of ranks: three of four bytes go to neighbours.",
)
def bine(rank: int, size: int) -> Iterator[Round]:
    """Halve at distances 1, 1, 3, 5, 11, ..., then double backwards; what is sent lies together.

    When p is not a power of two, some neighbours fold: one takes part for both.
    """
    core_size = 1 << trees.floor_log2(size)
    return folded(_bine_core, rank, size, core_size, range(core_size))


def _bine_core(rank: int, size: int) -> Iterator[Round]:
    halving = list(_bine_halving(rank, size))
    yield from halving
    yield from dual(halving, rank, combine=False)


def _bine_halving(rank: int, size: int) -> Iterator[Round]:
    """Split the pieces of partners, which are numbered so that those that are kept lie together."""
    for step in range(trees.ceil_log2(size)):
        partner, length = negabinary.partner(rank, size, step), size >> step + 1
        mine, theirs = (
            range(place // length * length, (place // length + 1) * length)
            for place in (negabinary.place(rank, size), negabinary.place(partner, size))
        )
        yield Send(partner, theirs), RecvReduce(partner, mine)


@algorithm(
    **costs_of(recursive_doubling),
    reduction_bytes="(k + (p != P)) * n",
    scratch_bytes="n",
    source="De Sensi et al. 2025",
    use="Use it for short vectors on networks where far messages share few links: as many rounds "
    "as recursive doubling, between partners a third nearer.",
)
def bine_latency(rank: int, size: int) -> Iterator[Round]:
    """Exchange whole vectors at distances ..., 11, 5, 3, 1, 1 on alternating sides.

    In this order, groups of ranks that have the same sum exchange it, so that all ranks combine in
    the same way.  When p is not a power of two, some neighbours fold.
    """
    core_size = 1 << trees.floor_log2(size)
    return folded(_bine_latency_core, rank, size, core_size, [0])


def _bine_latency_core(rank: int, size: int) -> Iterator[Round]:
    for step in reversed(range(trees.ceil_log2(size))):
        partner = negabinary.partner(rank, size, step)
        yield Send(partner, [0]), RecvReduce(partner, [0])


@algorithm(
    rounds="2 * (fill(p) + 2 * (N - 1))",
    messages="4 * (p - 1) * N",
    max_bytes_per_rank="n * min(2, p - 1) - n / 2 * (p == 3)",
    total_bytes="2 * (p - 1) * n",
    critical_bytes="2 * (fill(p) + 2 * (N - 1)) * n / (2 * N)",
    reduction_bytes="n",
    scratch_bytes="n / (2 * N)",
    pieces="2 * N",
    options={"segments": 1},
    source="Sanders, Speck and Traff 2009",
    use="Use it for large vectors on many ranks, where a ring would take too many rounds.",
)
def double_binary_tree(rank: int, size: int, segments: int = 1) -> Iterator[Round]:
    """Reduce to rank 0 and broadcast from it by two binary trees, each for half of the pieces."""
    yield from reduce.double_binary_tree(rank, size, 0, segments)
    yield from broadcast.double_binary_tree(rank, size, 0, segments=segments)


@algorithm(
    rounds="q",
    messages="p * q",
    max_bytes_per_rank="q * n",
    total_bytes="p * q * n",
    reduction_bytes="n * (q + max(0, q - log(p & -p, 2) - 2))",
    scratch_bytes="2 * n",
    is_bitwise=False,
    source="Bar-Noy, Kipnis and Schieber 1993",
    use="Use it for short vectors where the number of ranks is not a power of two: no algorithm "
    "takes fewer rounds.",
)
def census(rank: int, size: int) -> Iterator[Round]:
    """Combine a growing window of ranks until it contains all: the fewest rounds."""
    return windows(rank, size, list(_census_plan(size)), is_ring=True)


def _census_plan(size: int) -> Iterator[list[bool]]:
    """Return which rounds send the own vector: those where p-1 has a binary digit 1."""
    return ([digit == "1"] for digit in f"{size - 1:b}" if size > 1)


@algorithm(
    rounds="log(p, 3)",
    startups="2 * log(p, 3) - (p <= 2 * power(p - 1, 3))",
    messages="p * (2 * log(p, 3) - (p <= 2 * power(p - 1, 3)))",
    max_bytes_per_rank="n * (2 * log(p, 3) - (p <= 2 * power(p - 1, 3)))",
    total_bytes="p * n * (2 * log(p, 3) - (p <= 2 * power(p - 1, 3)))",
    reduction_bytes="n * (2 * log(p, 3) - (p <= 2 * power(p - 1, 3))"
    " + max(0, log(p, 3) - 2 - sum(p % 3 ** (i + 1) == 0 for i in range(log(p, 3)))))",
    scratch_bytes="3 * n",
    is_bitwise=False,
    source="Juerss, Addanki and Schmid 2026",
    use="Use it for short vectors where a rank can send and receive two messages at once, such as "
    "both ways around a ring or a torus: no algorithm with two messages takes fewer rounds.",
)
def tripling(rank: int, size: int) -> Iterator[Round]:
    """Triple the window of ranks that a rank combines in each round, in both directions.

    For a power of three of ranks this is Trivance: partners are 1, 3, 9, ... ahead and behind.  For
    other numbers windows reach backwards until only whole ones are needed, as in the census.
    """
    return windows(rank, size, list(_tripling_plan(size)), is_ring=True)


def _tripling_plan(size: int) -> Iterator[list[bool]]:
    """Yield how many of two messages include the own vector: the digits of p-1 to the base 3."""
    for exponent in reversed(range(trees.ceil_log(size, 3))):
        whole = (size - 1) // 3**exponent % 3
        is_first = size - 1 < 3 ** (exponent + 1)  # others are not known yet
        yield [True] * whole + [False] * (0 if is_first else 2 - whole)


@algorithm(
    rounds="q",
    messages="p * q",
    max_bytes_per_rank="(p - 1) * n",
    total_bytes="p * (p - 1) * n",
    reduction_bytes="(p - 1) * n",
    scratch_bytes="2 * p * n",
    is_ordered=True,
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for very short vectors where every rank must combine in the order of the ranks.",
)
def all_gather_reduce(rank: int, size: int) -> Iterator[Round]:
    """Gather all vectors on every rank, and combine them in rank order.

    All ranks get the same bits.
    """
    rounds = [
        tuple(_of_vectors(op, rank) for op in operations)
        for operations in all_gather.bruck(rank, size)
    ]
    if size > 1:
        rounds[-1] += tuple(_combined_in_order(rank, size))
    return iter(rounds)


def _of_vectors(op: Operation, rank: int) -> Operation:
    """Return an all-gather's operation on whole vectors.

    A vector is called 0 by its rank, (rank, 0) by others.
    """

    def names(holder: int | None) -> list[Block]:
        return [0 if owner == holder else (owner, 0) for owner in op.blocks]

    if op.kind == "send":
        return op._replace(blocks=tuple(names(rank)))
    return op._replace(blocks=tuple(names(op.peer)), into=tuple(names(rank)))


def _combined_in_order(rank: int, size: int) -> list[Operation]:
    """Return the operations that combine the gathered vectors as (((0 (+) 1) (+) 2) ...)."""
    own = ("own", 0)
    vectors: list[Block] = [own if other == rank else (other, 0) for other in range(size)]
    start = [Copy([0], [own]), Copy(vectors[:1], [0])] if rank else []
    return start + [CopyReduce([vector], [0], side="right") for vector in vectors[1:]]


@algorithm(
    rounds="2 * (log(g, 2) + log(H, 2))",
    messages="2 * p * (log(g, 2) + log(H, 2))",
    max_bytes_per_rank="2 * f * n",
    total_bytes="2 * (p - 1) * n",
    reduction_bytes="f * n",
    scratch_bytes="n",
    pieces="g * H",
    options={"per_host": 2},
    for_even_hosts=BY_HOST,
    source="Cho et al. 2019",
    use="Use it for large vectors on several hosts: hosts send each other the least possible.",
)
def hierarchical(rank: int, size: int, hosts: Topology) -> Iterator[Round]:
    """Reduce-scatter within each host, all-reduce between hosts, all-gather within each host.

    Each of H hosts sends 2n (H-1)/H bytes to other hosts, the least possible.  The vector has as
    many columns as the largest host has ranks; smaller hosts divide them among fewer ranks.
    """
    host, num_hosts = hosts.host_of[rank], hosts.num_hosts
    pieces = range(hosts.max_per_host * num_hosts)

    def holder(piece: int, host: int) -> int:
        return hosts.in_column(piece // num_hosts, host)

    parts = [[i for i in pieces if holder(i, host) == mate] for mate in hosts.mates(rank)]
    between = circulant(host, num_hosts)
    yield from within_hosts(reduce_scatter.circulant, rank, hosts, parts.__getitem__)
    yield from among_hosts(between, rank, hosts, lambda i: pieces[i::num_hosts], holder)
    yield from within_hosts(all_gather.circulant, rank, hosts, parts.__getitem__)


@algorithm(
    rounds="1 + (p > 1) + (L > 0)",
    startups="2 * (p - 1)",
    messages="2 * p * (p - 1)",
    max_bytes_per_rank=f"{reduce_scatter.EXCHANGED['part']} + f * n",
    total_bytes=f"{reduce_scatter.EXCHANGED['total']} + (p - 1) * n",
    reduction_bytes=reduce_scatter.EXCHANGED["combined"],
    scratch_bytes=reduce_scatter.EXCHANGED["scratch"],
    pieces="p",
    ranks="at most shards",
    options={"shards": 0},
    is_ordered=True,
    is_invariant=True,
    source="Stelz, Hubner and Stamatakis 2026",
    use="Use it where results must have the same bits on any number of ranks: pass `shards=`.  It "
    "sends as little as the ring if the shards of each rank are one subtree.",
)
def invariant(rank: int, size: int, shards: int = 0) -> Iterator[Round]:
    """Combine every part on one rank along the fixed tree, and send it from there to all ranks."""
    yield from reduce_scatter.invariant(rank, size, shards)
    yield from all_gather.direct(rank, size)


@algorithm(
    rounds="1 + (L > 0)",
    startups="p - 1",
    messages="p * (p - 1)",
    max_bytes_per_rank="max((p - 1) * max(parts(p, L)), sum(parts(p, L)) - min(parts(p, L))) * n",
    total_bytes="(p - 1) * sum(parts(p, L)) * n",
    reduction_bytes="n * (max(within(p, L)) + sum(parts(p, L)) - 1)",
    scratch_bytes="n * ((max(within(p, L)) + 1) // 2 + sum(parts(p, L))"
    " + (p - 1) * max(parts(p, L)) * (max(parts(p, L)) > 1))",
    ranks="at most shards",
    options={"shards": 0},
    is_ordered=True,
    is_invariant=True,
    source="Stelz, Hubner and Stamatakis 2026",
    use="Use it for short vectors on few ranks, with the bits of `invariant` in one exchange.",
)
def invariant_one_shot(rank: int, size: int, shards: int = 0) -> Iterator[Round]:
    """Exchange all contributions, and combine them along the fixed tree on every rank."""
    return along_fixed_tree(rank, size, shards, [0], lambda owner: [0])
