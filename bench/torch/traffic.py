"""What PyTorch's strategies send in a training step: predicted, recorded, and observed by MPI.

    ring bench torch_traffic

A small transformer is trained with DDP, FSDP2, tensor parallelism, and with two of them on a mesh
of two dimensions, by 4 ranks that the command starts.  Formulas predict every call before the step;
the ledger records every message; Open MPI counts messages as well.  The exit status is 1 if a byte
differs; 2 if there is no torch or no MPI.
"""

from __future__ import annotations

import argparse

from bench.commands.jobs import starting_jobs
from bench.commands.options import add_jobs, add_output
from bench.torch.backends import require_torch
from collectives.console import Command, console_for, write_json
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch.mpirun import find_mpirun

RANKS = 4


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_jobs(parse, 300.0, has_quick=False)
    add_output(parse)


def run(options: argparse.Namespace) -> int:
    """Start the ranks; return their exit status.  Raises Refused without torch or MPI."""
    require_torch()
    with starting_jobs(console_for(0, options), options) as jobs:
        counts = MPIRUN_ARGS if find_mpirun().vendor == "openmpi" else ()
        program = ["-m", "bench.torch.traffic_ranks", *["--wide"] * options.wide]
        status, result = jobs.run("traffic", RANKS, program, counts)
    write_json(result, options.json)
    return status


COMMAND = Command("bench.torch.traffic", __doc__, add_options, run)
