"""Runs the program of one rank, as ``python -m mpi4py`` would, with reports to the launcher."""

from __future__ import annotations

import atexit
import io
import os
import runpy
import signal
import sys
from itertools import takewhile
from typing import NoReturn

from collectives.engines import leave_out_networks
from collectives.launch import bootstrap
from collectives.launch.drop_in import DropIn

DROP_IN, TRAFFIC = "--drop-in", "--traffic"  # may precede the program


def run_rank(command: list[str]) -> None:
    """Run the program as ``python -m mpi4py`` would: an uncaught exception aborts the whole job.

    This does not work before MPI_Init: with MPICH the other ranks then wait in MPI_Init for ever,
    and Open MPI 5's mpirun hangs if it has to end a rank that is just connecting.  Therefore a
    failing rank also reports to the launcher, which ends the job if mpirun does not.

    `command`: the program, after the options of this file.
    """
    drop_in, command = _drop_in(command)
    leave_out_networks()
    _line_buffer_stdout()
    atexit.register(bootstrap.leave)
    atexit.register(drop_in.end)
    _report_successful_exits()
    bootstrap.report_mpi_init(drop_in.begin)
    sys.argv = ["mpi4py", *command]
    try:
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except BaseException as error:
        if status := _status(error):
            drop_in.end(has_failed=True)
            bootstrap.leave(status)
        raise


def _drop_in(command: list[str]) -> tuple[DropIn, list[str]]:
    """What the options in front of the program ask for, and the program."""
    options = list(takewhile({DROP_IN, TRAFFIC}.__contains__, command))
    drop_in = DropIn(is_wanted=DROP_IN in options, is_recorded=TRAFFIC in options)
    return drop_in, command[len(options) :]


def _report_successful_exits() -> None:
    """Let ``os._exit(0)``, which runs no atexit functions, report success to the launcher.

    ``os._exit`` with another status counts as a death.
    """
    exit_at_once = os._exit

    def leave_and_exit(status: int) -> NoReturn:
        if status == 0:
            bootstrap.leave()
        exit_at_once(status)

    os._exit = leave_and_exit


def _line_buffer_stdout() -> None:
    """Write whole lines at once, so that lines of different ranks do not mix."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _status(error: BaseException) -> int:
    """The exit status with which Python will end on this exception."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    if isinstance(error, SystemExit):
        return int(error.code is not None)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
