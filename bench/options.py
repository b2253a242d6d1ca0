"""The command line of the microbenchmark: the options of nccl-tests that apply here, and our own.

Nothing here starts MPI, so the command line can be parsed without it.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bench import sizes
from collectives.arrays.operators import operators
from collectives.schedule.contracts import SPECS
from collectives.selection import labels
from parallel.cli import at_least, can_be_written


def add_options(parser: argparse.ArgumentParser, collective: str) -> None:
    """The options that have a meaning for this collective."""
    parser.set_defaults(run=run, collective=collective, op="sum", root=0, dtype=np.dtype("uint8"),
        device="cpu")  # fmt: skip
    add = parser.add_argument
    if collective != "barrier":
        add_sizes(parser)
    if SPECS[collective].is_reduction:
        names = operators(collective)
        add("-o", dest="op", choices=names, default="sum", help="operator; default: sum")
    if SPECS[collective].is_rooted:
        add("-r", dest="root", type=int, default=0, metavar="RANK", help="root; default: 0")
    _add_effort(parser)
    add("-c", dest="check", type=int, choices=(0, 1), default=1, help="check; default: 1")
    add("--algorithm", dest="names", action="append", type=partial(algorithm, collective),
        metavar="NAME", help="as the library takes it, such as 'bruck(radix=4)'; "
        "may be repeated; default: all that can run")  # fmt: skip
    if collective != "barrier":
        add("--device", choices=("cpu", "cuda"), default="cpu",
            help="where arrays are; cuda takes CuPy; default: %(default)s")  # fmt: skip
    add("--native", action="store_true", help="measure the MPI library's own call as well")
    add("--call", action="store_true", help="measure our one-shot call as well as the plans")
    add("-J", dest="json", type=Path, metavar="FILE", help="write everything to FILE")


def _add_effort(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", dest="samples", type=at_least(1), default=20, metavar="N",
        help="samples of each contender; default: %(default)s")  # fmt: skip
    add("-w", dest="warmup", type=at_least(0), default=5, metavar="N",
        help="calls before them; default: %(default)s")  # fmt: skip
    add("--seconds", type=seconds, default=5.0, metavar="S",
        help="after which a size gets no more samples; default: %(default)s")  # fmt: skip


def add_sizes(parser: argparse.ArgumentParser, last: str = "64M") -> None:
    """The series of sizes, up to `last` unless the user says otherwise, and the dtype."""
    add = parser.add_argument
    add("-b", dest="first", type=sizes.parse, default="8", metavar="MIN",
        help="least size in bytes, such as 8 or 64K; default: %(default)s")  # fmt: skip
    add("-e", dest="last", type=sizes.parse, default=last, metavar="MAX",
        help="greatest size, always included; default: %(default)s")  # fmt: skip
    add("-f", dest="factor", type=at_least(2), default=8, help="between; default: %(default)s")
    add("-d", "--dtype", type=dtype_of, default="float32",
        help="a NumPy name, or bfloat16; default: %(default)s")  # fmt: skip


def algorithm(collective: str, text: str) -> str:
    """An argument's type: an algorithm of the collective, with options if there are any."""
    try:
        return labels.parse_label(collective, text).label
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    """An argument's type: a positive time, which ends."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return float(text)


def output(text: str) -> Path:
    """An argument's type: a file that can be written.  For commands that are not run under MPI."""
    if not can_be_written(path := Path(text)):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def dtype_of(name: str) -> np.dtype[Any]:
    """An argument's type: a NumPy dtype of numbers, or bfloat16."""
    try:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    except TypeError:
        raise argparse.ArgumentTypeError(f"there is no dtype {name!r}") from None
    if dtype.kind not in "biufc" and name != "bfloat16":
        raise argparse.ArgumentTypeError(f"{name} is not a dtype of numbers")
    return dtype


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status."""
    from bench import perf  # noqa: PLC0415 - this starts MPI, which the demo and docs must not

    return perf.run(options)
