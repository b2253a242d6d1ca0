"""Simulate a collective on a machine that need not exist.

    ring simulate all_reduce --ranks 1024 --bytes 256M --topology hosts:128x8

Prints the time of each algorithm, its busiest kind of link and what its ranks send by each class of
links; then what the links of the best one carry.  Nothing is sent.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from collectives import algorithms
from collectives.console import (
    Command,
    Number,
    Table,
    add_output_options,
    at_least,
    console_for,
    in_units,
    num_bytes,
    output_file,
    progress,
    refusing,
    write_json,
)
from collectives.schedule import SPECS
from collectives.selection import Choice, choose, even_parts, machine_in
from collectives.simulation import (
    TOPOLOGIES,
    Call,
    Machine,
    Network,
    Tree,
    network_of,
    picture,
    simulate_call,
)


class SimulatedAlgorithm(NamedTuple):
    """An algorithm and what its simulation finds."""

    label: str
    call: Call


def run(options: argparse.Namespace) -> int:
    """Print what the options ask for; return the exit status."""
    console = console_for(0, options)
    with refusing(MemoryError, OverflowError, TypeError):
        machine = machine_in(options.machine)
        topology = options.topology or f"hosts:{options.ranks or 8}x1"
        network = network_of(topology, machine, options.ranks, is_folded=options.folded)
        ranking = simulated(options, machine, network, console)
    title = (
        f"{options.collective} of {options.bytes} bytes of {options.dtype} on"
        f" {network.num_ranks} ranks, {topology}"
    )
    tables = {
        "algorithms": algorithm_table(ranking, network),
        "links": link_table(ranking[0].call, network),
    }
    console.print(title)
    tables["algorithms"].print(console)
    console.print(f"best: {ranking[0].label}; its links:")
    tables["links"].print(console)
    if any(algorithm.call.is_extended for algorithm in ranking):
        console.print("Calls of many lanes were simulated with few, and extended linearly.")
    if options.picture:
        label, best = ranking[0]
        options.picture.write_text(picture(title, label, best.seconds, best.link_bytes, network))
        console.print(f"the links of {label}: {options.picture}")
    write_json({name: table.as_dicts() for name, table in tables.items()}, options.json)
    return 0


def simulated(
    options: argparse.Namespace, machine: Machine, network: Network, console: Console
) -> list[SimulatedAlgorithm]:
    """Return the algorithms with their calls, the fastest first; show the progress."""
    choices, ranking = _choices(options, network), []
    with progress(console, len(choices)) as show:
        for number, choice in enumerate(choices):
            show(number, choice.label)
            call = _simulated(options, choice, machine, network)
            ranking.append(SimulatedAlgorithm(choice.label, call))
    return sorted(ranking, key=lambda algorithm: algorithm.call.seconds)


def _choices(options: argparse.Namespace, network: Network) -> list[Choice]:
    """Return the algorithms that are compared: those that are named, or all that serve."""
    size, collective = network.num_ranks, options.collective
    if options.algorithm:
        labels = re.split(r",(?![^()]*\))", options.algorithm)  # at commas between algorithms
    else:
        labels = [
            label for label in _labels(collective, network) if _serves(collective, label, size)
        ]
    itemsize = np.dtype(options.dtype).itemsize
    return [choose(collective, label, size, options.bytes, itemsize=itemsize) for label in labels]


def _labels(collective: str, network: Network) -> Iterator[str]:
    """Yield all algorithms; algorithms for hosts get the number of ranks per host."""
    per_host = network.host if isinstance(network, Tree) else 1
    for name in algorithms.names(collective):
        of_hosts = "per_host" in algorithms.info(collective, name).options
        if not of_hosts:
            yield name
        elif per_host > 1:
            yield f"{name}(per_host={per_host})"


def _serves(collective: str, label: str, size: int) -> bool:
    try:
        choose(collective, label, size, 1)
    except ValueError:
        return False
    return True


def _simulated(
    options: argparse.Namespace, choice: Choice, machine: Machine, network: Network
) -> Call:
    itemsize = np.dtype(options.dtype).itemsize
    if options.bytes % itemsize:
        raise ValueError(f"{options.bytes} bytes are not elements of {itemsize} bytes")
    counts = even_parts(options.collective, network.num_ranks, options.bytes // itemsize)
    spec = choice.spec(counts, itemsize)
    return simulate_call(spec, machine, network, stragglers=dict(options.straggler))


def algorithm_table(ranking: Sequence[SimulatedAlgorithm], network: Network) -> Table:
    """Return a row for each algorithm: its time, its busiest kind of link, and bytes by class."""
    names = network.links.kind_names
    time, in_time = in_units("time", "s", [algorithm.call.seconds for algorithm in ranking])
    classes, in_class = columns_of_bytes(
        network.classes, [algorithm.call.class_bytes for algorithm in ranking]
    )
    table = Table("algorithm", time, "busiest links", Number("in use", ".0%"), *classes)
    for label, call in ranking:
        most = [share.max(initial=0) for share in in_use(call, network)]
        busiest = int(np.argmax(most)) if most else None
        link, share = ("", 0.0) if busiest is None else (names[busiest], float(most[busiest]))
        sent = (float(n) / in_class for n in call.class_bytes)
        table.add(label, call.seconds / in_time, link, share, *sent)
    return table


def link_table(call: Call, network: Network) -> Table:
    """Return a row for each kind of link: how much the links of this kind carry."""
    kinds, names, shares = network.links.kinds, network.links.kind_names, in_use(call, network)
    carried = {name: call.link_bytes[kinds == kind] for kind, name in enumerate(names)}
    most = [float(nbytes.max(initial=0)) for nbytes in carried.values()]
    (busiest, mean), in_head = columns_of_bytes(["busiest", "mean"], [most])
    table = Table("links", Number("number"), busiest, mean, Number("in use", ".0%"))
    for (name, nbytes), share in zip(carried.items(), shares, strict=True):
        if len(nbytes):
            numbers = (float(nbytes.max()) / in_head, float(nbytes.mean()) / in_head)
            table.add(name, len(nbytes), *numbers, float(share.max(initial=0)))
    return table


def columns_of_bytes(
    heads: Sequence[str], values: Iterable[Iterable[float]]
) -> tuple[list[Number], float]:
    """Return columns of bytes, all in the same multiple of bytes, and the multiple."""
    sent = [float(n) for row in values for n in row if n]
    _, multiple = in_units("", "B", sent)
    return [in_units(head, "B", sent)[0] for head in heads], multiple


def in_use(call: Call, network: Network) -> list[NDArray[np.float64]]:
    """Return the part of the time for which each link of each kind is in use at its full rate."""
    capacities, kinds, names = network.links
    share = call.link_bytes / capacities / max(call.seconds, 1e-300)
    return [share[kinds == kind] for kind in range(len(names))]


def straggler(word: str) -> tuple[int, float]:
    """Return (5, 2.0) for "5=2"; an argument type."""
    left, _, right = word.partition("=")
    try:
        rank, factor = int(left), float(right)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not RANK=FACTOR, such as 5=2") from None
    if not 0 < factor < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r}: the factor must be more than 0")
    return rank, factor


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.epilog = f"topologies:\n\n{TOPOLOGIES}"
    add = parse.add_argument
    add("collective", choices=list(SPECS))
    add(
        "--bytes",
        type=num_bytes,
        default=2**20,
        metavar="N",
        help="the n of the formulas, such as 256M; default: 1M",
    )
    add("--dtype", default="float32", help="default: %(default)s")
    add("--ranks", type=at_least(1), metavar="N", help="the first N; default: all that fit")
    add("--topology", metavar="TEXT", help="see below; default: one rank on each host")
    add("--algorithm", metavar="NAMES", help="such as ring,swing; default: all that serve")
    add("--machine", type=Path, metavar="FILE", help="written by `ring bench tune`")
    add(
        "--straggler",
        type=straggler,
        action="append",
        default=[],
        metavar="RANK=FACTOR",
        help="a rank whose processor is slower; may be given several times",
    )
    add(
        "--folded",
        action="store_true",
        help="simulate one of the largest groups for all, where all ranks do the same",
    )
    add(
        "--picture", type=output_file, metavar="FILE.svg", help="write how much each link is in use"
    )
    add_output_options(parse)


COMMAND = Command("collectives.simulate", __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(COMMAND.main())
