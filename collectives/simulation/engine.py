"""Simulates the programs of all ranks on a machine: a clock for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import jit
from collectives.programs import Program
from collectives.simulation.machine import Machine
from collectives.simulation.network import Apart, Network
from collectives.simulation.tables import Messages, Rows, rows_of, world_of
from collectives.simulation.world import Flows, World, flows_of


class Simulation(NamedTuple):
    """What a simulation finds.

    Attributes
    ----------
    rank_seconds : array
        When each simulated rank has completed its program.
    link_bytes, class_bytes : array
        The bytes that each link of the network carried, and that all ranks sent by each class of
        links.
    """

    rank_seconds: NDArray[np.float64]
    link_bytes: NDArray[np.float64]
    class_bytes: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """When the last rank has completed its program."""
        return float(self.rank_seconds.max())


def simulate(
    programs: Sequence[Program],
    machine: Machine,
    network: Network | None = None,
    *,
    hosts: Sequence[int] | None = None,
    stragglers: Mapping[int, float] | None = None,
) -> Simulation:
    """Run the programs of all ranks in simulated time.

    Every rank has one processor, and one port for each class of links.  A rank begins its rows in
    order, up to the next row that waits, copies or combines.  Messages cost what they do in the
    LogGOPS model (Hoefler, Schneider and Lumsdaine 2010):

    - The send of s bytes occupies the sender's processor for o + (s - 1) O, and its port for
      g + (s - 1) G.
    - If no links are shared, as in LogGOPSim, the receive occupies the receiver's processor from
      the arrival of the first byte, for o + max((s - 1) O, (s - 1) G), and its port for
      g + (s - 1) G.
    - On links that are shared, the sender's port is busy until the message has left it, and the
      receive begins when the last byte is there.

    Parameters
    ----------
    programs : sequence of Program
        The programs of ranks 0, 1, ....  The programs of `network.period` ranks stand for the
        programs of all ranks: with n programs, rank r + n does what rank r does, with all peers
        moved on by n.
    machine : Machine
        What messages, copies and combinations cost.
    network : Network, optional
        Where ranks are, and which links they share.  By default they share none.
    hosts : sequence of int, optional
        Without a network, the host of each rank.  By default all ranks are on one host.
    stragglers : mapping of int to float, optional
        By rank, a factor by which its processor is slower: its overheads, copies and combinations
        take longer.

    Raises
    ------
    ValueError
        If the ranks do not receive what they send each other, or wait for each other forever, if
        the number of programs is wrong, or if the machine has no link for a message.
    """
    if network is None:
        network = Apart([0] * len(programs) if hosts is None else hosts)
    return simulate_rows([rows_of(x, machine) for x in programs], machine, network, stragglers)


def simulate_rows(
    rows: Sequence[Rows],
    machine: Machine,
    network: Network,
    stragglers: Mapping[int, float] | None = None,
    resolution: float = 0.0,
) -> Simulation:
    """Run the rows of each rank in simulated time, as `simulate` runs programs.

    A message may wait for a part `resolution` of its time until the links are divided anew, so that
    they are divided once for many messages.
    """
    _check(len(rows), network, stragglers)
    slowness = np.ones(len(rows))
    for rank, factor in (stragglers or {}).items():
        slowness[rank] = factor
    world, messages = world_of(rows, machine, network, slowness)
    classes = network.classify(messages.sources, messages.destinations)
    class_bytes = np.bincount(classes, messages.sizes, len(network.classes)).astype(float)
    flows, link_bytes = _routed(world, messages, network, resolution)
    del messages, classes
    _run(world, flows)
    _require_end(world)
    return Simulation(
        world.ranks.clock.copy(), link_bytes, class_bytes * (network.num_ranks // len(rows))
    )


def _check(num_programs: int, network: Network, stragglers: Mapping[int, float] | None) -> None:
    """Raise ValueError if the network is for other programs, or has no such stragglers."""
    if num_programs != network.period:
        raise ValueError(f"there are {num_programs} programs for {network.period} ranks")
    if wrong := [rank for rank in stragglers or () if not 0 <= rank < network.num_ranks]:
        raise ValueError(f"there is no rank {wrong[0]} among {network.num_ranks} ranks")
    if stragglers and network.period != network.num_ranks:
        raise ValueError("ranks can be slower than others only if each has its own program")


def _routed(
    world: World, messages: Messages, network: Network, resolution: float
) -> tuple[Flows, NDArray[np.float64]]:
    """Return the network without messages, and the bytes that each of its links will have carried.

    It writes the route of each message into the world.
    """
    pairs, inverse = np.unique(
        messages.sources * network.num_ranks + messages.destinations, return_inverse=True
    )
    routes = network.routes(*np.divmod(pairs, network.num_ranks))
    capacities = network.links.capacities
    pair_bytes = np.bincount(inverse, messages.sizes, len(pairs))
    weights = np.where(routes >= 0, pair_bytes[:, None], 0)
    link_bytes = np.bincount(np.maximum(routes, 0).ravel(), weights.ravel(), len(capacities))
    world.messages.route = inverse
    flows = flows_of(routes.astype(np.int32), capacities, world.ports.size, resolution)
    return flows, link_bytes.astype(float)


def _run(world: World, flows: Flows) -> None:
    """Let the event loop run, and divide the links anew whenever messages begin or end."""
    from collectives.simulation import event_loop, sharing  # noqa: PLC0415 - they import numba

    run = _compiled(event_loop.run, world, flows)
    share_links = _compiled(sharing.share_links, flows, world.messages)
    while run(world, flows):
        share_links(flows, world.messages)


def _compiled(function: Any, *arguments: Any) -> Callable[..., Any]:
    """Return the function compiled for these arguments; without numba, the function itself."""
    if jit.why_unavailable() is not None:
        return function  # type: ignore[no-any-return]
    import numba  # noqa: PLC0415

    return jit.function(function.py_func, tuple(map(numba.typeof, arguments)))


def _require_end(world: World) -> None:
    """Raise ValueError if a rank has not completed its program."""
    ranks = world.ranks
    is_busy = (ranks.row < ranks.stop) | (ranks.num_open > 0)
    if is_busy.any():
        rank = int(np.flatnonzero(is_busy)[0])
        raise ValueError(f"the ranks wait for each other forever: rank {rank} among others")
