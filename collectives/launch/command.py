"""Run a Python script or module on N ranks, under the MPI of this environment.

    ring launch -n 4 example.py
    ring launch -n 8 -m parallel.train --mesh data=8 --zero 2

What follows the script or the module are its own arguments.
"""

from __future__ import annotations

import argparse
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from collectives.console import Command, at_least, refusing, seconds
from collectives.launch.job import launch, made_directory
from collectives.launch.mpirun import MpiNotFound


def run(options: argparse.Namespace) -> int:
    """Run one job; return its exit status."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        _handle(signum)
    with refusing(MpiNotFound):
        job = launch(
            options.n,
            options.program,
            mpi_args=options.mpi_args,
            timeout=options.timeout,
            fault_tolerant=options.fault_tolerant,
            flight=options.flight,
            drop_in=options.drop_in,
            traffic=options.traffic,
            check=options.check,
            gpus_per_rank=options.gpus_per_rank,
        )
    return job.returncode


def read(parse: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the options before the program, and the program with its arguments."""
    before, program = split_words(words)
    options = parse.parse_args(before)
    if not program or program == ["-m"]:
        parse.error("a script, or -m and a module, is needed")
    if program[0] != "-m" and not Path(program[0]).exists():
        parse.error(f"there is no script {program[0]}")
    if options.traffic and not options.drop_in:
        parse.error("--traffic needs --drop-in")
    options.program = program
    return options


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the launcher itself."""
    parse.usage = (
        "%(prog)s -n N [--timeout S] [--flight DIR] [--fault-tolerant] [--gpus-per-rank N] "
        "[--mpi-args ARGS] [--check] [--drop-in [--traffic]] [--] (SCRIPT | -m MODULE) [ARGS ...]"
    )
    parse.epilog = (
        "Exit status: the job's own (not zero if any rank failed), 124 at the time limit, "
        "2 for a wrong command line or when there is no MPI."
    )
    parse.allow_abbrev = False
    add, positive = parse.add_argument, at_least(1)
    add("-n", metavar="N", type=positive, required=True, help="number of ranks")
    add("--mpi-args", metavar="ARGS", type=_words, default=[], help="more words for mpirun")
    add(
        "--gpus-per-rank",
        metavar="N",
        type=positive,
        help="leave each rank N GPUs of its own in CUDA_VISIBLE_DEVICES; by default all",
    )
    add("--timeout", metavar="S", type=seconds, help="end the job after S seconds")
    add(
        "--flight",
        metavar="DIR",
        type=_dumps,
        help="directory of hang reports: at a failed wait, SIGUSR1, or the time limit",
    )
    add(
        "--fault-tolerant",
        action="store_true",
        help="when a rank dies, the others continue and get an error (Open MPI only)",
    )
    add(
        "--drop-in",
        action="store_true",
        help="let MPI.COMM_WORLD of an mpi4py program use the collectives of this library",
    )
    add(
        "--traffic",
        action="store_true",
        help="print at the end what this library sent, by call site; needs --drop-in",
    )
    add(
        "--check",
        action="store_true",
        help="compare the calls of the ranks before each collective, and raise if they differ",
    )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of words: {error}") from None


def _dumps(text: str) -> Path:
    try:
        return made_directory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_WITH_VALUES = ("-n", "--mpi-args", "--timeout", "--flight", "--gpus-per-rank")


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's options, and the command, which argparse does not parse.

    The command may follow a "--", as with other commands that take a program.
    A value is joined to its option by "=", because argparse would read ``--mpi-args --verbose`` as
    two options.
    """
    rest = list(argv)
    options = []
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        option = rest.pop(0)
        if option == "--":
            break
        has_value = option in _WITH_VALUES and rest
        options.append(f"{option}={rest.pop(0)}" if has_value else option)
    return options, rest


def _handle(signum: signal.Signals) -> None:
    """Let a signal end the job.

    An ignored SIGHUP stays ignored, as nohup requires.
    """
    if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
        signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Unwind through ``launch``, which ends the job; ignore a second Ctrl-C meanwhile."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    raise SystemExit(128 + signum)


COMMAND = Command("collectives.launch", __doc__, add_options, run, read)
