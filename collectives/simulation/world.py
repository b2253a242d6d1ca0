"""What the loops work on: arrays of records, and the dtypes of these."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.simulation.machine import Link

Ints = NDArray[np.int32]
# Arrays of records; mypy does not know their fields.
Records = Any

# A row of a program.  `slot`: the (first) slot; `number`: the message, or how many slots a row
# waits for; `seconds`: of copies and combinations.
ROW = np.dtype([("seconds", "f8"), ("slot", "i4"), ("number", "i4"), ("kind", "i1")], align=True)

# A rank and its processor: its next row and its last; `clock`, when the processor is free;
# `slowness`, by which its own work takes longer; work that is to be done, and when that became
# known (-1: there is none); the slots that it waits for, and how many of them are open.
RANK = np.dtype(
    [
        ("row", "i8"),
        ("stop", "i8"),
        ("clock", "f8"),
        ("slowness", "f8"),
        ("work", "f8"),
        ("work_known", "i8"),
        ("wait_first", "i4"),
        ("wait_stop", "i4"),
        ("num_open", "i4"),
    ],
    align=True,
)

# A port of a rank: when it is free in both directions, and two queues of messages, which are linked
# by `following`.
PORT = np.dtype(
    [
        ("send_free", "f8"),
        ("receive_free", "f8"),
        ("first_to_send", "i4"),
        ("last_to_send", "i4"),
        ("first_arrived", "i4"),
        ("last_arrived", "i4"),
    ],
    align=True,
)

# A message.  `further`: its bytes without the first; `cost`: the row of costs; `route`: that of
# routes; `known`: the larger, the later; `phase`: see `event_loop.py`.
MESSAGE = np.dtype(
    [
        ("further", "i8"),
        ("known", "i8"),
        ("source", "i4"),
        ("destination", "i4"),
        ("send_slot", "i4"),
        ("receive_slot", "i4"),
        ("route", "i4"),
        ("following", "i4"),
        ("cost", "i1"),
        ("phase", "i1"),
        ("is_posted", "?"),
    ],
    align=True,
)

# What a message costs: the letters of a `Link`, and the port of its class.
COST = np.dtype(
    [
        ("overhead", "f8"),
        ("overhead_per_byte", "f8"),
        ("latency", "f8"),
        ("gap", "f8"),
        ("gap_per_byte", "f8"),
        ("is_rendezvous", "?"),
        ("port", "i4"),
    ],
    align=True,
)

# The time of an event, since when it is known, and its place in the heap (-1: none).
EVENT = np.dtype([("time", "f8"), ("known", "i8"), ("place", "i4")], align=True)

# A flow: a message on the network; -1: none.  `left`: its bytes that are left at the time `since`;
# `limit` and `rate`: bytes a second; `entered`: its route.
FLOW = np.dtype(
    [
        ("left", "f8"),
        ("since", "f8"),
        ("limit", "f8"),
        ("rate", "f8"),
        ("message", "i4"),
        ("entered", "i4"),
        ("is_changed", "?"),
        ("is_listed", "?"),
    ],
    align=True,
)

# A link.  `demand`: the sum of the limits of the flows on it; `number`: how many these are; `head`:
# the first of them.  While rates are decided: `free`, the bytes a second that are left; `num_open`,
# the flows whose rates are open; `share`, what each of them could have.
LINK = np.dtype(
    [
        ("capacity", "f8"),
        ("demand", "f8"),
        ("free", "f8"),
        ("share", "f8"),
        ("number", "i4"),
        ("num_open", "i4"),
        ("head", "i4"),
        ("is_listed", "?"),
    ],
    align=True,
)

# A flow on a link: the next and the previous on this link.
NODE = np.dtype([("after", "i4"), ("before", "i4")])


class World(NamedTuple):
    """All ranks, their programs and their messages.

    Attributes
    ----------
    rows, ranks, ports, messages, costs, events : array of records
        See above.
    is_done : array of bool
        Whether each slot is done.
    heap : array of int
        The events in the order of their times.
    ready : array of int
        Ranks that need not wait any more.
    touched : array of int
        Events whose times must be decided.
    counters : array of int
        How many ranks are ready and how many events touched, among others.
    """

    rows: Records
    ranks: Records
    ports: Records
    messages: Records
    costs: Records
    events: Records
    is_done: NDArray[np.bool_]
    heap: Ints
    ready: Ints
    touched: Ints
    counters: NDArray[np.int64]


class Flows(NamedTuple):
    """What is on the network.

    Attributes
    ----------
    flows : array of records
        Flow rank * ports + port is the message that this port sends.
    ends : array of float
        When each flow will have ended; infinite if it has no rate yet, or no message.
    links : array of records
        The links.
    nodes : array of records
        One for each flow and link on its way.
    routes : array of int
        The links on the way of messages, filled up with -1.
    changed, moved : array of int
        Flows that began or ended, and flows that get new rates.
    listed : array of int
        Links whose flows get new rates.
    ending : array of int
        The flows that end first.
    counters : array of int
        How many flows are changed, moved and ending, and how many links listed.
    clocks : array of float
        The time at which the links must be divided anew, and the part of its time for which a
        message may wait for that.
    """

    flows: Records
    ends: NDArray[np.float64]
    links: Records
    nodes: Records
    routes: Ints
    changed: Ints
    moved: Ints
    listed: Ints
    ending: Ints
    counters: NDArray[np.int64]
    clocks: NDArray[np.float64]


def zeros(shape: int | tuple[int, ...], dtype: np.dtype[Any], /, **values: Any) -> Records:
    """Return an array of records that are 0, except for the fields that are given."""
    records = np.zeros(shape, dtype).view(np.recarray)
    for field, value in values.items():
        records[field] = value
    return records


def cost_of(link: Link, port: int) -> tuple[float, ...]:
    """Return the costs of a link of the machine as a record."""
    return (
        *(link.overhead_seconds, link.overhead_seconds_per_byte, link.latency_seconds),
        *(link.gap_seconds, link.seconds_per_byte, link.is_rendezvous, port),
    )


def initial_world(
    rows: Records, messages: Records, costs: Records, ranks: Records, num_ports: int, num_slots: int
) -> World:
    """Return the world before anything has happened."""
    num_ranks, num_events = len(ranks), len(ranks) + len(messages)
    nothing = dict.fromkeys(("first_to_send", "last_to_send", "first_arrived", "last_arrived"), -1)
    return World(
        rows=rows,
        ranks=ranks,
        ports=zeros((num_ranks, num_ports), PORT, **nothing),
        messages=messages,
        costs=costs,
        events=zeros(num_events, EVENT, place=-1),
        is_done=np.zeros(num_slots, bool),
        heap=np.zeros(num_events, np.int32),
        ready=np.arange(num_ranks, dtype=np.int32),
        touched=np.arange(num_events, dtype=np.int32),
        counters=np.array([0, 0, num_ranks, num_ranks]),
    )


def flows_of(
    routes: Ints, capacities: NDArray[np.float64], num_flows: int, resolution: float
) -> Flows:
    """Return a network on which no message is."""
    return Flows(
        flows=zeros(num_flows, FLOW, message=-1, entered=-1),
        ends=np.full(num_flows, np.inf),
        links=zeros(len(capacities), LINK, capacity=capacities, head=-1),
        nodes=zeros(num_flows * routes.shape[1], NODE),
        routes=routes,
        changed=np.zeros(num_flows, np.int32),
        moved=np.zeros(num_flows, np.int32),
        listed=np.zeros(len(capacities), np.int32),
        ending=np.zeros(num_flows, np.int32),
        counters=np.zeros(4, np.int64),
        clocks=np.array([np.inf, resolution]),
    )
