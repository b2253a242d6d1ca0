"""Measure messages between two ranks: latency and bandwidth, by this library and by mpi4py.

    ring bench pingpong -g 2
    mpirun -n 4 python -m bench pingpong --pairs all -e 1M

Latency is half the time of a message there and one of the same size back, by blocking calls.  For
the bandwidth one rank sends 16 messages to the other, which answers with one byte; for the
bidirectional bandwidth, which counts both directions, both send 16 messages at the same time.
"ours" are comm.send and comm.recv; "mpi4py" are Send, Recv, Isend and Irecv.  All take turns, in
random order; times are medians, and +- is half the distance between the quartiles.  The exit status
is 1 if a message arrives wrong, 2 if it cannot be measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

from mpi4py import MPI

from bench.calls import messages
from bench.calls.messages import OURS, THEIRS, WINDOW
from bench.calls.start_ranks import with_ranks
from bench.commands import world
from bench.commands.options import add_output, add_ranks, add_samples, add_sizes, option
from bench.timing.interleaved import SMALL, Effort, sampled
from bench.timing.quartiles import Quartiles
from bench.workloads import sizes
from bench.workloads.datatypes import ALL
from collectives import Communicator
from collectives.console import Cell, Number, Table, console_for, progress, refusing, write_json

Pair = tuple[int, int]
RATES = ("bandwidth", "bidirectional")


class Link(NamedTuple):
    """Messages of one size between two ranks: the times of each engine and kind of exchange."""

    pair: Pair
    is_same_host: bool
    num_bytes: int
    times: dict[str, dict[str, Quartiles]]
    wrong: int

    def rate(self, engine: str, kind: str) -> float:
        """Return bytes per second."""
        directions = 2 if kind == "bidirectional" else 1
        return directions * WINDOW * self.num_bytes / self.times[engine][kind].median

    def as_dict(self) -> dict[str, Any]:
        """Return the link for JSON."""
        return {
            "pair": self.pair,
            "link": "same_host" if self.is_same_host else "other_host",
            "bytes": self.num_bytes,
            "wrong": self.wrong,
            **{engine: self._engine_dict(engine) for engine in self.times},
        }

    def _engine_dict(self, engine: str) -> dict[str, Any]:
        latency = [seconds / 2 for seconds in self.times[engine]["latency"]]
        rates = {f"{kind}_bytes_per_second": self.rate(engine, kind) for kind in RATES}
        names = ("latency_low_seconds", "latency_seconds", "latency_high_seconds")
        return dict(zip(names, latency, strict=True)) | rates


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_sizes(parse, last="2M")
    add_samples(parse, seconds=1.0)
    add_ranks(parse)
    about = "which ranks"
    option(parse, "--pairs", about, type=pairs, default="0-1", metavar="A-B,C-D|all")
    add_output(parse, is_local=False)


def pairs(text: str) -> list[Pair] | str:
    """Return pairs of ranks, or "all"; an argument type."""
    if text == ALL:
        return ALL
    chosen = []
    for word in text.split(","):
        first, dash, second = word.partition("-")
        if not (dash and first.isdecimal() and second.isdecimal()) or int(first) == int(second):
            raise argparse.ArgumentTypeError(f"{word!r} is not two ranks such as 0-1")
        chosen.append((int(first), int(second)))
    return chosen


def run(options: argparse.Namespace) -> int:
    """Measure; return 0, or 1 if anything is wrong.  Raises Refused."""
    return world.on_ranks(lambda comm: measured(comm, options), options.timeout)


def measured(comm: Communicator, options: argparse.Namespace) -> int:
    """Measure everything, and let rank 0 print and write it; return the exit status."""
    console = console_for(comm.rank, options, is_terminal=options.live)
    with refusing():
        wanted = list(product(pairs_of(options.pairs, comm.size), sizes.sizes_of(options)))
    world.check_output(options.json)
    effort = Effort(options.warmup, options.samples, options.seconds)
    links = list[Link]()
    with progress(console, len(wanted), refresh=False) as show:
        for pair, num_bytes in wanted:
            show(len(links), f"{pair[0]}-{pair[1]}, {sizes.text(num_bytes)}")
            links.append(link(comm, pair, num_bytes, effort))
    facts = {"mpi": world.mpi_version(), "ranks": comm.size, "window": WINDOW}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()))
    table(links).print(console)
    if comm.rank == 0:
        write_json(facts | {"links": [link.as_dict() for link in links]}, options.json)
    return int(any(link.wrong for link in links))


def pairs_of(wanted: list[Pair] | str, size: int) -> list[Pair]:
    """Return the pairs of ranks.  ValueError, on every rank, if there are none such."""
    if size == 1:
        raise ValueError("pingpong needs two ranks; -g 2 starts them")
    if isinstance(wanted, str):
        return list(combinations(range(size), 2))
    for pair in wanted:
        if max(pair) >= size:
            raise ValueError(f"--pairs: there is no rank {max(pair)} among {size} ranks")
    return wanted


def link(comm: Communicator, pair: Pair, num_bytes: int, effort: Effort) -> Link:
    """Measure all engines and kinds of exchange side by side, and check what arrives."""
    arrays = messages.arrays_of(num_bytes)
    engines = {OURS: messages.ours(comm), THEIRS: messages.theirs()}
    made = {
        name: messages.runs(engine, arrays, pair, comm.rank) for name, engine in engines.items()
    }
    runs = [run for kinds in made.values() for run in kinds.values()]
    samples = sampled(runs, arrays[0], is_small=num_bytes < SMALL, effort=effort)
    taken = iter([sample.ranks[pair[0]] for sample in samples])
    times = {name: {kind: next(taken) for kind in kinds} for name, kinds in made.items()}
    wrong = [
        messages.num_wrong(kinds["bidirectional"], arrays, pair, comm.rank)
        for kinds in made.values()
    ]
    total = int(MPI.COMM_WORLD.allreduce(sum(wrong)))
    first, second = (comm.topology.host_of[rank] for rank in pair)
    return Link(pair, first == second, num_bytes, times, total)


def table(links: Sequence[Link]) -> Table:
    """Return a line for each pair and size: latency, and bandwidth in one and both directions."""
    latencies = [
        Number(head, form)
        for engine in (OURS, THEIRS)
        for head, form in ((f"us {engine}", ".2f"), (f"+- % {engine}", ".1f"))
    ]
    rates = [
        Number(f"{kind} {engine}", ".1f")
        for kind in ("MB/s", "both MB/s")
        for engine in (OURS, THEIRS)
    ]
    made = Table("ranks", "host", Number("size"), *latencies, *rates, Number("wrong"))
    for link in links:
        first, second = link.pair
        host = "same" if link.is_same_host else "other"
        size = sizes.text(link.num_bytes)
        made.add(f"{first}-{second}", host, size, *numbers(link), link.wrong)
    return made


def numbers(link: Link) -> Iterator[Cell]:
    """Yield latencies in us with their spreads in percent, and bandwidths in MB/s."""
    for engine in (OURS, THEIRS):
        low, median, high = link.times[engine]["latency"]
        yield median / 2 * 1e6
        yield (high - low) / 2 / median * 100
    for kind in RATES:
        for engine in (OURS, THEIRS):
            yield link.rate(engine, kind) / 1e6


COMMAND = with_ranks("pingpong", __doc__, add_options, run)
