"""Collective communication, written from scratch over MPI point-to-point.

    import collectives

    comm = collectives.world()                 # COMM_WORLD under mpirun, a world of one without
    y = comm.all_reduce(x)                     # x: any NumPy or CuPy array

    collectives.run(fn, size=4)                # fn(comm) on four threads of this process, no MPI

Importing this module imports neither mpi4py nor CuPy.
"""

from __future__ import annotations

from collectives import algorithms
from collectives.communicator import Communicator
from collectives.entry import run, world, wrap
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    NotFinite,
    PeerFailed,
)
from collectives.ledger import Ledger, phase
from collectives.monitor import MonitorUnavailable
from collectives.plan import Plan, Work
from collectives.reduction import Operator
from collectives.schedule import ScheduleError
from collectives.select import choose, using

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "Ledger",
    "MonitorUnavailable",
    "NotFinite",
    "Operator",
    "PeerFailed",
    "Plan",
    "ScheduleError",
    "Work",
    "algorithms",
    "choose",
    "phase",
    "run",
    "using",
    "world",
    "wrap",
]
