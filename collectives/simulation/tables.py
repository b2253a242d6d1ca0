"""The programs of all ranks as one table, with every message matched to its receive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.programs import Kind, Program, Row
from collectives.simulation.machine import Machine
from collectives.simulation.network import Ints, Network
from collectives.simulation.world import (
    COST,
    MESSAGE,
    RANK,
    ROW,
    Records,
    World,
    cost_of,
    initial_world,
    zeros,
)

_WORK = Kind.COPY  # the kind of all rows that copy, combine or divide
_KIND, _PEER, _SIZE, _SLOT = (Row._fields.index(x) for x in ("kind", "peer", "size", "slot"))


class Messages(NamedTuple):
    """All messages, in the order in which each rank sends them, with their sizes in bytes."""

    sources: Ints
    destinations: Ints
    sizes: Ints


class Rows(NamedTuple):
    """The rows of a program, of which adjacent copies and combinations are one row of work.

    Attributes
    ----------
    kinds, slots, sizes : array
        The kind, the (first) slot and the bytes of each row.
    peers : array
        The peer of each row; or, of a row that waits, for how many slots.
    seconds : array
        How long each row of work takes; 0 for the others.
    num_slots : int
        The number of slots of the program.
    """

    kinds: NDArray[np.int8]
    peers: NDArray[np.int32]
    sizes: Ints
    slots: NDArray[np.int32]
    seconds: NDArray[np.float64]
    num_slots: int

    def moved(self, by: int, num_ranks: int) -> Rows:
        """Return the rows of a rank that does the same as this one, with peers moved on `by`."""
        return self.renamed((np.arange(num_ranks) + by) % num_ranks)

    def renamed(self, names: Ints) -> Rows:
        """Return the rows with peer `names[i]` in place of peer i."""
        is_message = self.kinds <= Kind.SEND
        peers = self.peers.copy()
        peers[is_message] = names[peers[is_message]]
        return self._replace(peers=peers)

    def equals(self, other: Rows) -> bool:
        """Return whether two ranks do the same."""
        pairs: Iterable[tuple[Any, Any]] = zip(self, other, strict=True)
        return all(np.array_equal(*pair) for pair in pairs)


NO_ROWS = Rows(
    np.zeros(0, np.int8),
    np.zeros(0, np.int32),
    np.zeros(0, np.int64),
    np.zeros(0, np.int32),
    np.zeros(0, np.float64),
    0,
)


def at_once(calls: Sequence[Rows]) -> Rows:
    """Return the rows of a rank that makes some calls at the same time.

    The rank begins all calls, and then waits.  Raises ValueError for several calls of which one has
    several rounds.
    """
    if len(calls) < 2:
        return calls[0] if calls else NO_ROWS
    if any(np.count_nonzero(rows.kinds == Kind.WAIT) > 1 for rows in calls):
        raise ValueError("a rank can make several calls at once only if they have one round")
    rows, num_slots = _joined(calls), [rows.num_slots for rows in calls]
    firsts = np.repeat(np.cumsum(num_slots) - num_slots, [len(rows.kinds) for rows in calls])
    order = np.argsort(rows.kinds, kind="stable")  # messages, then waits, then work
    return Rows(
        rows.kinds[order],
        rows.peers[order],
        rows.sizes[order],
        (rows.slots + firsts).astype(np.int32)[order],
        rows.seconds[order],
        rows.num_slots,
    )


def work_rates(machine: Machine) -> NDArray[np.float64]:
    """Return the seconds per byte of each `Kind` of row; 0 for rows that are not work."""
    rates = np.zeros(len(Kind))
    rates[Kind.COPY] = machine.copy_seconds_per_byte
    rates[[Kind.COMBINE, Kind.DIVIDE]] = machine.combine_seconds_per_byte
    return rates


def rows_of(program: Program, machine: Machine) -> Rows:
    """Return the rows of a program on a machine."""
    kinds, peers, sizes, slots = program.rows[:, [_KIND, _PEER, _SIZE, _SLOT]].T
    seconds, kinds = work_rates(machine)[kinds] * sizes, np.minimum(kinds, _WORK)
    is_first = np.ones(len(kinds), bool)
    is_first[1:] = (kinds[1:] != _WORK) | (kinds[:-1] != _WORK)
    starts = np.flatnonzero(is_first)
    peers, sizes = np.where(kinds == Kind.WAIT, sizes, peers), np.where(kinds < _WORK, sizes, 0)
    return Rows(
        kinds[starts].astype(np.int8),
        peers[starts].astype(np.int32),
        sizes[starts],
        slots[starts].astype(np.int32),
        np.add.reduceat(seconds, starts) if len(starts) else seconds,
        program.num_slots,
    )


def world_of(
    rows_of_ranks: Sequence[Rows], machine: Machine, network: Network, slowness: NDArray[np.float64]
) -> tuple[World, Messages]:
    """Return the world in which the rows of each rank run, and all messages.

    The first ranks stand for all ranks: rank r + n does what rank r does, with all peers moved on
    by n, the number of ranks that have rows.

    Raises ValueError if sends and receives do not match.
    """
    num_programs = len(rows_of_ranks)
    lengths = [len(rows.kinds) for rows in rows_of_ranks]
    stops = np.cumsum(lengths)
    starts = stops - lengths
    rows = _joined(rows_of_ranks)
    owners = np.repeat(np.arange(num_programs), lengths)
    num_slots = np.cumsum([0, *(rows.num_slots for rows in rows_of_ranks)])
    slots = rows.slots + num_slots[owners]
    sends, receives = (np.flatnonzero(rows.kinds == kind) for kind in (Kind.SEND, Kind.RECEIVE))
    sent = Messages(owners[sends], rows.peers[sends].astype(np.int64), rows.sizes[sends])
    received = _received(rows, owners, receives, num_programs, network.num_ranks)
    matched = _matched(sent, received, network.num_ranks)
    numbers = rows.peers.copy()
    numbers[sends], numbers[receives] = np.arange(len(sends)), matched
    table = zeros(
        len(numbers), ROW, kind=rows.kinds, slot=slots, number=numbers, seconds=rows.seconds
    )
    costs, links = _costs(sent, machine, network)
    messages = zeros(
        len(sends),
        MESSAGE,
        further=np.maximum(sent.sizes - 1, 0),
        source=sent.sources,
        destination=sent.destinations % num_programs,
        send_slot=slots[sends],
        cost=links,
    )
    messages.receive_slot[matched] = slots[receives]
    ranks = zeros(
        num_programs,
        RANK,
        row=starts,
        stop=stops,
        work_known=-1,
        slowness=slowness,
        clock=slowness * machine.call_seconds,
    )
    world = initial_world(table, messages, costs, ranks, len(network.classes), num_slots[-1])
    return world, sent


def _joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of several ranks or calls, one after the other."""
    kinds, peers, sizes, slots, seconds = (
        np.concatenate([rows[column] for rows in parts]) for column in range(5)
    )
    return Rows(kinds, peers, sizes, slots, seconds, sum(rows.num_slots for rows in parts))


def _received(
    rows: Rows, ranks: Ints, receives: Ints, num_programs: int, num_ranks: int
) -> Messages:
    """Return the messages that are received, with senders moved to ranks with a program."""
    sources = rows.peers[receives].astype(np.int64)
    moved = sources - sources % num_programs
    destinations = (ranks[receives] - moved) % num_ranks
    return Messages(sources - moved, destinations, rows.sizes[receives])


def _matched(sent: Messages, received: Messages, num_ranks: int) -> Ints:
    """Return the number of the message of each receive.

    Between two ranks, messages arrive in the order of their sends.  Raises ValueError if a receive
    has no message, or one of another size.
    """
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


def _costs(messages: Messages, machine: Machine, network: Network) -> tuple[Records, Ints]:
    """Return the costs of each link of the machine as records, and each message's record number."""
    costs: list[tuple[float, ...]] = []
    classes = network.classify(messages.sources, messages.destinations)
    records = np.zeros(len(classes), np.int64)
    for port, name in enumerate(network.classes):
        mine, links = classes == port, machine.links.get(name, ())
        if mine.any() and not links:
            raise ValueError(f"a message needs a link {name}, which the machine does not have")
        limits = [link.up_to_bytes for link in links]
        records[mine] = len(costs) + np.searchsorted(limits, messages.sizes[mine])
        costs += [cost_of(link, port) for link in links]
    return np.array(costs, COST).view(np.recarray), records
