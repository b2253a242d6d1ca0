"""Starts the job of a command line with -g: as many ranks of it on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from bench import sizes
from bench.jobs import environment
from bench.mps import last_line
from bench.names import UNTRIED, WORKS
from collectives.export import unwritable
from collectives.launch import TIMED_OUT, launch
from collectives.launch.bootstrap import RANK_VARIABLES
from collectives.launch.mpirun import MpiNotFound

SECONDS = 3600.0  # after which the job is ended
TRIAL_SECONDS = 60.0  # after which the job that tries MPI on arrays of a GPU is ended


def run(words: Sequence[str], options: argparse.Namespace) -> int:
    """Run `python -m bench` on the ranks that -g names; the exit status.

    Another job first tries whether MPI works on arrays of a GPU, where that is to be measured.
    2 if this process is itself a rank of a job, if there is no MPI, or if a look at the options
    shows, before any rank is started, that nothing can be measured.
    """
    size, command = without_ranks(words)
    if any(name in os.environ for name in RANK_VARIABLES):
        return _refused("-g starts a job of its own; under mpirun leave it out")
    try:
        if hasattr(options, "usual"):
            sizes.sizes_of(options)
    except ValueError as error:
        return _refused(str(error))
    if options.json is not None and (reason := unwritable(options.json)):
        return _refused(reason)
    try:
        if wants_trial(options):
            command.append(f"--device-mpi={tried(size, command)}")
        command += ["--live"] * sys.stdout.isatty()
        done = launch(size, ["-m", "bench", *command], timeout=SECONDS, env=environment())
    except MpiNotFound as error:
        return _refused(str(error))
    return done.returncode


def wants_trial(options: argparse.Namespace) -> bool:
    """Whether MPI is to be measured on arrays of a GPU, and the user does not say if it works."""
    is_wanted = getattr(options, "native", False) and options.device == "cuda"
    return is_wanted and options.device_mpi == UNTRIED


def tried(size: int, command: Sequence[str]) -> str:
    """The word that MPI works on arrays of a GPU, or why not: a job tries that."""
    program = ["-m", "bench.device_mpi", *command]
    done = launch(size, program, timeout=TRIAL_SECONDS, env=environment(), capture=True)
    if done.returncode == 0:
        return WORKS
    if done.returncode == TIMED_OUT:
        return f"a job that tried it on arrays of a GPU was not done after {TRIAL_SECONDS:g} s"
    said = "".join(filter(str.isprintable, last_line(done.stderr)))
    return f"a job that tried it on arrays of a GPU ended with status {done.returncode}: {said}"


def without_ranks(words: Sequence[str]) -> tuple[int, list[str]]:
    """The number of ranks, and the command line without it."""
    parse = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parse.add_argument("-g", "--ngpus", type=int, required=True)
    found, command = parse.parse_known_args(words)
    return found.ngpus, command


def _refused(reason: str) -> int:
    print(f"bench: {reason}", file=sys.stderr)
    return 2
