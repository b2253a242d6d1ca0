"""One rank of a launched job: how it starts, and what it tells the launcher.

The ranks are not the launcher's children, so it cannot wait for them, and not every mpirun says
which of them died.  So each rank holds a connection to the launcher, a Unix socket, from its start
to its end.  It says which rank it is, when it is through MPI_Init and, when it ends in an orderly
way, with which status.  If the connection closes before that, the rank was killed, or crashed.

mpirun starts this file itself, which needs the standard library only.  It connects, and then
becomes the Python that runs the program.  So the launcher also learns of a rank that crashes while
Python, the user's site-packages or this library are loading.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.abc
import importlib.machinery
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn
from urllib.parse import quote_from_bytes, unquote_to_bytes

JOB = "COLLECTIVES_JOB"
"""The environment variable that names the directory of the job; each job has its own."""

IN_MPI = b"in MPI"
"""What a rank says when it is through MPI_Init."""

_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # where an MPI tells a rank its number
_ANSWER = 5.0  # seconds the launcher has to answer; a rank that gets no answer starts all the same
_HIGH = 1000  # see `_moved_up`
_LONGEST = 100  # bytes in the address of a Unix socket; Linux allows 107, macOS 103

_launcher: socket.socket | None = None


# --- the process that mpirun starts -------------------------------------------------------------


def command(program: Sequence[str]) -> list[str]:
    """What mpirun shall start, so that ``python *program`` runs as a rank.

    Some mpiruns read, change or drop words that follow the command, such as ``:`` and
    ``--map-by``.  So every word of the program is quoted, and looks like no option.
    """
    quoted = ["=" + quote_from_bytes(os.fsencode(word)) for word in program]
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *quoted]


def _main(quoted: Sequence[str]) -> NoReturn:
    descriptor = _connect()
    start = [sys.executable, "-m", "collectives.launch", "--rank", str(descriptor)]
    program = [unquote_to_bytes(word[1:]) for word in quoted]
    os.execv(sys.executable, [*map(os.fsencode, start), *program])


def _connect() -> int:
    """The descriptor of a connection to the launcher, or -1 if there is none on this host.

    The launcher answers when it watches this rank.  Nothing of the program runs before that, so
    the launcher sees in which order ranks die, even if they die at once.
    """
    job = os.environ.get(JOB)
    if not job:
        return -1
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        launcher = socket.socket(socket.AF_UNIX)
        stack.callback(launcher.close)
        launcher.settimeout(_ANSWER)
        launcher.connect(stack.enter_context(address(job)))
        launcher.sendall(b"%d\n" % _number())
        with contextlib.suppress(TimeoutError):
            launcher.recv(1)
        descriptor = _moved_up(launcher)
        os.set_inheritable(descriptor, True)  # by the program that this process becomes
        return descriptor
    return -1


def _moved_up(connection: socket.socket) -> int:
    """A duplicate with a high number.

    When a process ends, Linux releases its files from the highest descriptor down.  mpirun also
    sees a rank die by a connection that closes, and then kills the others.  This one closes first.
    """
    with contextlib.suppress(OSError):  # so many files may not be allowed
        return fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    return os.dup(connection.fileno())


@contextlib.contextmanager
def address(job: str) -> Iterator[str]:
    """The address of the launcher's socket in the job's directory, however long its path is."""
    path = os.path.join(job, "launcher")
    if len(os.fsencode(path)) <= _LONGEST:
        yield path
        return
    directory = os.open(job, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{directory}/launcher"
    finally:
        os.close(directory)


def _number() -> int:
    """Of this rank, or -1 where no MPI has said it."""
    found = [os.environ[name] for name in _NUMBERS if name in os.environ]
    return int(found[0]) if found and found[0].isdecimal() else -1


# --- the program that it becomes ----------------------------------------------------------------


def enter(descriptor: int) -> None:
    """Take over the connection to the launcher; -1: there is none."""
    global _launcher
    if descriptor >= 0:
        _launcher = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        os.register_at_fork(after_in_child=_let_go)


def leave(status: int = 0) -> None:
    """Tell the launcher that this rank ends in an orderly way, with this status.  Once."""
    global _launcher
    _say(b"%d" % status)
    launcher, _launcher = _launcher, None
    if launcher is not None:
        launcher.detach()  # the end of the process closes it


def tell_of_mpi() -> None:
    """Tell the launcher when this process has imported mpi4py.MPI, and so is through MPI_Init."""
    sys.meta_path.insert(0, _ImportOfMpi())


class _ImportOfMpi(importlib.abc.MetaPathFinder):
    """Finds mpi4py.MPI where it is, and says so to the launcher once it is loaded."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_say(module: ModuleType) -> None:
                execute(module)
                _say(IN_MPI)

            spec.loader.exec_module = execute_and_say  # type: ignore[method-assign]
        return spec


def _say(what: bytes) -> None:
    if _launcher is not None:
        with contextlib.suppress(OSError):  # the launcher is gone, or the program has closed this
            _launcher.send(what + b"\n")


def _let_go() -> None:
    """In a forked child: it is no rank, and must not hold the connection open."""
    global _launcher
    launcher, _launcher = _launcher, None
    if launcher is not None:
        with contextlib.suppress(OSError):
            launcher.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
