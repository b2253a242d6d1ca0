"""Run a command with an MPS daemon of its own, so that processes use a GPU at the same time.

    python -m bench.gpu.mps 60 -m collectives.launch -n 2 program.py

If there is no `nvidia-cuda-mps-control` on the path, or if no process can use its daemon, it says
so, the command is not run, and the exit status is 0.  The daemon is in the foreground and has its
files in a temporary folder.  At the end, also at the time limit and after SIGTERM, it is told to
quit, and what then is left of it is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.commands.jobs import last_line
from collectives.console import Command, seconds

CONTROL = "nvidia-cuda-mps-control"
VARIABLES = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PROBE = "import cupy; print(int(cupy.arange(4).sum()))"
START_SECONDS, PROBE_SECONDS, QUIT_SECONDS = 10.0, 30.0, 7.0
TIMED_OUT = 124  # as coreutils' timeout
_POLL = 0.1


class NoMps(Exception):  # noqa: N818
    """There is no MPS here; the message says why."""


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.add_argument("seconds", type=seconds, help="time limit of the command")
    parse.add_argument("words", nargs=argparse.REMAINDER, help="what follows python")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with daemon() as environment:
            return status_of(options.words, environment, options.seconds)
    except NoMps as reason:
        print(f"MPS is not available: {reason}", flush=True)
        return 0


def status_of(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> int:
    """Run Python on these words; return its exit status."""
    with contextlib.ExitStack() as stack:
        job = subprocess.Popen([sys.executable, *command], env=environment)
        stack.callback(ended, job, QUIT_SECONDS)
        try:
            return job.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"bench.gpu.mps: the command did not end in {timeout:g} s", flush=True)
            return TIMED_OUT


@contextlib.contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """Yield an MPS daemon; the environment of processes that use it.  Raises NoMps."""
    if (control := shutil.which(CONTROL)) is None:
        raise NoMps(f"there is no {CONTROL} on the path")
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **dict.fromkeys(VARIABLES, folder)}
        with open(os.devnull) as nothing, Path(folder, "said.txt").open("w") as said:
            started = subprocess.Popen(
                [control, "-f"], env=environment, stdin=nothing, stdout=said, stderr=said
            )
        try:
            await_start(started, Path(folder))
            probe(environment)
            yield environment
        finally:
            quit_daemon(control, environment, started)


def await_start(started: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until the daemon can be told something.  Raises NoMps."""
    pipe = folder / "control"
    wait_until(lambda: pipe.exists() or started.poll() is not None, START_SECONDS)
    if started.poll() is not None or not pipe.exists():
        said = (folder / "said.txt").read_text(errors="replace")
        raise NoMps(f"its daemon does not start: {last_line(said)}")


def probe(environment: Mapping[str, str]) -> None:
    """Let a process use the GPU through the daemon.  Raises NoMps if it cannot."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=environment,
            timeout=PROBE_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoMps(f"a process waits for it for more than {PROBE_SECONDS:g} s") from None
    if done.returncode:
        raise NoMps(f"a process cannot use it: {last_line(done.stderr)}")


def quit_daemon(
    control: str, environment: Mapping[str, str], started: subprocess.Popen[bytes]
) -> None:
    """Tell the daemon to quit, and kill what is left of it and of its servers."""
    servers = [
        int(word)
        for word in tell(control, environment, "get_server_list").split()
        if word.isdecimal()
    ]
    tell(control, environment, "quit")
    wait_until(lambda: started.poll() is not None and not any(map(is_alive, servers)), QUIT_SECONDS)
    ended(started, QUIT_SECONDS)
    for server in filter(is_alive, servers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, servers)), QUIT_SECONDS)


def wait_until(is_over: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is over, or the seconds are; return whether it is."""
    deadline = time.monotonic() + seconds
    while not (over := is_over()) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return over


def tell(control: str, environment: Mapping[str, str], word: str) -> str:
    """Tell the daemon a word; return its answer, or nothing."""
    try:
        done = subprocess.run(
            [control],
            env=environment,
            input=f"{word}\n",
            timeout=QUIT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


def is_alive(process: int) -> bool:
    """Return whether a process exists, and is not only waiting to be noticed by its parent."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def ended(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process, if it has not ended: it is asked to, and killed when it does not in time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


COMMAND = Command("bench.gpu.mps", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
