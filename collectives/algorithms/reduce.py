"""Reduce: the root gets the combination of all vectors.  The algorithms are reversed broadcasts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from collectives.algorithms import broadcast, gather, reduce_scatter
from collectives.algorithms.registry import algorithm, costs_of
from collectives.schedule import RankAlgorithm, Round, Stream, Topology, dual, trees


def costs(down: RankAlgorithm, scratch: str) -> dict[str, Any]:
    """Return the costs of the reversed broadcast; the busiest rank combines what it sends there."""
    reversed_costs = costs_of(down)
    combined = reversed_costs["max_bytes_per_rank"]
    return reversed_costs | {"reduction_bytes": combined, "scratch_bytes": scratch}


@algorithm(
    **costs(broadcast.linear, "n"),
    is_ordered=True,
    source="Chan et al. 2007",
    use="Use it for two or three ranks, or where the operator does not commute and the vector "
    "is short.",
)
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """Receive from every other rank on the root, nearest first, and combine in rank order."""
    return dual(broadcast.linear(rank, size, root), rank, combine=True)


@algorithm(
    **costs(broadcast.chain, "min(n, 2 * n / N)"),
    source="Pjesivac-Grbovic et al. 2007",
    use="Use it for large vectors where the root can receive from several lines at once.",
)
def chain(rank: int, size: int, root: int, chains: int = 2, segments: int = 1) -> Iterator[Round]:
    """Add each rank's part along several lines; the root combines the sums of the lines."""
    down = broadcast.chain(rank, size, root, chains=chains, segments=segments)
    return dual(down, rank, combine=True)


@algorithm(
    **costs(broadcast.pipeline, "min(n, 2 * n / N)"),
    source="Chan et al. 2007",
    use="Use it for very large vectors on few ranks: with enough segments a rank sends little "
    "more than n bytes.",
)
def pipeline(rank: int, size: int, root: int, segments: int = 1) -> Iterator[Round]:
    """Send the pieces one after the other along the line of ranks; each rank adds its part."""
    return dual(broadcast.pipeline(rank, size, root, segments), rank, combine=True)


@algorithm(
    **costs(broadcast.binary, "2 * n / N"),
    source="Pjesivac-Grbovic et al. 2007",
    use="Use it for vectors of middle size.",
)
def binary(rank: int, size: int, root: int, segments: int = 1) -> Iterator[Round]:
    """Add each rank's part to those of two others, and forward the sum, in a binary tree."""
    return dual(broadcast.binary(rank, size, root, segments=segments), rank, combine=True)


@algorithm(
    rounds="1 + depth(p - 1) + min(2, p - 1) * (N - 1)",
    messages="(p - 1) * N",
    max_bytes_per_rank="min(2, p - 1) * n",
    total_bytes="(p - 1) * n",
    critical_bytes="(1 + depth(p - 1) + min(2, p - 1) * (N - 1)) * n / N",
    reduction_bytes="min(2, p - 1) * n",
    scratch_bytes="2 * n / N",
    pieces="N",
    is_ordered=True,
    options={"segments": 1},
    source="Pjesivac-Grbovic et al. 2007",
    use="Use it where the operator does not commute and the vector is of middle to large size.",
)
def in_order_binary(rank: int, size: int, root: int, segments: int = 1) -> Iterator[Round]:
    """Reduce along a binary tree in rank order with any root.

    Lower ranks are on the root's left, higher ones on its right.
    """
    parent, time, children = trees.in_order(rank, size, root)
    pieces, period = range(segments), min(2, size - 1)
    streams = [Stream(parent, rank, time - 1, pieces)] * (rank != root)
    streams += [Stream(rank, child, time + number, pieces) for number, child in enumerate(children)]
    num_rounds = 1 + trees.depth(size - 1) + period * (segments - 1) if size > 1 else 0
    return dual(trees.pipelined(rank, streams, period, num_rounds), rank, combine=True)


@algorithm(
    **costs(broadcast.split_binary, "min(n, 3 * n / N)"),
    source="Pjesivac-Grbovic et al. 2007",
    use="Use it for vectors of middle to large size: it halves what inner ranks of a binary "
    "tree receive.",
)
def split_binary(rank: int, size: int, root: int, segments: int = 1) -> Iterator[Round]:
    """Add one half each in pairs of ranks; then reduce each half by its own binary tree."""
    return dual(broadcast.split_binary(rank, size, root, segments=segments), rank, combine=True)


@algorithm(
    **costs(broadcast.knomial, "r * n"),
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for short vectors where a rank can receive several messages at once, such as "
    "within one host.",
)
def knomial(rank: int, size: int, root: int, radix: int = 4) -> Iterator[Round]:
    """Divide the number of ranks that hold partial results by the radix in every round."""
    return dual(broadcast.knomial(rank, size, root, radix=radix), rank, combine=True)


@algorithm(
    **costs(broadcast.binomial, "2 * n"),
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for short vectors on any number of ranks: no algorithm takes fewer rounds.",
)
def binomial(rank: int, size: int, root: int) -> Iterator[Round]:
    """Halve the number of ranks that hold partial results in every round.

    Parts are combined in rank order for root 0; other roots rotate the order.
    """
    return dual(broadcast.binomial(rank, size, root), rank, combine=True)


@algorithm(
    **costs(broadcast.bine, "2 * n"),
    source="De Sensi et al. 2025",
    use="Use it instead of the binomial tree on networks where far messages share few links: they "
    "go up to a third less far.",
)
def bine(rank: int, size: int, root: int) -> Iterator[Round]:
    """Halve the number of ranks that hold partial results in every round; the last hop is p/3."""
    return dual(broadcast.bine(rank, size, root), rank, combine=True)


@algorithm(
    **costs(broadcast.double_binary_tree, "n / N"),
    source="Sanders, Speck and Traff 2009",
    use="Use it for large vectors on many ranks: it sends the least bytes in a logarithmic "
    "number of rounds.",
)
def double_binary_tree(rank: int, size: int, root: int, segments: int = 1) -> Iterator[Round]:
    """Reduce even pieces by one binary tree, odd pieces by another, at full speed."""
    return dual(
        broadcast.double_binary_tree(rank, size, root, segments=segments), rank, combine=True
    )


@algorithm(
    **costs_of(broadcast.scatter_all_gather),
    reduction_bytes="f * n",
    scratch_bytes="3 * n / 2",
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for large vectors: every rank combines only its part of the vector.",
)
def reduce_scatter_gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Reduce-scatter by the circulant algorithm, then gather to the root by a binomial tree."""
    yield from reduce_scatter.circulant(rank, size)
    yield from gather.binomial(rank, size, root)


@algorithm(
    **costs_of(broadcast.scatter_ring_all_gather),
    reduction_bytes="f * n",
    scratch_bytes="3 * n / 2",
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for large vectors where messages to neighbours are the cheapest.",
)
def ring_reduce_scatter_gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Reduce-scatter around a ring, then gather to the root by a binomial tree."""
    yield from reduce_scatter.ring(rank, size)
    yield from gather.binomial(rank, size, root)


@algorithm(
    **costs(broadcast.circulant, "min(2 * n, 4 * n / N)"),
    source="Traff 2024a",
    use="Use it for vectors of any size if the number of segments fits: no algorithm takes "
    "fewer rounds for as many segments.",
)
def circulant(rank: int, size: int, root: int, segments: int = 1) -> Iterator[Round]:
    """Reduce each piece along its own tree.

    The trees are interleaved so that no rounds are wasted.
    """
    return dual(broadcast.circulant(rank, size, root, segments=segments), rank, combine=True)


@algorithm(
    **costs(broadcast.hierarchical, "2 * n"),
    source="Karonis et al. 2000",
    use="Use it for short vectors on several hosts: each host sends its partial result once "
    "to another host.",
)
def hierarchical(rank: int, size: int, root: int, hosts: Topology) -> Iterator[Round]:
    """Reduce to one rank of every host, then between hosts to the root, by binomial trees."""
    return dual(broadcast.hierarchical(rank, size, root, hosts), rank, combine=True)
