"""Send tokens to the ranks that have their experts, and what the experts compute back.

A rank copies the rows of its tokens into a buffer in the order of the experts, so that the rows for
each rank follow each other; an all-to-all exchanges the buffers; and after the experts another one
brings the rows back to where they were.  Buffers are of one of two kinds:

- `dropless`: exactly the rows that are routed.  Ranks tell each other first how many (`exchange`).
- `padded`: the same number of rows for each expert and group of tokens, whatever is routed, such as
  the capacity; unused rows are zero.

A dispatch may be divided into parts, so that the experts compute one of them while another is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from collectives import Communicator, SentReceived, even_counts
from moe.payload import decode, encode
from moe.routing import Integers, Routing, slots_of
from parallel.nn import Array, cast, namespace_of
from parallel.placement import length, span

ALGORITHM = "linear"  # of all exchanges
Finish: TypeAlias = Callable[[], Array]  # waits for a call and returns its result


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
        For each expert of this rank, its rows of the received buffer, one slice for each source.
    """

    entry: Integers
    token: Integers
    place: Integers
    sent: tuple[int, ...]
    received: tuple[int, ...]
    segments: tuple[tuple[slice, ...], ...]

    @property
    def num_sent(self) -> int:
        """The rows of the send buffer."""
        return sum(self.sent)

    @property
    def num_received(self) -> int:
        """The rows of the receive buffer."""
        return sum(self.received)


def experts_of(num_experts: int, num_ranks: int, rank: int) -> slice:
    """Return the experts of a rank: consecutive ones, divided as evenly as possible."""
    return span(num_experts, num_ranks, rank)


# How many rows


def exchange(load: Integers, comm: Communicator | None) -> Integers:
    """Return how many rows each rank sends to each expert of this rank, int64 (ranks, experts).

    `load` are the rows that this rank sends to each expert (`Routing.load`).  All ranks of `comm`
    call this: each sends every other one 8 bytes for each of its experts.
    """
    if comm is None:
        return load[None]
    owned = even_counts(len(load), comm.size)
    received = comm.all_to_all(
        load, counts=SentReceived(owned, (owned[comm.rank],) * comm.size), algorithm=ALGORITHM
    )
    return received.reshape(comm.size, owned[comm.rank])


def dropless(routing: Routing, loads: Integers, num_parts: int = 1) -> list[Part]:
    """Return the parts of a dispatch of exactly the rows that are routed.

    `loads` is what `exchange` returned.  The rows of each pair of a source and an expert are
    divided over `num_parts` as evenly as possible.
    """
    kept = np.flatnonzero(~routing.is_dropped)
    by_expert = kept[np.argsort(routing.expert[kept], kind="stable")]
    ends = np.cumsum(routing.load)
    parts = []
    for i in range(num_parts):
        sent, first = share(routing.load, num_parts, i)
        firsts = (ends - routing.load + first).tolist()
        each = [by_expert[a : a + n] for a, n in zip(firsts, sent.tolist(), strict=True)]
        entry = np.concatenate([by_expert[:0], *each])  # there may be no experts
        arriving = share(loads, num_parts, i)[0]
        parts.append(_part(routing, entry, np.arange(len(entry)), sent, arriving))
    return parts


def share(totals: Integers, num_parts: int, i: int) -> tuple[Integers, Integers]:
    """Return the size of part `i` of each of some totals, divided evenly, and where it begins."""
    each, rest = np.divmod(totals, num_parts)
    return each + (i < rest), i * each + np.minimum(i, rest)


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
    parts = []
    for i in range(num_parts):
        slots = span(capacity, num_parts, i)
        slot = routing.slot[kept]
        entry = kept[(slot >= slots.start) & (slot < slots.stop)]
        queue = routing.expert[entry] * groups[rank] + routing.group[entry]
        place = queue * length(slots) + routing.slot[entry] - slots.start
        order = np.argsort(place)
        sent = np.full(routing.num_experts, groups[rank] * length(slots), np.int64)
        arriving = np.outer(groups, np.full(length(mine), length(slots))).astype(np.int64)
        parts.append(_part(routing, entry[order], place[order], sent, arriving))
    return parts


def _part(
    routing: Routing, entry: Integers, place: Integers, sent: Integers, arriving: Integers
) -> Part:
    """Return a part of these entries, with the rows `sent` to each expert and `arriving` here."""
    ends = list(accumulate(sent.tolist(), initial=0))
    num_ranks = len(arriving)
    owned = [experts_of(routing.num_experts, num_ranks, rank) for rank in range(num_ranks)]
    starts = accumulate(arriving.ravel().tolist(), initial=0)
    segments = [slice(a, b) for a, b in pairwise(starts)]
    num_experts = arriving.shape[1]
    return Part(
        entry, routing.token[entry], place,
        tuple(ends[experts.stop] - ends[experts.start] for experts in owned),
        tuple(arriving.sum(axis=1).tolist()),
        tuple(tuple(segments[i::num_experts]) for i in range(num_experts)),
    )  # fmt: skip


# Rows of tokens


def spread(x: Array, part: Part, weights: Array | None = None) -> Array:
    """Return the send buffer of a part, (rows, dim): the rows of `x` (tokens, dim) in their places.

    `weights` (n,), if given, are factors of the entries.
    """
    xp = namespace_of(x)
    rows = xp.take(x, xp.asarray(part.token), axis=0)
    if weights is not None:
        rows = cast(rows * weights[:, None], x.dtype)
    if len(part.entry) == part.num_sent:  # each row is used
        return rows
    buffer = xp.zeros((part.num_sent, x.shape[1]), dtype=x.dtype)
    buffer[xp.asarray(part.place)] = rows
    return buffer


def add_rows(y: Array, rows: Array, part: Part, weights: Array | None = None) -> None:
    """Add rows of the send buffer of a part to the tokens `y` (tokens, dim) that they came from.

    `weights` (n,), if given, are factors of the entries.  The rows of a token are added in the
    order of its entries.
    """
    xp = namespace_of(y)
    turn = slots_of(part.token, np.ones(len(part.token), bool), y.shape[0])
    for i in range(int(turn.max(initial=-1)) + 1):
        once = np.flatnonzero(turn == i)  # entries of different tokens
        added = cast(xp.take(rows, xp.asarray(part.place[once]), axis=0), y.dtype)
        if weights is not None:
            added = added * xp.take(weights, xp.asarray(once))[:, None]
        y[xp.asarray(part.token[once])] += added


def products(rows: Array, x: Array, part: Part) -> Array:
    """Return the dot product of each entry's row and its token in `x` (tokens, dim), (n,)."""
    xp = namespace_of(x)
    mine = xp.take(rows, xp.asarray(part.place), axis=0)
    return xp.sum(mine * xp.take(x, xp.asarray(part.token), axis=0), axis=-1)


# Messages


def start(
    rows: Array,
    part: Part,
    comm: Communicator | None,
    *,
    is_back: bool = False,
    payload: str = "same",
) -> Finish:
    """Start the exchange of a part; return a function that waits for the received rows.

    `rows` are the send buffer, or what experts made of the received one, if it goes back.  They
    are sent in the form of `payload`.
    """
    sent, dim, dtype = encode(rows, payload), rows.shape[1], rows.dtype
    if comm is None:
        return lambda: decode(sent, payload, dim, dtype)
    counts = SentReceived(part.sent, part.received)
    if is_back:
        counts = SentReceived(part.received, part.sent)
    work = comm.all_to_all(sent, counts=counts, algorithm=ALGORITHM, async_op=True)
    return lambda: decode(work.wait(), payload, dim, dtype)


def tables(loads: Iterable[Integers], num_ranks: int) -> list[list[int]]:
    """Return the rows from each rank to each, for the rows that ranks send to each expert.

    `loads` are int64 (experts,), of each rank.
    """
    found = []
    for load in loads:
        ends = list(accumulate(load.tolist(), initial=0))
        owned = (experts_of(len(load), num_ranks, rank) for rank in range(num_ranks))
        found.append([ends[experts.stop] - ends[experts.start] for experts in owned])
    return found
