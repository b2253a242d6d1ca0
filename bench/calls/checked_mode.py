"""Measure the cost of checked mode: the same all-reduces with and without it, side by side.

    ring launch -n 2 -m bench checked_mode

Times are in microseconds: medians of samples in random order, of the slowest rank.  "plan" is
`comm.plan.all_reduce(x, out=y).run`, and "call" is `comm.all_reduce(x, out=y)`.  "checked" compares
the calls of the ranks first, and "finite" also checks every value of the input and the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import collectives
from bench.commands import world
from bench.commands.options import add_datatype, add_output, add_samples, add_sizes
from bench.timing.interleaved import SMALL, Effort, times
from bench.workloads.sizes import sizes_of
from collectives import Communicator
from collectives.arrays.operators import operator
from collectives.communicator.entry import Check
from collectives.console import Command, Number, Table, console_for, refusing, write_json

SECONDS = 20.0  # after which fewer samples must do
MODES: dict[str, Check] = {"off": False, "checked": True, "finite": "finite"}


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_sizes(parse, last="2M")
    add_datatype(parse)
    add_samples(parse)
    add_output(parse, is_local=False)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0.  Raises Refused."""
    return world.on_ranks(lambda comm: measured(comm, options), check=False)


def measured(comm: Communicator, options: argparse.Namespace) -> int:
    """Measure all sizes, and let rank 0 print and write them; return 0."""
    with refusing(TypeError):
        operator("sum", "all_reduce").check(options.dtype)
        series = sizes_of(options)
    world.check_output(options.json)
    console = console_for(comm.rank, options)
    made = table({num_bytes: seconds_of(num_bytes, options) for num_bytes in series})
    facts = {"mpi": world.mpi_version(), "ranks": comm.size, "dtype": str(options.dtype)}
    console.print(f"{facts['mpi']}, {comm.size} ranks, {options.dtype}: all-reduce, microseconds")
    made.print(console)
    if comm.rank == 0:
        write_json(facts | {"microseconds": made.as_dicts()}, options.json)
    return 0


def seconds_of(num_bytes: int, options: argparse.Namespace) -> list[float]:
    """Return the seconds of the plan in each mode, then those of the call."""
    comms = [collectives.world(check=check) for check in MODES.values()]
    x = np.zeros(max(1, num_bytes // options.dtype.itemsize), options.dtype)
    y = np.empty_like(x)
    plans = [comm.plan.all_reduce(x, out=y) for comm in comms]
    calls: list[Callable[[], Any]] = [partial(comm.all_reduce, x, out=y) for comm in comms]
    effort = Effort(options.warmup, options.samples, SECONDS)
    runs = [*(plan.run for plan in plans), *calls]
    medians = times(runs, x, is_small=x.nbytes <= SMALL, effort=effort)
    for plan in plans:
        plan.free()
    return medians


def table(seconds_by_size: Mapping[int, Sequence[float]]) -> Table:
    """Return a line for each size; plan and call in each mode, in the order of `MODES`."""
    heads = [f"{how} {mode}" for how in ("plan", "call") for mode in MODES]
    made = Table(Number("size (B)"), *(Number(head, ".1f") for head in heads))
    for num_bytes, seconds in seconds_by_size.items():
        made.add(num_bytes, *(taken * 1e6 for taken in seconds))
    return made


COMMAND = Command("bench.calls.checked_mode", __doc__, add_options, run)
