"""The programs of all ranks as one set of arrays, with every message matched to its receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.programs import Kind, Program, Row
from collectives.simulation.machine import Link, Machine

Ints = NDArray[np.int64]
# The class of the link between each source and destination, as an index into a list of classes.
Classify = Callable[[Ints, Ints], Ints]

_COLUMNS = [Row._fields.index(name) for name in ("kind", "peer", "size", "slot")]
RECEIVE, SEND, WAIT, WORK = Kind.RECEIVE, Kind.SEND, Kind.WAIT, Kind.COPY  # the kinds in a table


class LinkCosts(NamedTuple):
    """A row of `Tables.link_costs`: the letters of a `Link`, and the port of its class."""

    overhead: float
    overhead_per_byte: float
    latency: float
    gap: float
    gap_per_byte: float
    is_rendezvous: float
    port: float


class Tables(NamedTuple):
    """The programs of all ranks, one after the other.

    `first_rows`: where the rows of each rank begin, and the end.  Of each row: `kinds`; `slots`,
    the (first) slot; `numbers`, the message, or how many slots a row waits for; `seconds` of work
    (copies and combinations).  Of each message: `sources`, `destinations`, `send_slots`,
    `receive_slots`, `further`, its bytes without the first, and `links`, its row of `link_costs`.
    """

    first_rows: Ints
    kinds: NDArray[np.int8]
    slots: NDArray[np.int32]
    numbers: NDArray[np.int32]
    seconds: NDArray[np.float64]
    sources: NDArray[np.int32]
    destinations: NDArray[np.int32]
    send_slots: NDArray[np.int32]
    receive_slots: NDArray[np.int32]
    further: Ints
    links: NDArray[np.int8]
    link_costs: NDArray[np.float64]


class Rows(NamedTuple):
    """The rows of one rank.  `peers`: or how many slots a row waits for.  `sizes`: in bytes."""

    kinds: NDArray[np.int8]
    peers: Ints
    sizes: Ints
    slots: Ints
    seconds: NDArray[np.float64]


class Messages(NamedTuple):
    """All messages, in the order in which each rank sends them.  `sizes`: in bytes."""

    sources: Ints
    destinations: Ints
    sizes: Ints


def rows_of(program: Program, machine: Machine) -> Rows:
    """The rows of a program, with adjacent copies and combinations joined into one row of work."""
    kinds, peers, sizes, slots = program.rows[:, _COLUMNS].T
    rates = np.zeros(len(Kind))
    rates[Kind.COPY] = machine.copy_seconds_per_byte
    rates[[Kind.COMBINE, Kind.DIVIDE]] = machine.combine_seconds_per_byte
    seconds, kind = rates[kinds] * sizes, np.minimum(kinds, WORK).astype(np.int8)
    is_first = np.ones(len(kind), bool)
    is_first[1:] = (kind[1:] != WORK) | (kind[:-1] != WORK)
    starts = np.flatnonzero(is_first)
    summed = np.add.reduceat(seconds, starts) if len(starts) else seconds
    numbers = np.where(kind == WAIT, sizes, peers)[starts]
    return Rows(kind[starts], numbers, sizes[starts], slots[starts], summed)


def tables_of(
    programs: Iterable[Program], machine: Machine, classes: list[str], classify: Classify
) -> tuple[Tables, Messages]:
    """The tables of all ranks' programs.  Raises ValueError if sends and receives do not match."""
    num_slots, all_rows = [0], []
    for program in programs:
        all_rows.append(rows_of(program, machine))
        num_slots.append(program.num_slots)
    first_rows = np.cumsum([0, *(len(rows.kinds) for rows in all_rows)])
    ranks = np.repeat(np.arange(len(all_rows)), np.diff(first_rows))
    rows = Rows(*(np.concatenate(each) for each in zip(*all_rows, strict=True)))
    slots = rows.slots + np.cumsum(num_slots)[ranks]
    sends, receives = np.flatnonzero(rows.kinds == SEND), np.flatnonzero(rows.kinds == RECEIVE)
    sent = Messages(ranks[sends], rows.peers[sends], rows.sizes[sends])
    matched = _matched(sent, Messages(rows.peers[receives], ranks[receives], rows.sizes[receives]))
    numbers, receive_slots = rows.peers.copy(), np.empty(len(sends), np.int32)
    numbers[sends], numbers[receives] = np.arange(len(sends)), matched
    receive_slots[matched] = slots[receives]
    costs, links = links_of(sent, machine, classes, classify)
    tables = Tables(
        first_rows=first_rows,
        kinds=rows.kinds,
        slots=slots.astype(np.int32),
        numbers=numbers.astype(np.int32),
        seconds=rows.seconds,
        sources=sent.sources.astype(np.int32),
        destinations=sent.destinations.astype(np.int32),
        send_slots=slots[sends].astype(np.int32),
        receive_slots=receive_slots,
        further=np.maximum(sent.sizes - 1, 0),
        links=links,
        link_costs=costs,
    )
    return tables, sent


def _matched(sent: Messages, received: Messages) -> Ints:
    """The message of each receive: between two ranks, messages arrive in the order of their sends.

    Raises ValueError if there is none, or one of another size.
    """
    num_ranks = 1 + max(int(each.max(initial=0)) for each in (*sent[:2], *received[:2]))
    sends, receives = (
        np.argsort(sources * num_ranks + destinations, kind="stable")
        for sources, destinations, _ in (sent, received)
    )
    if len(sends) != len(receives) or any(
        (a[sends] != b[receives]).any() for a, b in zip(sent, received, strict=True)
    ):
        raise ValueError("the ranks do not receive what they send each other")
    matched = np.empty(len(sends), np.int64)
    matched[receives] = sends
    return matched


def links_of(
    messages: Messages, machine: Machine, classes: list[str], classify: Classify
) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """What messages cost, one row for each link of the machine, and the row of each message."""
    costs: list[LinkCosts] = []
    limits, firsts = [], []
    for port, name in enumerate(classes):
        firsts.append(len(costs))
        links = machine.links.get(name, ())
        limits.append([link.up_to_bytes for link in links])
        costs += [_costs(link, port) for link in links]
    found = classify(messages.sources, messages.destinations)
    rows = np.zeros(len(found), np.int8)
    for each, name in enumerate(classes):
        mine = found == each
        if mine.any() and not limits[each]:
            raise ValueError(f"a message needs a link {name}, which the machine does not have")
        rows[mine] = firsts[each] + np.searchsorted(limits[each], messages.sizes[mine])
    return np.array(costs), rows


def _costs(link: Link, port: int) -> LinkCosts:
    return LinkCosts(
        *(link.overhead_seconds, link.overhead_seconds_per_byte, link.latency_seconds),
        *(link.gap_seconds, link.seconds_per_byte, link.is_rendezvous, port),
    )
