"""Run a program of the command line on all ranks, under MPI or as threads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mpi4py.run

import collectives
from collectives import Communicator


class InvalidRun(Exception):  # noqa: N818
    """The arguments do not go together.  Raised on all ranks, with the same message."""


def on_ranks(
    parse: argparse.ArgumentParser,
    options: argparse.Namespace,
    run: Callable[[Communicator], int],
    world: Callable[[], Communicator] = collectives.world,
) -> int:
    """Call `run` on each rank; return the exit status.

    Ranks are threads if the `options` have a number of ``threads``, or else those of `world`.
    After an `InvalidRun` rank 0 prints its message, and the program exits with status 2.
    """
    is_first = options.threads is not None or collectives.world().rank == 0
    try:
        if options.threads is None:
            return run(world())
        return collectives.run(run, size=options.threads, timeout=None)[0]
    except InvalidRun as error:
        parse.exit(2, f"{parse.prog}: {error}\n" if is_first else None)


@contextmanager
def preparing() -> Iterator[None]:
    """Raise InvalidRun in place of ValueError."""
    try:
        yield
    except ValueError as error:
        raise InvalidRun(str(error)) from error


@contextmanager
def running(options: argparse.Namespace) -> Iterator[None]:
    """Abort the MPI job if a rank fails, for the others would wait for it forever."""
    try:
        yield
    except InvalidRun:  # on all ranks: none waits
        raise
    except BaseException as error:
        if options.threads is None:
            mpi4py.run.set_abort_status(error)  # takes effect when Python exits
        raise
