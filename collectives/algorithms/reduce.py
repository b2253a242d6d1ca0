"""Reduce: the combination of every rank's vector, at the root.  Broadcasts, run backwards."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms import broadcast
from collectives.algorithms.registry import algorithm, costs_of
from collectives.schedule import Round
from collectives.transform import dual


@algorithm(**costs_of("broadcast", "linear"), is_ordered=True, source="Chan et al. 2007")
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """The root receives from every other rank, nearest ranks first, and combines in rank order."""
    return dual(broadcast.linear(rank, size, root), rank, combine=True)


@algorithm(**costs_of("broadcast", "binomial"), source="Thakur, Rabenseifner and Gropp 2005")
def binomial(rank: int, size: int, root: int) -> Iterator[Round]:
    """Every round halves the number of ranks that hold partial results.

    In rank order for root 0; other roots rotate the order.
    """
    return dual(broadcast.binomial(rank, size, root), rank, combine=True)
