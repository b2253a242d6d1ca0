"""Programs for ranks that are processes, of which one job runs several, one after the other.

A job starts in more time than most programs take.  Each program has a communicator of its own, and
begins with the fake GPU as new.  A program that ends its process, or changes it for those that
follow, has a job of its own.  `program_jobs.py` starts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mpi4py import MPI

import collectives
from collectives import Communicator
from tests.fakes.device import BACKEND
from tests.fakes.driver import gpu

Program = Callable[[Communicator], None]


class Programs:
    """The programs of a file, by name.  `alone`: those that have jobs of their own."""

    def __init__(self) -> None:
        self.by_name: dict[str, Program] = {}
        self.alone: set[str] = set()

    def together(self, program: Program) -> Program:
        """Add a program that may run in a job with others."""
        self.by_name[program.__name__] = program
        return program

    def on_its_own(self, program: Program) -> Program:
        """Add a program that has a job of its own."""
        self.alone.add(program.__name__)
        return self.together(program)

    def run(self, names: Iterable[str], queue_length: int) -> None:
        """Run programs on this rank, and say so after each."""
        gpu().go_on_alone()
        for name in names:
            is_alone = name in self.alone
            comm = collectives.world() if is_alone else collectives.wrap(MPI.COMM_WORLD)
            BACKEND.reset()
            gpu().reset(seed=comm.rank, queue_length=queue_length)
            self.by_name[name](comm)
            gpu().check()
            print(f"{name} is right on rank {comm.rank}", flush=True)
            if not is_alone:
                comm.free()
