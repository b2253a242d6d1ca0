"""Divides links among the messages that are on them at the same time, max-min fairly.

A rate could be larger only if one became smaller that is not larger (Bertsekas and Gallager 1992).
Rates change only when a message enters or leaves the network, and only the rates of messages that
are connected with it through links that are full.

Numba compiles this file; where it is missing, Python interprets it.
"""

from __future__ import annotations

import math

from collectives.arrays import jit
from collectives.simulation.world import Flows, Records

NUM_CHANGED, NUM_MOVED, NUM_LISTED = range(3)  # of `Flows.counters`, as in `event_loop.py`
DEADLINE = 0  # of `Flows.clocks`
EXACTLY = 1 + 1e-9  # sums of rates differ by less in the order in which they are added


@jit.helper
def is_full(network: Flows, link: int) -> bool:
    """Return whether the messages on a link could together be faster than the link."""
    return network.links[link].demand > network.links[link].capacity * EXACTLY


@jit.helper
def list_link(network: Flows, link: int) -> None:
    """Note that the rates of all messages on a link must be decided, if it is full."""
    if not network.links[link].is_listed and is_full(network, link):
        network.links[link].is_listed = True
        network.listed[network.counters[NUM_LISTED]] = link
        network.counters[NUM_LISTED] += 1


@jit.helper
def list_flow(network: Flows, place: int) -> None:
    """Note that the rate of a message, and all rates that depend on it, must be decided."""
    flow = network.flows[place]
    if flow.is_listed:
        return
    flow.is_listed = True
    network.moved[network.counters[NUM_MOVED]] = place
    network.counters[NUM_MOVED] += 1
    for hop in range(network.routes.shape[1]):
        link = network.routes[flow.entered, hop]
        if link >= 0:
            list_link(network, link)


@jit.helper
def leave(network: Flows, place: int) -> None:
    """Take a message off the links of its route."""
    flow, hops = network.flows[place], network.routes.shape[1]
    for hop in range(hops):
        number = network.routes[flow.entered, hop]
        if number < 0:
            continue
        list_link(network, number)
        link, node = network.links[number], network.nodes[place * hops + hop]
        if node.before >= 0:
            network.nodes[node.before].after = node.after
        else:
            link.head = node.after
        if node.after >= 0:
            network.nodes[node.after].before = node.before
        link.number -= 1
        link.demand = link.demand - flow.limit if link.number > 0 else 0.0
    flow.entered = -1


@jit.helper
def enter(network: Flows, place: int, route: int) -> None:
    """Put a message on the links of its route."""
    flow, hops = network.flows[place], network.routes.shape[1]
    flow.entered, flow.rate = route, 0.0
    for hop in range(hops):
        number = network.routes[route, hop]
        if number < 0:
            continue
        link, node = network.links[number], network.nodes[place * hops + hop]
        node.before, node.after = -1, link.head
        if link.head >= 0:
            network.nodes[link.head].before = place * hops + hop
        link.head = place * hops + hop
        link.number += 1
        link.demand += flow.limit


@jit.helper
def list_all(network: Flows, messages: Records) -> None:
    """Move the messages that began or ended, and note all whose rates must be decided."""
    network.counters[NUM_MOVED] = network.counters[NUM_LISTED] = 0
    num_changed = network.counters[NUM_CHANGED]
    for number in range(num_changed):
        if network.flows[network.changed[number]].entered >= 0:
            leave(network, network.changed[number])
    for number in range(num_changed):
        flow = network.flows[network.changed[number]]
        flow.is_changed = False
        if flow.message >= 0:
            enter(network, network.changed[number], messages[flow.message].route)
    for number in range(num_changed):
        if network.flows[network.changed[number]].message >= 0:
            list_flow(network, network.changed[number])
    network.counters[NUM_CHANGED] = 0
    number = 0
    while number < network.counters[NUM_LISTED]:
        list_flows_on(network, network.listed[number])
        number += 1


@jit.helper
def list_flows_on(network: Flows, link: int) -> None:
    """Note that the rates of all messages on a link must be decided."""
    node = network.links[link].head
    while node >= 0:
        list_flow(network, node // network.routes.shape[1])
        node = network.nodes[node].after


@jit.helper
def fix(network: Flows, place: int, rate: float) -> None:
    """Decide the rate of a message."""
    flow = network.flows[place]
    flow.rate, flow.is_listed = rate, False
    for hop in range(network.routes.shape[1]):
        link = network.routes[flow.entered, hop]
        if link >= 0:
            network.links[link].free -= rate
            network.links[link].num_open -= 1


@jit.helper
def fair_share(network: Flows, number: int) -> float:
    """Return the rate that a link has for each message whose rate is open."""
    link = network.links[number]
    return link.free / link.num_open if link.num_open > 0 else math.inf


@jit.helper
def sink(network: Flows, place: int, size: int) -> None:
    """Let a link sink in the heap of listed links, those with the smallest shares on top."""
    listed, links = network.listed, network.links
    number = listed[place]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and links[listed[child + 1]].share < links[listed[child]].share:
            child += 1
        if links[listed[child]].share >= links[number].share:
            break
        listed[place] = listed[child]
        place = child
    listed[place] = number


@jit.helper
def make_heap(network: Flows) -> int:
    """Order the full links among those that are listed by their shares; return their number."""
    size = 0
    for place in range(network.counters[NUM_LISTED]):
        number = network.listed[place]
        if is_full(network, number) and network.links[number].num_open > 0:
            network.links[number].share = fair_share(network, number)
            network.listed[size] = number
            size += 1
    for place in range(size // 2 - 1, -1, -1):
        sink(network, place, size)
    return size


@jit.helper
def refresh(network: Flows, size: int) -> int:
    """Bring the link with the smallest share to the top; return the number of links.

    Shares only grow, so the share of the top is computed anew until it is still the smallest.
    """
    while size > 0:
        link = network.links[network.listed[0]]
        share = fair_share(network, network.listed[0])
        if share <= link.share * EXACTLY:
            break
        if link.num_open == 0:
            size -= 1
            network.listed[0] = network.listed[size]
        else:
            link.share = share
        sink(network, 0, size)
    return size


@jit.helper
def fix_limited(network: Flows, level: float) -> int:
    """Decide the rates of messages that cannot be faster than `level`; return their number."""
    count = 0
    for number in range(network.counters[NUM_MOVED]):
        flow = network.flows[network.moved[number]]
        if flow.is_listed and flow.limit <= level * EXACTLY:
            fix(network, network.moved[number], flow.limit)
            count += 1
    return count


@jit.helper
def smallest_limit(network: Flows) -> float:
    """Return the smallest limit of the messages whose rates are open."""
    smallest = math.inf
    for number in range(network.counters[NUM_MOVED]):
        flow = network.flows[network.moved[number]]
        if flow.is_listed:
            smallest = min(smallest, flow.limit)
    return smallest


@jit.helper
def fix_on(network: Flows, link: int, level: float) -> int:
    """Decide the rates of all messages on a link; return their number."""
    count, node = 0, network.links[link].head
    while node >= 0:
        place = node // network.routes.shape[1]
        if network.flows[place].is_listed:
            fix(network, place, level)
            count += 1
        node = network.nodes[node].after
    return count


@jit.helper
def decide_rates(network: Flows) -> None:
    """Decide rates: of messages with the smallest limits, or on the link with the smallest share.

    `is_listed` marks the messages whose rates are open.
    """
    num_left, size = network.counters[NUM_MOVED], make_heap(network)
    level, limit = 0.0, smallest_limit(network)
    while num_left > 0:
        size = refresh(network, size)
        share = network.links[network.listed[0]].share if size > 0 else math.inf
        level = level if share <= level * EXACTLY else share
        if limit <= level * EXACTLY:
            num_left -= fix_limited(network, level)
            limit = smallest_limit(network)
        else:
            num_left -= fix_on(network, network.listed[0], level)


@jit.helper
def share_links(network: Flows, messages: Records) -> None:
    """Decide the rates that change, and when the messages will have ended."""
    now, network.clocks[DEADLINE] = network.clocks[DEADLINE], math.inf
    list_all(network, messages)
    for number in range(network.counters[NUM_LISTED]):
        link = network.links[network.listed[number]]
        link.is_listed, link.free, link.num_open = False, link.capacity, link.number
    for number in range(network.counters[NUM_MOVED]):
        flow = network.flows[network.moved[number]]
        flow.left -= flow.rate * (now - flow.since)
        flow.since = now
    decide_rates(network)
    for number in range(network.counters[NUM_MOVED]):
        flow = network.flows[network.moved[number]]
        network.ends[network.moved[number]] = now + max(0.0, flow.left) / flow.rate
