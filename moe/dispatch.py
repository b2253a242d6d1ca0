"""Which rows a rank sends to the ranks of its tokens' experts, and where they are in the buffers.

A rank copies the rows of its tokens into a buffer (`moe.rows`) in the order of the experts, so that
the rows for each rank follow each other, its own last; an all-to-all exchanges those for others;
and after the experts another one brings the rows back to where they were (`moe.exchange`).  Buffers
are of one of two kinds:

- `dropless`: exactly the rows that are routed.  Ranks tell each other first how many (`exchange`).
- `padded`: the same number of rows for each expert and group of tokens, whatever is routed, such as
  the capacity; unused rows are zero.

A dispatch may be divided into parts, so that the experts compute one of them while another is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from collectives import Communicator, SentReceived, even_counts
from moe.routing import Flags, Integers, Routing
from parallel.placement import length, span

ALGORITHM = "linear"  # of all exchanges


class Part(NamedTuple):
    """One exchange of a dispatch, as one rank sees it.

    Attributes
    ----------
    entry : array
        The entries of the routing that this part sends, int64 (n,).
    token : array
        The token of each of them.
    place : array
        The row of the send buffer of each of them, in ascending order.
    sent, received : tuple of int
        The rows to each rank, and from each rank.
    segments : tuple of (tuple of slice)
        For each expert of this rank, its rows from each source: of those received from other ranks,
        or, if the source is this rank, of its own.
    rank : int
        This rank.
    """

    entry: Integers
    token: Integers
    place: Integers
    sent: tuple[int, ...]
    received: tuple[int, ...]
    segments: tuple[tuple[slice, ...], ...]
    rank: int

    @property
    def num_sent(self) -> int:
        """The rows of the send buffer, of which the last are this rank's own."""
        return sum(self.sent)

    @property
    def num_away(self) -> int:
        """The rows of the send buffer that go to other ranks."""
        return self.num_sent - self.sent[self.rank]

    @property
    def num_arriving(self) -> int:
        """The rows that come from other ranks."""
        return sum(self.received) - self.received[self.rank]

    @property
    def counts(self) -> SentReceived:
        """The rows to and from other ranks."""
        return SentReceived(
            *(
                (*each[: self.rank], 0, *each[self.rank + 1 :])
                for each in (self.sent, self.received)
            )
        )


def experts_of(num_experts: int, num_ranks: int, rank: int) -> slice:
    """Return the experts of a rank: consecutive ones, divided as evenly as possible."""
    return span(num_experts, num_ranks, rank)


# How many rows


def exchange(load: Integers, comm: Communicator | None) -> Callable[[], Integers]:
    """Start to tell other ranks what this one sends to their experts; return what waits.

    That returns how many rows each rank sends to each expert of this rank, int64 (ranks, experts).
    `load` are the rows that this rank sends to each expert (`Routing.load`).  All ranks of `comm`
    call this: each sends every other one 8 bytes for each of its experts.
    """
    if comm is None:
        return lambda: load[None]
    owned = even_counts(len(load), comm.size)
    shape = comm.size, owned[comm.rank]
    counts = SentReceived(owned, (owned[comm.rank],) * comm.size)
    work = comm.all_to_all(load, counts=counts, algorithm=ALGORITHM, async_op=True)
    return lambda: work.wait().reshape(shape)


def dropless(routing: Routing, loads: Integers, rank: int = 0, num_parts: int = 1) -> list[Part]:
    """Return the parts of a dispatch of exactly the rows that are routed.

    `loads` is what `exchange` has found on this `rank`.  The parts are those of `Division`.
    """
    mine = experts_of(routing.num_experts, len(loads), rank)
    kept = np.flatnonzero(~routing.is_dropped)
    by_expert = kept[stable_order(routing.expert[kept], routing.num_experts)]
    starts, order = np.cumsum(routing.load) - routing.load, own_last(routing, len(loads), rank)
    parts = []
    for i in range(num_parts):
        division = Division(routing.num_experts, len(loads), num_parts, i)
        sent, first = division.of(routing.load)
        stops = starts + first + sent
        of_expert = [by_expert[a:b] for a, b in zip(starts + first, stops, strict=True)]
        entry = np.concatenate([by_expert[:0], *(of_expert[expert] for expert in order)])
        arriving = division.of(loads, mine)[0]
        parts.append(_part(routing, rank, entry, np.arange(len(entry)), sent, arriving))
    return parts


def own_last(routing: Routing, num_ranks: int, rank: int) -> list[int]:
    """Return all experts in the order of send buffers: those of this `rank` are the last."""
    mine = experts_of(routing.num_experts, num_ranks, rank)
    experts = range(routing.num_experts)
    return [*experts[: mine.start], *experts[mine.stop :], *experts[mine]]


class Division(NamedTuple):
    """What part `i` of `num_parts` has of the rows for each expert.

    If each rank has at least so many experts, a part has all rows of some experts of each rank:
    products of large matrices take less time than those of several small ones.  Otherwise it has
    some rows of each expert, divided as evenly as possible.
    """

    num_experts: int
    num_ranks: int
    num_parts: int
    i: int

    def of(self, totals: Integers, experts: slice = slice(None)) -> tuple[Integers, Integers]:
        """Return how many of the `totals` (..., experts) this part has, and from which on."""
        if self.num_parts > self.num_experts // self.num_ranks:
            each, rest = np.divmod(totals, self.num_parts)
            return each + (self.i < rest), self.i * each + np.minimum(self.i, rest)
        return totals * _is_in_part(*self)[experts], np.zeros_like(totals)


@lru_cache(maxsize=1024)
def _is_in_part(num_experts: int, num_ranks: int, num_parts: int, i: int) -> Flags:
    """Return which experts are in part `i`, if parts have whole experts."""
    found = np.zeros(num_experts, bool)
    for rank in range(num_ranks):
        owned = experts_of(num_experts, num_ranks, rank)
        found[owned][span(length(owned), num_parts, i)] = True
    return found


def stable_order(keys: Integers, stop: int) -> Integers:
    """Return what sorts `keys` from 0 to below `stop`, equal ones in the order that they have.

    NumPy sorts integers of up to two bytes in linear time.
    """
    return np.argsort(keys.astype(np.min_scalar_type(max(stop - 1, 0))), kind="stable")


def distinct_order(keys: Integers) -> Integers:
    """Return what sorts `keys`, which are not negative and all different, in linear time."""
    found = np.full(keys.max(initial=-1) + 1, -1)
    found[keys] = np.arange(len(keys))
    return found[found >= 0]


def padded(
    routing: Routing,
    capacity: int,
    groups: Sequence[int],
    rank: int,
    num_parts: int = 1,
) -> list[Part]:
    """Return the parts of a dispatch with a row for each expert, group and slot.

    Parameters
    ----------
    routing : Routing
    capacity : int
        The slots of each expert for a group; at least as many as are used.
    groups : sequence of int
        The numbers of groups of all ranks.
    rank : int
        This rank.
    num_parts : int
        The parts are those of `Division`, of slots in place of rows.
    """
    kept = np.flatnonzero(~routing.is_dropped)
    mine = experts_of(routing.num_experts, len(groups), rank)
    order = own_last(routing, len(groups), rank)
    slots = np.full(routing.num_experts, capacity, np.int64)
    parts = []
    for i in range(num_parts):
        size, first = Division(routing.num_experts, len(groups), num_parts, i).of(slots)
        slot, expert = routing.slot - first[routing.expert], routing.expert
        entry = kept[((slot >= 0) & (slot < size[expert]))[kept]]
        slot, expert = slot[entry], expert[entry]
        sent = groups[rank] * size
        starts = np.empty_like(sent)
        starts[order] = np.cumsum(sent[order]) - sent[order]
        place = starts[expert] + routing.group[entry] * size[expert] + slot
        by_place = distinct_order(place)
        arriving = np.outer(groups, size[mine])
        parts.append(_part(routing, rank, entry[by_place], place[by_place], sent, arriving))
    return parts


def _part(
    routing: Routing, rank: int, entry: Integers, place: Integers, sent: Integers,
    arriving: Integers,
) -> Part:  # fmt: skip
    """Return a part of these entries, with the rows `sent` to each expert and `arriving` here."""
    return Part(
        entry, routing.token[entry], place, tuple(_by_rank(sent, len(arriving))),
        tuple(arriving.sum(axis=1).tolist()), _segments(arriving, rank), rank,
    )  # fmt: skip


def _by_rank(load: Integers, num_ranks: int) -> list[int]:
    """Return the sum of a `load`, int64 (experts,), over the experts of each rank."""
    ends = list(accumulate(load.tolist(), initial=0))
    owned = (experts_of(len(load), num_ranks, rank) for rank in range(num_ranks))
    return [ends[experts.stop] - ends[experts.start] for experts in owned]


def _segments(arriving: Integers, rank: int) -> tuple[tuple[slice, ...], ...]:
    """Return `Part.segments`."""
    away = np.where(np.arange(len(arriving))[:, None] == rank, 0, arriving)
    stops = np.cumsum(away).reshape(away.shape)
    stops[rank] = np.cumsum(arriving[rank])
    starts = stops - arriving
    return tuple(
        tuple(slice(a, b) for a, b in zip(*each, strict=True))
        for each in zip(starts.T.tolist(), stops.T.tolist(), strict=True)
    )


def tables(loads: Iterable[Integers], num_ranks: int) -> list[list[int]]:
    """Return the rows from each rank to each, for the rows that ranks send to each expert.

    `loads` are int64 (experts,), of each rank.
    """
    return [_by_rank(load, num_ranks) for load in loads]
