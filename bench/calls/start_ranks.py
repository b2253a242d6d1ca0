"""Start the job of a command line with -g: as many ranks of it on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from bench.commands.jobs import environment, last_line
from bench.commands.modules import imports
from bench.contenders.contender import UNTRIED, WORKS
from bench.workloads import sizes
from collectives.console import Command, Refused, refusing, unwritable
from collectives.launch import TIMED_OUT, launch
from collectives.launch.bootstrap import RANK_VARIABLES
from collectives.launch.mpirun import MpiNotFound

SECONDS = 3600.0  # after which the job is ended
TRIAL_SECONDS = 60.0  # after which the job that tries MPI on arrays of a GPU is ended


def with_ranks(
    name: str,
    description: str | None,
    add_options: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> Command:
    """Return the command `name` of ``ring bench``, which with -g starts ranks of itself."""

    def read(parse: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
        return parse.parse_args(words, argparse.Namespace(words=[name, *words]))

    def run_or_start(options: argparse.Namespace) -> int:
        return run(options) if options.ngpus is None else start(options)

    return Command("bench", description, add_options, run_or_start, read)


def start(options: argparse.Namespace) -> int:
    """Run the command line on the ranks that -g names; return the exit status.

    Another job first tries whether MPI works on arrays of a GPU, where that is to be measured.
    Raises Refused if this process is itself a rank of a job, if there is no MPI, or if a look at
    the options shows, before any rank is started, that nothing can be measured.
    """
    size, words = without_ranks(options.words)
    if any(name in os.environ for name in RANK_VARIABLES):
        raise Refused("-g starts a job of its own; under mpirun leave it out")
    if options.json is not None and (why := unwritable(options.json)):
        raise Refused(why)
    with refusing(MpiNotFound):
        if hasattr(options, "usual"):
            sizes.sizes_of(options)
        command = [*imports(), *words]
        if wants_trial(options):
            command.append(f"--device-mpi={tried(size, command)}")
        command += ["--live"] * sys.stdout.isatty()
        return launch(
            size, ["-m", "bench", *command], timeout=SECONDS, env=environment()
        ).returncode


def wants_trial(options: argparse.Namespace) -> bool:
    """Return whether MPI is measured on arrays of a GPU, and the user does not say if it works."""
    is_wanted = getattr(options, "native", False) and options.device == "cuda"
    return is_wanted and options.device_mpi == UNTRIED


def tried(size: int, command: Sequence[str]) -> str:
    """Return that MPI works on arrays of a GPU, or why not: a job tries that."""
    program = ["-m", "bench.calls.mpi_on_device", *command]
    done = launch(size, program, timeout=TRIAL_SECONDS, env=environment(), capture=True)
    if done.returncode == 0:
        return WORKS
    if done.returncode == TIMED_OUT:
        return f"a job that tried it on arrays of a GPU was not done after {TRIAL_SECONDS:g} s"
    said = "".join(filter(str.isprintable, last_line(done.stderr)))
    return f"a job that tried it on arrays of a GPU ended with status {done.returncode}: {said}"


def without_ranks(words: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of ranks, and the command line without it."""
    parse = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parse.add_argument("-g", "--ngpus", type=int, required=True)
    options, command = parse.parse_known_args(words)
    return options.ngpus, command
