"""Start one MPI job, monitor it, and end it with no process left.

The launcher does what ``mpirun`` leaves to the user.  It finds the mpirun of the MPI that mpi4py
loads, and sets the options that this MPI needs to run as root or with more ranks than cores.  It
ends the job when a rank fails, says which rank died, and leaves no process behind.  The rest of the
library does not need it: a plain ``mpirun -n 4 python script.py`` works too.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from collectives.diagnostics import hang_report
from collectives.launch import bootstrap, gpus, process_monitor
from collectives.launch.mpirun import defaults, fault_tolerance_args, find_mpirun, open_mpi_files
from collectives.launch.rank_program import DROP_IN, TRAFFIC

TIMED_OUT = 124
"""The exit status of a job that was stopped at its time limit, as with coreutils' ``timeout``."""

_POLL = 0.1  # seconds between two looks at the job
_FAILURE_SECONDS = 2.0  # that mpirun has to end the job by itself after a rank has failed
_EXIT_SECONDS = 10.0  # the same if all ranks exit with the same status, and so finalize MPI
_DEATH_SECONDS = 3.0  # the same after a rank has died: mpirun may have to kill many others
_START_SECONDS = 5.0  # between the connections of two ranks; after that a missing one is dead
_FINALIZE_SECONDS = 5.0  # that mpirun has after all programs have ended, if some of them died
_OUTPUT_SECONDS = 5.0  # that mpirun has to end, and its output to be read, after all ranks
_DUMP_SECONDS = 1.0  # that the ranks have to write their dumps at the job's time limit
_KILL_SECONDS = 3.0  # that mpirun has, after SIGTERM, to end the ranks of this and other hosts

# The exit statuses of a job in which a rank was killed or crashed: 128 + the signal as in a shell,
# or the signal itself (MPICH).  SIGHUP, SIGINT and SIGQUIT are missing, because 1, 2 and 3 are more
# likely the exit statuses of programs.
_SIGNALS = (
    *range(signal.SIGILL, signal.SIGTERM + 1),
    signal.SIGXCPU,
    signal.SIGXFSZ,
    signal.SIGSYS,
)
_KILLED = {*_SIGNALS, *(128 + signum for signum in _SIGNALS)}

_WAITS = (
    "All ranks of this host have ended. The job waits for the end of every process that a rank "
    "has started and that keeps its output open: {}.\n"
)
_ABORTED = "The job was aborted, although mpirun reports success: ranks {} did not end.\n"
_FAILED_AFTER = " Other ranks failed after that."  # perhaps because of it
_NO_MPI = "A rank died before MPI had started on all ranks, so the job was stopped.\n"

# Runs in a process that is then replaced by mpirun: when the launcher dies, even by SIGKILL, the
# kernel sends mpirun a SIGTERM (1 is PR_SET_PDEATHSIG).  A preexec_fn is not safe with threads.
_DIE_WITH_LAUNCHER = (
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
    drop_in: bool = False,
    traffic: bool = False,
    check: bool = False,
    gpus_per_rank: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *command`` on `size` ranks and wait until the job ends.

    A rank of this host that was killed, crashed, or called os._exit before MPI_Finalize is named on
    the standard error of the job.  Such a death ends the job, unless it is `fault_tolerant` and
    MPI_Init has returned on all ranks: then the other ranks continue, and the status is theirs.

    Parameters
    ----------
    size : int
        The number of ranks.
    command : sequence of str
        A script, or ``-m`` and a module, and its arguments.
    mpi_args : sequence of str
        More words for mpirun.
    timeout : float, optional
        After so many seconds the whole job is ended, with status `TIMED_OUT` and a sentence on its
        standard error.
    env : mapping of str to str, optional
        Variables that are added to this process's environment.
    capture : bool
        Whether the result has the output of the ranks.
    fault_tolerant : bool
        Whether the other ranks continue when a rank dies.
    flight : path, optional
        A directory to which the ranks dump their last calls: when a wait fails or times out, when
        this process gets SIGUSR1 (if this is its main thread), and at the job's time limit.  At the
        time limit, standard error also says who waits for whom, as ``ring flight`` does.
    drop_in : bool
        Whether ``MPI.COMM_WORLD`` is a `collectives.Intracomm` from the beginning of the program
        on.
    traffic : bool
        Whether rank 0 prints, when the program ends, what was sent on that communicator and on
        others made from it.
    check : bool
        Whether checked mode is on, as by COLLECTIVES_CHECK=1.
    gpus_per_rank : int, optional
        How many GPUs each rank sees: CUDA_VISIBLE_DEVICES has those of the rank, by its number on
        the host.  By default all ranks see the same.

    Returns
    -------
    subprocess.CompletedProcess
        It has the job's exit status, which is not zero if any rank failed.

    Raises
    ------
    MpiNotFound
        If no MPI is found, or none that supports the options.
    """
    _check(size, command, timeout, drop_in, traffic)
    directory = None if flight is None else made_directory(flight)
    mpirun = find_mpirun()
    options = fault_tolerance_args(mpirun) if fault_tolerant else ()
    command = [*gpus.options(gpus_per_rank), *[DROP_IN] * drop_in, *[TRAFFIC] * traffic, *command]
    words = [mpirun.path, "-n", str(size), *options, *mpi_args, *bootstrap.command(command)]
    notes: list[str] = []
    extra = dict(env or {})
    if directory is not None:
        extra["COLLECTIVES_FLIGHT"] = str(directory)
    if check:
        extra["COLLECTIVES_CHECK"] = "1"
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-job-"))
        monitor = stack.enter_context(process_monitor.ProcessMonitor(home, size))
        # Files, because a pipe must be read all the time, and may never be closed.
        out, err = (
            stack.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2)
        )
        environment = {
            **width_of_terminal(),
            **defaults(mpirun, fault_tolerant=fault_tolerant),
            **os.environ,
            **extra,
            bootstrap.JOB: home,
        }
        job = subprocess.Popen(
            [*_die_with_launcher(), *words],
            env=environment,
            stdin=subprocess.DEVNULL if capture else None,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which ends the job
        )
        status = TIMED_OUT
        try:
            if directory is not None:
                stack.enter_context(_forwarding(signal.SIGUSR1, monitor))
            say = notes.append if capture else _say
            status, death = _wait(job, monitor, timeout, is_tolerant=fault_tolerant, say=say)
            if death is not None:
                say(f"{death}{_FAILED_AFTER if monitor.status else ''}\n")
            if status == TIMED_OUT and directory is not None and job.poll() is None:
                say(_hang_report(monitor, directory))
        finally:
            if status != 0 or job.poll() is None:
                _end(job, home)
                shutil.rmtree(open_mpi_files(environment, job.pid), ignore_errors=True)
        return subprocess.CompletedProcess(words, status, _text(out), _text(err, "".join(notes)))


def width_of_terminal() -> dict[str, str]:
    """Return the variable that says how wide the terminal is, or none.

    A rank cannot find out the width.
    """
    return {"COLUMNS": str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}


def _check(
    size: int, command: Sequence[str], timeout: float | None, drop_in: bool, traffic: bool
) -> None:
    if isinstance(command, str):
        raise TypeError(f"command is a list of words, not the text {command!r}")
    if operator.index(size) < 1 or not command:
        raise ValueError("a job needs at least one rank and a script or a module to run")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout} s; it must be positive, or None for no limit")
    if traffic and not drop_in:
        raise ValueError("traffic needs drop_in: it is recorded on the COMM_WORLD of that")


def made_directory(flight: str | Path) -> Path:
    """Return the directory of the dumps, made if necessary.

    Raises ValueError if it cannot be made or written.
    """
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
    monitor: process_monitor.ProcessMonitor,
    timeout: float | None,
    *,
    is_tolerant: bool,
    say: Callable[[str], object],
) -> tuple[int, process_monitor.Death | None]:
    """Wait until the job ends or must be ended; return its exit status, and the death to name.

    If it `is_tolerant`, the others continue when a rank dies; then each death is said at once.
    """
    limit = math.inf if timeout is None else time.monotonic() + timeout
    failed, is_ending, dead_at = 0, False, math.inf
    monitor.begin(job.pid)
    while (died := monitor.wait(_POLL)) or job.poll() is None:
        if died and is_tolerant:
            say(f"{died}\n")
        if died:
            dead_at = min(dead_at, time.monotonic())
        dead = None if is_tolerant else monitor.first_death
        is_late = not monitor.status and time.monotonic() >= dead_at + _DEATH_SECONDS
        if dead and is_late:
            return _status_of_death(dead), dead
        # The others may wait in MPI_Init for ever, even with fault tolerance.
        is_stuck = (
            monitor.has_died_starting()
            or monitor.are_missing(_START_SECONDS)
            or (is_late and monitor.are_starting())
        )
        if is_tolerant and is_stuck and not monitor.status:
            say(_NO_MPI)
            return 1, None
        if time.monotonic() >= limit:
            if failed or is_ending:
                return failed, dead
            say(f"The job did not end within {timeout:g} s and was stopped.{_ended(monitor)}\n")
            return TIMED_OUT, dead
        if left := monitor.left_behind(_OUTPUT_SECONDS):
            say(_WAITS.format(", ".join(left)))
        if not failed and (failed := monitor.status):
            patience = _EXIT_SECONDS if monitor.do_all_exit else _FAILURE_SECONDS
            limit = min(limit, time.monotonic() + patience)
        # Open MPI 5 can hang in the MPI_Finalize of the others if two have died at once.
        has_died = dead_at < math.inf
        if is_tolerant and has_died and not is_ending and monitor.have_all_ended():
            is_ending, limit = True, min(limit, time.monotonic() + _FINALIZE_SECONDS)
    monitor.finish()
    status = _status_of(job.returncode, monitor.status)
    return (status, None) if is_tolerant else _judged(status, monitor, say)


def _judged(
    status: int, monitor: process_monitor.ProcessMonitor, say: Callable[[str], object]
) -> tuple[int, process_monitor.Death | None]:
    """Return the exit status of a job that has ended with `status`, and the death to name.

    The ranks that mpirun kills after an MPI_Abort die without a report, too: they are not named.
    If the first rank has ended with status 0, MPICH's mpirun kills the others and may report
    success.
    """
    dead = monitor.first_death
    if dead is None:
        if status == 0 and (ranks := monitor.unfinished()):
            say(_ABORTED.format(", ".join(map(str, ranks))))
            return 1, None
        return status, None
    is_exit = dead.exit_code is not None
    if not monitor.status and (is_exit or status == 0):
        return _status_of_death(dead), dead
    is_cause = is_exit or status in {monitor.status, *_KILLED} or not monitor.is_in_mpi
    return status, dead if is_cause else None


@contextlib.contextmanager
def _forwarding(signum: signal.Signals, monitor: process_monitor.ProcessMonitor) -> Iterator[None]:
    """Forward a signal to the ranks, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signum, lambda *_: monitor.send_signal(signum))
    try:
        yield
    finally:
        signal.signal(signum, before)


def _hang_report(monitor: process_monitor.ProcessMonitor, directory: Path) -> str:
    """Return the hang report of the ranks, from dumps that they write on request.

    Older dumps, of another job or of a wait that timed out, would show what is no longer so.
    """
    asked_at = time.time()
    asked = set(monitor.send_signal(signal.SIGUSR1))
    deadline = time.monotonic() + _DUMP_SECONDS
    try:
        while not asked <= _ranks_of(directory, asked_at) and time.monotonic() < deadline:
            time.sleep(_POLL / 10)
        paths = hang_report.files(directory, asked_at)
    except OSError as error:
        return f"{directory} cannot be read as a directory ({error.strerror}).\n"
    dumps, said = hang_report.read(paths)
    if dumps:
        said += hang_report.lines(dumps)
    else:
        said.append(f"No rank has written a dump to {directory}.")
    return "".join(f"{line}\n" for line in said)


def _ranks_of(directory: Path, since: float) -> set[int | None]:
    """Return the ranks that have written a dump since then."""
    return {hang_report.rank_of(path) for path in hang_report.files(directory, since)}


def _status_of_death(dead: process_monitor.Death) -> int:
    """Return the exit status of a job that ends because of this death.

    It is used unless mpirun knows a better one.
    """
    return bootstrap.failure_status(dead.exit_code or 1)


def _ended(monitor: process_monitor.ProcessMonitor) -> str:
    """Return which ranks had ended when the others did not, as a sentence after another."""
    ended = ", ".join(map(str, monitor.ended()))
    return f" It still ran, although these ranks had ended: {ended}." if ended else ""


def _status_of(returncode: int, reported: int) -> int:
    """Return the exit status of the job; 128 + k if mpirun was killed by signal k, as in a shell.

    Then a status that a rank reported takes precedence: Open MPI 5's mpirun can crash on a rank
    that ends while connecting to it.
    """
    return (reported or 128 - returncode) if returncode < 0 else (returncode or reported)


def _die_with_launcher() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_LAUNCHER] if sys.platform == "linux" else []


def _text(file: IO[bytes] | None, notes: str = "") -> str | None:
    """Return what the job wrote to a file, and the launcher's `notes` from a new line on."""
    if file is None:
        return None
    file.seek(0)
    text = file.read().decode(errors="replace")
    # Open MPI writes a NUL after some of its messages, also where a line has ended.
    is_in_line = text and notes and not text.endswith("\n")
    return f"{text}\n{notes}" if is_in_line else text + notes


def _end(job: subprocess.Popen[bytes], home: str) -> None:
    """End every rank: by SIGTERM to mpirun, which reaches other hosts too, then by SIGKILL."""
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(_KILL_SECONDS)
    process_monitor.kill(home)
    job.kill()
    job.wait()
