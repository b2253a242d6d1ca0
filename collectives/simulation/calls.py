"""Simulates a call of a collective, also on very many ranks.

Two things make that possible, and both are exact or checked:

- Where all ranks do the same at peers at the same distances, one rank is compiled.  If the network
  is folded, the ranks of one of its groups are simulated for all.
- The lanes of a large reduction follow each other in the same way.  A call of many lanes is
  simulated with few, at two sizes, and its time follows from the difference.

Where a rank has many messages in a round as well, rates are computed less often.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from collectives.programs import CallSpec, compile_call
from collectives.simulation.engine import Simulation, simulate_rows
from collectives.simulation.machine import Machine
from collectives.simulation.network import Network
from collectives.simulation.tables import Rows, at_once, rows_of

FEW_LANES = (6, 9)  # that are simulated for many; multiples of those that run at the same time
FEWER_LANES = (3, 6)  # for more than `MANY_RANKS`
FEWEST_LANES = (1, 2)  # where all ranks send to all others
MANY_RANKS = 256
RESOLUTION = 0.02  # there: how long a message may wait, as a part of its time
MANY_MESSAGES = 16  # of a rank in a round


class Call(NamedTuple):
    """What the simulation of a call finds.

    Attributes
    ----------
    seconds : float
        From the beginning of all ranks to the end of the last.
    link_bytes, class_bytes : array
        The bytes that each link of the network carried, and that all ranks sent by each class of
        links.
    is_extended : bool
        Whether fewer lanes were simulated than the call has.
    """

    seconds: float
    link_bytes: NDArray[np.float64]
    class_bytes: NDArray[np.float64]
    is_extended: bool


def simulate_call(
    spec: CallSpec,
    machine: Machine,
    network: Network,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    stragglers: Mapping[int, float] | None = None,
) -> Call:
    """Simulate a call of all ranks of a network, or the same call of several groups of them.

    Parameters
    ----------
    spec : CallSpec
        The call.
    machine, network, stragglers
        As for `simulate`.
    groups : sequence of sequences of int, optional
        The ranks of each group.  All groups are equally large; ranks without a group do nothing.  A
        rank may be in several groups if the call has one round.  By default all ranks are one
        group.

    Raises
    ------
    ValueError
        If the algorithm cannot serve, if the network is folded and the ranks do not all do the
        same, or if a rank would be in several calls of several rounds.
    """
    size = network.num_ranks if groups is None else len(groups[0])
    is_dense = has_many_messages(spec, size)
    few = FEWEST_LANES if is_dense else FEWER_LANES if size > MANY_RANKS else FEW_LANES
    is_extended = spec.segments > few[1]
    specs = [shortened(spec, lanes) for lanes in few] if is_extended else [spec]
    if groups is None:
        tables = _tables(specs, machine, network)
    else:
        tables = [_rows_of_groups(spec, machine, groups, network.num_ranks) for spec in specs]
    resolution = RESOLUTION if is_dense and is_extended else 0.0
    first, *others = [
        simulate_rows(rows, machine, network, stragglers, resolution) for rows in tables
    ]
    if not is_extended:
        return Call(first.seconds, first.link_bytes, first.class_bytes, False)
    return _extended(first, others[0], (_num_lanes(spec) - few[1]) / (few[1] - few[0]))


def _extended(first: Simulation, second: Simulation, factor: float) -> Call:
    """Return a call with more lanes than two simulated ones.

    It takes longer than `second` by `factor` times the difference between `first` and `second`.
    """
    return Call(
        second.seconds + factor * (second.seconds - first.seconds),
        second.link_bytes + factor * (second.link_bytes - first.link_bytes),
        second.class_bytes + factor * (second.class_bytes - first.class_bytes),
        True,
    )


def has_many_messages(spec: CallSpec, size: int) -> bool:
    """Return whether a rank has many messages in a round."""
    startups, rounds = (
        float(formula(p=size, n=size, **dict(spec.options)))
        for formula in (spec.algorithm.startups, spec.algorithm.rounds)
    )
    return startups > MANY_MESSAGES * rounds


def _num_lanes(spec: CallSpec) -> float:
    """Return the number of lanes of a call; the last one, which may be shorter, is a fraction."""
    return _largest(spec) / -(-_largest(spec) // spec.segments)


def _largest(spec: CallSpec) -> int:
    """Return the number of elements of the largest block that lanes divide."""
    counts = spec.counts
    return counts if isinstance(counts, int) else max(cast("tuple[int, ...]", counts))


def shortened(spec: CallSpec, lanes: int) -> CallSpec:
    """Return the call on the elements of its first lanes."""
    if lanes >= spec.segments:
        return spec
    most, counts = lanes * -(-_largest(spec) // spec.segments), spec.counts
    if isinstance(counts, int):
        return spec._replace(counts=min(counts, most), segments=lanes)
    kept = tuple(min(count, most) for count in cast("tuple[int, ...]", counts))
    return spec._replace(counts=kept, segments=lanes)


def _tables(specs: Sequence[CallSpec], machine: Machine, network: Network) -> list[list[Rows]]:
    """Return for each call the rows of each rank that is simulated."""
    num_ranks, ranks = network.num_ranks, range(network.period)
    firsts = [repeated(spec, machine, num_ranks) for spec in specs]
    if None not in firsts:
        return [[first.moved(rank, num_ranks) for rank in ranks] for first in firsts if first]
    if network.period < num_ranks:
        raise ValueError(f"{specs[0].algorithm.label}: the ranks do not all do the same")
    tables: list[list[Rows]] = [[] for _ in specs]
    with _without_garbage_collection():
        for rank in ranks:  # all calls of a rank follow each other: they have the same schedule
            for spec, rows in zip(specs, tables, strict=True):
                rows.append(rows_of(compile_call(spec, rank, num_ranks, is_kept=False), machine))
    return tables


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Do not search for cycles of objects: programs have none, and it takes a third of the time."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _rows_of_groups(
    spec: CallSpec, machine: Machine, groups: Sequence[Sequence[int]], num_ranks: int
) -> list[Rows]:
    """Return the rows of each rank, which makes the calls of its groups at the same time."""
    size = len(groups[0])
    of_group = [rows_of(compile_call(spec, i, size, is_kept=False), machine) for i in range(size)]
    calls_of_ranks: list[list[Rows]] = [[] for _ in range(num_ranks)]
    for group in groups:
        for rank, rows in zip(group, of_group, strict=True):
            calls_of_ranks[rank].append(rows.renamed(np.asarray(group)))
    return [at_once(calls) for calls in calls_of_ranks]


def repeated(spec: CallSpec, machine: Machine, size: int) -> Rows | None:
    """Return the rows of rank 0, if all ranks do the same at peers at the same distances.

    Some ranks are compared.  (Tests check for all ranks of all algorithms, with few ranks, that
    these are enough.)
    """

    def rows(rank: int) -> Rows:
        return rows_of(compile_call(spec, rank, size, is_kept=False), machine)

    first = rows(0)
    others = {1, size // 2, size - 1} if size > 1 else set[int]()
    return first if all(first.moved(r, size).equals(rows(r)) for r in sorted(others)) else None
