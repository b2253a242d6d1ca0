"""The ranks of one job on this host, as their launcher sees them.

`bootstrap.py` is the other side: it says why ranks connect to the launcher, and what they tell it.
"""

from __future__ import annotations

import contextlib
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

from collectives.launch.bootstrap import IN_MPI, JOB, address

_PF_EXITING = 0x4  # among the flags in /proc/PID/stat: the process is ending (linux/sched.h)


class Rank(NamedTuple):
    """A process of this host that is a rank of the job."""

    number: int
    pid: int

    def __str__(self) -> str:
        return f"Rank {self.number} (process {self.pid})"


@dataclass
class _Connection:
    """What is known of one rank."""

    socket: socket.socket
    pid: int
    said: bytes = b""
    number: int | None = None  # None: it has not said yet; -1: it does not know
    has_left: bool = False  # it ends in an orderly way, or is no longer to be seen
    has_died: bool = False


class Watch:
    """Hears what the ranks of this host say, and sees them die, in that order.

    A selector hands over one event after the other in the order in which they happened.  That is
    needed: after a death mpirun kills the other ranks, often before the launcher's turn has come.
    A connection closes before the process has ended, and its process may end after those of ranks
    that were killed because of it.  So a closed connection counts as the death.  The process itself
    is watched too, for a child that a library has forked may hold the connection open.

    Where the kernel cannot watch processes (Linux can from 5.3 on) nobody is seen to die.
    """

    def __init__(self, job: str) -> None:
        """`job`: the job's directory."""
        self.status = 0  # of the first rank that has failed in an orderly way
        self.is_in_mpi = False  # MPI_Init has returned on some rank
        self._connections: list[_Connection] = []
        self._news: deque[Rank] = deque()
        self._sees_deaths = False
        self._undo = contextlib.ExitStack()
        self._selector = self._undo.enter_context(selectors.DefaultSelector())
        self._door = self._undo.enter_context(socket.socket(socket.AF_UNIX))
        self._door.setblocking(False)
        with address(job) as path:
            self._door.bind(path)
        self._door.listen(socket.SOMAXCONN)
        self._follow(self._door, self._admit)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *failure: object) -> None:
        self._undo.close()

    def begin(self, mpirun: int) -> None:
        """See ranks die from now on, and until this process ends: then they die of its end."""
        self._sees_deaths = self._follow_process(mpirun, self._end)

    def wait(self, seconds: float) -> Rank | None:
        """A rank that has died without a word, or None after so long, or when mpirun ends."""
        deadline, saw_deaths = time.monotonic() + seconds, self._sees_deaths
        while events := self._selector.select(max(deadline - time.monotonic(), 0.0)):
            for key, _ in events:
                key.data()
            if self._news or saw_deaths != self._sees_deaths:
                break
        return self._news.popleft() if self._news else None

    def saw_the_end_of(self, size: int) -> bool:
        """Whether so many ranks were here, each of which has died or come to its program's end."""
        return len(self._connections) == size and not any(self._running())

    def ask(self, signum: int) -> list[int]:
        """Send a signal to the running ranks that handle it; their numbers."""
        asked = []
        for rank in self._running():
            with contextlib.suppress(OSError):  # gone already
                if _handles(rank.pid, signum):  # or it would die of it
                    os.kill(rank.pid, signum)
                    asked.append(rank.number)
        return asked

    def _running(self) -> Iterator[Rank]:
        for each in self._connections:
            if not each.has_left and not each.has_died:
                yield Rank(-1 if each.number is None else each.number, each.pid)

    # --- events

    def _follow(self, file: int | socket.socket, react: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, react)

    def _follow_process(self, pid: int, react: Callable[[], object]) -> bool:
        """React when this process ends; False if that cannot be seen."""
        try:
            process = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return False
        self._undo.callback(os.close, process)

        def ended() -> None:
            self._selector.unregister(process)
            react()

        self._follow(process, ended)
        return True

    def _end(self) -> None:
        self._sees_deaths = False

    def _admit(self) -> None:
        """A process has connected."""
        connected = self._undo.enter_context(self._door.accept()[0])
        connected.setblocking(False)
        connection = _Connection(connected, _peer(connected))
        self._connections.append(connection)
        self._follow(connected, partial(self._hear, connection))
        self._follow_process(connection.pid, partial(self._lose, connection))

    def _hear(self, connection: _Connection) -> None:
        """A rank has said something, or its connection is closed."""
        said = b""
        with contextlib.suppress(OSError):  # it was closed with something unread
            said = connection.socket.recv(64)
        if said:
            self._take(connection, said)
            return
        self._selector.unregister(connection.socket)
        if _is_ending(connection.pid):
            self._lose(connection)
        connection.has_left = True  # it has closed its files, or has become another program

    def _take(self, connection: _Connection, said: bytes) -> None:
        """First a rank says its number, and is answered; at its end, its status."""
        *lines, connection.said = (connection.said + said).split(b"\n")
        for line in lines:
            if line == IN_MPI:
                self.is_in_mpi = True
            elif connection.number is None:
                connection.number = int(line)
                with contextlib.suppress(OSError):
                    connection.socket.send(b"\n")
            else:
                connection.has_left = True
                self.status = self.status or int(line)

    def _lose(self, connection: _Connection) -> None:
        """A rank has died, unless it had left; that it may have said just before."""
        if connection.has_left or connection.has_died or not self._sees_deaths:
            return
        connection.has_died = True
        if connection.number is not None and connection.number >= 0:
            self._news.append(Rank(connection.number, connection.pid))


def _peer(connected: socket.socket) -> int:
    """The process that has connected."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)


def _is_ending(pid: int) -> bool:
    """Whether this process has ended, or is about to: the kernel already closes its files."""
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


def kill(job: str) -> None:
    """Kill what is left of a job on this host, and whatever it has started.

    Neither group nor parent leads to the ranks: MPICH's stand in sessions of their own, Open MPI's
    outlive an mpirun that was killed.
    """
    for pid in _processes():
        with contextlib.suppress(OSError):
            if os.fsencode(f"{JOB}={job}") in _environment(pid):
                os.kill(pid, signal.SIGKILL)


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def _environment(pid: int) -> list[bytes]:
    """What the process was started with.  OSError if it is gone, or somebody else's."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
