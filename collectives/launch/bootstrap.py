"""Start one rank of a launched job, and connect it to the launcher.

The ranks are not children of the launcher, so it cannot wait for them, and not every mpirun reports
which of them died.  Therefore each rank has a connection to the launcher, a Unix socket, from its
start to its end.  It sends its rank, a note when MPI_Init has returned, and its exit status when it
ends normally or calls os._exit.  If the connection closes before that, the rank was killed or has
crashed.

mpirun starts this file, which needs only the standard library.  It connects, and then replaces
itself by the Python that runs the program.  So the launcher also notices a rank that crashes while
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
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import NoReturn
from urllib.parse import quote_from_bytes, unquote_to_bytes

JOB = "COLLECTIVES_JOB"
"""The environment variable that names the directory of the job; each job has its own."""

IN_MPI = b"in MPI"
"""The message of a rank when MPI_Init has returned."""

MONITORED = b"+"
"""The launcher's answer to the number of a rank: it monitors this rank now."""

AT_ONCE = b" by os._exit"
"""Follows the exit status in the message of a rank that calls os._exit."""

WITH_ALL = b" with all others?"
"""Follows the exit status in the question of a rank that calls sys.exit; see `all_exit`."""

ALL_EXIT = b"="
"""The launcher's answer to that question when all ranks have asked it."""

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # where an MPI sets the rank
_ANSWER = 5.0  # seconds the launcher has to answer; after that the rank starts without an answer
_AGREE = 1.0  # seconds the other ranks have to exit with the same status
_HIGH = 1000  # see `_with_high_number`
_LONGEST = 100  # bytes in the address of a Unix socket; Linux allows 107, macOS 103

_launcher: socket.socket | None = None


# --- the process that mpirun starts -------------------------------------------------------------


def command(program: Sequence[str]) -> list[str]:
    """Return the command for mpirun that runs ``python *program`` as a rank.

    Some mpiruns interpret, change or drop words that follow the command, such as ``:`` and
    ``--map-by``.  Therefore every word of the program is quoted, so that none looks like an option.
    """
    quoted = ["=" + quote_from_bytes(os.fsencode(word)) for word in program]
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *quoted]


def _main(quoted: Sequence[str]) -> NoReturn:
    descriptor = _connect()
    start = [sys.executable, "-m", "collectives.launch", "--rank", str(descriptor)]
    program = [unquote_to_bytes(word[1:]) for word in quoted]
    os.execv(sys.executable, [*map(os.fsencode, start), *program])


def _connect() -> int:
    """Return the descriptor of a connection to the launcher, or -1 if there is none on this host.

    The launcher answers when it monitors this rank.  The program starts only after that, so the
    launcher sees the order in which ranks die, even if they die at once.
    """
    job = os.environ.get(JOB)
    if not job:
        return -1
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        launcher = socket.socket(socket.AF_UNIX)
        stack.callback(launcher.close)
        launcher.settimeout(_ANSWER)
        launcher.connect(stack.enter_context(address(job)))
        launcher.sendall(b"%d\n" % number())
        with contextlib.suppress(TimeoutError):
            launcher.recv(1)
        descriptor = _with_high_number(launcher)
        os.set_inheritable(descriptor, True)  # for the program that replaces this process
        return descriptor
    return -1


def _with_high_number(connection: socket.socket) -> int:
    """Return a duplicate of the connection with a high descriptor number.

    When a process ends, Linux closes its files from the highest descriptor down.  mpirun also has a
    connection to the rank, and kills the others when it closes.  This connection closes first.
    """
    with contextlib.suppress(OSError):  # the limit of open files may be lower
        return fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    return os.dup(connection.fileno())


@contextlib.contextmanager
def address(job: str) -> Iterator[str]:
    """Yield the address of the launcher's socket in the job's directory.

    It is short enough for a socket, even if the path of the directory is long.
    """
    path = os.path.join(job, "launcher")
    if len(os.fsencode(path)) <= _LONGEST:
        yield path
        return
    directory = os.open(job, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{directory}/launcher"
    finally:
        os.close(directory)


def number() -> int:
    """Return the number of this rank in the job, or -1 if no MPI has set it."""
    text = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "")
    return int(text) if text.isdecimal() else -1


# --- the program --------------------------------------------------------------------------------


def enter(descriptor: int) -> None:
    """Take over the connection to the launcher; -1 means that there is none."""
    global _launcher
    if descriptor >= 0:
        _launcher = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        os.register_at_fork(after_in_child=_forget_launcher)


def leave(status: int = 0) -> None:
    """Report to the launcher, once, that this rank ends normally with this exit status."""
    _say_last(b"%d" % status)


def all_exit(status: int) -> bool:
    """Return whether all ranks are about to call sys.exit with this status, about now.

    Then none waits for another, and the job need not be aborted, which mpirun reports at length.
    """
    if _launcher is None:
        return False
    _launcher.settimeout(_AGREE)
    with contextlib.suppress(OSError):
        _launcher.sendall(b"%d%b\n" % (status, WITH_ALL))
        while (answer := _launcher.recv(1)) == MONITORED:  # it came too late for `_connect`
            pass
        return answer == ALL_EXIT
    return False


def leave_at_once(status: int) -> None:
    """Report that this rank calls os._exit, which is no normal end."""
    _say_last(b"%d%b" % (status, AT_ONCE))


def failure_status(code: int) -> int:
    """Return the exit status of a failure with this code, of which systems keep 8 bits: never 0."""
    return code & 0xFF or 1


def _say_last(what: bytes) -> None:
    global _launcher
    _send(what)
    launcher, _launcher = _launcher, None
    if launcher is not None:
        launcher.detach()  # the end of the process closes it


def report_mpi_init(then: Callable[[ModuleType], object]) -> None:
    """Report when this process has imported mpi4py.MPI, which calls MPI_Init.

    `then` is called with the module after the report, before the importing program continues.
    """
    sys.meta_path.insert(0, _MpiImportHook(then))


class _MpiImportHook(importlib.abc.MetaPathFinder):
    """Finds mpi4py.MPI as usual, and reports to the launcher when it is loaded."""

    def __init__(self, then: Callable[[ModuleType], object]) -> None:
        self._then = then

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_report(module: ModuleType) -> None:
                execute(module)
                _send(IN_MPI)
                self._then(module)

            spec.loader.exec_module = execute_and_report  # type: ignore[method-assign]
        return spec


def _send(what: bytes) -> None:
    if _launcher is not None:
        with contextlib.suppress(OSError):  # the launcher has ended, or the program has closed it
            _launcher.send(what + b"\n")


def _forget_launcher() -> None:
    """Close the connection in a forked child, which is not a rank."""
    global _launcher
    launcher, _launcher = _launcher, None
    if launcher is not None:
        with contextlib.suppress(OSError):
            launcher.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
