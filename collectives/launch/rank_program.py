"""The program of one rank, as ``python -m mpi4py`` would run it, with word to the launcher."""

from __future__ import annotations

import atexit
import io
import os
import runpy
import signal
import sys
from typing import NoReturn

from collectives.launch import bootstrap


def run_rank(command: list[str]) -> None:
    """Run the target as ``python -m mpi4py`` would: an uncaught exception aborts the whole job.

    But not if it comes before MPI_Init.  MPICH's mpirun then lets the others wait in MPI_Init for
    ever, and Open MPI 5's itself hangs if it has to end a rank that is just connecting to it.  So
    a failing rank also tells the launcher, which ends what mpirun does not.
    """
    _write_whole_lines()
    atexit.register(bootstrap.leave)
    _tell_of_good_exits()
    bootstrap.tell_of_mpi()
    sys.argv = ["mpi4py", *command]
    try:
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except BaseException as error:
        if status := _status(error):
            bootstrap.leave(status)
        raise


def _tell_of_good_exits() -> None:
    """Let ``os._exit(0)``, which runs no atexit, tell the launcher that all is well.

    ``os._exit`` with another status counts as a death.
    """
    exit_at_once = os._exit

    def leave_and_exit(status: int) -> NoReturn:
        if status == 0:
            bootstrap.leave()
        exit_at_once(status)

    os._exit = leave_and_exit


def _write_whole_lines() -> None:
    """At once, and whole: what a rank prints in pieces is torn by what the others print."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _status(error: BaseException) -> int:
    """The exit status with which Python will end on this exception."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    if isinstance(error, SystemExit):
        return int(error.code is not None)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
