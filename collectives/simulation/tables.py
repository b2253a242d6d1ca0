"""The programs of all ranks as one table, with every message matched to its receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.programs import Kind, Program, Row
from collectives.simulation.machine import Machine
from collectives.simulation.network import Ints, Network
from collectives.simulation.world import COST, MESSAGE, RANK, ROW, Records, World, cost_of, zeros
from collectives.simulation.world import world_of as assembled

_WORK = Kind.COPY  # the kind of all rows that copy, combine or divide
_KIND, _PEER, _SIZE, _SLOT = (Row._fields.index(x) for x in ("kind", "peer", "size", "slot"))


class Messages(NamedTuple):
    """All messages, in the order in which each rank sends them.  `sizes`: in bytes."""

    sources: Ints
    destinations: Ints
    sizes: Ints


class _Rows(NamedTuple):
    """Rows of programs.  `peers`: or how many slots a row waits for."""

    kinds: Ints
    peers: Ints
    sizes: Ints
    slots: Ints
    seconds: NDArray[np.float64]


def work_rates(machine: Machine) -> NDArray[np.float64]:
    """The seconds per byte of each `Kind` of row; 0 for those that are not work."""
    rates = np.zeros(len(Kind))
    rates[Kind.COPY] = machine.copy_seconds_per_byte
    rates[[Kind.COMBINE, Kind.DIVIDE]] = machine.combine_seconds_per_byte
    return rates


def _rows_of(program: Program, machine: Machine) -> _Rows:
    """The rows of a program, of which adjacent copies and combinations are one row of work."""
    kinds, peers, sizes, slots = program.rows[:, [_KIND, _PEER, _SIZE, _SLOT]].T
    seconds, kinds = work_rates(machine)[kinds] * sizes, np.minimum(kinds, _WORK)
    is_first = np.ones(len(kinds), bool)
    is_first[1:] = (kinds[1:] != _WORK) | (kinds[:-1] != _WORK)
    starts = np.flatnonzero(is_first)
    summed = np.add.reduceat(seconds, starts) if len(starts) else seconds
    peers = np.where(kinds == Kind.WAIT, sizes, peers)
    return _Rows(kinds[starts], peers[starts], sizes[starts], slots[starts], summed)


def world_of(
    programs: Sequence[Program], machine: Machine, network: Network, slowness: NDArray[np.float64]
) -> tuple[World, Messages]:
    """The world in which these programs run, and all their messages.

    The programs of the first ranks stand for those of all ranks: rank r + n does what rank r does,
    with all peers moved on by n, the number of programs.

    Raises ValueError if sends and receives do not match.
    """
    each = [_rows_of(program, machine) for program in programs]
    stops = np.cumsum([len(rows.kinds) for rows in each])
    starts = stops - [len(rows.kinds) for rows in each]
    rows = _Rows(*(np.concatenate(column) for column in zip(*each, strict=True)))
    owners = np.repeat(np.arange(len(each)), stops - starts)
    num_slots = np.cumsum([0, *(program.num_slots for program in programs)])
    slots = rows.slots + num_slots[owners]
    sends, receives = (np.flatnonzero(rows.kinds == kind) for kind in (Kind.SEND, Kind.RECEIVE))
    sent = Messages(owners[sends], rows.peers[sends], rows.sizes[sends])
    matched = _matched(
        sent, _received(rows, owners, receives, len(each), network.num_ranks), network.num_ranks
    )
    numbers = rows.peers.copy()
    numbers[sends], numbers[receives] = np.arange(len(sends)), matched
    table = zeros(
        len(numbers), ROW, kind=rows.kinds, slot=slots, number=numbers, seconds=rows.seconds
    )
    costs, links = _costs(sent, machine, network)
    messages = zeros(
        len(sends), MESSAGE, further=np.maximum(sent.sizes - 1, 0), source=sent.sources,
        destination=sent.destinations % len(each), send_slot=slots[sends], cost=links,
    )  # fmt: skip
    messages.receive_slot[matched] = slots[receives]
    ranks = zeros(
        len(each), RANK, row=starts, stop=stops, work_known=-1, slowness=slowness,
        clock=slowness * machine.call_seconds,
    )  # fmt: skip
    world = assembled(table, messages, costs, ranks, len(network.classes), num_slots[-1])
    return world, sent


def _received(
    rows: _Rows, ranks: Ints, receives: Ints, num_programs: int, num_ranks: int
) -> Messages:
    """The messages that are received, of which the senders are moved to ranks with a program."""
    sources = rows.peers[receives]
    moved = sources - sources % num_programs
    destinations = (ranks[receives] - moved) % num_ranks
    return Messages(sources - moved, destinations, rows.sizes[receives])


def _matched(sent: Messages, received: Messages, num_ranks: int) -> Ints:
    """The message of each receive: between two ranks, messages arrive in the order of their sends.

    Raises ValueError if there is none, or one of another size.
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
    """What messages cost, a record for each link of the machine, and the record of each message."""
    costs: list[tuple[float, ...]] = []
    found = network.classify(messages.sources, messages.destinations)
    records = np.zeros(len(found), np.int64)
    for port, name in enumerate(network.classes):
        mine, links = found == port, machine.links.get(name, ())
        if mine.any() and not links:
            raise ValueError(f"a message needs a link {name}, which the machine does not have")
        limits = [link.up_to_bytes for link in links]
        records[mine] = len(costs) + np.searchsorted(limits, messages.sizes[mine])
        costs += [cost_of(link, port) for link in links]
    return np.array(costs, COST).view(np.recarray), records
