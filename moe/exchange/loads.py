"""How many rows ranks send to the experts of other ranks, and how parts divide these rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from collectives import Communicator, SentReceived, even_counts
from moe.routing import Flags, Integers
from parallel.mesh import length, span

ALGORITHM = "linear"  # of all exchanges


def experts_of(num_experts: int, num_ranks: int, rank: int) -> slice:
    """Return the experts of a rank: consecutive ones, divided as evenly as possible."""
    return span(num_experts, num_ranks, rank)


def start_loads(load: Integers, comm: Communicator | None) -> Callable[[], Integers]:
    """Start to tell other ranks how many rows this rank sends; return a function that waits.

    The function returns how many rows each rank sends to each expert of this rank, int64 (ranks,
    experts).  `load` are the rows that this rank sends to each expert (`Routing.load`).  All ranks
    of `comm` call this: each sends every other one 8 bytes for each of its experts.
    """
    if comm is None:
        return lambda: load[None]
    owned = even_counts(len(load), comm.size)
    shape = comm.size, owned[comm.rank]
    counts = SentReceived(owned, (owned[comm.rank],) * comm.size)
    work = comm.all_to_all(load, counts=counts, algorithm=ALGORITHM, async_op=True)
    return lambda: work.wait().reshape(shape)


def rows_to_ranks(loads: Integers, num_ranks: int) -> Integers:
    """Return the rows to each rank, (..., ranks), from the rows to each expert, (..., experts)."""
    bounds = np.cumsum([0, *even_counts(loads.shape[-1], num_ranks)])
    totals = np.zeros((*loads.shape[:-1], loads.shape[-1] + 1), np.int64)
    np.cumsum(loads, axis=-1, out=totals[..., 1:])
    return np.diff(totals[..., bounds], axis=-1)


class Division(NamedTuple):
    """What part `i` of `num_parts` has of the rows for each expert.

    If each rank has at least so many experts, a part has all rows of some experts of each rank:
    products of large matrices take less time than products of several small ones.  Otherwise a part
    has some rows of each expert, divided as evenly as possible.
    """

    num_experts: int
    num_ranks: int
    num_parts: int
    i: int

    def of(self, totals: Integers, experts: slice = slice(None)) -> tuple[Integers, Integers]:
        """Return how many of the `totals` (..., experts) this part has, and from which on."""
        if self.num_parts > self.num_experts // self.num_ranks:
            quotient, rest = np.divmod(totals, self.num_parts)
            return quotient + (self.i < rest), self.i * quotient + np.minimum(self.i, rest)
        return totals * _is_in_part(*self)[experts], np.zeros_like(totals)


def divisions(num_experts: int, num_ranks: int, num_parts: int) -> list[Division]:
    """Return the divisions of all parts."""
    return [Division(num_experts, num_ranks, num_parts, i) for i in range(num_parts)]


@lru_cache(maxsize=1024)
def _is_in_part(num_experts: int, num_ranks: int, num_parts: int, i: int) -> Flags:
    """Return which experts are in part `i`, if parts have whole experts."""
    is_in_part = np.zeros(num_experts, bool)
    for rank in range(num_ranks):
        owned = experts_of(num_experts, num_ranks, rank)
        is_in_part[owned][span(length(owned), num_parts, i)] = True
    return is_in_part
