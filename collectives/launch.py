"""Start an MPI job: ``python -m collectives.launch -n 4 script.py``.

What ``mpirun`` leaves to the user is settled here: which mpirun belongs to the MPI that mpi4py
loads, what that MPI wants before it runs as root or with more ranks than cores, that one failing
rank ends the job instead of leaving the others to wait, which rank it was that died, and that
nothing is left running when the job is stopped.  Nothing else in the library knows of this file: a
plain ``mpirun -n 4 python script.py`` works as well, without these courtesies.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import math
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from collectives import flight as recorded
from collectives import ranks
from collectives.mpirun import MpiNotFound, defaults, find_mpirun, tolerance

TIMED_OUT = 124
"""The exit status of a job that was stopped at its time limit, as coreutils' ``timeout`` has it."""

_POLL = 0.1  # seconds between two looks at the job
_PATIENCE = 2.0  # seconds mpirun has to end the job by itself after a rank has failed
_FAREWELL = 5.0  # seconds to the end of mpirun from the end of all programs, some of which died
_WRITING = 1.0  # seconds the ranks have to dump what they are doing, at the job's time limit
_GRACE = 3.0  # seconds it has, after SIGTERM, to end the ranks of this host and of others

# The statuses of a job one of whose ranks was killed or crashed: of an mpirun that counts them as a
# shell does, and of one (MPICH's) that does not.
_SIGNALS = (4, 6, 7, 8, 9, 11, 15)  # SIGILL, -ABRT, -BUS, -FPE, -KILL, -SEGV, -TERM
_KILLED = {*_SIGNALS, *(128 + signum for signum in _SIGNALS)}

# Runs in a process that then becomes mpirun: when the launcher dies, even by SIGKILL, the kernel
# sends mpirun a SIGTERM (1 is PR_SET_PDEATHSIG).  A preexec_fn could do it, but not among threads.
_TETHER = (
    "import ctypes, os, signal, sys;"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


# --- one job ------------------------------------------------------------------------------------


def launch(
    size: int,
    command: Sequence[str],
    *,
    mpi_args: Sequence[str] = (),
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    capture: bool = False,
    fault_tolerant: bool = False,
    flight: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *command`` on ``size`` ranks and wait for the end.

    ``command`` begins with a script, or with ``-m`` and a module.  ``mpi_args`` go to mpirun,
    ``env`` is added to this process's environment.  The result carries the job's exit status, not
    zero when any rank failed, and with ``capture`` what the ranks wrote.  At the time limit the
    whole job is ended: status ``TIMED_OUT`` and a sentence on its standard error.  There it also
    says which rank of this host was killed, or crashed.  That ends the job, unless it is
    ``fault_tolerant``: then the others go on, and the status is theirs.

    ``flight`` is a directory where the ranks dump what they are doing: when a wait fails or runs
    out of time, when this process gets SIGUSR1 (if it is in its main thread), and at the job's time
    limit; then it also says on standard error, as ``python -m collectives.flight`` does, who waits
    for whom.

    Raises MpiNotFound if there is no MPI, or none that can do it.
    """
    if size < 1 or not command:
        raise ValueError("a job needs at least one rank and a script or a module to run")
    mpirun = find_mpirun()
    options = tolerance(mpirun) if fault_tolerant else ()
    program = [sys.executable, "-m", "collectives.launch", "--rank", *command]
    words = [mpirun.path, "-n", str(size), *options, *mpi_args, *program]
    notes: list[str] = []
    extra = dict(env or {})
    if flight is not None:
        extra["COLLECTIVES_FLIGHT"] = str(Path(flight).absolute())
    with contextlib.ExitStack() as stack:
        board = stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-job-"))
        # Files, not pipes: a pipe would have to be read all the while, to an end that may not come.
        out, err = (
            stack.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2)
        )
        job = subprocess.Popen(
            [*_tether(), *words],
            env={**defaults(mpirun), **os.environ, **extra, ranks.BOARD: board},
            stdin=subprocess.DEVNULL if capture else None,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C reaches the launcher alone; it ends the job, once
        )
        status, began = TIMED_OUT, time.time()
        try:
            if flight is not None:
                stack.enter_context(_passing_on(signal.SIGUSR1, board))
            say = notes.append if capture else _say
            status = _wait(job, board, timeout, size if fault_tolerant else None, say)
            if status == TIMED_OUT and flight is not None and job.poll() is None:
                say(_flights(board, Path(flight), began))
        finally:
            if status != 0 or job.poll() is None:
                _end(job, board)
        return subprocess.CompletedProcess(words, status, _text(out), _text(err, "".join(notes)))


def _say(sentence: str) -> None:
    sys.stderr.write(sentence)


def _wait(
    job: subprocess.Popen[bytes],
    board: str,
    timeout: float | None,
    tolerant_size: int | None,
    say: Callable[[str], object],
) -> int:
    """The status with which the job ended or must be ended.

    `tolerant_size`: how many ranks there are, if others may go on where one dies.
    """
    limit = math.inf if timeout is None else time.monotonic() + timeout
    failed, is_over, dead = 0, False, None
    with ranks.Watch(board, job.pid) as watch:
        while (died := watch.wait(_POLL)) or job.poll() is None:
            if died and tolerant_size:
                say(_sentence(died))
            dead = dead or died
            if time.monotonic() >= limit:
                if is_over:
                    return failed
                if not failed:
                    say(f"The job did not end within {timeout:g} s and was stopped.\n")
                return failed or TIMED_OUT
            if not failed and (failed := ranks.reported(board)):
                limit = min(limit, time.monotonic() + _PATIENCE)
            # Open MPI 5 can hang in the MPI_Finalize of the others where two have died at once.
            if tolerant_size and dead and not is_over and watch.saw_the_end_of(tolerant_size):
                is_over, limit = True, min(limit, time.monotonic() + _FAREWELL)
    status = _status_of(job.returncode, ranks.reported(board))
    if dead and not tolerant_size and status in _KILLED:
        say(_sentence(dead))
    return status


@contextlib.contextmanager
def _passing_on(signum: signal.Signals, board: str) -> Iterator[None]:
    """Pass a signal on to the ranks, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signum, lambda *_: ranks.ask(board, signum))
    try:
        yield
    finally:
        signal.signal(signum, before)


def _flights(board: str, directory: Path, began: float) -> str:
    """What the ranks are doing, line by line, as they say themselves when they are asked."""
    asked = set(ranks.ask(board, signal.SIGUSR1))
    asked_at = time.time()
    deadline = time.monotonic() + _WRITING
    while asked - _fresh(directory, asked_at) and time.monotonic() < deadline:
        time.sleep(_POLL / 10)
    fresh = _fresh(directory, began)
    try:
        dumps = {rank: dump for rank, dump in recorded.read(directory).items() if rank in fresh}
    except ValueError as error:
        return f"{error}\n"
    if not dumps:
        return f"No rank has written to {directory} what it is doing.\n"
    return "".join(f"{line}\n" for line in recorded.lines(dumps))


def _fresh(directory: Path, since: float) -> set[int]:
    """The ranks with a dump that is not older: the directory may hold those of another job."""
    dumps = directory.glob("flight.*.json")
    return {int(path.name.split(".")[1]) for path in dumps if path.stat().st_mtime >= since - 0.01}


def _sentence(dead: ranks.Rank) -> str:
    return f"{dead} died without a word: it was killed, it crashed, or it called os._exit.\n"


def _status_of(returncode: int, reported: int) -> int:
    """An mpirun that was itself killed by signal k ends with 128 + k, as a shell would say it.

    It says nothing of the ranks then (Open MPI 5's can crash on a rank that ends while connecting
    to it); what one of them has reported does.
    """
    return (reported or 128 - returncode) if returncode < 0 else (returncode or reported)


def _tether() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _TETHER] if sys.platform == "linux" else []


def _text(file: IO[bytes] | None, end: str = "") -> str | None:
    if file is None:
        return None
    file.seek(0)
    return file.read().decode(errors="replace") + end


def _end(job: subprocess.Popen[bytes], board: str) -> None:
    """End every rank: politely through mpirun, which reaches other hosts too, then by force."""
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(_GRACE)
    ranks.kill(board)
    job.kill()
    job.wait()


# --- one rank -----------------------------------------------------------------------------------


def _run_rank(command: list[str]) -> None:
    """Run the target as ``python -m mpi4py`` would: an uncaught exception aborts the whole job.

    But not if it comes before MPI_Init.  MPICH's mpirun then lets the others wait in MPI_Init for
    ever, and Open MPI 5's itself hangs if it has to end a rank that is just connecting to it.  So
    a failing rank also tells the launcher, which ends what mpirun does not.
    """
    _write_whole_lines()
    ranks.enter()
    atexit.register(ranks.leave)
    sys.argv = ["mpi4py", *command]
    try:
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except BaseException as error:
        if status := _status(error):
            ranks.leave(status)
        raise


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


# --- the command --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job as the command line says; its exit status."""
    parser = _parser()
    options, command = _split(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(options)
    if not command or command == ["-m"]:
        parser.error("a script, or -m and a module, is needed")
    if command[0] != "-m" and not Path(command[0]).exists():
        parser.error(f"there is no script {command[0]}")
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
        )
    except MpiNotFound as error:
        parser.exit(2, f"{error}\n")
    return job.returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m collectives.launch",
        usage="%(prog)s -n N [--timeout S] [--flight DIR] [--fault-tolerant] "
        "[--mpi-args ARGS] "
        "(SCRIPT | -m MODULE) [ARGS ...]",
        description="Run a Python script or module on N ranks under this environment's MPI.",
        epilog="Exit status: the job's own (not zero if any rank failed), 124 at the time limit, "
        "2 for a wrong command line or when there is no MPI.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", metavar="N", type=_ranks, required=True, help="number of ranks")
    parser.add_argument(
        "--mpi-args", metavar="ARGS", type=shlex.split, default=[], help="more words for mpirun"
    )
    parser.add_argument("--timeout", metavar="S", type=_seconds, help="end the job after S seconds")
    parser.add_argument(
        "--flight",
        metavar="DIR",
        type=Path,
        help="ranks dump there what they are doing: at a failed wait, SIGUSR1, or the time limit",
    )
    parser.add_argument(
        "--fault-tolerant",
        action="store_true",
        help="when a rank dies the others go on, and are told (Open MPI only)",
    )
    return parser


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the command, which argparse never sees and so cannot change.

    A value is joined to its option by "=", or argparse would take ``--mpi-args --verbose`` for two.
    """
    rest = list(argv)
    options = []
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        option = rest.pop(0)
        has_value = option in ("-n", "--mpi-args", "--timeout", "--flight") and rest
        options.append(f"{option}={rest.pop(0)}" if has_value else option)
    return options, rest


def _handle(signum: signal.Signals) -> None:
    """Let a signal end the job.  An ignored SIGHUP stays ignored: that is what nohup asks for."""
    if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
        signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Unwind through ``launch``, which ends the job; a second Ctrl-C must not cut that short."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _run_rank(sys.argv[2:])
    else:
        sys.exit(main())
