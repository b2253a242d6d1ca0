"""Measure which algorithm is fastest here, and write it down for `comm.load_decisions`.

    mpirun -n 4 python -m bench tune --output decisions.json

Under MPI, once for each number of ranks: what FILE says of other numbers of ranks, and of
collectives that are not measured now, stays.  At every size the algorithms take turns; those that
the cost model gives more than four times the least time are left out.  What is at most a tenth
slower than the fastest counts as level, and of those the built-in rule's choice stays.  The exit
status is 2 if FILE or the options are wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.options import add_sizes, seconds
from collectives import algorithms


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.set_defaults(run=run, op="sum", root=0)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add_sizes(parser, last="16M")
    add("--seconds", type=seconds, default=120.0, metavar="S",
        help="about how long it may take in all; default: %(default)s")  # fmt: skip
    add("--collective", dest="collectives", action="append", choices=algorithms.collectives(),
        metavar="NAME", help="measure this one; may be repeated; default: all")  # fmt: skip
    add("--output", type=Path, default=Path("decisions.json"), metavar="FILE",
        help="default: %(default)s")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status."""
    from bench import tuning  # noqa: PLC0415 - this starts MPI, which the demo and docs must not

    return tuning.run(options)
