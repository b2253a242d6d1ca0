"""The loop that runs the programs of all ranks in simulated time, by the rules of LogGOPSim.

Every rank has one processor.  It executes rows in order until it must wait.  Then three things
compete for it: the first message that is to be sent, the first that has arrived, and local work.
What can begin first begins; of several, the one that has been known for longest.

An event is the number of a rank, whose processor may begin something, or the number of ranks plus
the number of a message, which arrives, or releases its sender.  Messages that leave the network are
no events: most ends change before they come, so the first is searched among all.

Numba compiles this file; where it is missing, Python interprets it.
"""

from __future__ import annotations

import math

from collectives.arrays import jit
from collectives.programs import Kind
from collectives.simulation.world import Flows, World

# Compiled code is cached until this file changes, so constants of other files are repeated here.
RECEIVE, SEND, WAIT, WORK = range(4)
assert [Kind.RECEIVE, Kind.SEND, Kind.WAIT, Kind.COPY] == [RECEIVE, SEND, WAIT, WORK]

# What a message is doing: to be sent, on the network, on its way, at the receiver before or after
# it was received, waiting for the end of the receiver's call that releases the sender.
POSTED, FLOWING, TRAVELLING, ARRIVED, TAKEN, RELEASING = range(6)
HEAP_SIZE, LAST_KNOWN, NUM_READY, NUM_TOUCHED = range(4)  # of `World.counters`
NUM_CHANGED, NUM_ENDING = 0, 3  # of `Flows.counters`
DEADLINE, RESOLUTION = range(2)  # of `Flows.clocks`


@jit.helper
def is_before(world: World, a: int, b: int) -> bool:
    """Return whether event `a` precedes `b`: it is earlier, or has been known for longer."""
    first, second = world.events[a], world.events[b]
    if first.time == second.time:
        return first.known < second.known
    return first.time < second.time


@jit.helper
def rise(world: World, place: int, event: int) -> None:
    """Put an event at a place of the heap or above."""
    heap, events = world.heap, world.events
    while place > 0 and is_before(world, event, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        events[heap[place]].place = place
        place = (place - 1) // 2
    heap[place] = event
    events[event].place = place


@jit.helper
def sink(world: World, place: int, event: int) -> None:
    """Put an event at a place of the heap or below."""
    heap, events, size = world.heap, world.events, world.counters[HEAP_SIZE]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and is_before(world, heap[child + 1], heap[child]):
            child += 1
        if not is_before(world, heap[child], event):
            break
        heap[place] = heap[child]
        events[heap[place]].place = place
        place = child
    heap[place] = event
    events[event].place = place


@jit.helper
def schedule(world: World, event: int, time: float, known: int) -> None:
    """Let an event happen at a time, instead of when it was to happen before."""
    place = world.events[event].place
    if place < 0:
        place = world.counters[HEAP_SIZE]
        world.counters[HEAP_SIZE] += 1
    world.events[event].time, world.events[event].known = time, known
    rise(world, place, event)
    sink(world, world.events[event].place, event)


@jit.helper
def take_first(world: World) -> int:
    """Remove the first event of the heap, and return it."""
    first = world.heap[0]
    world.counters[HEAP_SIZE] -= 1
    size = world.counters[HEAP_SIZE]
    world.events[first].place = -1
    if size > 0:
        sink(world, 0, world.heap[size])
    return first


@jit.helper
def touch(world: World, event: int) -> None:
    """Note that the time of an event must be decided."""
    world.touched[world.counters[NUM_TOUCHED]] = event
    world.counters[NUM_TOUCHED] += 1


@jit.helper
def happen_at(world: World, message: int, time: float) -> None:
    """Let the next event of a message happen at a time."""
    event = len(world.ranks) + message
    world.events[event].time = time
    touch(world, event)


@jit.helper
def now_known(world: World) -> int:
    """Return a number that is larger than all numbers returned before."""
    world.counters[LAST_KNOWN] += 1
    return world.counters[LAST_KNOWN]


@jit.helper
def choose(world: World, rank: int) -> tuple[float, int, int, int]:
    """Return what the processor can begin first: when, since when that is known, kind, port."""
    clock, messages = world.ranks[rank].clock, world.messages
    time, known, kind, port = math.inf, 0, WAIT, 0
    if world.ranks[rank].work_known >= 0:
        time, known, kind = clock, world.ranks[rank].work_known, WORK
    for candidate in range(world.ports.shape[1]):
        at = world.ports[rank, candidate]
        if at.first_to_send >= 0:
            begin, since = max(clock, at.send_free), messages[at.first_to_send].known
            if begin < time or (begin == time and since < known):
                time, known, kind, port = begin, since, SEND, candidate
        if at.first_arrived >= 0:
            arrival = world.events[len(world.ranks) + at.first_arrived].time
            begin = max(clock, at.receive_free, arrival)
            since = messages[at.first_arrived].known
            if begin < time or (begin == time and since < known):
                time, known, kind, port = begin, since, RECEIVE, candidate
    return time, known, kind, port


@jit.helper
def proceed(world: World, rank: int) -> None:
    """Execute the rows of a rank until it has to wait."""
    mine = world.ranks[rank]
    while mine.row < mine.stop:
        row = world.rows[mine.row]
        mine.row += 1
        if row.kind == RECEIVE:
            post_receive(world, rank, row.number, row.slot)
        elif row.kind == SEND:
            post_send(world, rank, row.number, row.slot)
        elif row.kind == WORK:
            mine.work, mine.work_known = row.seconds, now_known(world)
            return
        else:
            mine.wait_first, mine.wait_stop, mine.num_open = row.slot, row.slot + row.number, 0
            for slot in range(row.slot, row.slot + row.number):
                mine.num_open += not world.is_done[slot]
            if mine.num_open > 0:
                return


@jit.helper
def post_send(world: World, rank: int, number: int, slot: int) -> None:
    """Add a message to the queue of a port."""
    message = world.messages[number]
    world.is_done[slot] = False
    message.known, message.following = now_known(world), -1
    port = world.ports[rank, world.costs[message.cost].port]
    if port.first_to_send < 0:
        port.first_to_send = number
    else:
        world.messages[port.last_to_send].following = number
    port.last_to_send = number


@jit.helper
def post_receive(world: World, rank: int, number: int, slot: int) -> None:
    """Post a receive; if the message is there, it is complete, and a sender that waits is freed."""
    message = world.messages[number]
    message.is_posted = True
    world.is_done[slot] = message.phase == TAKEN
    if message.phase == TAKEN and world.costs[message.cost].is_rendezvous:
        message.phase, message.known = RELEASING, now_known(world)
        happen_at(world, number, world.ranks[rank].clock)


@jit.helper
def let_proceed(world: World, rank: int) -> None:
    """Note that a rank need not wait any more."""
    world.ready[world.counters[NUM_READY]] = rank
    world.counters[NUM_READY] += 1


@jit.helper
def complete(world: World, rank: int, slot: int) -> None:
    """Complete a message at one end; a rank that waited for it as the last one proceeds."""
    mine = world.ranks[rank]
    world.is_done[slot] = True
    if mine.num_open > 0 and mine.wait_first <= slot < mine.wait_stop:
        mine.num_open -= 1
        if mine.num_open == 0:
            let_proceed(world, rank)


@jit.helper
def send(world: World, network: Flows, rank: int, port: int, time: float) -> None:
    """Begin to send the first message of a queue."""
    at = world.ports[rank, port]
    number = at.first_to_send
    message, mine = world.messages[number], world.ranks[rank]
    cost = world.costs[message.cost]
    at.first_to_send = message.following
    busy = cost.overhead + message.further * cost.overhead_per_byte
    mine.clock = time + mine.slowness * busy
    message.known = now_known(world)
    if len(network.links) > 0:
        enter(world, network, number, time)
    else:
        travel(world, number, time)
        at.send_free += message.further * cost.gap_per_byte
    if not cost.is_rendezvous:
        complete(world, rank, message.send_slot)


@jit.helper
def enter(world: World, network: Flows, number: int, time: float) -> None:
    """Let a message enter the network; its port is busy until it has left."""
    message = world.messages[number]
    cost = world.costs[message.cost]
    message.phase = FLOWING
    world.ports[message.source, cost.port].send_free = math.inf
    if message.further == 0 or cost.gap_per_byte == 0:
        happen_at(world, number, time)
        return
    place = message.source * world.ports.shape[1] + cost.port
    flow = network.flows[place]
    flow.message, flow.left, flow.since = number, message.further, time
    flow.limit = 1 / cost.gap_per_byte
    expected = flow.left / (flow.rate if flow.rate > 0 else flow.limit)
    change(network, place, time + network.clocks[RESOLUTION] * expected)


@jit.helper
def change(network: Flows, place: int, deadline: float) -> None:
    """Note that a flow began or ended, and when the links must be divided anew at the latest."""
    network.clocks[DEADLINE] = min(network.clocks[DEADLINE], deadline)
    if not network.flows[place].is_changed:
        network.flows[place].is_changed = True
        network.changed[network.counters[NUM_CHANGED]] = place
        network.counters[NUM_CHANGED] += 1


@jit.helper
def leave(world: World, network: Flows, number: int, time: float) -> None:
    """Let a message leave the network, so that the next can enter."""
    message = world.messages[number]
    place = message.source * world.ports.shape[1] + world.costs[message.cost].port
    if network.flows[place].message == number:
        network.flows[place].message, network.ends[place] = -1, math.inf
        expected = message.further / network.flows[place].rate
        change(network, place, time + network.clocks[RESOLUTION] * expected)
    travel(world, number, time)
    touch(world, message.source)


@jit.helper
def travel(world: World, number: int, time: float) -> None:
    """Schedule the arrival of a message, all of which is on its way."""
    message = world.messages[number]
    cost = world.costs[message.cost]
    message.phase = TRAVELLING
    world.ports[message.source, cost.port].send_free = time + cost.gap
    overhead = world.ranks[message.source].slowness * cost.overhead
    happen_at(world, number, time + overhead + cost.latency)


@jit.helper
def arrive(world: World, number: int) -> None:
    """Let the first byte of a message arrive, or on a network the last."""
    message = world.messages[number]
    message.phase, message.following = ARRIVED, -1
    port = world.ports[message.destination, world.costs[message.cost].port]
    if port.first_arrived < 0:
        port.first_arrived = number
    else:
        world.messages[port.last_arrived].following = number
    port.last_arrived = number
    touch(world, message.destination)


@jit.helper
def receive(world: World, network: Flows, rank: int, port: int, time: float) -> None:
    """Receive the first message of a queue; the processor is busy until its last byte is there.

    On links that are shared, the last byte is there when the receive begins.
    """
    at = world.ports[rank, port]
    number = at.first_arrived
    message, mine = world.messages[number], world.ranks[rank]
    cost = world.costs[message.cost]
    at.first_arrived = message.following
    on_link = message.further * cost.gap_per_byte
    busy = max(mine.slowness * message.further * cost.overhead_per_byte, on_link)
    elapsed = on_link if len(network.links) > 0 else 0.0
    mine.clock = time + mine.slowness * cost.overhead + busy - elapsed
    at.receive_free = time + cost.gap + on_link - elapsed
    message.phase = TAKEN
    if message.is_posted:
        if cost.is_rendezvous:
            release(world, number, time)
        complete(world, rank, message.receive_slot)


@jit.helper
def release(world: World, number: int, time: float) -> None:
    """Complete a send whose receiver has taken the message."""
    message = world.messages[number]
    sender = world.ranks[message.source]
    port = world.ports[message.source, world.costs[message.cost].port]
    sender.clock, port.send_free = max(sender.clock, time), max(port.send_free, time)
    complete(world, message.source, message.send_slot)
    touch(world, message.source)


@jit.helper
def begin(world: World, network: Flows, rank: int) -> None:
    """Begin what a rank can begin at the time of its event."""
    time, _, kind, port = choose(world, rank)
    if time <= world.events[rank].time:
        if kind == SEND:
            send(world, network, rank, port, time)
        elif kind == RECEIVE:
            receive(world, network, rank, port, time)
        else:
            mine = world.ranks[rank]
            mine.clock, mine.work_known = time + mine.slowness * mine.work, -1
            let_proceed(world, rank)
    touch(world, rank)


@jit.helper
def happen(world: World, network: Flows, event: int) -> None:
    """Let an event happen."""
    number, time = event - len(world.ranks), world.events[event].time
    if number < 0:
        begin(world, network, event)
    elif world.messages[number].phase == FLOWING:
        leave(world, network, number, time)
    elif world.messages[number].phase == TRAVELLING:
        arrive(world, number)
    else:
        release(world, number, time)


@jit.helper
def settle(world: World) -> None:
    """Let ranks proceed that need not wait any more, and schedule the events that follow."""
    for number in range(world.counters[NUM_READY]):
        proceed(world, world.ready[number])
    world.counters[NUM_READY] = 0
    for number in range(world.counters[NUM_TOUCHED]):
        event = world.touched[number]
        if event < len(world.ranks):
            time, known, _, _ = choose(world, event)
        else:
            time = world.events[event].time
            known = world.messages[event - len(world.ranks)].known
        schedule(world, event, time, known)
    world.counters[NUM_TOUCHED] = 0


@jit.helper
def first_end(network: Flows) -> float:
    """Return when the next messages will have left the network; note which these are."""
    first, count = math.inf, 0
    for place in range(len(network.ends)):
        end = network.ends[place]
        if end > first or end == math.inf:
            continue
        if end < first:
            first, count = end, 0
        network.ending[count] = place
        count += 1
    network.counters[NUM_ENDING] = count
    return first


@jit.helper
def end_flows(world: World, network: Flows, time: float) -> None:
    """Let the messages leave the network that will have done so first, at this time."""
    for number in range(network.counters[NUM_ENDING]):
        leave(world, network, network.flows[network.ending[number]].message, time)


@jit.helper
def run(world: World, network: Flows) -> bool:
    """Continue until nothing can happen any more, or until the links must be divided anew.

    Return whether the links must be divided anew.
    """
    settle(world)
    end = first_end(network)
    while True:
        time = world.events[world.heap[0]].time if world.counters[HEAP_SIZE] > 0 else math.inf
        if min(time, end) == math.inf:
            return network.counters[NUM_CHANGED] > 0
        if min(time, end) > network.clocks[DEADLINE]:
            return True
        if end <= time:
            end_flows(world, network, end)
            settle(world)
            end = first_end(network)
        else:
            happen(world, network, take_first(world))
            settle(world)
