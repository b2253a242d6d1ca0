"""Gather: the root gets the blocks of all ranks.  The algorithms are reversed scatters."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms import scatter
from collectives.algorithms.registry import algorithm, costs_of
from collectives.schedule import Round, dual


@algorithm(
    **costs_of(scatter.linear_bounded),
    scratch_bytes="0",
    is_local=True,
    source="Chan et al. 2007",
    use="Use it for blocks of any size on few ranks; the root posts only a few receives at a time.",
)
def linear_bounded(rank: int, size: int, root: int, outstanding: int = 4) -> Iterator[Round]:
    """Receive every other rank's block on the root, a few at a time."""
    return dual(scatter.linear_bounded(rank, size, root, outstanding), rank, combine=False)


@algorithm(
    **costs_of(scatter.linear),
    scratch_bytes="0",
    is_local=True,
    source="Chan et al. 2007",
    use="Use it for large blocks: every block is sent once.",
)
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """Receive every other rank's block on the root, one after the other."""
    return dual(scatter.linear(rank, size, root), rank, combine=False)


@algorithm(
    **costs_of(scatter.knomial),
    scratch_bytes="n",
    source="Chan et al. 2007",
    use="Use it for small blocks where a rank can receive several messages at once.",
)
def knomial(rank: int, size: int, root: int, radix: int = 4) -> Iterator[Round]:
    """Merge the blocks of groups of neighbours, then of groups of groups, up to the root."""
    return dual(scatter.knomial(rank, size, root, radix=radix), rank, combine=False)


@algorithm(
    **costs_of(scatter.binomial),
    scratch_bytes="n",
    source="Chan et al. 2007",
    use="Use it for small blocks on many ranks: no algorithm takes fewer rounds.",
)
def binomial(rank: int, size: int, root: int) -> Iterator[Round]:
    """Merge the blocks of neighbours, then of neighbouring pairs, up to the root."""
    return dual(scatter.binomial(rank, size, root), rank, combine=False)


@algorithm(
    **costs_of(scatter.bine),
    scratch_bytes="n",
    source="De Sensi et al. 2025",
    use="Use it instead of the binomial tree on networks where far messages share few links: they "
    "go up to a third less far.",
)
def bine(rank: int, size: int, root: int) -> Iterator[Round]:
    """Merge the blocks of neighbouring ranks, then of neighbouring groups, up to the root."""
    return dual(scatter.bine(rank, size, root), rank, combine=False)
