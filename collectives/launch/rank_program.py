"""Run the program of one rank, as ``python -m mpi4py`` would, with reports to the launcher."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import signal
import sys
from itertools import takewhile
from typing import NoReturn

from collectives.engines import leave_out_networks
from collectives.launch import bootstrap, gpus
from collectives.launch.drop_in import DropIn

DROP_IN, TRAFFIC = "--drop-in", "--traffic"  # may precede the program


def run_rank(command: list[str]) -> None:
    """Run the program as ``python -m mpi4py`` would: an uncaught exception aborts the whole job.

    `command` is the program, after the options of this file.

    This does not work before MPI_Init: with MPICH the other ranks then wait in MPI_Init for ever,
    and Open MPI 5's mpirun hangs if it has to end a rank that is just connecting.  Therefore a
    failing rank also reports to the launcher, which ends the job if mpirun does not.  If all ranks
    exit with the same status, nothing is aborted.
    """
    gpus_per_rank, command = gpus.read_options(command)
    drop_in, command = _drop_in(command)
    leave_out_networks()
    _line_buffer_stdout()
    child = _ForkedChild()
    atexit.register(child.end)  # runs after all others
    atexit.register(bootstrap.leave)
    atexit.register(drop_in.end)
    os.register_at_fork(after_in_child=lambda: atexit.unregister(drop_in.end))
    _report_exits_at_once()
    bootstrap.report_mpi_init(drop_in.begin)
    sys.argv = ["mpi4py", *command]
    try:
        _bind_gpus(gpus_per_rank)
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except BaseException as error:
        child.status = _status(error)
        if child.status and not child.is_one:
            try:
                drop_in.end(has_failed=True)
                is_common = _is_plain_exit(error) and bootstrap.all_exit(child.status)
            finally:  # also after Ctrl-C
                bootstrap.leave(child.status)
            if is_common:
                _exit_without_abort()
        raise


def _is_plain_exit(error: BaseException) -> bool:
    """Return whether the rank ends by sys.exit with a number, in order.

    It does if MPI is finalized then, or need not be.
    """
    if not isinstance(error, SystemExit) or not isinstance(error.code, int):
        return False
    rc = sys.modules["mpi4py"].rc  # a program that calls MPI_Init itself may leave out MPI_Finalize
    does_finalize = rc.initialize if rc.finalize is None else rc.finalize
    return bool(does_finalize) or not _must_finalize()


def _exit_without_abort() -> NoReturn:
    """End this process normally, for mpirun too; the launcher knows the status."""
    if mpi := sys.modules.get("mpi4py.MPI"):
        mpi._set_abort_status(0)  # which mpi4py.run has set
    raise SystemExit(0)


class _ForkedChild:
    """Ends a child that the program has forked and that runs on to the end of the program.

    Python would call MPI_Finalize or MPI_Abort in the child, whose MPI is a copy of the rank's: it
    would wait for the other ranks for ever, or abort the job.
    """

    def __init__(self) -> None:
        self.status = 0  # with which this process ends
        self._rank = os.getpid()

    @property
    def is_one(self) -> bool:
        """Whether this process is not the rank, but its child."""
        return os.getpid() != self._rank

    def end(self) -> None:
        """End this process before MPI is finalized, if it is a child."""
        if self.is_one:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                with contextlib.suppress(OSError, ValueError):  # it is closed
                    stream.flush()
            os._exit(self.status)


def _bind_gpus(gpus_per_rank: int | None) -> None:
    """Leave this rank its own GPUs; end it with a sentence if that is not possible."""
    try:
        if gpus_per_rank is not None:
            gpus.bind(gpus_per_rank)
    except gpus.NoGpus as error:
        raise SystemExit(str(error)) from None


def _drop_in(command: list[str]) -> tuple[DropIn, list[str]]:
    """Return what the options in front of the program ask for, and the program."""
    options = list(takewhile({DROP_IN, TRAFFIC}.__contains__, command))
    drop_in = DropIn(is_wanted=DROP_IN in options, is_recorded=TRAFFIC in options)
    return drop_in, command[len(options) :]


def _report_exits_at_once() -> None:
    """Let ``os._exit``, which runs no atexit functions, report to the launcher.

    It is a normal end if the status is 0 and there is no MPI to finalize.
    """
    exit_at_once = os._exit

    def leave_and_exit(status: int) -> NoReturn:
        if status == 0 and not _must_finalize():
            bootstrap.leave()
        else:
            bootstrap.leave_at_once(status)
        exit_at_once(status)

    os._exit = leave_and_exit


def _must_finalize() -> bool:
    """Return whether MPI has been initialized and not finalized."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def _line_buffer_stdout() -> None:
    """Write whole lines at once, so that lines of different ranks do not mix."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _status(error: BaseException) -> int:
    """Return the exit status of the rank after this exception.

    Python ends with an exit code modulo 256.  A code that is not 0 is a failure all the same, and
    mpi4py aborts the job: it must not become a 0.
    """
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return bootstrap.failure_status(error.code) if error.code else 0
    if isinstance(error, SystemExit):
        return int(error.code is not None)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
