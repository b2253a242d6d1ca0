"""Collective communication, written from scratch over MPI point-to-point.

    import collectives

    comm = collectives.world()                 # COMM_WORLD under mpirun, a world of one without
    y = comm.all_reduce(x)                     # x: any NumPy or CuPy array

    collectives.run(fn, size=4)                # fn(comm) on four threads of this process, no MPI

    comm = collectives.Intracomm(comm)         # an mpi4py communicator with our collectives

Importing this module imports neither mpi4py, CuPy nor numba; naming `Intracomm` imports mpi4py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collectives import algorithms
from collectives.arrays import Operator, compiled, empty
from collectives.communicator import Communicator, SentReceived, run, world, wrap
from collectives.diagnostics import Ledger, MonitorUnavailable, phase
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    NotFinite,
    PeerFailed,
)
from collectives.runtime import Plan, Work
from collectives.schedule import ScheduleError, Topology, even_counts
from collectives.selection import choose, predict, using

if TYPE_CHECKING:
    from collectives.mpi4py_compat import Intracomm

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "Intracomm",
    "Ledger",
    "MonitorUnavailable",
    "NotFinite",
    "Operator",
    "PeerFailed",
    "Plan",
    "ScheduleError",
    "SentReceived",
    "Topology",
    "Work",
    "algorithms",
    "choose",
    "compiled",
    "empty",
    "even_counts",
    "phase",
    "predict",
    "run",
    "using",
    "world",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name == "Intracomm":
        from collectives.mpi4py_compat import Intracomm  # noqa: PLC0415 - it imports mpi4py

        return Intracomm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
