"""The options of a collective's benchmark: those of nccl-tests, and our own.

Nothing here starts MPI, so the command line can be parsed without it.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path

from bench.calls.start_ranks import with_ranks
from bench.commands.options import (
    COUNT,
    add_device,
    add_output,
    add_ranks,
    add_samples,
    add_sizes,
    option,
)
from bench.contenders.contender import UNTRIED
from bench.timing.quartiles import AVERAGES
from bench.workloads.datatypes import ALL, collectives_of, dtypes_of
from collectives import algorithms
from collectives.arrays.operators import operators
from collectives.console import Command, at_least
from collectives.schedule.contracts import SPECS
from collectives.selection import labels


def command_of(collective: str) -> Command:
    """Return the command that measures this collective, or "all" of them."""
    about = f"Measure {collective if collective != ALL else 'all collectives'}"
    return with_ranks(collective, about, partial(add_options, collective=collective), run)


def run(options: argparse.Namespace) -> int:
    """Measure; return the exit status."""
    from bench.calls import collective  # noqa: PLC0415 - this starts MPI, which --help must not

    return collective.run(options)


def add_options(parse: argparse.ArgumentParser, collective: str) -> None:
    """Add the options that have a meaning for this collective, or for "all" of them."""
    specs = [SPECS[name] for name in collectives_of(collective)]
    parse.set_defaults(collective=collective, collectives=[collective], op="sum", root="0")
    parse.set_defaults(device="cpu", dtypes=dtypes_of("uint8"), counts=None)
    if collective != "barrier":
        add_data(parse)
    if collective == ALL:
        names = algorithms.collectives()
        parse.add_argument(
            "--collectives",
            nargs="+",
            choices=names,
            metavar="NAME",
            default=names,
            help="only these",
        )
    if any(spec.is_reduction for spec in specs):
        names = [*operators(collective if collective != ALL else "all_reduce"), ALL]
        option(parse, "-o --op", "operator", choices=names, default="sum")
    if any(spec.is_rooted for spec in specs):
        option(parse, "-r --root", "", type=root, default="0", metavar="RANK|all")
    add_times(parse)
    add_ranks(parse)
    add_contenders(parse, collective)
    add_format(parse)


def add_data(parse: argparse.ArgumentParser) -> None:
    """Add what is sent, and where it is."""
    add_sizes(parse)
    about = "a name of NCCL or of NumPy; float is float32 as in NCCL"
    more = {"type": dtypes_of, "default": "float", "metavar": "TYPE|all"}
    option(parse, "-d --datatype", about, dest="dtypes", **more)
    about = (
        "uneven blocks: the elements of each rank, or for all_to_all a line for each source; "
        "instead of sizes"
    )
    option(parse, "--counts", about, type=Path, metavar="FILE")
    add_device(parse)


def add_times(parse: argparse.ArgumentParser) -> None:
    """Add how often calls are made, and which time is reported."""
    add_samples(parse, seconds=5.0)
    about = "calls that one sample takes together; default: 40 below 64K, else 1"
    option(parse, "-m --agg_iters", about, dest="calls", **COUNT)
    about = "runs of each contender whose results are checked"
    option(parse, "-c --check", about, dest="checks", type=at_least(0), default=1, metavar="N")
    about = "the time among ranks: " + ", ".join(f"{i}={name}" for i, name in enumerate(AVERAGES))
    option(parse, "-a --average", about, type=int, choices=range(4), default=3)


def add_contenders(parse: argparse.ArgumentParser, collective: str) -> None:
    """Add who is measured."""
    group = parse.add_argument_group("contenders")
    about = (
        "as the library takes them, such as 'bruck(radix=4)'; may be repeated; default: a plan of "
        "what the library selects"
    )
    kind = partial(names, collective)
    group.add_argument(
        "--algorithm", dest="names", action="extend", type=kind, metavar="A,B|all", help=about
    )
    flags = {
        "--plan": "measure a plan, run again and again",
        "--call": "measure our one-shot call",
        "--native": "measure the MPI library's own call; with --device cuda also NCCL's, and "
        "copies to the host and back around MPI's",
        "--limits": "measure a copy in memory, and the least exchange of messages that the "
        "collective needs",
    }
    for flag, about in flags.items():
        group.add_argument(flag, action="store_true", help=about)
    about = (
        "whether MPI works on arrays of a GPU, or why --native must leave it out there; with -g a "
        "job of its own tries it first; default: that nobody has tried"
    )
    group.add_argument("--device-mpi", metavar="works|WHY", default=UNTRIED, help=about)


def add_format(parse: argparse.ArgumentParser) -> None:
    """Add how results are printed and written."""
    form = parse.add_mutually_exclusive_group()
    option(form, "--format", "as which program prints", choices=["nccl", "osu"], default="nccl")
    about = "print comma-separated values"
    option(form, "--csv", about, dest="format", action="store_const", const="csv")
    about = "with --format osu: also the fastest and slowest rank"
    option(parse, "--full", about, action="store_true")
    add_output(parse, is_local=False)


def names(collective: str, text: str) -> list[str]:
    """Return algorithms, with options if there are any, or "all"; an argument type."""
    words = [word.strip() for word in re.split(r",(?![^(]*\))", text)]
    return [ALL if word == ALL else algorithm(collective, word) for word in words]


def algorithm(collective: str, text: str) -> str:
    """Return an algorithm of the collective, or of any of "all"; an argument type."""
    errors = []
    for name in collectives_of(collective):
        try:
            return labels.parse_default(name, text).label
        except ValueError as error:
            errors.append(str(error))
    several = f"no collective has an algorithm {text!r}"
    raise argparse.ArgumentTypeError(errors[0] if len(errors) == 1 else several)


def root(text: str) -> str:
    """Return a rank, or "all"; an argument type."""
    if text != ALL and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank, or all")
    return text
