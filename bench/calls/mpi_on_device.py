"""Try the MPI library's own calls on arrays of a GPU, with which they may crash or hang.

    ring launch -n 2 -m bench.calls.mpi_on_device all_reduce --device cuda

The words are those of `ring bench`, which runs this in a job of its own before it measures.
One result of the first and of the last case of each collective is compared.  The exit status is 0
if all are right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter

from mpi4py import MPI

from bench.calls.options import add_options
from bench.commands import world
from bench.commands.modules import add_import
from bench.contenders.mpi import native_lacks, native_on_device
from bench.workloads import sizes
from bench.workloads.collective import Case, Check, in_place, out_of_place
from bench.workloads.datatypes import ALL
from bench.workloads.from_options import every_case
from collectives import algorithms
from collectives.console import Command, Group


def run(options: argparse.Namespace) -> int:
    """Try all cases of a command line until one fails."""
    comm = world.communicator(options.timeout)
    for case in extremes(every_case(comm, options, world.backend(comm, options.device))):
        if native_lacks(case) is None and (number := num_wrong(case)):
            size = sizes.text(case.num_bytes)
            print(f"{number} elements of {case.collective} of {size} are wrong", file=sys.stderr)
            return 1
    return 0


def extremes(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield the first and the last case of each collective."""
    for _, group in groupby(cases, attrgetter("collective")):
        first, *others = group
        yield from [first, *others[-1:]]


def num_wrong(case: Case) -> int:
    """Return the number of wrong elements of all ranks, in both forms."""
    check, wrong = Check(case), 0
    for buffers in filter(None, (out_of_place(case), in_place(case))):
        made = native_on_device(case, buffers)
        check.prepare(buffers)
        made.run()
        wrong += check.num_wrong(made.result)
    return int(MPI.COMM_WORLD.allreduce(wrong))


def command_of(collective: str) -> Command:
    """Return the command that tries a collective, or "all" of them."""
    add = partial(add_options, collective=collective)
    return Command("bench.calls.mpi_on_device", f"Try {collective}", add, run)


SECTIONS = {"try": {name: partial(command_of, name) for name in (*algorithms.collectives(), ALL)}}
COMMAND = Group("bench.calls.mpi_on_device", __doc__, SECTIONS, add_import)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
