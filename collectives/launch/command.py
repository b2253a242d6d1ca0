"""The command line of ``python -m collectives.launch``."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from collectives.launch.job import launch, made_directory
from collectives.launch.mpirun import MpiNotFound


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job, and return its exit status."""
    parse = parser()
    options, command = _split(sys.argv[1:] if argv is None else argv)
    arguments = parse.parse_args(options)
    if not command or command == ["-m"]:
        parse.error("a script, or -m and a module, is needed")
    if command[0] != "-m" and not Path(command[0]).exists():
        parse.error(f"there is no script {command[0]}")
    if arguments.traffic and not arguments.drop_in:
        parse.error("--traffic needs --drop-in")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        _handle(signum)
    try:
        job = launch(
            arguments.n,
            command,
            mpi_args=arguments.mpi_args,
            timeout=arguments.timeout,
            fault_tolerant=arguments.fault_tolerant,
            flight=arguments.flight,
            drop_in=arguments.drop_in,
            traffic=arguments.traffic,
            check=arguments.check,
            gpus_per_rank=arguments.gpus_per_rank,
        )
    except MpiNotFound as error:
        parse.exit(2, f"{error}\n")
    return job.returncode


def parser() -> argparse.ArgumentParser:
    """The parser of the launcher's own options."""
    parse = argparse.ArgumentParser(
        prog="python -m collectives.launch",
        usage="%(prog)s -n N [--timeout S] [--flight DIR] [--fault-tolerant] "
        "[--gpus-per-rank N] [--mpi-args ARGS] [--check] [--drop-in [--traffic]] [--] "
        "(SCRIPT | -m MODULE) [ARGS ...]",
        description="Run a Python script or module on N ranks under this environment's MPI.",
        epilog="Exit status: the job's own (not zero if any rank failed), 124 at the time limit, "
        "2 for a wrong command line or when there is no MPI.",
        allow_abbrev=False,
    )
    parse.add_argument("-n", metavar="N", type=_number, required=True, help="number of ranks")
    parse.add_argument(
        "--mpi-args", metavar="ARGS", type=_words, default=[], help="more words for mpirun"
    )
    parse.add_argument(
        "--gpus-per-rank",
        metavar="N",
        type=_number,
        help="leave each rank N GPUs of its own in CUDA_VISIBLE_DEVICES; by default all",
    )
    parse.add_argument("--timeout", metavar="S", type=_seconds, help="end the job after S seconds")
    parse.add_argument(
        "--flight",
        metavar="DIR",
        type=_dumps,
        help="directory of hang reports: at a failed wait, SIGUSR1, or the time limit",
    )
    parse.add_argument(
        "--fault-tolerant",
        action="store_true",
        help="when a rank dies, the others continue and get an error (Open MPI only)",
    )
    parse.add_argument(
        "--drop-in",
        action="store_true",
        help="let MPI.COMM_WORLD of an mpi4py program use the collectives of this library",
    )
    parse.add_argument(
        "--traffic",
        action="store_true",
        help="print at the end what this library sent, by call site; needs --drop-in",
    )
    parse.add_argument(
        "--check",
        action="store_true",
        help="compare the calls of the ranks before each collective, and raise if they differ",
    )
    return parse


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


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")


_WITH_VALUES = ("-n", "--mpi-args", "--timeout", "--flight", "--gpus-per-rank")


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's options, and the command, which argparse does not parse.

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
    """Let a signal end the job.  An ignored SIGHUP stays ignored, as nohup requires."""
    if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
        signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Unwind through ``launch``, which ends the job; ignore a second Ctrl-C meanwhile."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + signum)
