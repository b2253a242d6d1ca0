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
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from collectives import Communicator, SentReceived, even_counts
from moe.routing import Integers, Routing
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

    `loads` is what `exchange` has found on this `rank`.  The rows of each pair of a source and an
    expert are divided over `num_parts` as evenly as possible.
    """
    kept = np.flatnonzero(~routing.is_dropped)
    by_expert = kept[stable_order(routing.expert[kept], routing.num_experts)]
    starts, order = np.cumsum(routing.load) - routing.load, own_last(routing, len(loads), rank)
    parts = []
    for i in range(num_parts):
        sent, first = share(routing.load, num_parts, i)
        stops = starts + first + sent
        of_expert = [by_expert[a:b] for a, b in zip(starts + first, stops, strict=True)]
        entry = np.concatenate([by_expert[:0], *(of_expert[expert] for expert in order)])
        arriving = share(loads, num_parts, i)[0]
        parts.append(_part(routing, rank, entry, np.arange(len(entry)), sent, arriving))
    return parts


def own_last(routing: Routing, num_ranks: int, rank: int) -> list[int]:
    """Return all experts in the order of send buffers: those of this `rank` are the last."""
    mine = experts_of(routing.num_experts, num_ranks, rank)
    experts = range(routing.num_experts)
    return [*experts[: mine.start], *experts[mine.stop :], *experts[mine]]


def share(totals: Integers, num_parts: int, i: int) -> tuple[Integers, Integers]:
    """Return the size of part `i` of each of some totals, divided evenly, and where it begins."""
    each, rest = np.divmod(totals, num_parts)
    return each + (i < rest), i * each + np.minimum(i, rest)


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
        The slots are divided over so many parts, as evenly as possible.
    """
    kept = np.flatnonzero(~routing.is_dropped)
    mine = experts_of(routing.num_experts, len(groups), rank)
    position = np.argsort(own_last(routing, len(groups), rank))
    parts = []
    for i in range(num_parts):
        slots = span(capacity, num_parts, i)
        slot = routing.slot[kept]
        entry = kept[(slot >= slots.start) & (slot < slots.stop)]
        queue = position[routing.expert[entry]] * groups[rank] + routing.group[entry]
        place = queue * length(slots) + routing.slot[entry] - slots.start
        order = distinct_order(place)
        sent = np.full(routing.num_experts, groups[rank] * length(slots), np.int64)
        arriving = np.outer(groups, np.full(length(mine), length(slots))).astype(np.int64)
        parts.append(_part(routing, rank, entry[order], place[order], sent, arriving))
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
