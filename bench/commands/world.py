"""What every rank of a benchmark does: join the others, find its device, end the job on errors."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mpi4py.run
from mpi4py import MPI

import collectives
from bench.timing.deadline import StuckError
from collectives import CollectiveError, Communicator
from collectives.arrays.backends import Backend, backend_of_kind
from collectives.communicator.entry import Check
from collectives.console import Refused, unwritable
from collectives.devices import DeviceMode


def on_ranks(
    run: Callable[[Communicator], int],
    timeout: float | None = None,
    *,
    check: Check = None,
    device: DeviceMode = "auto",
) -> int:
    """Call `run` with the communicator of all ranks; return the exit status.

    What `run` refuses on all ranks only rank 0 says.  An error of a call ends the job, because the
    other ranks would wait for ever.

    Parameters
    ----------
    run : function
        Called with the communicator; returns the exit status.
    timeout : float, optional
        Seconds after which a call fails.
    check : bool or str, optional
        Whether calls are checked; see `collectives.world`.
    device : str
        How arrays on GPUs are sent; see `collectives.world`.
    """
    comm = communicator(timeout, check=check, device=device)
    try:
        status = run(comm)
    except Refused:
        if comm.rank != 0:
            raise SystemExit(2) from None
        raise
    except CollectiveError as error:
        print(f"bench: {error}", file=sys.stderr, flush=True)
        # Takes effect when Python exits: MPICH's mpirun can lose what was printed just before an
        # MPI_Abort.
        mpi4py.run.set_abort_status(1)
        raise SystemExit(1) from None
    except StuckError as error:
        if comm.rank == 0:
            print(f"bench: {error}", file=sys.stderr, flush=True)
        time.sleep(1)  # or the launcher could lose what was printed
        os._exit(1)  # because Python would wait for the device
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 report
    return status


def communicator(
    timeout: float | None = None, *, check: Check = None, device: DeviceMode = "auto"
) -> Communicator:
    """Return the communicator of all ranks, with a time limit of each of their calls."""
    if timeout is None:
        return collectives.world(check=check, device=device)
    return collectives.wrap(MPI.COMM_WORLD, timeout=timeout, check=check, device=device)


def backend(comm: Communicator, device: str) -> Backend:
    """Return what serves arrays on this device.  Raises Refused on all ranks if one has none."""
    server, why = None, ""
    try:
        if device == "cuda":
            comm.use_gpu()
        server = backend_of_kind({"cpu": "numpy", "cuda": "cupy"}[device])
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        why = f"--device {device}: {str(error) or repr(error)}"
    reasons = MPI.COMM_WORLD.allgather(why)
    if first := next(filter(None, reasons), None):
        raise Refused(f"rank {reasons.index(first)}: {first}")
    assert server is not None, "a rank without a device has said so"
    return server


def check_output(path: Path | None) -> None:
    """Raise Refused, on every rank, if rank 0 cannot write this file."""
    if path is not None and (reason := MPI.COMM_WORLD.bcast(unwritable(path))):
        raise Refused(reason)


def mpi_version() -> str:
    """Return the MPI library's name and version."""
    name, version = MPI.get_vendor()
    return " ".join([name, ".".join(map(str, version))])
