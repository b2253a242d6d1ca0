"""The command line of the microbenchmark: the options of nccl-tests, and our own.

Nothing here starts MPI, so the command line can be parsed without it.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import sizes
from bench.names import ALL, UNTRIED, collectives_of, dtype_of, dtypes_of
from bench.samples import AVERAGES
from collectives import algorithms
from collectives.arrays.operators import operators
from collectives.schedule.contracts import SPECS
from collectives.selection import labels
from parallel.cli import at_least

Add = Callable[..., argparse.Action]
FORMATS = ["nccl", "osu"]


def add_options(parser: argparse.ArgumentParser, collective: str) -> None:
    """Add the options that have a meaning for this collective, or for "all" of them."""
    specs = [SPECS[name] for name in collectives_of(collective)]
    parser.set_defaults(
        run=run,
        collective=collective,
        collectives=[collective],
        op="sum",
        root="0",
        device="cpu",
        dtypes=dtypes_of("uint8"),
        counts=None,
    )
    add = parser.add_argument
    if collective != "barrier":
        _add_data(parser)
    if collective == ALL:
        add(
            "--collectives",
            nargs="+",
            choices=algorithms.collectives(),
            metavar="NAME",
            default=algorithms.collectives(),
            help="only these",
        )
    if any(spec.is_reduction for spec in specs):
        names = [*(operators(collective) if collective != ALL else operators("all_reduce")), ALL]
        add("-o", "--op", choices=names, default="sum", help="operator; default: %(default)s")
    if any(spec.is_rooted for spec in specs):
        add("-r", "--root", type=root, default="0", metavar="RANK|all", help="default: 0")
    _add_times(add)
    _add_contenders(add, collective)
    _add_output(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    """What is sent, and where it is."""
    add_sizes(parser)
    add = parser.add_argument
    add(
        "-d",
        "--datatype",
        dest="dtypes",
        type=dtypes_of,
        default="float",
        metavar="TYPE|all",
        help="a name of NCCL or of NumPy, and float is float32 as in NCCL; default: %(default)s",
    )
    add(
        "--counts",
        type=Path,
        metavar="FILE",
        help="uneven blocks: the elements of each rank, or "
        "for all_to_all a line for each source; instead of sizes",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where arrays are; cuda takes CuPy; default: %(default)s",
    )


def _add_times(add: Add) -> None:
    """How often calls are made, and which time is reported."""
    add_effort(add)
    add(
        "-m",
        "--agg_iters",
        dest="calls",
        type=at_least(1),
        metavar="N",
        help="calls that one sample takes together; default: 40 below 64K, else 1",
    )
    add(
        "-c",
        "--check",
        dest="checks",
        type=at_least(0),
        default=1,
        metavar="N",
        help="runs of each contender whose results are checked; default: %(default)s",
    )
    add(
        "-a",
        "--average",
        type=int,
        choices=range(4),
        default=3,
        help="the time among ranks: "
        + ", ".join(f"{number}={name}" for number, name in enumerate(AVERAGES))
        + "; default: %(default)s",
    )
    add_job(add)


def add_effort(add: Add, seconds_of_size: float = 5.0) -> None:
    """The samples of each contender, and the seconds that a size may take."""
    add_samples(add)
    add(
        "--seconds",
        type=seconds,
        default=seconds_of_size,
        metavar="S",
        help="after which a size gets no more samples; default: %(default)s",
    )


def add_samples(add: Add) -> None:
    """The samples of each contender."""
    add(
        "-n",
        "--iters",
        dest="samples",
        type=at_least(1),
        default=20,
        metavar="N",
        help="samples of each contender; default: %(default)s",
    )
    add(
        "-w",
        "--warmup_iters",
        dest="warmup",
        type=at_least(0),
        default=5,
        metavar="N",
        help="calls before them, which are not timed; default: %(default)s",
    )


def add_job(add: Add) -> None:
    """The number of ranks, the limit of their calls, and whether a person looks on."""
    add(
        "--live",
        action="store_true",
        help="show what is being measured; by itself on a terminal, "
        "of which mpirun tells its ranks nothing",
    )
    add(
        "-g",
        "--ngpus",
        type=at_least(1),
        metavar="N",
        help="start N ranks here; without it mpirun starts them",
    )
    add(
        "-T",
        "--timeout",
        type=seconds,
        metavar="S",
        help="seconds after which a call that waits for others fails; default: none",
    )


def _add_contenders(add: Add, collective: str) -> None:
    add(
        "--algorithm",
        dest="names",
        action="extend",
        type=partial(names, collective),
        metavar="A,B|all",
        help="as the library takes them, such as 'bruck(radix=4)'; may be "
        "repeated; default: a plan of what the library selects",
    )
    add("--plan", action="store_true", help="measure a plan, run again and again")
    add("--call", action="store_true", help="measure our one-shot call")
    add(
        "--native",
        action="store_true",
        help="measure the MPI library's own call; with --device "
        "cuda also NCCL's, and copies to the host and back around MPI's",
    )
    add(
        "--device-mpi",
        metavar="works|WHY",
        default=UNTRIED,
        help="whether MPI works on arrays of "
        "a GPU, or why --native must leave it out there; with -g a job of its own tries it first; "
        "default: that nobody has tried",
    )
    add(
        "--limits",
        action="store_true",
        help="measure a copy in memory, and the least exchange "
        "of messages that the collective needs",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--format", choices=FORMATS, default="nccl", help="default: %(default)s")
    form.add_argument(
        "--csv",
        dest="format",
        action="store_const",
        const="csv",
        help="print comma-separated values",
    )
    add = parser.add_argument
    add("--full", action="store_true", help="with --format osu: also the fastest and slowest rank")
    add(
        "-J",
        "--output_file",
        dest="json",
        type=Path,
        metavar="FILE",
        help="write everything to FILE, as JSON",
    )


def add_sizes(parser: argparse.ArgumentParser, last: str = "16M") -> None:
    """The series of sizes, up to `last` unless the user says otherwise."""
    parser.set_defaults(usual=(8, sizes.parse(last)))
    add = parser.add_argument
    add(
        "-b",
        "--minbytes",
        dest="first",
        type=sizes.parse,
        metavar="MIN",
        help="least size in bytes, such as 8 or 64K; default: 8",
    )
    add(
        "-e",
        "--maxbytes",
        dest="last",
        type=sizes.parse,
        metavar="MAX",
        help=f"no size is greater; default: {last}",
    )
    add(
        "--sizes",
        nargs="+",
        type=sizes.parse,
        metavar="BYTES",
        help="exactly these, instead of a series",
    )
    between = parser.add_mutually_exclusive_group()
    between.add_argument(
        "-i",
        "--stepbytes",
        dest="step",
        type=sizes.parse,
        metavar="STEP",
        help="bytes from one size to the next",
    )
    between.add_argument(
        "-f",
        "--stepfactor",
        dest="factor",
        type=at_least(2),
        metavar="X",
        help=f"times from one size to the next; default: {sizes.FACTOR}",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """One datatype."""
    parser.add_argument(
        "-d",
        "--datatype",
        dest="dtype",
        type=dtype_of,
        default="float",
        help="a name of NCCL or of NumPy, and float is float32 as in NCCL; default: %(default)s",
    )


def names(collective: str, text: str) -> list[str]:
    """An argument's type: algorithms, with options if there are any, or "all"."""
    words = [word.strip() for word in re.split(r",(?![^(]*\))", text)]
    return [ALL if word == ALL else algorithm(collective, word) for word in words]


def algorithm(collective: str, text: str) -> str:
    """An argument's type: an algorithm of the collective, or of any of "all"."""
    errors = []
    for each in collectives_of(collective):
        try:
            return labels.parse_default(each, text).label
        except ValueError as error:
            errors.append(str(error))
    several = f"no collective has an algorithm {text!r}"
    raise argparse.ArgumentTypeError(errors[0] if len(errors) == 1 else several)


def root(text: str) -> str:
    """An argument's type: a rank, or "all"."""
    if text != ALL and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank, or all")
    return text


def seconds(text: str) -> float:
    """An argument's type: a positive time, which ends."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return float(text)


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status."""
    from bench import perf  # noqa: PLC0415 - this starts MPI, which the demo and docs must not

    return perf.run(options)
