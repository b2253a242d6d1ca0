"""Broadcast: every rank gets the root's vector.  The vector is cut into pieces 0, 1, ..."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from collectives.algorithms import all_gather, scatter
from collectives.algorithms.registry import algorithm
from collectives.schedule import (
    Recv,
    Round,
    Send,
    Stream,
    Topology,
    idle,
    negabinary,
    nested,
    rooted,
    trees,
    within_hosts,
)
from collectives.schedule import circulant as graph
from collectives.schedule import two_trees as pair


@algorithm(
    rounds="p - 1",
    messages="p - 1",
    max_bytes_per_rank="(p - 1) * n",
    total_bytes="(p - 1) * n",
    scratch_bytes="0",
    source="Chan et al. 2007",
    use="Use it for two or three ranks, or as the simplest thing to compare others with.",
)
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send from the root to every other rank, one after the other."""
    for edges in trees.linear(rank, size, root):
        yield tuple(trees.down(rank, edge, [0]) for edge in edges)


@algorithm(
    rounds="min(c, p - 1) * N - 1 + (p - 1) // min(c, p - 1)",
    messages="(p - 1) * N",
    max_bytes_per_rank="min(c, p - 1) * n",
    total_bytes="(p - 1) * n",
    critical_bytes="(min(c, p - 1) * N - 1 + (p - 1) // min(c, p - 1)) * n / N",
    scratch_bytes="0",
    pieces="N",
    options={"chains": 2, "segments": 1},
    source="Pjesivac-Grbovic et al. 2007",
    use="Use it for large vectors where the root can feed several lines at once; with one "
    "chain it is the pipeline.",
)
@rooted(blocks_are_ranks=False)
def chain(rank: int, size: int, chains: int = 2, segments: int = 1) -> Iterator[Round]:
    """Send each piece from the root to several lines of ranks, where each rank forwards it."""
    chains = min(chains, size - 1)
    streams = []
    lines = trees.groups(size - 1, chains) if size > 1 else []
    for number, line in enumerate(lines):
        way = [0, *(place + 1 for place in line)]
        hops = pairwise(way)
        streams += [
            Stream(parent, child, number + hop, range(segments))
            for hop, (parent, child) in enumerate(hops)
            if rank in (parent, child)
        ]
    last = max((number + len(line) for number, line in enumerate(lines)), default=0)
    num_rounds = last + chains * (segments - 1)
    return trees.pipelined(rank, streams, max(chains, 1), num_rounds)


@algorithm(
    rounds="p - 2 + N",
    messages="(p - 1) * N",
    max_bytes_per_rank="n",
    total_bytes="(p - 1) * n",
    critical_bytes="(p - 2 + N) * n / N",
    scratch_bytes="0",
    pieces="N",
    options={"segments": 1},
    source="Chan et al. 2007",
    use="Use it for very large vectors on few ranks: with enough segments the root sends "
    "little more than n bytes.",
)
def pipeline(rank: int, size: int, root: int, segments: int = 1) -> Iterator[Round]:
    """Send the pieces one after the other along the line of all ranks."""
    return chain(rank, size, root, chains=1, segments=segments)


@algorithm(
    rounds="depth(p) + min(2, p - 1) * (N - 1)",
    messages="(p - 1) * N",
    max_bytes_per_rank="min(2, p - 1) * n",
    total_bytes="(p - 1) * n",
    critical_bytes="(depth(p) + min(2, p - 1) * (N - 1)) * n / N",
    scratch_bytes="0",
    pieces="N",
    options={"segments": 1},
    source="Pjesivac-Grbovic et al. 2007",
    use="Use it for vectors of middle size: the tree is shallow, but inner ranks send "
    "everything twice.",
)
@rooted(blocks_are_ranks=False)
def binary(rank: int, size: int, segments: int = 1) -> Iterator[Round]:
    """Forward each piece to two others, in a binary tree."""
    streams = _binary_streams(rank, range(size), 0, range(segments))
    period = min(2, size - 1)
    return trees.pipelined(rank, streams, period, trees.depth(size) + period * (segments - 1))


def _binary_streams(rank: int, members: range, start: int, pieces: range) -> list[Stream]:
    """Return the streams at `rank` in a binary tree of some ranks.

    The top of the tree gets its first piece in round `start`.
    """
    if rank not in members:
        return []
    parent, time, children = trees.binary(members.index(rank), len(members))
    above = [] if time == 0 else [Stream(members[parent], rank, start + time - 1, pieces)]
    below = [
        Stream(rank, members[child], start + time + number, pieces)
        for number, child in enumerate(children)
    ]
    return above + below


@algorithm(
    rounds="max(depth(p // 2), depth((p - 1) // 2) + (p > 2)) + min(2, p - 1) * (N - 1) + 2",
    messages="(p - 1) * (N + 1)",
    max_bytes_per_rank="n + n / 2 * (p == 4 or p > 5)",
    total_bytes="(p - 1) * n",
    critical_bytes="n / 2 + (max(depth(p // 2), depth((p - 1) // 2) + 1) + 2 * N - 1) * n / (2 * N)"
    " if p > 2 else n * (p - 1)",
    scratch_bytes="0",
    pieces="2 * N",
    options={"segments": 1},
    source="Pjesivac-Grbovic et al. 2007",
    use="Use it for vectors of middle to large size: it halves what inner ranks of a binary "
    "tree send.",
)
@rooted(blocks_are_ranks=False)
def split_binary(rank: int, size: int, segments: int = 1) -> Iterator[Round]:
    """Send each half down its own binary tree of half the ranks; then swap halves in pairs.

    The odd ranks (counted from the root) get the first half, the even ones the second.  When there
    is one odd rank too many, the root gives it its second half.
    """
    halves = range(segments), range(segments, 2 * segments)
    sides = range(1, size, 2), range(2, size, 2)
    streams = []
    for number, (members, pieces) in enumerate(zip(sides, halves, strict=True)):
        if rank == 0 and members:
            streams.append(Stream(0, members[0], number, pieces))
        if rank in members:
            streams += _binary_streams(rank, members, number + 1, pieces)
            streams += [Stream(0, rank, number, pieces)] * (rank == members[0])
    last = max(trees.depth(len(sides[0])), trees.depth(len(sides[1])) + (size > 2))
    if size > 1:
        period = min(2, size - 1)
        yield from trees.pipelined(rank, streams, period, last + 1 + period * (segments - 1))
        yield _swap(rank, size, *halves)


def _swap(rank: int, size: int, first: range, second: range) -> Round:
    """Return the last round: ranks 2i-1 and 2i give each other their halves."""
    if rank == 0:
        return (Send(size - 1, second),) if size % 2 == 0 else ()
    if rank == size - 1 and size % 2 == 0:
        return (Recv(0, second),)
    mine, other = (first, second) if rank % 2 else (second, first)
    partner = rank + 1 if rank % 2 else rank - 1
    return Send(partner, mine), Recv(partner, other)


@algorithm(
    rounds="log(p, r)",
    startups="children(p, r)",
    messages="p - 1",
    max_bytes_per_rank="n * children(p, r)",
    total_bytes="(p - 1) * n",
    scratch_bytes="0",
    options={"radix": 4},
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for short vectors where a rank can start several sends at once, such as "
    "within one host.",
)
@rooted(blocks_are_ranks=False)
def knomial(rank: int, size: int, radix: int = 4) -> Iterator[Round]:
    """Multiply the number of ranks that have the vector by the radix in every round."""
    for edges in trees.knomial(rank, size, radix):
        yield tuple(trees.down(rank, edge, [0]) for edge in edges)


@algorithm(
    rounds="q",
    messages="p - 1",
    max_bytes_per_rank="q * n",
    total_bytes="(p - 1) * n",
    scratch_bytes="0",
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for short vectors on any number of ranks: no algorithm takes fewer rounds.",
)
def binomial(rank: int, size: int, root: int) -> Iterator[Round]:
    """Double the number of ranks that have the vector in every round."""
    return knomial(rank, size, root, radix=2)


@algorithm(
    rounds="q",
    messages="p - 1",
    max_bytes_per_rank="q * n",
    total_bytes="(p - 1) * n",
    scratch_bytes="0",
    source="De Sensi et al. 2025",
    use="Use it instead of the binomial tree on networks where far messages share few links, such "
    "as a torus or an oversubscribed fat tree: they go up to a third less far.",
)
@rooted(blocks_are_ranks=False)
def bine(rank: int, size: int) -> Iterator[Round]:
    """Double the number of ranks that have the vector in every round, at distances p/3, p/6, ..."""
    for edges in negabinary.tree(rank, size):
        yield tuple(trees.down(rank, edge, [0]) for edge in edges)


@algorithm(
    rounds="fill(p) + 2 * (N - 1)",
    messages="2 * (p - 1) * N",
    max_bytes_per_rank="n",
    total_bytes="(p - 1) * n",
    critical_bytes="(fill(p) + 2 * (N - 1)) * n / (2 * N)",
    scratch_bytes="0",
    pieces="2 * N",
    options={"segments": 1},
    source="Sanders, Speck and Traff 2009",
    use="Use it for large vectors on many ranks: it sends the least bytes in a logarithmic "
    "number of rounds.",
)
@rooted(blocks_are_ranks=False)
def double_binary_tree(rank: int, size: int, segments: int = 1) -> Iterator[Round]:
    """Send even pieces down one binary tree, odd pieces down another, at full speed.

    A rank that forwards pieces in one tree is a leaf of the other.
    """
    streams = [
        Stream(link.parent, link.child, link.start, range(link.tree, 2 * segments, 2))
        for link in pair.two_trees(size)
        if rank in (link.parent, link.child)
    ]
    num_rounds = pair.fill(size) + 2 * (segments - 1) if size > 1 else 0
    return trees.pipelined(rank, streams, 2, num_rounds)


@algorithm(
    rounds="2 * q",
    messages="(p - 1) + p * q",
    max_bytes_per_rank="2 * f * n",
    total_bytes="(p - 1) * n + n / p * hops(p, 2)",
    scratch_bytes="n / 2",
    pieces="p",
    source="Barnett et al. 1994",
    use="Use it for large vectors on a power of two of ranks, where bytes cost more than rounds.",
)
def scatter_all_gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Scatter by a binomial tree, then all-gather by Bruck's algorithm."""
    yield from scatter.binomial(rank, size, root)
    yield from all_gather.bruck(rank, size)


@algorithm(
    rounds="q + p - 1",
    messages="(p - 1) + p * (p - 1)",
    max_bytes_per_rank="2 * f * n",
    total_bytes="(p - 1) * n + n / p * hops(p, 2)",
    scratch_bytes="n / 2",
    pieces="p",
    source="Barnett et al. 1994",
    use="Use it for large vectors where messages to neighbours are the cheapest; its rounds "
    "grow with the number of ranks.",
)
def scatter_ring_all_gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Scatter by a binomial tree, then all-gather around a ring."""
    yield from scatter.binomial(rank, size, root)
    yield from all_gather.ring(rank, size)


@algorithm(
    rounds="N - 1 + q",
    messages="(p - 1) * N",
    max_bytes_per_rank="(N - 1 + q) * n / N",
    total_bytes="(p - 1) * n",
    scratch_bytes="0",
    pieces="N",
    options={"segments": 1},
    source="Traff 2024a",
    use="Use it for vectors of any size if the number of segments fits: no algorithm takes "
    "fewer rounds for as many segments.",
)
@rooted(blocks_are_ranks=False)
def circulant(rank: int, size: int, segments: int = 1) -> Iterator[Round]:
    """Send each piece along its own tree.

    The trees are interleaved so that no rounds are wasted.
    """
    for receives, sends in zip(*graph.transfers(rank, size, segments), strict=True):
        comes = [Recv((rank - t.distance) % size, [t.piece]) for t in [receives] if t]
        goes = [Send((rank + t.distance) % size, [t.piece]) for t in [sends] if t]
        yield (*comes, *goes)


@algorithm(
    rounds="log(H, 2) + log(g, 2)",
    messages="p - 1",
    max_bytes_per_rank="(log(H, 2) + log(g, 2)) * n",
    total_bytes="(p - 1) * n",
    scratch_bytes="0",
    options={"per_host": 2},
    source="Karonis et al. 2000",
    use="Use it for short vectors on several hosts: each host receives the vector once from "
    "another host.",
)
def hierarchical(rank: int, size: int, root: int, hosts: Topology) -> Iterator[Round]:
    """Send to one rank of every host, then within every host, by binomial trees."""
    root_host = hosts.host_of[root]
    leaders = [hosts.counterpart(root, host) for host in range(hosts.num_hosts)]
    leader = leaders[hosts.host_of[rank]]
    across = nested(lambda r, p: binomial(r, p, root_host), leader, leaders)
    yield from across if rank == leader else idle(across)
    place = hosts.place(leader)
    yield from within_hosts(lambda r, p: binomial(r, p, place), rank, hosts)
