"""The fraction of the processor cores that the ranks of a job had."""

from __future__ import annotations

import os
import time

from mpi4py import MPI


class Watch:
    """How much of the cores the ranks have from now on."""

    def __init__(self) -> None:
        self.wall, self.mine = time.perf_counter(), time.process_time()

    def cores(self) -> float:
        """Return the fraction of the cores that the ranks can use; the same on every rank."""
        world = MPI.COMM_WORLD
        mine = (time.process_time() - self.mine) / (time.perf_counter() - self.wall)
        return float(world.allreduce(mine)) / min(world.size, os.cpu_count() or 1)
