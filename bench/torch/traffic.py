"""What PyTorch's strategies send in a training step: predicted, recorded, and observed by MPI.

    python -m bench torch_traffic

A small transformer is trained with DDP, FSDP2, tensor parallelism, and with two of them on a mesh
of two dimensions, by 4 ranks that the command starts.  Formulas predict every call before the step;
the ledger records every message; Open MPI counts messages as well.  The exit status is 1 if a byte
differs; 2 if there is no torch or no MPI.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from bench.jobs import environment, has_mpi
from bench.torch.command import NO_TORCH
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from collectives.launch.mpirun import find_mpirun
from parallel.cli import console_of

RANKS = 4
SECONDS = 300.0  # after which the job is ended


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Start the ranks."""
    if find_spec("torch") is None:
        print(NO_TORCH, file=sys.stderr)
        return 2
    if not has_mpi(console_of(0)):
        return 2
    counts = find_mpirun().vendor == "openmpi"
    program = ["-m", "bench.torch.traffic_ranks"]
    return launch(
        RANKS, program, mpi_args=MPIRUN_ARGS if counts else (), timeout=SECONDS, env=environment()
    ).returncode
