"""Simulates a call of a collective, also on very many ranks.

Two things make that possible, and both are exact or checked:

- Where all ranks do the same at peers at the same distances, one rank is compiled.  If the network
  is folded, the ranks of one of its groups are simulated for all.
- The lanes of a large reduction follow each other in the same way.  A call of many lanes is
  simulated with few, at two sizes, and its time follows from the difference.

Where a rank has many messages in a round as well, rates are computed less often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from collectives.programs import CallSpec, compile_call
from collectives.simulation.engine import Simulation, simulate_rows
from collectives.simulation.machine import Machine
from collectives.simulation.network import Network
from collectives.simulation.tables import NO_ROWS, Rows, rows_of

FEW_LANES = (6, 9)  # that are simulated for many; multiples of those that run at the same time
FEWER_LANES = (3, 6)  # for more than `MANY_RANKS`
FEWEST_LANES = (1, 2)  # where all ranks send to all others
MANY_RANKS = 256
RESOLUTION = 0.02  # there: how long a message may wait, as a part of its time
MANY_MESSAGES = 16  # of a rank in a round


class Call(NamedTuple):
    """What the simulation of a call finds.

    - `seconds`: from the beginning of all ranks to the end of the last.
    - `link_bytes`: what each link of the network carried.
    - `class_bytes`: what all ranks sent by each class of links.
    - `is_extended`: whether fewer lanes were simulated than the call has.
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

    - `spec`: the call.
    - `machine`, `network`, `stragglers`: those of `simulate`.
    - `groups`: the ranks of each group, which are equally large; other ranks do nothing.  None: all
      ranks are one group.

    Returns a `Call`.  Raises ValueError if the algorithm cannot serve, or if the network is folded
    and the ranks do not all do the same.
    """

    def run(lanes: int) -> Simulation:
        few = shortened(spec, lanes)
        if groups is None:
            rows = list(_rows(few, machine, network))
        else:
            rows = _rows_of_groups(few, machine, groups, network.num_ranks)
        resolution = RESOLUTION if is_dense and lanes < spec.segments else 0.0
        return simulate_rows(rows, machine, network, stragglers, resolution)

    size = network.num_ranks if groups is None else len(groups[0])
    is_dense = has_many_messages(spec, size)
    few = FEWEST_LANES if is_dense else FEWER_LANES if size > MANY_RANKS else FEW_LANES
    if spec.segments <= few[1]:
        found = run(spec.segments)
        return Call(found.seconds, found.link_bytes, found.class_bytes, False)
    first, second = map(run, few)
    factor = (_num_lanes(spec) - few[1]) / (few[1] - few[0])
    return Call(
        second.seconds + factor * (second.seconds - first.seconds),
        second.link_bytes + factor * (second.link_bytes - first.link_bytes),
        second.class_bytes + factor * (second.class_bytes - first.class_bytes),
        True,
    )


def has_many_messages(spec: CallSpec, size: int) -> bool:
    """Whether a rank has many messages in a round."""
    startups, rounds = (
        float(formula(p=size, n=size, **dict(spec.options)))
        for formula in (spec.algorithm.startups, spec.algorithm.rounds)
    )
    return startups > MANY_MESSAGES * rounds


def _num_lanes(spec: CallSpec) -> float:
    """The lanes of a call; of the last one, which may be shorter, the fraction."""
    return _largest(spec) / -(-_largest(spec) // spec.segments)


def _largest(spec: CallSpec) -> int:
    """The elements of the largest block that lanes divide."""
    counts = spec.counts
    return counts if isinstance(counts, int) else max(cast("tuple[int, ...]", counts))


def shortened(spec: CallSpec, lanes: int) -> CallSpec:
    """The call on the elements of its first lanes."""
    if lanes >= spec.segments:
        return spec
    most, counts = lanes * -(-_largest(spec) // spec.segments), spec.counts
    if isinstance(counts, int):
        return spec._replace(counts=min(counts, most), segments=lanes)
    kept = tuple(min(count, most) for count in cast("tuple[int, ...]", counts))
    return spec._replace(counts=kept, segments=lanes)


def _rows(spec: CallSpec, machine: Machine, network: Network) -> Iterator[Rows]:
    """The rows of each rank that is simulated."""
    num_ranks = network.num_ranks
    if (first := repeated(spec, machine, num_ranks)) is not None:
        yield from (first.moved(rank, num_ranks) for rank in range(network.period))
        return
    if network.period < num_ranks:
        raise ValueError(f"{spec.algorithm.label}: the ranks do not all do the same")
    for rank in range(num_ranks):
        yield rows_of(compile_call(spec, rank, num_ranks, is_kept=False), machine)


def _rows_of_groups(
    spec: CallSpec, machine: Machine, groups: Sequence[Sequence[int]], num_ranks: int
) -> list[Rows]:
    """The rows of each rank, of which there are none outside of groups."""
    size = len(groups[0])
    of_group = [rows_of(compile_call(spec, i, size, is_kept=False), machine) for i in range(size)]
    found = [NO_ROWS] * num_ranks
    for group in groups:
        for rank, rows in zip(group, of_group, strict=True):
            found[rank] = rows.renamed(np.asarray(group))
    return found


def repeated(spec: CallSpec, machine: Machine, size: int) -> Rows | None:
    """The rows of rank 0, if all ranks do the same at peers at the same distances.

    That is checked for some ranks.  (Tests check for all ranks of all algorithms, with few ranks,
    that these are enough.)
    """

    def rows(rank: int) -> Rows:
        return rows_of(compile_call(spec, rank, size, is_kept=False), machine)

    first = rows(0)
    others = {1, size // 2, size - 1} if size > 1 else set[int]()
    return first if all(first.moved(r, size).equals(rows(r)) for r in sorted(others)) else None
