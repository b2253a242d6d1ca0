"""Write a collective as a file for another simulator or runtime: ``python -m collectives.export``.

    python -m collectives.export all_reduce ring --ranks 64 --bytes 1M --format goal -o ring.goal

goal: for LogGOPSim and ATLAHS.  smpi: for SimGrid's replay, and --platform FILE for its platform.
msccl: an algorithm for MSCCL's runtime.  chakra: for ASTRA-sim; the files are PATH.RANK.et.
Nothing is sent.  ``python -m parallel.export`` writes a whole training step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from collectives.algorithms import collectives as names_of_collectives
from collectives.export import (
    Call,
    at_least_one,
    machine_in,
    num_bytes,
    output_file,
    platform,
    summary,
    write,
    write_text,
)

FORMATS = ("goal", "smpi", "msccl", "chakra")


def main(arguments: list[str] | None = None) -> int:
    """Write the files that the command line asks for; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        written = export(call_of(options), options)
    except (MemoryError, OverflowError, TypeError, ValueError, OSError) as error:
        parse.exit(2, f"{parse.prog}: {str(error) or 'there is not enough memory'}\n")
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


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m collectives.export", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("collective", choices=names_of_collectives())
    add("algorithm", nargs="?", help="such as ring or 'pipeline(segments=8)'; default: as calls do")
    add("--ranks", type=at_least_one, required=True)
    add("--bytes", type=num_bytes, required=True, metavar="N", help="such as 1M")
    add("--format", choices=FORMATS, required=True)
    add("-o", "--output", type=output_file, metavar="PATH", help="default: standard output")
    add(
        "--machine",
        type=Path,
        metavar="FILE",
        help="of bench fit: what copies and combinations cost; default: built in",
    )
    add("--platform", type=output_file, metavar="FILE", help="write a platform for SimGrid")
    add("--root", type=int, default=0, help="of a rooted collective; default: %(default)s")
    add("--dtype", default="float32", help="elements are not divided; default: %(default)s")
    return parse


if __name__ == "__main__":
    sys.exit(main())
