"""Monitor the ranks of one job on this host, for the launcher.

`bootstrap.py` is the other end: it explains why ranks connect to the launcher, and what they send.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from collectives.launch.bootstrap import (
    ALL_EXIT,
    AT_ONCE,
    IN_MPI,
    JOB,
    MONITORED,
    WITH_ALL,
    address,
)

_LOCAL_SIZE = b"OMPI_COMM_WORLD_LOCAL_SIZE="  # in the environment of Open MPI's ranks
_SHARED_MEMORY = "/dev/shm/mpich_shm_"  # how the names of MPICH's files of shared memory begin
_PF_EXITING = 0x4  # among the flags in /proc/PID/stat: the process is ending (linux/sched.h)


class Rank(NamedTuple):
    """A process of this host that is a rank of the job."""

    number: int
    pid: int

    def __str__(self) -> str:
        return f"Rank {self.number} (process {self.pid})"


class Death(NamedTuple):
    """A rank that ended without MPI_Finalize, and the argument of os._exit if it called that."""

    rank: Rank
    exit_code: int | None = None

    def __str__(self) -> str:
        if self.exit_code is not None:
            return f"{self.rank} ended by os._exit({self.exit_code}), without MPI_Finalize."
        causes = "it was killed, it crashed, or compiled code ended it"
        return f"{self.rank} died without a word: {causes}."


@dataclass
class _Connection:
    """The state of one rank."""

    socket: socket.socket
    pid: int
    outputs: frozenset[str]  # what its standard output and error are
    received: bytes = b""
    number: int | None = None  # None: not received yet; -1: the rank does not know it
    wanted: int | None = None  # the status with which it wants to exit, if all others do
    status: int | None = None  # that it has reported at its end
    is_lost: bool = False  # it can no longer be monitored
    has_died: bool = False
    is_gone: bool = False  # its process has ended
    is_in_mpi: bool = False  # MPI_Init has returned

    @property
    def has_ended(self) -> bool:
        return self.status is not None or self.is_lost

    @property
    def is_running(self) -> bool:
        return not self.has_ended and not self.has_died


class ProcessMonitor:
    """Receives the messages of the ranks of this host, and notices which rank dies first.

    A selector returns the events in the order in which they happened.  The order matters: after a
    death mpirun kills the other ranks, often before the launcher runs again.  A connection closes
    before its process has ended, and the process may end after those of ranks that were killed
    because of it.  Therefore a closed connection counts as the death.  The process is monitored
    too, because a child that a library forked may keep the connection open.

    If the kernel cannot monitor processes (Linux can since 5.3), no deaths are noticed.
    """

    def __init__(self, job: str, size: int) -> None:
        """Listen in `job`, the directory of the job, to the ranks of this host.

        `size` is the number of the job's ranks, on all hosts.
        """
        self._job, self._size = job, size
        self.status = 0  # of the first rank that reported a failure
        self.first_death: Death | None = None  # if it was noticed before any report of a failure
        self.do_all_exit = False  # with the same status
        self._connections: list[_Connection] = []
        self._connected_at = time.monotonic()  # when the last rank connected
        self._local_size = 0  # the number of ranks of this host, if known
        self._gone_at = math.inf  # when the last process of a rank ended
        self._deaths: deque[Death] = deque()
        self._watches_deaths = False
        self._shared_memory: set[str] = set()
        self._undo = contextlib.ExitStack()
        self._selector = self._undo.enter_context(selectors.DefaultSelector())
        self._listener = self._undo.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.setblocking(False)
        with address(job) as path:
            self._listener.bind(path)
        self._listener.listen(socket.SOMAXCONN)
        self._register(self._listener, self._accept_rank)

    def __enter__(self) -> ProcessMonitor:
        return self

    def __exit__(self, *failure: object) -> None:
        """Stop monitoring a job that has ended, and remove the shared memory that it has left.

        MPICH removes it in MPI_Finalize only.
        """
        self._undo.close()
        for path in self._shared_memory:
            Path(path).unlink(missing_ok=True)

    def begin(self, mpirun: int) -> None:
        """Notice deaths from now on, until mpirun ends, which ends the ranks itself."""
        self._watches_deaths = self._register_process(mpirun, self._stop_watching)

    def wait(self, seconds: float) -> Death | None:
        """Return the next death of a rank; None after `seconds`, or when mpirun ends."""
        deadline, were_watched = time.monotonic() + seconds, self._watches_deaths
        while self._react(max(deadline - time.monotonic(), 0.0)):
            if self._deaths or were_watched != self._watches_deaths:
                break
        return self._deaths.popleft() if self._deaths else None

    def finish(self) -> None:
        """Take in all that has happened, after mpirun has ended."""
        while self._react(0.0):
            pass

    def _react(self, seconds: float) -> bool:
        """Take in the next events; return False if there are none for so many seconds."""
        events = self._selector.select(seconds)
        for key, _ in events:
            key.data()
        return bool(events)

    @property
    def is_in_mpi(self) -> bool:
        """Whether MPI_Init has returned on some rank."""
        return any(connection.is_in_mpi for connection in self._connections)

    def has_died_starting(self) -> bool:
        """Return whether a rank has died before MPI_Init returned on it."""
        return any(
            connection.has_died and not connection.is_in_mpi for connection in self._connections
        )

    def are_starting(self) -> bool:
        """Return whether MPI_Init has not returned yet on a running rank."""
        return any(
            not connection.is_in_mpi for connection in self._connections if connection.is_running
        )

    def are_missing(self, seconds: float) -> bool:
        """Return whether some ranks of this host have not connected.

        If so, no rank has connected in the last `seconds`.  A rank that is killed in its first
        milliseconds does not connect.
        """
        is_late = time.monotonic() > self._connected_at + seconds
        return is_late and len(self._connections) < self._local_size

    def have_all_ended(self) -> bool:
        """Return whether all ranks have connected, and each has died or reported its end."""
        return len(self._connections) == self._size and not any(self._running())

    def ended(self) -> list[int]:
        """Return the ranks that have reported their end."""
        return sorted(
            connection.number or 0
            for connection in self._connections
            if connection.status is not None
        )

    def unfinished(self) -> list[int]:
        """Return the ranks that have initialized MPI and have not reported their end."""
        ranks = (
            connection
            for connection in self._connections
            if connection.is_in_mpi and not connection.has_ended
        )
        return sorted(connection.number or 0 for connection in ranks)

    def left_behind(self, seconds: float) -> list[str]:
        """Return what writes to the output of a rank, `seconds` after all ranks have ended.

        These processes are children of ranks; mpirun waits for them.  They are returned only once.
        """
        if time.monotonic() < self._gone_at + seconds:
            return []
        if not self._connections or not all(connection.is_gone for connection in self._connections):
            return []
        self._gone_at = math.inf
        outputs = frozenset().union(*(connection.outputs for connection in self._connections))
        return _writers(outputs - _outputs("self"), self._job)

    def send_signal(self, signum: int) -> list[int]:
        """Send a signal to the running ranks that handle it; return their numbers."""
        reached = []
        for rank in self._running():
            with contextlib.suppress(OSError):  # it has ended
                if _handles(rank.pid, signum):  # otherwise the signal would kill it
                    os.kill(rank.pid, signum)
                    reached.append(rank.number)
        return reached

    def _running(self) -> Iterator[Rank]:
        for connection in self._connections:
            if connection.is_running:
                yield Rank(-1 if connection.number is None else connection.number, connection.pid)

    def _register(self, file: int | socket.socket, react: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, react)

    def _register_process(self, pid: int, react: Callable[[], object]) -> bool:
        """Call `react` when a process ends; return False if the kernel cannot do that."""
        try:
            process = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return False
        self._undo.callback(os.close, process)

        def ended() -> None:
            self._selector.unregister(process)
            react()

        self._register(process, ended)
        return True

    def _stop_watching(self) -> None:
        self._watches_deaths = False

    def _accept_rank(self) -> None:
        """Accept the connection of a rank."""
        connected = self._undo.enter_context(self._listener.accept()[0])
        connected.setblocking(False)
        connection = _Connection(connected, pid := _peer(connected), _outputs(pid))
        self._connections.append(connection)
        self._connected_at = time.monotonic()
        self._local_size = self._local_size or _local_size(pid)
        self._register(connected, partial(self._on_readable, connection))
        self._register_process(pid, partial(self._on_end, connection))

    def _on_end(self, connection: _Connection) -> None:
        """Note that the process of a rank has ended."""
        connection.is_gone, self._gone_at = True, time.monotonic()
        self._record_death(connection)

    def _on_readable(self, connection: _Connection) -> None:
        """Read a rank's message, or notice that its connection is closed."""
        received = b""
        with contextlib.suppress(OSError):  # it was closed with unread data
            received = connection.socket.recv(64)
        if received:
            self._parse(connection, received)
            return
        self._selector.unregister(connection.socket)
        if _is_ending(connection.pid):
            self._record_death(connection)
        else:  # it has closed its files, or has started another program
            connection.is_lost = True

    def _parse(self, connection: _Connection, received: bytes) -> None:
        """Take in what a rank has sent.

        A rank first sends its number, and gets an answer; at its end it sends its status.
        """
        *lines, connection.received = (connection.received + received).split(b"\n")
        for line in lines:
            if line == IN_MPI:
                connection.is_in_mpi = True
                self._shared_memory |= _shared_memory(connection.pid)
            elif connection.number is None:
                connection.number = int(line)
                _answer(connection, MONITORED)
            elif line.endswith(WITH_ALL):
                connection.wanted = int(line.removesuffix(WITH_ALL))
                self._let_all_exit()
            elif line.endswith(AT_ONCE):
                self._record_death(connection, int(line.removesuffix(AT_ONCE)))
            else:
                connection.status = int(line)
                self.status = self.status or connection.status

    def _let_all_exit(self) -> None:
        """Answer the ranks, if all of them want to exit with the same status."""
        # One that has ended does not wait for the answer any more.
        wanted = [connection.wanted for connection in self._connections if connection.is_running]
        self.do_all_exit = len(wanted) == self._size and len(set(wanted)) == 1
        if self.do_all_exit:
            for connection in self._connections:
                _answer(connection, ALL_EXIT)

    def _record_death(self, connection: _Connection, exit_code: int | None = None) -> None:
        """Note that a rank has died, unless it has reported its end."""
        if connection.has_ended or connection.has_died or not self._watches_deaths:
            return
        connection.has_died = True
        if connection.number is not None and connection.number >= 0:
            death = Death(Rank(connection.number, connection.pid), exit_code)
            self._deaths.append(death)
            if not self.status:
                self.first_death = self.first_death or death


def _answer(connection: _Connection, answer: bytes) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.socket.send(answer)


def _peer(connected: socket.socket) -> int:
    """Return the process at the other end of a connection."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)


def _local_size(pid: int) -> int:
    """Return the number of ranks on the host of a rank, or 0 if its MPI does not tell."""
    with contextlib.suppress(OSError):  # it has ended
        for entry in _environment(pid):
            if entry.startswith(_LOCAL_SIZE):
                return int(entry.removeprefix(_LOCAL_SIZE))
    return 0


def _outputs(pid: int | str) -> frozenset[str]:
    """Return what the standard output and error of a process are.

    They are names of pipes, terminals or files.
    """
    names = set()
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it has ended, has closed it, or is another user's
            names.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return frozenset(names - {os.devnull})


def _writers(outputs: frozenset[str], job: str) -> list[str]:
    """Return the processes of this host whose standard output or error is one of these.

    Not those of other jobs: the terminal of a rank that has ended may be that of their ranks now.
    """
    writers = []
    for pid in _processes():
        if outputs & _outputs(pid):
            with contextlib.suppress(OSError):  # it has ended
                name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
                if _jobs_of(pid) <= {job}:
                    writers.append(f"{name} (process {pid})")
    return writers


def _is_ending(pid: int) -> bool:
    """Return whether a process has ended, or is ending: the kernel is closing its files."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    flags = int(stat.rpartition(b")")[2].split()[6])
    return bool(flags & _PF_EXITING)


def _handles(pid: int, signum: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    (caught,) = (line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def _shared_memory(pid: int) -> set[str]:
    """Return the files of shared memory of MPICH that a process has mapped."""
    with contextlib.suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        last = {line.split(maxsplit=5)[-1] for line in lines}
        return {path for path in last if path.startswith(_SHARED_MEMORY)}
    return set()


def kill(job: str) -> None:
    """Kill all processes of a job that are left on this host, with their children.

    They are found by their environment.  Process groups and parents do not lead to them: MPICH's
    ranks have their own sessions, and Open MPI's survive an mpirun that was killed.
    """
    for pid in _processes():
        with contextlib.suppress(OSError):
            if job in _jobs_of(pid):
                os.kill(pid, signal.SIGKILL)


def _jobs_of(pid: int) -> set[str]:
    """Return the job that the environment of a process names, if it names one."""
    name = f"{JOB}="
    entries = map(os.fsdecode, _environment(pid))
    return {entry.removeprefix(name) for entry in entries if entry.startswith(name)}


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def _environment(pid: int) -> list[bytes]:
    """Return the environment of a process.

    Raises OSError if the process has ended, or is another user's.
    """
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
