"""Write a collective as a file for another simulator or runtime.

    ring export all_reduce ring --ranks 64 --bytes 1M --format goal -o ring.goal

goal: for LogGOPSim and ATLAHS.  smpi: for SimGrid's replay, and --platform FILE for its platform.
msccl: an algorithm for MSCCL's runtime.  chakra: for ASTRA-sim; the files are PATH.RANK.et.
Nothing is sent.  ``ring export step`` writes a whole training step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from collectives.algorithms import collectives as names_of_collectives
from collectives.console import Command, at_least, num_bytes, output_file, refusing
from collectives.export import Call, machine_in, platform, summary, write, write_text

FORMATS = ("goal", "smpi", "msccl", "chakra")


def run(options: argparse.Namespace) -> int:
    """Write the files that the options ask for; return the exit status."""
    with refusing(MemoryError, OverflowError, TypeError):
        written = export(call_of(options), options)
    sys.stderr.write(summary(written))
    return 0


def call_of(options: argparse.Namespace) -> Call:
    """Return the call of the command line."""
    return Call(
        options.collective,
        options.ranks,
        options.bytes,
        options.algorithm,
        options.root,
        np.dtype(options.dtype).itemsize,
    )


def export(call: Call, options: argparse.Namespace) -> list[Path]:
    """Write the call, and a platform if one is wanted; return the paths of the files."""
    machine = machine_in(options.machine)
    if options.format == "msccl":
        return write_text([call.msccl()], options.output)
    written = write(call.tasks(machine), options.format, options.output)
    if options.platform is not None:
        written += write_text([platform(call.size, machine)], options.platform)
    return written


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parse.add_argument
    add("collective", choices=names_of_collectives())
    add("algorithm", nargs="?", help="such as ring or 'pipeline(segments=8)'; default: as calls do")
    add("--ranks", type=at_least(1), required=True)
    add("--bytes", type=num_bytes, required=True, metavar="N", help="such as 1M")
    add("--format", choices=FORMATS, required=True)
    add("-o", "--output", type=output_file, metavar="PATH", help="default: standard output")
    add(
        "--machine",
        type=Path,
        metavar="FILE",
        help="of ring bench tune: what copies and combinations cost; default: built in",
    )
    add("--platform", type=output_file, metavar="FILE", help="write a platform for SimGrid")
    add("--root", type=int, default=0, help="of a rooted collective; default: %(default)s")
    add("--dtype", default="float32", help="elements are not divided; default: %(default)s")


COMMAND = Command("collectives.export", __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(COMMAND.main())
