"""Which rows a rank sends to the ranks of its tokens' experts, and where they are in the buffers.

A rank copies the rows of its tokens into a buffer in the order of the experts, so that the rows for
each rank follow each other, its own last (`SendBuffer`).  An all-to-all exchanges the rows for
others; after the experts another one brings the rows back to where they were (`Exchange`).  Buffers
are of one of two kinds:

- `dropless`: exactly the rows that are routed.  Ranks first tell each other how many
  (`start_loads`).
- `padded`: the same number of rows for each expert and group of tokens, whatever is routed, such as
  the capacity; unused rows are zero.

A dispatch may be divided into parts, so that experts compute one part while another is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from collectives import SentReceived
from moe.exchange.loads import divisions, experts_of, rows_to_ranks
from moe.routing import Integers, Routing
from moe.sums import distinct_order, stable_order


class Part(NamedTuple):
    """One exchange of a dispatch, as one rank sees it.

    Attributes
    ----------
    entry : array
        The entries of the routing that this part sends, int64 (n,).
    token : array
        The token of each entry.
    row : array
        The row of the send buffer of each entry, in ascending order.
    sent, received : tuple of int
        The rows to each rank, and from each rank.
    segments : tuple of (tuple of slice)
        For each expert of this rank, its rows from each source: a slice of the rows that were
        received from other ranks, or, if the source is this rank, of its own rows.
    rank : int
        The index of this rank.
    """

    entry: Integers
    token: Integers
    row: Integers
    sent: tuple[int, ...]
    received: tuple[int, ...]
    segments: tuple[tuple[slice, ...], ...]
    rank: int

    @property
    def num_sent(self) -> int:
        """The rows of the send buffer; the last of them are this rank's own."""
        return sum(self.sent)

    @property
    def num_away(self) -> int:
        """The rows of the send buffer that go to other ranks."""
        return self.num_sent - self.sent[self.rank]

    @property
    def counts(self) -> SentReceived:
        """The rows to and from other ranks."""
        sent, received = list(self.sent), list(self.received)
        sent[self.rank] = received[self.rank] = 0
        return SentReceived(tuple(sent), tuple(received))


def dropless(routing: Routing, loads: Integers, rank: int = 0, num_parts: int = 1) -> list[Part]:
    """Return the parts of a dispatch of exactly the rows that are routed.

    `loads` is what `start_loads` has received on this `rank`.  `divisions` has the parts.
    """
    mine = experts_of(routing.num_experts, len(loads), rank)
    kept = np.flatnonzero(~routing.is_dropped)
    by_expert = kept[stable_order(routing.expert[kept], routing.num_experts)]
    starts, order = np.cumsum(routing.load) - routing.load, own_last(routing, len(loads), rank)
    parts = []
    for division in divisions(routing.num_experts, len(loads), num_parts):
        sent, first = division.of(routing.load)
        stops = starts + first + sent
        of_expert = [by_expert[a:b] for a, b in zip(starts + first, stops, strict=True)]
        entry = np.concatenate([by_expert[:0], *(of_expert[expert] for expert in order)])
        arriving = division.of(loads, mine)[0]
        parts.append(_part(routing, rank, entry, np.arange(len(entry)), sent, arriving))
    return parts


def padded(
    routing: Routing, capacity: int, groups: Sequence[int], rank: int, num_parts: int = 1
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
        The index of this rank.
    num_parts : int
        The number of parts; `divisions` has them, of slots in place of rows.
    """
    kept = np.flatnonzero(~routing.is_dropped)
    mine = experts_of(routing.num_experts, len(groups), rank)
    order = own_last(routing, len(groups), rank)
    slots = np.full(routing.num_experts, capacity, np.int64)
    parts = []
    for division in divisions(routing.num_experts, len(groups), num_parts):
        size, first = division.of(slots)
        slot, expert = routing.slot - first[routing.expert], routing.expert
        entry = kept[((slot >= 0) & (slot < size[expert]))[kept]]
        slot, expert = slot[entry], expert[entry]
        sent = groups[rank] * size
        starts = np.empty_like(sent)
        starts[order] = np.cumsum(sent[order]) - sent[order]
        row = starts[expert] + routing.group[entry] * size[expert] + slot
        by_row = distinct_order(row)
        arriving = np.outer(groups, size[mine])
        parts.append(_part(routing, rank, entry[by_row], row[by_row], sent, arriving))
    return parts


def own_last(routing: Routing, num_ranks: int, rank: int) -> list[int]:
    """Return all experts in the order of send buffers: the experts of this `rank` are the last."""
    mine = experts_of(routing.num_experts, num_ranks, rank)
    experts = range(routing.num_experts)
    return [*experts[: mine.start], *experts[mine.stop :], *experts[mine]]


def _part(
    routing: Routing, rank: int, entry: Integers, row: Integers, sent: Integers, arriving: Integers
) -> Part:
    """Return a part of these entries, with the rows `sent` to each expert and `arriving` here."""
    return Part(
        entry,
        routing.token[entry],
        row,
        tuple(rows_to_ranks(sent, len(arriving)).tolist()),
        tuple(arriving.sum(axis=1).tolist()),
        _segments(arriving, rank),
        rank,
    )


def _segments(arriving: Integers, rank: int) -> tuple[tuple[slice, ...], ...]:
    """Return the `segments` of a part."""
    away = np.where(np.arange(len(arriving))[:, None] == rank, 0, arriving)
    stops = np.cumsum(away).reshape(away.shape)
    stops[rank] = np.cumsum(arriving[rank])
    starts = stops - arriving
    return tuple(
        tuple(map(slice, starts_of_expert, stops_of_expert))
        for starts_of_expert, stops_of_expert in zip(
            starts.T.tolist(), stops.T.tolist(), strict=True
        )
    )
