"""Scatter: rank r gets block r of the root's buffer."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms.registry import algorithm
from collectives.schedule import Round, negabinary, rooted, trees


@algorithm(
    rounds="ceil((p - 1) / m)",
    startups="p - 1",
    messages="p - 1",
    max_bytes_per_rank="f * n",
    total_bytes="f * n",
    scratch_bytes="0",
    is_local=True,
    options={"outstanding": 4},
    source="Chan et al. 2007",
    use="Use it for blocks of any size on few ranks; the root posts only a few sends at a time.",
)
def linear_bounded(rank: int, size: int, root: int, outstanding: int = 4) -> Iterator[Round]:
    """Send every other rank its block from the root, a few at a time."""
    for edges in trees.linear(rank, size, root, outstanding):
        yield tuple(trees.down(rank, edge, edge.subtree) for edge in edges)


@algorithm(
    rounds="p - 1",
    messages="p - 1",
    max_bytes_per_rank="f * n",
    total_bytes="f * n",
    scratch_bytes="0",
    is_local=True,
    source="Chan et al. 2007",
    use="Use it for large blocks: every block is sent once.",
)
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send every other rank its block from the root, one after the other."""
    return linear_bounded(rank, size, root, outstanding=1)


@algorithm(
    rounds="log(p, r)",
    startups="children(p, r)",
    messages="p - 1",
    max_bytes_per_rank="f * n",
    total_bytes="n / p * hops(p, r)",
    scratch_bytes="n / 2",
    options={"radix": 4},
    source="Chan et al. 2007",
    use="Use it for small blocks where a rank can start several sends at once.",
)
@rooted(blocks_are_ranks=True)
def knomial(rank: int, size: int, radix: int = 4) -> Iterator[Round]:
    """Cut a rank's blocks into `radix` parts, and forward all parts but one."""
    for edges in trees.knomial(rank, size, radix):
        yield tuple(trees.down(rank, edge, edge.subtree) for edge in edges)


@algorithm(
    rounds="q",
    messages="p - 1",
    max_bytes_per_rank="f * n",
    total_bytes="n / p * hops(p, 2)",
    scratch_bytes="n / 2",
    source="Chan et al. 2007",
    use="Use it for small blocks on many ranks: no algorithm takes fewer rounds.",
)
def binomial(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send the far half of a rank's blocks to the rank in the middle."""
    return knomial(rank, size, root, radix=2)


@algorithm(
    rounds="q",
    messages="p - 1",
    max_bytes_per_rank="f * n",
    total_bytes="n / p * hops(p, 2)",
    scratch_bytes="n / 2",
    source="De Sensi et al. 2025",
    use="Use it instead of the binomial tree on networks where far messages share few links: they "
    "go up to a third less far.",
)
@rooted(blocks_are_ranks=True)
def bine(rank: int, size: int) -> Iterator[Round]:
    """Send the far half of a rank's blocks to a rank inside that half: at p/3, p/6, ..."""
    for edges in negabinary.tree(rank, size):
        yield tuple(trees.down(rank, edge, edge.subtree) for edge in edges)
