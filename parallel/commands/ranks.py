"""Run a command on all ranks, under MPI or as threads."""

from __future__ import annotations

import argparse
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np

import collectives
from collectives import Communicator
from collectives.console import Refused, console_for
from parallel.accounts import TrafficMonitor


def on_ranks(
    options: argparse.Namespace,
    run: Callable[[Communicator], int],
    world: Callable[[], Communicator] = collectives.world,
) -> int:
    """Call `run` on each rank; return the exit status.

    If `run` raises Refused, on all ranks, only the first rank says why.

    Parameters
    ----------
    options : Namespace
        The options of the command.  With ``threads``, ranks are threads.
    run : function
        Called with the communicator; returns the exit status.
    world : function
        Returns the communicator of the ranks of an MPI job.
    """
    if options.threads is not None:
        return collectives.run(run, size=options.threads, timeout=None)[0]
    try:
        return run(world())
    except Refused:
        if collectives.world().rank != 0:
            raise SystemExit(2) from None
        raise


@contextmanager
def running(options: argparse.Namespace) -> Iterator[None]:
    """Return a context manager that ends an MPI job if a rank fails: others would wait forever.

    Ranks that are threads, according to the `options`, are ended by `collectives.run`.
    """
    try:
        yield
    except Refused:  # on all ranks: none waits
        raise
    except BaseException as error:
        if options.threads is None:
            import mpi4py.run  # noqa: PLC0415 - threads need no MPI

            mpi4py.run.set_abort_status(error)  # takes effect when Python exits
        raise


# The communicator that trains


def training_world(options: argparse.Namespace) -> Communicator:
    """Return the communicator of all ranks for the `options` of a training command.

    Arrays on GPUs are staged in host memory if MPI's counters are read, for MPI does not see what
    ranks read from each other's GPUs.  All ranks call this.
    """
    is_elastic = options.strategy == "elastic"  # its sums are blocking
    wanted = "none" if is_elastic and options.progress == "auto" else options.progress
    comm = collectives.world()
    if options.device == "cpu" or options.no_monitor or not has_counters(comm):
        return with_progress(comm, wanted)
    console_for(comm.rank).print(
        "Messages are staged in host memory, where MPI counts them; with --no-monitor ranks read"
        " each other's GPUs."
    )
    return with_progress(collectives.world(device="staged"), wanted, "staged")


def has_counters(comm: Communicator) -> bool:
    """Return whether MPI's counters can be read on some rank.  All ranks call this."""
    with TrafficMonitor(comm) as monitor:
        mine = np.array([monitor.reason is None])
    return bool(comm.all_gather(mine).any())


def with_progress(
    comm: Communicator, wanted: str, device: Literal["auto", "staged"] = "auto"
) -> Communicator:
    """Return `comm`, or one whose calls continue in a thread, as is `wanted` (``--progress``).

    `device` is the device of `comm`; see `collectives.world`.  All ranks call this.  Raises
    Refused if the MPI cannot be called from several threads.
    """
    if wanted == "auto":
        are_free = comm.all_gather(np.array([has_free_core(comm)])).all()
        wanted = "thread" if are_free and comm.size > 1 else "none"
    if wanted == "none":
        return comm
    try:
        return collectives.world(progress="thread", device=device)
    except RuntimeError as error:
        raise Refused(str(error)) from error


def has_free_core(comm: Communicator) -> bool:
    """Return whether this rank's cores are more than the ranks that use them."""
    host = comm.all_gather(np.array([zlib.crc32(platform.node().encode())]))
    cores = len(os.sched_getaffinity(0))
    is_bound = cores < (os.cpu_count() or 1)  # then no other rank uses these cores
    return cores > (1 if is_bound else int((host == host[comm.rank]).sum()))
