"""Simulates the programs of all ranks on a machine: a clock for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import jit
from collectives.programs import Program
from collectives.simulation.machine import OTHER_HOST, SAME_HOST, Machine
from collectives.simulation.tables import Ints, Messages, Tables, tables_of

if TYPE_CHECKING:
    from collectives.simulation.event_loop import State


class Simulation(NamedTuple):
    """`rank_seconds`: when each rank has completed its program.  `messages`: what was sent."""

    rank_seconds: NDArray[np.float64]
    messages: Messages

    @property
    def seconds(self) -> float:
        """When the last rank has completed its program."""
        return float(self.rank_seconds.max())


def simulate(
    programs: Iterable[Program],
    machine: Machine,
    *,
    hosts: Sequence[int] | None = None,
    stragglers: Mapping[int, float] | None = None,
) -> Simulation:
    """Run the programs of all ranks in simulated time.

    - `programs`: those of ranks 0, 1, ....
    - `machine`: what messages, copies and combinations cost.
    - `hosts`: the host of each rank; None: all are on the same host.
    - `stragglers`: by rank, a factor by which its processor is slower: its overheads, copies and
      combinations take longer.

    Messages cost what they do in LogGOPSim (Hoefler, Schneider and Lumsdaine 2010), with one
    processor per rank, and one port per rank and class of link.  Of s bytes, the send occupies the
    sender's processor for o + (s - 1) O, and the receive occupies the receiver's, from the arrival
    of the first byte, for o + max((s - 1) O, (s - 1) G).  A port is free again after g + (s - 1) G.
    A rank begins its rows in order, up to the next row that waits, copies or combines.

    Returns a `Simulation`.  Raises ValueError if the ranks do not receive what they send each
    other, or wait for each other forever, or if the machine has no link for a message.
    """
    places = None if hosts is None else np.asarray(hosts)
    classes = [SAME_HOST] if places is None else [SAME_HOST, OTHER_HOST]

    def classify(sources: Ints, destinations: Ints) -> Ints:
        if places is None:
            return np.zeros_like(sources)
        return np.asarray(places[sources] != places[destinations], np.int64)

    tables, messages = tables_of(programs, machine, classes, classify)
    num_ranks = len(tables.first_rows) - 1
    slowness = np.ones(num_ranks)
    for rank, factor in (stragglers or {}).items():
        slowness[rank] = factor
    state = _start(tables, len(classes), machine.call_seconds, slowness)
    _loop(tables, state)(tables, state)
    _require_end(tables, state)
    return Simulation(state.clocks, messages)


def _loop(*arguments: tuple[NDArray[Any], ...]) -> Callable[..., Any]:
    """The compiled loop for these arguments; the interpreted one where numba is missing."""
    from collectives.simulation import event_loop  # noqa: PLC0415 - imports numba

    if jit.why_unavailable() is not None:
        return event_loop.run  # type: ignore[no-any-return]
    import numba  # noqa: PLC0415

    return jit.function(event_loop.run.py_func, tuple(map(numba.typeof, arguments)))


def _start(
    tables: Tables, num_ports: int, call_seconds: float, slowness: NDArray[np.float64]
) -> State:
    """The state in which all ranks make their calls at time 0."""
    from collectives.simulation.event_loop import State  # noqa: PLC0415 - imports numba

    num_ranks, num_messages = len(slowness), len(tables.sources)
    num_slots = 1 + max(tables.send_slots.max(initial=0), tables.receive_slots.max(initial=0))
    queues = np.full((2, num_ranks, num_ports, 2), -1, np.int32)
    heap = np.full((2, num_ranks + num_messages), -1, np.int32)
    return State(
        rows=tables.first_rows[:-1].copy(),
        clocks=call_seconds * slowness,
        slowness=slowness,
        send_free=np.zeros((num_ranks, num_ports)),
        receive_free=np.zeros((num_ranks, num_ports)),
        work=np.zeros(num_ranks),
        work_known=np.full(num_ranks, -1),
        waits=np.zeros((num_ranks, 3), np.int64),
        to_send=queues[0],
        arrived=queues[1],
        following=np.full(num_messages, -1, np.int32),
        phases=np.zeros(num_messages, np.int8),
        known=np.zeros(num_messages, np.int64),
        is_posted=np.zeros(num_messages, bool),
        is_done=np.zeros(num_slots, bool),
        times=np.zeros(num_ranks + num_messages),
        places=heap[0],
        heap=heap[1],
        counters=np.zeros(2, np.int64),
    )


def _require_end(tables: Tables, state: State) -> None:
    """Raise ValueError if a rank has not completed its program."""
    is_busy = (state.rows < tables.first_rows[1:]) | (state.waits[:, -1] > 0)
    if is_busy.any():
        rank = int(np.flatnonzero(is_busy)[0])
        row = int(state.rows[rank] - tables.first_rows[rank])
        raise ValueError(f"the ranks wait for each other forever: rank {rank} before row {row}")
