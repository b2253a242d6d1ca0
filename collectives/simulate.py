"""Simulate a collective on a machine that need not exist: ``python -m collectives.simulate``.

    python -m collectives.simulate all_reduce --ranks 1024 --bytes 256M --topology hosts:128x8

Prints the time of each algorithm, its busiest kind of link and what its ranks send by each class of
links; then what the links of the best one carry.  Nothing is sent.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives import algorithms
from collectives.export import at_least_one, num_bytes, output_file
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


class Found(NamedTuple):
    """A simulated algorithm."""

    label: str
    call: Call


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the command line asks for; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        machine = machine_in(options.machine)
        topology = options.topology or f"hosts:{options.ranks or 8}x1"
        network = network_of(topology, machine, options.ranks, is_folded=options.folded)
        choices = _choices(options, network)
        found = []
        for choice in choices:
            found.append(Found(choice.label, _simulated(options, choice, machine, network)))
            sys.stderr.write(f"{choice.label}: {_seconds(found[-1].call.seconds)}\n")
    except (MemoryError, OSError, OverflowError, TypeError, ValueError) as error:
        parse.exit(2, f"{parse.prog}: {str(error) or 'there is not enough memory'}\n")
    found.sort(key=lambda each: each.call.seconds)
    num_bytes = f"{options.bytes} bytes of {options.dtype}"
    title = f"{options.collective} of {num_bytes} on {network.num_ranks} ranks, {topology}"
    sys.stdout.writelines(f"{line}\n" for line in lines(title, found, network))
    if options.picture:
        label, best = found[0]
        options.picture.write_text(picture(title, label, best.seconds, best.link_bytes, network))
        sys.stdout.write(f"the links of {found[0].label}: {options.picture}\n")
    return 0


def _choices(options: argparse.Namespace, network: Network) -> list[Choice]:
    """The algorithms that are compared: those that are named, or all that serve."""
    size, collective = network.num_ranks, options.collective
    if options.algorithm:
        labels = re.split(r",(?![^()]*\))", options.algorithm)  # at commas between algorithms
    else:
        labels = [
            label for label in _labels(collective, network) if _serves(collective, label, size)
        ]
    itemsize = np.dtype(options.dtype).itemsize
    return [choose(collective, each, size, options.bytes, itemsize=itemsize) for each in labels]


def _labels(collective: str, network: Network) -> Iterator[str]:
    """All algorithms; those for hosts with as many ranks as the hosts of the network have."""
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


# What is printed


def lines(title: str, found: Sequence[Found], network: Network) -> Iterator[str]:
    """The algorithms, the fastest first, and the links of that one."""
    yield title
    yield ""
    heads = ["algorithm", "time", "busiest links", "in use", *network.classes]
    rows = [[label, *_row(call, network)] for label, call in found]
    yield from table(heads, rows)
    yield ""
    yield f"best: {found[0].label}; its links:"
    yield ""
    yield from table(
        ["links", "number", "busiest", "mean", "in use"], _by_kind(found[0].call, network)
    )
    if any(each.call.is_extended for each in found):
        yield ""
        yield "Calls of many lanes were simulated with few, and extended linearly."


def _row(call: Call, network: Network) -> list[str]:
    """The time of a call, its busiest kind of link, and the bytes by class."""
    names, shares = network.links.kind_names, in_use(call, network)
    busiest = int(np.argmax([each.max(initial=0) for each in shares])) if shares else 0
    most = shares[busiest].max(initial=0) if shares else 0.0
    return [
        _seconds(call.seconds),
        names[busiest] if names else "",
        f"{most:.0%}",
        *map(_bytes, call.class_bytes),
    ]


def in_use(call: Call, network: Network) -> list[NDArray[np.float64]]:
    """The part of the time for which each link of each kind is in use at its full rate."""
    capacities, kinds, names = network.links
    share = call.link_bytes / capacities / max(call.seconds, 1e-300)
    return [share[kinds == kind] for kind in range(len(names))]


def _by_kind(call: Call, network: Network) -> list[list[str]]:
    kinds, names, shares = network.links.kinds, network.links.kind_names, in_use(call, network)
    return [
        [
            name,
            str(len(mine)),
            _bytes(mine.max(initial=0)),
            _bytes(mine.mean()),
            f"{shares[kind].max(initial=0):.0%}",
        ]
        for kind, name in enumerate(names)
        if len(mine := call.link_bytes[kinds == kind])
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as text: words on the left, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    is_number = [any(c.isdigit() for c in x[:1]) for x in (rows[0] if rows else heads)]
    for row in (heads, *rows):
        cells = (
            word.rjust(width) if right else word.ljust(width)
            for word, width, right in zip(row, widths, is_number, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _seconds(value: float) -> str:
    factor, unit = next(
        (each for each in ((1, "s"), (1e3, "ms")) if value * each[0] >= 1), (1e6, "us")
    )
    return f"{value * factor:.4g} {unit}"


def _bytes(value: float) -> str:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.4g} B"


# The command line


def straggler(word: str) -> tuple[int, float]:
    """(5, 2.0) for "5=2"; an argument type."""
    rank, _, factor = word.partition("=")
    try:
        found = int(rank), float(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not RANK=FACTOR, such as 5=2") from None
    if not 0 < found[1] < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r}: the factor must be more than 0")
    return found


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parse = argparse.ArgumentParser("python -m collectives.simulate", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
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
    add("--ranks", type=at_least_one, metavar="N", help="the first N; default: all that fit")
    add("--topology", metavar="TEXT", help="see below; default: one rank on each host")
    add("--algorithm", metavar="NAMES", help="such as ring,swing; default: all that serve")
    add("--machine", type=Path, metavar="FILE", help="written by `python -m bench fit`")
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
    return parse


if __name__ == "__main__":
    sys.exit(main())
