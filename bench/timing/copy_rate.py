"""The rate of a copy within a device, with which the busiest rank of a call is compared."""

from __future__ import annotations

import statistics
import time

import numpy as np

from collectives.arrays.backends import Backend

NUM_BYTES = 256 << 20  # of a copy: more than any cache of a device holds
NUM_COPIES = 7  # of which the median counts


def copy_rate(backend: Backend) -> float:
    """Return the bytes that a device copies in a second, while only rank 0 uses its device."""
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
