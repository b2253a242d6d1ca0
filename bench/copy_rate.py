"""The rate of a copy within a device, with which the busiest rank of a call is compared."""

from __future__ import annotations

import statistics
import time

import numpy as np

from bench.case import Case
from collectives.arrays.backends import Backend

NUM_BYTES = 256 << 20  # of a copy: more than any cache of a device holds
NUM_COPIES = 7  # of which the median counts


def copy_rate(backend: Backend) -> float:
    """The bytes that a device copies in a second, while only rank 0 uses its device."""
    from mpi4py import MPI  # noqa: PLC0415 - what reads tables, too, may do without MPI

    world, seconds = MPI.COMM_WORLD, 0.0
    world.Barrier()
    if world.rank == 0:
        x, y = (backend.empty((NUM_BYTES,), np.dtype(np.uint8)) for _ in range(2))
        _, *taken = [_seconds(backend, x, y) for _ in range(NUM_COPIES + 1)]
        seconds = statistics.median(taken)
    return NUM_BYTES / float(world.bcast(seconds))


def _seconds(backend: Backend, x: object, y: object) -> float:
    began = time.perf_counter()
    backend.copy(x, y)
    backend.synchronize()
    return time.perf_counter() - began


def least_copied(case: Case) -> float:
    """A copy of so many bytes reads and writes as many as the busiest rank of a call must.

    A rank reads its input and writes its result, once each.
    """
    return max(_moved(case._replace(rank=rank)) for rank in range(case.size)) / 2


def _moved(case: Case) -> int:
    read, written = sum(case.in_counts), sum(case.out_counts)
    is_there = case.collective == "broadcast" and read > 0  # the root's result is its input
    return (read if is_there else read + written) * case.dtype.itemsize
