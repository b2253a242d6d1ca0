"""Measure what messages, copies and calls cost here, and write the machine to a file.

    mpirun -n 2 python -m bench fit --output decisions.json
    mpirun -n 4 python -m bench fit --check

Two ranks on the same host, and two on different hosts, exchange messages: a ping-pong, one way,
both ways at once, several at once.  Between hosts one rank of each host exchanges around a ring.
If ranks outnumber the cores of a host, all ranks do so in pairs; else samples in which a rank has
lost its core to another program do not count, and on a busy machine nothing is fitted.  What is
sent has just been written, as in programs.  The size from which a send waits for its receive is
found by trying.  A machine of the LogGOPS model is fitted to the times by relative error.

`Communicator.load_decisions` reads FILE; then predictions choose algorithms where `bench tune` has
measured nothing.  Tables of `bench tune` in FILE are kept.

`--check` then measures every algorithm of every collective on 2 to 8 ranks, at sizes at which
nothing was fitted, and compares them with predictions.  The exit status is 1 if the median error is
above 10 %, its 90th percentile above 25 %, or if the algorithms that are predicted to be fastest
are more than 10 % slower than the fastest (in the geometric mean); 2 if nothing can be fitted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI
from rich.console import Console

import collectives
from bench.fit import check, showing
from bench.fit.fitting import fitted_links, rate, refuse_few, undisturbed
from bench.fit.measuring import Group, Measurement, groups_of
from bench.fit.patterns import ITEMSIZE, PATTERNS, Sample
from bench.options import seconds
from bench.tune import earlier, here
from collectives import Communicator, algorithms
from collectives.selection.machine_file import Fitted
from collectives.simulation import SAME_HOST, Machine
from parallel.cli import at_least, console_of

_SIZES = tuple(8 * 4**power for power in range(10))  # bytes, up to 2 MiB
_WORK_SIZES = tuple(4096 * 4**power for power in range(6))  # up to 4 MiB
# Overhead, copies, combinations, a call, and four patterns on each of two classes of links: how
# many times the seconds of the fit are divided.
_METHODS = 12
_BURST_BYTES = 256 << 10  # the largest message of a burst


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.set_defaults(run=run)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=Path("decisions.json"),
        metavar="FILE",
        help="default: %(default)s",
    )
    add(
        "--samples",
        type=at_least(3),
        default=400,
        metavar="N",
        help="of each time; default: %(default)s",
    )
    add(
        "--at-once",
        action="store_true",
        help="all ranks exchange in pairs at once, as they do in "
        "collectives; always so if ranks outnumber the cores of a host",
    )
    add("--check", action="store_true", help="compare predictions with collectives")
    add(
        "--collective",
        dest="collectives",
        action="append",
        choices=algorithms.collectives(),
        metavar="NAME",
        help="check this one; may be repeated; default: all",
    )
    add("--keep", action="store_true", help="do not fit: check the machine that FILE has")
    add(
        "--seconds",
        type=seconds,
        default=120.0,
        metavar="S",
        help="about how long each of fit and check may take, unless a few calls of everything "
        "take longer; default: %(default)s",
    )


def run(options: argparse.Namespace) -> int:
    """Measure as told.  0, 1 if a goal of the check is not met, 2 if nothing can be fitted."""
    comm = collectives.world()
    console = console_of(comm.rank)
    try:
        status = _run(comm, options, console)
    except ValueError as error:
        console.print(f"bench: {error}", markup=False)
        status = 2
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 say why
    return status


def _run(comm: Communicator, options: argparse.Namespace, console: Console) -> int:
    if comm.size == 1:
        raise ValueError("one rank sends no messages; run it under mpirun")
    known = earlier(comm, options)
    if options.keep:
        if known.fitted is None:
            raise ValueError(f"--keep: {options.output} has no fitted machine")
        machine = known.fitted.machine
    else:
        machine = fit(comm, options, console)
        written = known.with_machine(Fitted(here() | {"ranks": str(comm.size)}, machine))
        if comm.rank == 0:
            options.output.write_text(written.to_json())
        console.print(f"Written to {options.output}", markup=False)
    if not options.check:
        return 0
    return checked(comm, machine, options, console)


def fit(comm: Communicator, options: argparse.Namespace, console: Console) -> Machine:
    """Measure and fit, with what rank 0 shows meanwhile.  ValueError on all ranks alike."""
    measurement = Measurement(MPI.COMM_WORLD, options.samples, options.seconds / _METHODS)
    found, links = list[Sample](), {}
    work = {kind: measurement.work(kind, _WORK_SIZES) for kind in ("copy", "combine")}
    rates = [rate(_WORK_SIZES, times) for times in work.values()]
    base = Machine({}, measurement.overhead, *rates)
    is_crowded = comm.topology.max_per_host > len(os.sched_getaffinity(0))
    at_once = options.at_once or is_crowded
    for group in groups_of(comm.topology.host_of, at_once=at_once):
        limit = measurement.eager_limit(group.pairs[0])
        is_quiet = group.link_class == SAME_HOST and not is_crowded
        measured = list[Sample]()
        for samples in measure_links(measurement, group, limit):
            quiet = undisturbed(samples) if is_quiet else samples
            showing.show_left_out([each for each in samples if each not in quiet], console)
            measured += quiet
            refuse_few(measured, limit)  # the first pattern decides
        links[group.link_class] = fitted_links(measured, limit, base)
        found += measured
    machine = Machine(links, measurement.call(comm), *rates)
    measurement.free()
    showing.show_machine(machine, found, base, console)
    showing.show_work(_WORK_SIZES, work, machine, console)
    return machine


def measure_links(
    measurement: Measurement, group: Group, limit: int | None
) -> Iterator[list[Sample]]:
    """The samples of each pattern between ranks of a group."""
    around = () if limit is None else (limit, limit + 16 * ITEMSIZE, 2 * limit // 8 * 8)
    all_sizes = sorted({*_SIZES, *around})
    for pattern in PATTERNS:
        sizes = [size for size in all_sizes if pattern != "burst" or size <= _BURST_BYTES]
        yield measurement.pattern(group, pattern, sizes)


def checked(
    comm: Communicator, machine: Machine, options: argparse.Namespace, console: Console
) -> int:
    """The held-out check: 0 if all goals are met, else 1; the same on all ranks."""
    held = list(check.held_out(comm, machine, options))
    is_met = comm.rank == 0 and showing.show_check(held, console)
    return 0 if MPI.COMM_WORLD.bcast(is_met) else 1
