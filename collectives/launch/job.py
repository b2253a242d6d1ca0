"""One MPI job: started, watched, and ended, with nothing left running.

What ``mpirun`` leaves to the user is settled here: which mpirun belongs to the MPI that mpi4py
loads, what that MPI wants before it runs as root or with more ranks than cores, that one failing
rank ends the job instead of leaving the others to wait, which rank it was that died, and that
nothing is left running when the job is stopped.  Nothing else in the library knows of this file: a
plain ``mpirun -n 4 python script.py`` works as well, without these courtesies.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from collectives.diagnostics import hang_report as recorded
from collectives.launch import bootstrap, process_monitor
from collectives.launch.mpirun import defaults, find_mpirun, tolerance

TIMED_OUT = 124
"""The exit status of a job that was stopped at its time limit, as coreutils' ``timeout`` has it."""

_POLL = 0.1  # seconds between two looks at the job
_PATIENCE = 2.0  # seconds mpirun has to end the job by itself after a rank has failed
_DYING = 3.0  # seconds it has after one has died: it may have to end many by force
_FAREWELL = 5.0  # seconds to the end of mpirun from the end of all programs, some of which died
_WRITING = 1.0  # seconds the ranks have to dump what they are doing, at the job's time limit
_GRACE = 3.0  # seconds it has, after SIGTERM, to end the ranks of this host and of others

# The statuses of a job one of whose ranks was killed or crashed: of an mpirun that counts them as a
# shell does, and of one (MPICH's) that does not.  SIGHUP, SIGINT and SIGQUIT are missing: a 1, 2 or
# 3 is rather the status with which a program has failed.
_SIGNALS = (
    *range(signal.SIGILL, signal.SIGTERM + 1),
    signal.SIGXCPU,
    signal.SIGXFSZ,
    signal.SIGSYS,
)
_KILLED = {*_SIGNALS, *(128 + signum for signum in _SIGNALS)}

_NO_MPI = "No other rank can come through MPI_Init, so the job was stopped.\n"

# Runs in a process that then becomes mpirun: when the launcher dies, even by SIGKILL, the kernel
# sends mpirun a SIGTERM (1 is PR_SET_PDEATHSIG).  A preexec_fn could do it, but not among threads.
_TETHER = (
    "import ctypes, os, signal, sys;"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


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
    ``fault_tolerant`` and through MPI_Init: then the others go on, and the status is theirs.

    ``flight`` is a directory where the ranks dump what they are doing: when a wait fails or runs
    out of time, when this process gets SIGUSR1 (if it is in its main thread), and at the job's time
    limit; then it also says on standard error, as ``python -m collectives.flight`` does, who waits
    for whom.

    Raises MpiNotFound if there is no MPI, or none that can do it.
    """
    _check(size, command, timeout)
    directory = None if flight is None else made_directory(flight)
    mpirun = find_mpirun()
    options = tolerance(mpirun) if fault_tolerant else ()
    words = [mpirun.path, "-n", str(size), *options, *mpi_args, *bootstrap.command(command)]
    notes: list[str] = []
    extra = dict(env or {})
    if directory is not None:
        extra["COLLECTIVES_FLIGHT"] = str(directory)
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-job-"))
        watch = stack.enter_context(process_monitor.Watch(home))
        # Files, not pipes: a pipe would have to be read all the while, to an end that may not come.
        out, err = (
            stack.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2)
        )
        job = subprocess.Popen(
            [*_tether(), *words],
            env={**defaults(mpirun), **os.environ, **extra, bootstrap.JOB: home},
            stdin=subprocess.DEVNULL if capture else None,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C reaches the launcher alone; it ends the job, once
        )
        status, began = TIMED_OUT, time.time()
        try:
            if directory is not None:
                stack.enter_context(_passing_on(signal.SIGUSR1, watch))
            say = notes.append if capture else _say
            status = _wait(job, watch, timeout, size if fault_tolerant else None, say)
            if status == TIMED_OUT and directory is not None and job.poll() is None:
                say(_flights(watch, directory, began))
        finally:
            if status != 0 or job.poll() is None:
                _end(job, home)
        return subprocess.CompletedProcess(words, status, _text(out), _text(err, "".join(notes)))


def _check(size: int, command: Sequence[str], timeout: float | None) -> None:
    if isinstance(command, str):
        raise TypeError(f"command is a list of words, not the text {command!r}")
    if operator.index(size) < 1 or not command:
        raise ValueError("a job needs at least one rank and a script or a module to run")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout} s; it must be positive, or None for no limit")


def made_directory(flight: str | Path) -> Path:
    """The directory of the dumps, which is made if need be: the ranks could only fail to."""
    directory = Path(flight).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"flight: {flight} cannot be a directory ({error.strerror})") from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"flight: {flight} is not a directory in which this user may write")
    return directory


def _say(sentence: str) -> None:
    sys.stderr.write(sentence)


def _wait(
    job: subprocess.Popen[bytes],
    watch: process_monitor.Watch,
    timeout: float | None,
    tolerant_size: int | None,
    say: Callable[[str], object],
) -> int:
    """The status with which the job ended or must be ended.

    `tolerant_size`: how many ranks there are, if others may go on where one dies.
    """
    limit = math.inf if timeout is None else time.monotonic() + timeout
    failed, is_over, dead, dead_at = 0, False, None, math.inf
    watch.begin(job.pid)
    while (died := watch.wait(_POLL)) or job.poll() is None:
        if died and tolerant_size:
            say(_sentence(died))
        if died and not dead:
            dead, dead_at = died, time.monotonic()
        # mpirun may let the others wait for it in MPI_Init for ever, even if it is a tolerant one.
        is_stuck = not failed and time.monotonic() >= dead_at + _DYING
        if dead and is_stuck and not (tolerant_size and watch.is_in_mpi):
            say(_NO_MPI if tolerant_size else _sentence(dead))
            return 1
        if time.monotonic() >= limit:
            if failed or is_over:
                return failed
            if dead and not tolerant_size:
                say(_sentence(dead))
            say(f"The job did not end within {timeout:g} s and was stopped.\n")
            return TIMED_OUT
        if not failed and (failed := watch.status):
            limit = min(limit, time.monotonic() + _PATIENCE)
        # Open MPI 5 can hang in the MPI_Finalize of the others where two have died at once.
        if tolerant_size and dead and not is_over and watch.saw_the_end_of(tolerant_size):
            is_over, limit = True, min(limit, time.monotonic() + _FAREWELL)
    watch.wait(0)  # what the ranks said in the end
    status = _status_of(job.returncode, watch.status)
    # The ranks that mpirun kills after an MPI_Abort die without a word, too.
    was_killed = status in _KILLED or (status != 0 and not watch.is_in_mpi)
    if dead and not tolerant_size and not watch.status and was_killed:
        say(_sentence(dead))
    return status


@contextlib.contextmanager
def _passing_on(signum: signal.Signals, watch: process_monitor.Watch) -> Iterator[None]:
    """Pass a signal on to the ranks, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signum, lambda *_: watch.ask(signum))
    try:
        yield
    finally:
        signal.signal(signum, before)


def _flights(watch: process_monitor.Watch, directory: Path, began: float) -> str:
    """What the ranks are doing, line by line, as they say themselves when they are asked."""
    asked_at = time.time()
    asked = set(watch.ask(signal.SIGUSR1))
    deadline = time.monotonic() + _WRITING
    try:
        while not asked <= _ranks_of(directory, asked_at) and time.monotonic() < deadline:
            time.sleep(_POLL / 10)
        paths = recorded.files(directory, began)  # it may hold the dumps of another job
    except OSError as error:
        return f"{directory} cannot be read as a directory ({error.strerror}).\n"
    dumps, said = recorded.read(paths)
    if dumps:
        said += recorded.lines(dumps)
    else:
        said.append(f"No rank has written to {directory} what it is doing.")
    return "".join(f"{line}\n" for line in said)


def _ranks_of(directory: Path, since: float) -> set[int | None]:
    """Those that have written a dump."""
    return {recorded.rank_of(path) for path in recorded.files(directory, since)}


def _sentence(dead: process_monitor.Rank) -> str:
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


def _end(job: subprocess.Popen[bytes], home: str) -> None:
    """End every rank: politely through mpirun, which reaches other hosts too, then by force."""
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(_GRACE)
    process_monitor.kill(home)
    job.kill()
    job.wait()
