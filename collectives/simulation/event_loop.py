"""The loop that runs the programs of all ranks in simulated time, by the rules of LogGOPSim.

Numba compiles it; where numba is missing, Python interprets the same functions.  Every rank has one
processor.  It executes rows in order until it must wait.  Then three things compete for it: the
first of the messages to be sent, the first of the messages that have arrived, and local work.  What
can begin first begins; of several, the one that has been known for longest.

An event is the number of a rank, whose processor may begin something, or `num_ranks` + the number
of a message, which arrives or releases its sender.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import jit
from collectives.programs import Kind
from collectives.simulation.tables import LinkCosts, Tables

if jit.why_unavailable() is None:
    from numba import njit
else:

    def njit(**_):  # type: ignore[no-untyped-def]
        return lambda function: function


Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Ints = NDArray[np.int32]
Bytes = NDArray[np.int8]
Flags = NDArray[np.bool_]

# Compiled code is cached until this file changes, so constants of other files are repeated here.
RECEIVE, SEND, WAIT, WORK = range(4)
OVERHEAD, OVERHEAD_PER_BYTE, LATENCY, GAP, GAP_PER_BYTE, IS_RENDEZVOUS, PORT = range(7)
assert [Kind.RECEIVE, Kind.SEND, Kind.WAIT, Kind.COPY] == [RECEIVE, SEND, WAIT, WORK]
assert [globals()[name.upper()] for name in LinkCosts._fields] == [*range(7)]

# What a message is doing: to be sent, on its way, at the receiver before or after it was received,
# waiting for the end of the receiver's call that releases the sender.
POSTED, TRAVELLING, ARRIVED, TAKEN, RELEASING = range(5)
FIRST, STOP, LEFT = range(3)  # columns of `State.waits`
HEAD, TAIL = range(2)
HEAP_SIZE, NEXT_ORDER = range(2)  # of `State.counters`


class State(NamedTuple):
    """Where everything stands.

    Of each rank: its next row; `clocks`, when its processor is free; `slowness`, by which its own
    work takes longer; `send_free` and `receive_free`, when each port is; `work` and since when it
    is known, and the slots it waits for.  Of each rank and port: queues of messages to send, and of
    arrived ones, linked by `following`.  Of each message: `phases`, `known` (the larger, the
    later), whether a receive `is_posted`.  Of each slot: whether it `is_done`.  Of each event: its
    time, and its place in the heap.
    """

    rows: Longs
    clocks: Floats
    slowness: Floats
    send_free: Floats
    receive_free: Floats
    work: Floats
    work_known: Longs
    waits: Longs
    to_send: Ints
    arrived: Ints
    following: Ints
    phases: Bytes
    known: Longs
    is_posted: Flags
    is_done: Flags
    times: Floats
    places: Ints
    heap: Ints
    counters: Longs


@njit(nogil=True, error_model="numpy")
def is_before(state: State, a: int, b: int) -> bool:
    """Whether event `a` precedes `b`; at the same time, messages precede what ranks begin."""
    return state.times[a] < state.times[b] or (state.times[a] == state.times[b] and a > b)


@njit(nogil=True, error_model="numpy")
def rise(state: State, place: int, event: int) -> None:
    """Put an event at a place of the heap or above."""
    heap = state.heap
    while place > 0 and is_before(state, event, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        state.places[heap[place]] = place
        place = (place - 1) // 2
    heap[place] = event
    state.places[event] = place


@njit(nogil=True, error_model="numpy")
def sink(state: State, place: int, event: int) -> None:
    """Put an event at a place of the heap or below."""
    heap, size = state.heap, state.counters[HEAP_SIZE]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and is_before(state, heap[child + 1], heap[child]):
            child += 1
        if not is_before(state, heap[child], event):
            break
        heap[place] = heap[child]
        state.places[heap[place]] = place
        place = child
    heap[place] = event
    state.places[event] = place


@njit(nogil=True, error_model="numpy")
def schedule(state: State, event: int, time: float) -> None:
    """Let an event happen at a time, instead of when it was to happen before."""
    place = state.places[event]
    if place < 0:
        place = state.counters[HEAP_SIZE]
        state.counters[HEAP_SIZE] += 1
    state.times[event] = time
    rise(state, place, event)
    sink(state, state.places[event], event)


@njit(nogil=True, error_model="numpy")
def take_first(state: State) -> int:
    """Remove the first event of the heap."""
    first = state.heap[0]
    state.counters[HEAP_SIZE] -= 1
    size = state.counters[HEAP_SIZE]
    state.places[first] = -1
    if size > 0:
        sink(state, 0, state.heap[size])
    return first


@njit(nogil=True, error_model="numpy")
def now_known(state: State) -> int:
    """A number larger than all before."""
    state.counters[NEXT_ORDER] += 1
    return state.counters[NEXT_ORDER]


@njit(nogil=True, error_model="numpy")
def append(state: State, queues: Ints, rank: int, port: int, message: int) -> None:
    """Add a message to the end of a queue."""
    if queues[rank, port, HEAD] < 0:
        queues[rank, port, HEAD] = message
    else:
        state.following[queues[rank, port, TAIL]] = message
    queues[rank, port, TAIL] = message
    state.following[message] = -1


@njit(nogil=True, error_model="numpy")
def choose(state: State, rank: int) -> tuple[float, int, int, int]:
    """What the processor can begin first: when, since when it is known, its kind, its port."""
    clock = state.clocks[rank]
    time, known, kind, port = math.inf, 0, WAIT, 0
    if state.work_known[rank] >= 0:
        time, known, kind = clock, state.work_known[rank], WORK
    for each in range(state.to_send.shape[1]):
        first = state.to_send[rank, each, HEAD]
        if first >= 0:
            begin = max(clock, state.send_free[rank, each])
            if begin < time or (begin == time and state.known[first] < known):
                time, known, kind, port = begin, state.known[first], SEND, each
        first = state.arrived[rank, each, HEAD]
        if first >= 0:
            arrival = state.times[len(state.rows) + first]
            begin = max(clock, state.receive_free[rank, each], arrival)
            if begin < time or (begin == time and state.known[first] < known):
                time, known, kind, port = begin, state.known[first], RECEIVE, each
    return time, known, kind, port


@njit(nogil=True, error_model="numpy")
def proceed(tables: Tables, state: State, rank: int) -> None:
    """Execute the rows of a rank until it has to wait."""
    row, stop = state.rows[rank], tables.first_rows[rank + 1]
    while row < stop:
        kind, slot, number = tables.kinds[row], tables.slots[row], tables.numbers[row]
        row += 1
        if kind == RECEIVE:
            post_receive(tables, state, rank, number, slot)
        elif kind == SEND:
            state.is_done[slot] = False
            state.known[number] = now_known(state)
            port = int(tables.link_costs[tables.links[number], PORT])
            append(state, state.to_send, rank, port, number)
        elif kind == WORK:
            state.work[rank], state.work_known[rank] = tables.seconds[row - 1], now_known(state)
            break
        else:
            state.waits[rank, FIRST], state.waits[rank, STOP] = slot, slot + number
            state.waits[rank, LEFT] = num_open(state, slot, slot + number)
            if state.waits[rank, LEFT] > 0:
                break
    state.rows[rank] = row


@njit(nogil=True, error_model="numpy")
def num_open(state: State, slot: int, stop: int) -> int:
    """The number of slots whose messages are not complete."""
    count = 0
    for each in range(slot, stop):
        count += not state.is_done[each]
    return count


@njit(nogil=True, error_model="numpy")
def post_receive(tables: Tables, state: State, rank: int, message: int, slot: int) -> None:
    """Post a receive; if the message is there, it is complete, and a sender that waits is freed."""
    state.is_posted[message] = True
    state.is_done[slot] = state.phases[message] == TAKEN
    if state.is_done[slot] and tables.link_costs[tables.links[message], IS_RENDEZVOUS] > 0:
        state.phases[message] = RELEASING
        schedule(state, len(state.rows) + message, state.clocks[rank])


@njit(nogil=True, error_model="numpy")
def complete(tables: Tables, state: State, rank: int, slot: int) -> None:
    """Complete a message at one end; a rank that waited for it as the last one proceeds."""
    state.is_done[slot] = True
    if state.waits[rank, LEFT] > 0 and state.waits[rank, FIRST] <= slot < state.waits[rank, STOP]:
        state.waits[rank, LEFT] -= 1
        if state.waits[rank, LEFT] == 0:
            proceed(tables, state, rank)


@njit(nogil=True, error_model="numpy")
def release(tables: Tables, state: State, message: int, time: float) -> None:
    """Complete a send whose receiver has taken the message."""
    rank, port = tables.sources[message], int(tables.link_costs[tables.links[message], PORT])
    state.clocks[rank] = max(state.clocks[rank], time)
    state.send_free[rank, port] = max(state.send_free[rank, port], time)
    complete(tables, state, rank, tables.send_slots[message])
    schedule(state, rank, choose(state, rank)[0])


@njit(nogil=True, error_model="numpy")
def send(tables: Tables, state: State, rank: int, port: int, time: float) -> None:
    """Begin to send the first message of a queue."""
    message = state.to_send[rank, port, HEAD]
    state.to_send[rank, port, HEAD] = state.following[message]
    costs, further = tables.link_costs[tables.links[message]], tables.further[message]
    busy = costs[OVERHEAD] + further * costs[OVERHEAD_PER_BYTE]
    state.clocks[rank] = time + state.slowness[rank] * busy
    state.send_free[rank, port] = time + costs[GAP] + further * costs[GAP_PER_BYTE]
    state.known[message], state.phases[message] = now_known(state), TRAVELLING
    arrival = time + state.slowness[rank] * costs[OVERHEAD] + costs[LATENCY]
    schedule(state, len(state.rows) + message, arrival)
    if costs[IS_RENDEZVOUS] == 0:
        complete(tables, state, rank, tables.send_slots[message])


@njit(nogil=True, error_model="numpy")
def receive(tables: Tables, state: State, rank: int, port: int, time: float) -> None:
    """Receive the first message of a queue; the processor is busy until its last byte is there."""
    message = state.arrived[rank, port, HEAD]
    state.arrived[rank, port, HEAD] = state.following[message]
    costs, further = tables.link_costs[tables.links[message]], tables.further[message]
    slowness, on_link = state.slowness[rank], further * costs[GAP_PER_BYTE]
    busy = slowness * further * costs[OVERHEAD_PER_BYTE]
    state.clocks[rank] = time + slowness * costs[OVERHEAD] + max(busy, on_link)
    state.receive_free[rank, port] = time + costs[GAP] + on_link
    state.phases[message] = TAKEN
    if state.is_posted[message]:
        if costs[IS_RENDEZVOUS] > 0:
            release(tables, state, message, time)
        complete(tables, state, rank, tables.receive_slots[message])


@njit(nogil=True, error_model="numpy")
def begin(tables: Tables, state: State, rank: int) -> None:
    """Begin what a rank can begin at the time of its event, and schedule the next."""
    time, _, kind, port = choose(state, rank)
    if time <= state.times[rank]:
        if kind == SEND:
            send(tables, state, rank, port, time)
        elif kind == RECEIVE:
            receive(tables, state, rank, port, time)
        else:
            state.clocks[rank] = time + state.slowness[rank] * state.work[rank]
            state.work_known[rank] = -1
            proceed(tables, state, rank)
    schedule(state, rank, choose(state, rank)[0])


@njit(nogil=True, error_model="numpy")
def arrive(tables: Tables, state: State, message: int) -> None:
    """Let the first byte of a message arrive."""
    rank, port = tables.destinations[message], int(tables.link_costs[tables.links[message], PORT])
    state.phases[message] = ARRIVED
    append(state, state.arrived, rank, port, message)
    schedule(state, rank, choose(state, rank)[0])


@njit(nogil=True, error_model="numpy")
def run(tables: Tables, state: State) -> None:
    """Run all ranks from their first rows until nothing can happen any more."""
    num_ranks = len(state.rows)
    for rank in range(num_ranks):
        proceed(tables, state, rank)
        schedule(state, rank, choose(state, rank)[0])
    while state.counters[HEAP_SIZE] > 0 and state.times[state.heap[0]] < math.inf:
        event = take_first(state)
        if event < num_ranks:
            begin(tables, state, event)
        elif state.phases[event - num_ranks] == TRAVELLING:
            arrive(tables, state, event - num_ranks)
        else:
            release(tables, state, event - num_ranks, state.times[event])
