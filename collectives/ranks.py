"""The ranks of one job on this host: what they tell their launcher, and what it sees of them.

They are not the launcher's children, so it cannot wait for them, and not every mpirun says which of
them died.  So a rank puts a pipe with its process number on the job's board when it starts, holds
it open as long as it lives, takes it down when it ends in good order, and posts its status if it
fails.  Whoever lets go of a pipe that is still up was killed, or crashed.  The board is a directory
that no other job has; by its name, which is in every rank's environment, the ranks are known too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

BOARD = "COLLECTIVES_JOB"
"""The environment variable that names the board."""

_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # where an MPI tells a rank its number


class Rank(NamedTuple):
    """A process of this host that is a rank of the job."""

    number: int
    pid: int

    def __str__(self) -> str:
        return f"Rank {self.number} (process {self.pid})"


# --- a rank's side ------------------------------------------------------------------------------


def enter() -> None:
    """Post on the job's board, if there is one here, that this process is a rank."""
    if board := os.environ.get(BOARD):
        with contextlib.suppress(OSError):
            os.mkfifo(_post(board))
            os.open(_post(board), os.O_RDWR | os.O_NONBLOCK)  # the end of the process closes it


def leave(status: int = 0) -> None:
    """Take the post down: this process ends in good order, or with a status that is now posted."""
    if board := os.environ.get(BOARD):
        with contextlib.suppress(OSError):
            if status:
                Path(board, f"status-{status}").touch()
            _post(board).unlink()


def _post(board: str, pid: int | None = None) -> Path:
    return Path(board, f"rank-{os.getpid() if pid is None else pid}")


# --- the launcher's side ------------------------------------------------------------------------


def reported(board: str) -> int:
    """The exit status of a rank of this host that has failed, or 0."""
    posts = Path(board).glob("status-*")
    return next((int(post.name.removeprefix("status-")) for post in posts), 0)


class Watch:
    """Sees the ranks of this host die as they do, in that order, and before the job has ended.

    Where the kernel cannot tell (Linux can from 5.3 on) nobody is seen to die.
    """

    def __init__(self, board: str, job: int) -> None:
        """`job`: the process of mpirun."""
        self._board = board
        self._known: set[int] = set()
        self._dead: set[int] = set()
        self._ranks: dict[int, Rank | None] = {}  # by file descriptor; None: mpirun
        self._undo = contextlib.ExitStack()
        # An epoll hands over one event after the other in the order in which they happened.  After
        # a death mpirun kills the rest, often before the launcher's turn to look has come.  Both
        # see a rank die when its files are closed; its process may end after those of the others.
        self._deaths = self._undo.enter_context(select.epoll()) if _can_watch() else None
        if self._deaths is not None:
            self._follow(self._deaths, os.pidfd_open(job), None)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *failure: object) -> None:
        self._undo.close()

    def wait(self, seconds: float) -> Rank | None:
        """A rank that has died without a word, or None after so long, or when the job ends."""
        if self._deaths is None:
            time.sleep(seconds)
            return None
        deadline = time.monotonic() + seconds
        self._meet(self._deaths)
        while events := self._deaths.poll(max(deadline - time.monotonic(), 0.0), maxevents=1):
            descriptor, _ = events[0]
            self._deaths.unregister(descriptor)
            rank = self._ranks[descriptor]
            if rank is None:
                self._deaths = None  # the ranks that outlive mpirun die of its end
                return None
            if _post(self._board, rank.pid).exists():
                self._dead.add(rank.pid)
                return rank
        return None

    def saw_the_end_of(self, size: int) -> bool:
        """Whether so many ranks were here, each of which has died or come to its program's end."""
        met = [rank.pid for rank in self._ranks.values() if rank is not None]
        return len(met) == size and not any(
            _post(self._board, pid).exists() for pid in met if pid not in self._dead
        )

    def _meet(self, deaths: select.epoll) -> None:
        """Follow the ranks that have come since the last time."""
        for post in Path(self._board).glob("rank-*"):
            pid = int(post.name.removeprefix("rank-"))
            if pid not in self._known:
                self._known.add(pid)
                with contextlib.suppress(OSError):  # gone already
                    # The post may be another host's, if the board lies on a shared disk.
                    if (rank := _rank(pid, self._board)) is not None:
                        descriptor = os.open(post, os.O_RDONLY | os.O_NONBLOCK)
                        self._follow(deaths, descriptor, rank)

    def _follow(self, deaths: select.epoll, descriptor: int, rank: Rank | None) -> None:
        self._undo.callback(os.close, descriptor)
        self._ranks[descriptor] = rank
        deaths.register(descriptor, select.EPOLLIN)


def _can_watch() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return hasattr(select, "epoll")


def ask(board: str, signum: int) -> list[int]:
    """Send a signal to the ranks of this host that handle it; their numbers."""
    asked = []
    for post in Path(board).glob("rank-*"):
        with contextlib.suppress(OSError):  # gone already
            rank = _rank(int(post.name.removeprefix("rank-")), board)
            if rank is not None and _handles(rank.pid, signum):  # or it would die of it
                os.kill(rank.pid, signum)
                asked.append(rank.number)
    return asked


def _handles(pid: int, signum: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def kill(board: str) -> None:
    """Kill what is left of a job on this host, and whatever it has started.

    Neither group nor parent leads to the ranks: MPICH's stand in sessions of their own, Open MPI's
    outlive an mpirun that was killed.
    """
    for pid in _processes():
        with contextlib.suppress(OSError):
            if _environment(pid).get(BOARD) == board:
                os.kill(pid, signal.SIGKILL)


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def _rank(pid: int, board: str) -> Rank | None:
    """The process as a rank of this job; None if it is none.  OSError if it is gone."""
    environment = _environment(pid)
    number = _number(environment)
    return Rank(number, pid) if environment.get(BOARD) == board and number is not None else None


def _environment(pid: int) -> dict[str, str]:
    """What the process was started with.  OSError if it is gone, or somebody else's."""
    entries = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _number(environment: Mapping[str, str]) -> int | None:
    found = [environment[name] for name in _NUMBERS if name in environment]
    return int(found[0]) if found and found[0].isdecimal() else None
