"""Groups of options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.workloads import sizes
from bench.workloads.datatypes import dtype_of
from collectives.console import add_output_options, at_least, output_file, seconds

COUNT: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
SECONDS: dict[str, Any] = {"type": seconds, "metavar": "S"}
BYTES: dict[str, Any] = {"type": sizes.parse}


def option(parse: argparse._ActionsContainer, names: str, about: str, **more: Any) -> None:
    """Add an option with these names, between blanks; its help ends with its default, if any."""
    shown = "; default: %(default)s" if more.get("default") is not None else ""
    parse.add_argument(*names.split(), help=about + shown, **more)


def add_sizes(parse: argparse.ArgumentParser, last: str = "16M") -> None:
    """Add the series of sizes, which `sizes_of` reads; it ends at `last` by default."""
    parse.set_defaults(usual=(8, sizes.parse(last)))
    group = parse.add_argument_group("sizes")
    first = "least size in bytes, such as 8 or 64K; default: 8"
    option(group, "-b --minbytes", first, dest="first", metavar="MIN", **BYTES)
    about = f"no size is greater; default: {last}"
    option(group, "-e --maxbytes", about, dest="last", metavar="MAX", **BYTES)
    about = "exactly these, instead of a series"
    option(group, "--sizes", about, nargs="+", metavar="BYTES", **BYTES)
    between = group.add_mutually_exclusive_group()
    about = "bytes from one size to the next"
    option(between, "-i --stepbytes", about, dest="step", metavar="STEP", **BYTES)
    about = f"factor from one size to the next; default: {sizes.FACTOR}"
    option(between, "-f --stepfactor", about, dest="factor", type=at_least(2), metavar="X")


def add_datatype(parse: argparse.ArgumentParser) -> None:
    """Add one datatype."""
    about = "a name of NCCL or of NumPy; float is float32 as in NCCL"
    option(parse, "-d --datatype", about, dest="dtype", type=dtype_of, default="float")


def add_device(parse: argparse.ArgumentParser) -> None:
    """Add where arrays are."""
    about = "where arrays are; cuda takes CuPy"
    option(parse, "--device", about, choices=("cpu", "cuda"), default="cpu")


def add_samples(
    parse: argparse.ArgumentParser, samples: int = 20, *, seconds: float | None = None
) -> None:
    """Add the number of samples and of calls before them, and the seconds that a size may take."""
    group = parse.add_argument_group("samples")
    about = "samples of each contender"
    option(group, "-n --iters", about, dest="samples", default=samples, **COUNT)
    about = "calls before them, which are not timed"
    kind = at_least(0)
    option(group, "-w --warmup_iters", about, dest="warmup", type=kind, default=5, metavar="N")
    if seconds is not None:
        option(group, "--seconds", "a size gets no more samples then", default=seconds, **SECONDS)


def add_ranks(parse: argparse.ArgumentParser) -> None:
    """Add the number of ranks, the time limit of their calls, and whether a person looks on."""
    group = parse.add_argument_group("ranks")
    option(group, "-g --ngpus", "start N ranks here; without it mpirun starts them", **COUNT)
    about = "seconds after which a call that waits for others fails; default: none"
    option(group, "-T --timeout", about, **SECONDS)
    about = "show progress; mpirun does not tell its ranks whether there is a terminal"
    option(group, "--live", about, action="store_true")


def add_jobs(parse: argparse.ArgumentParser, seconds: float, *, has_quick: bool = True) -> None:
    """Add the time limit of the jobs that a command starts, and how to try the command itself."""
    option(parse, "--timeout", "seconds for each of its jobs", default=seconds, **SECONDS)
    if has_quick:
        about = "few sizes, steps and samples, to try the command itself"
        option(parse, "--quick", about, action="store_true")


def add_output(parse: argparse.ArgumentParser, *, is_local: bool = True) -> None:
    """Add --json, also as nccl-tests spells it, and --wide.

    A command that is not local runs on ranks, of which only rank 0 finds out if it can write.
    """
    add_output_options(parse, is_local=is_local)
    kind = output_file if is_local else Path
    about = "the same as --json"
    option(parse, "-J --output_file", about, dest="json", type=kind, metavar="FILE")


def as_words(name: str, values: list[Any] | None) -> list[str]:
    """Return an option that may be repeated as words, once for each value."""
    return [word for value in values or () for word in (name, str(value))]
