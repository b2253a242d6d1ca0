"""Compile the code that runs programs ahead of time.

Compiled code is kept on disk, so this takes some seconds once per machine and moments afterwards.
Without it the first collective that needs a function compiles it.
"""

from __future__ import annotations

import argparse
import logging
import sys

from collectives import selection, simulation
from collectives.arrays import kernels
from collectives.console import Command
from collectives.devices import enqueue_loop
from collectives.engines import compiled


def run(options: argparse.Namespace) -> int:
    """Compile the loops, the most used kernels and the simulator; return the exit status.

    Without numba nothing is compiled, and the status is 0 too.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if (reason := compiled.why_unavailable()) is not None:
        logging.warning("programs will be interpreted: %s", reason)
        return 0
    compiled.loop()
    enqueue_loop()
    for function, dtype in kernels.common():
        kernels.combine(function, dtype)
    # What predicts the times of calls, if `comm.load_decisions` reads a machine that was fitted.
    simulation.simulate(selection.programs("broadcast", 2, 1), simulation.DEFAULT)
    return 0


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""


COMMAND = Command("collectives.warm", __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(COMMAND.main())
