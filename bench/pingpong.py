"""Measure messages between two ranks: latency and bandwidth, by this library and by mpi4py.

    python -m bench pingpong -g 2
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
import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI
from rich.console import Console
from rich.table import Table

from bench import messages, sizes
from bench.live import live
from bench.messages import OURS, THEIRS, WINDOW, Arrays
from bench.names import ALL
from bench.options import add_effort, add_job, add_sizes
from bench.perf import check_output, communicator, ending_the_job, mpi_version
from bench.report import percent, us
from bench.samples import Quartiles
from bench.timing import SMALL, Effort, sampled
from collectives import Communicator
from parallel.cli import console_of, print_table, table_with

Pair = tuple[int, int]


class Link(NamedTuple):
    """Messages of one size between two ranks: the times of each engine and kind of exchange."""

    pair: Pair
    is_same_host: bool
    num_bytes: int
    times: dict[str, dict[str, Quartiles]]
    wrong: int

    def rate(self, engine: str, kind: str) -> float:
        """Bytes per second."""
        directions = 2 if kind == "bidirectional" else 1
        return directions * WINDOW * self.num_bytes / self.times[engine][kind].median

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "pair": self.pair,
            "link": "same_host" if self.is_same_host else "other_host",
            "bytes": self.num_bytes,
            "wrong": self.wrong,
            **{engine: self._engine_dict(engine) for engine in self.times},
        }

    def _engine_dict(self, engine: str) -> dict[str, Any]:
        latency = [seconds / 2 for seconds in self.times[engine]["latency"]]
        rates = {f"{kind}_bytes_per_second": self.rate(engine, kind) for kind in _RATES}
        names = ("latency_low_seconds", "latency_seconds", "latency_high_seconds")
        return dict(zip(names, latency, strict=True)) | rates


_RATES = ("bandwidth", "bidirectional")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=run)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_sizes(parser, last="2M")
    add_effort(parser.add_argument, seconds_of_size=1.0)
    add_job(parser.add_argument)
    add = parser.add_argument
    add("--pairs", type=pairs, default="0-1", metavar="A-B,C-D|all", help="default: %(default)s")
    add(
        "-J",
        "--output_file",
        dest="json",
        type=Path,
        metavar="FILE",
        help="write everything to FILE, as JSON",
    )


def pairs(text: str) -> list[Pair] | str:
    """An argument's type: pairs of ranks, or "all"."""
    if text == ALL:
        return ALL
    found = []
    for word in text.split(","):
        first, dash, second = word.partition("-")
        if not (dash and first.isdecimal() and second.isdecimal()) or int(first) == int(second):
            raise argparse.ArgumentTypeError(f"{word!r} is not two ranks such as 0-1")
        found.append((int(first), int(second)))
    return found


def run(options: argparse.Namespace) -> int:
    """Measure as told.  0, 1 if anything is wrong, 2 if it cannot be measured."""
    comm = communicator(options.timeout)
    console = console_of(comm.rank, is_terminal=options.live)
    with ending_the_job():
        status = measured(comm, options, console)
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 report
    return status


def measured(comm: Communicator, options: argparse.Namespace, console: Console) -> int:
    """Everything, with what rank 0 prints and writes; the exit status."""
    try:
        chosen, series = pairs_of(options.pairs, comm.size), sizes.sizes_of(options)
        check_output(options.json)
    except ValueError as error:
        console.print(f"bench: {error}", markup=False)
        return 2
    effort = Effort(options.warmup, options.samples, options.seconds)
    with live(console, len(chosen) * len(series)) as show:
        found = []
        for pair in chosen:
            for num_bytes in series:
                show(f"{pair[0]}-{pair[1]}, {sizes.text(num_bytes)}")
                found.append(link(comm, pair, num_bytes, effort))
    facts = {"mpi": mpi_version(), "ranks": comm.size, "window": WINDOW}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), markup=False)
    print_table(table(found), console)
    if options.json is not None and comm.rank == 0:
        result = facts | {"links": [each.as_dict() for each in found]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(each.wrong for each in found))


def pairs_of(wanted: list[Pair] | str, size: int) -> list[Pair]:
    """The pairs of ranks.  ValueError, on every rank, if there are none such."""
    if size == 1:
        raise ValueError("pingpong needs two ranks; -g 2 starts them")
    if isinstance(wanted, str):
        return list(combinations(range(size), 2))
    for pair in wanted:
        if max(pair) >= size:
            raise ValueError(f"--pairs: there is no rank {max(pair)} among {size} ranks")
    return wanted


def link(comm: Communicator, pair: Pair, num_bytes: int, effort: Effort) -> Link:
    """All engines and kinds of exchange side by side, and the check of what arrives."""
    arrays = Arrays.of(num_bytes)
    engines = {OURS: messages.ours(comm), THEIRS: messages.theirs()}
    made = {name: messages.runs(each, arrays, pair, comm.rank) for name, each in engines.items()}
    runs = [run for kinds in made.values() for run in kinds.values()]
    samples = sampled(runs, arrays.x, is_small=num_bytes < SMALL, effort=effort)
    taken = iter([each.ranks[pair[0]] for each in samples])
    times = {name: {kind: next(taken) for kind in kinds} for name, kinds in made.items()}
    wrong = [
        messages.num_wrong(kinds["bidirectional"], arrays, pair, comm.rank)
        for kinds in made.values()
    ]
    total = int(MPI.COMM_WORLD.allreduce(sum(wrong)))
    first, second = (comm.topology.host_of[rank] for rank in pair)
    return Link(pair, first == second, num_bytes, times, total)


def table(found: Sequence[Link]) -> Table:
    """One line for each pair and size: latency, and bandwidth in one and in both directions."""
    heads = ["us ours", "+- %", "us mpi4py", "+- %"]
    heads += [f"{kind} {engine}" for kind in ("GB/s", "both GB/s") for engine in (OURS, THEIRS)]
    made = table_with("ranks", "host", numbers=["size", *heads, "wrong"])
    for each in found:
        first, second = each.pair
        host = "same" if each.is_same_host else "other"
        cells = [*_latencies(each), *_rates(each), str(each.wrong)]
        made.add_row(f"{first}-{second}", host, sizes.text(each.num_bytes), *cells)
    return made


def _latencies(each: Link) -> Iterator[str]:
    for engine in (OURS, THEIRS):
        low, median, high = each.times[engine]["latency"]
        yield us(median / 2)
        yield percent((high - low) / 2 / median)


def _rates(each: Link) -> Iterator[str]:
    for kind in _RATES:
        for engine in (OURS, THEIRS):
            yield f"{each.rate(engine, kind) / 1e9:.3g}"
