"""Compare training strategies: their traffic, memory and time, and whether they are exact.

1. Every strategy in two bytes on the largest number of ranks, counted in the run: the bytes that a
   rank sends in a step divided by those of 2 Psi elements, the share of them that leaves its group,
   the memory of a rank divided by 16 Psi bytes, and the time of a step.  These are the columns of
   the table in Rajbhandari et al. 2020.  Psi is the number of parameters.  Messages that are sent
   only once in a run do not count.
2. Every strategy on every number of ranks, in float64 and float32: the largest difference of its
   losses from those of one rank on the same batches.

Each run compares its traffic (predicted, recorded, and with Open MPI observed), its memory (by
formula and counted) and the parameters of its ranks.  The exit status is 1 if any of these differ,
or if losses differ too much.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from bench.docs.provenance import provenance
from bench.jobs import Jobs, has_mpi
from bench.options import seconds
from bench.verdict import largest_difference
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.export import output_file
from collectives.launch.mpirun import find_mpirun
from parallel import choose_group_size
from parallel.cli import at_least, console_of, print_table, table_with

STEPS = {"float64": (100, 1e-9), "float32": (20, 1e-5)}  # so many, and so close
RANKS = (1, 2, 3, 4, 5, 8)
KEPT = "parameters", "gradients", "optimizer", "master"
PRICE = 5  # steps of which traffic, memory and time are told
HEADS = 4  # of attention
BATCH = 19  # rows of all ranks together: of 2 to 8 ranks none can divide it equally
ONCE = "start", "finish"  # outermost phases of what is sent before all steps or after them


class Kind(NamedTuple):
    """A strategy with its options.

    `is_exact`: whether its losses are to be those of one rank.  `two_bytes`: the dtype of the first
    table.
    """

    name: str
    words: Sequence[str]
    is_exact: bool = True
    two_bytes: str = "float16"


KINDS = (
    Kind("server-sync", ["--strategy", "server-sync"]),
    Kind("server-async", ["--strategy", "server-async", "--staleness-bound", "2"], is_exact=False),
    Kind("ddp", ["--strategy", "ddp"]),
    Kind("ddp, float16 hook", ["--strategy", "ddp", "--hook", "float16"], is_exact=False),
    Kind("ddp, int8 hook", ["--strategy", "ddp", "--hook", "int8"], is_exact=False),
    Kind("ddp, PowerSGD 4", ["--strategy", "ddp", "--hook", "powersgd:4"], is_exact=False),
    Kind("zero1", ["--strategy", "zero1"]),
    Kind("zero2", ["--strategy", "zero2"]),
    Kind("zero3", ["--strategy", "zero3"]),
    Kind("zero3, kept", ["--strategy", "zero3", "--keep-after-forward"]),
    Kind("zero3, host", ["--strategy", "zero3", "--offload", "host"]),
    Kind("hsdp", ["--strategy", "hsdp"]),
    Kind("zeropp", ["--strategy", "zeropp"], is_exact=False),
    Kind(
        "local-updates, 5",
        ["--strategy", "local-updates", "--every", "5"],
        is_exact=False,
        two_bytes="bfloat16",
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run, refuse=parser.error)
    add(
        "--only",
        action="append",
        choices=[kind.name for kind in KINDS],
        metavar="STRATEGY",
        help="this one; may be given several times; default: all",
    )
    add("--ranks", type=numbers, default=RANKS, metavar="N,N", help="default: 1,2,3,4,5,8")
    add("--layers", type=at_least(1), default=2, help="blocks of the model, default: %(default)s")
    add("--hidden", type=at_least(1), default=32, help="its width, default: %(default)s")
    add("--micro-batches", type=at_least(1), default=1, metavar="K", help="default: %(default)s")
    add("--text", metavar="PATH", help="file or directory to learn; default: Python's own library")
    add(
        "--timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds for each of its jobs; default: %(default)s",
    )
    add("--json", type=output_file, metavar="FILE", help="write all results to FILE")
    add("--price-only", action="store_true", help="only the first table")


def numbers(word: str) -> tuple[int, ...]:
    """An argument's type: "2,4", each at least 1."""
    return tuple(map(at_least(1), word.split(",")))


def run(options: argparse.Namespace) -> int:
    """Both tables.  0, 1 if something differs, 2 if there is no MPI or a job would be refused."""
    refuse_batch(options)
    refuse_width(options)
    console = console_of(0)
    if not has_mpi(console):
        return 2
    with TemporaryDirectory() as folder:
        jobs = Jobs(console, Path(folder), options.timeout)
        strategies = Strategies(options, jobs)
        is_good = strategies.run()
    if options.json is not None:
        result = as_dict(strategies.kinds, max(options.ranks), jobs.results)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    failed = [name for name, status in jobs.statuses.items() if status]
    said = f"failed: {'; '.join(failed)}" if failed else f"all {len(jobs.statuses)} jobs ended well"
    console.print(f"{said}: traffic, memory and parameters compared in each", markup=False)
    return 0 if is_good and not failed else 1


def refuse_batch(options: argparse.Namespace) -> None:
    """End, before any job, if `parallel.train` would refuse the batch; say on how many ranks."""
    parts = options.micro_batches
    if too_many := [str(ranks) for ranks in options.ranks if ranks * parts > BATCH]:
        options.refuse(
            f"a global batch of {BATCH} cannot be divided among {', '.join(too_many)} ranks"
            f" with {parts} micro-batches each"
        )


def refuse_width(options: argparse.Namespace) -> None:
    """End, before any job, if `parallel.train` would refuse the model."""
    if options.hidden % HEADS:
        options.refuse(f"{HEADS} heads do not divide a width of {options.hidden}")


def as_dict(kinds: Sequence[Kind], ranks: int, results: dict[str, Any]) -> dict[str, Any]:
    """Everything, for JSON: the first table, and what every job found."""
    priced = {kind.name: results.get(price_name(kind, ranks)) for kind in kinds}
    return {
        "provenance": provenance(["collectives", "parallel"]) | {"mpi": mpi_name()},
        "costs": {name: list(costs(result)) for name, result in priced.items() if result},
        "jobs": results,
    }


def price_name(kind: Kind, ranks: int) -> str:
    """The job of the first table."""
    return job_name(kind, kind.two_bytes, ranks)


def job_name(kind: Kind, dtype: str, ranks: int) -> str:
    """The name of a job."""
    return f"{kind.name} {dtype} on {ranks}"


def mpi_name() -> str:
    """The MPI that the jobs ran under."""
    vendor = find_mpirun().vendor
    try:
        return f"{vendor} {version(vendor)}"
    except PackageNotFoundError:  # the system's
        return vendor


class Strategies:
    """The jobs, one after the other, and what they found."""

    def __init__(self, options: argparse.Namespace, jobs: Jobs) -> None:
        self.options, self.jobs = options, jobs
        self.kinds = [each for each in KINDS if not options.only or each.name in options.only]
        is_watched = find_mpirun().vendor == "openmpi"
        self.mpi_args = MPIRUN_ARGS if is_watched else ()

    def run(self) -> bool:
        """Whether all losses are near enough."""
        self.price(max(self.options.ranks))
        found = [self.equality(dtype) for dtype in STEPS if not self.options.price_only]
        return all(found)

    def train(self, kind: Kind, ranks: int, dtype: str, steps: int) -> dict[str, Any]:
        """What a run says of itself; nothing if it failed."""
        o = self.options
        command = ["-m", "parallel.train", *kind.words, "--dtype", dtype, "--steps", str(steps)]
        command += ["--layers", str(o.layers), "--hidden", str(o.hidden), "--context", "16"]
        command += ["--heads", str(HEADS)]
        command += ["--batch", str(BATCH), "--micro-batches", str(o.micro_batches)]
        command += ["--text", o.text] if o.text is not None else []
        return self.jobs.run(
            job_name(kind, dtype, ranks), ranks, command, self.mpi_args, is_quiet=True
        )[1]

    def price(self, ranks: int) -> None:
        """The first table."""
        heads = ["sent / 2 Psi", "between groups", "kept / 16 Psi", "at most", "ms a step"]
        table = table_with("strategy", numbers=heads)
        for kind in self.kinds:
            if result := self.train(kind, ranks, kind.two_bytes, PRICE):
                table.add_row(kind.name, *(f"{number:.3f}" for number in costs(result)))
        self.show(f"Psi parameters in two bytes on {ranks} ranks, per rank (mean) and step", table)

    def equality(self, dtype: str) -> bool:
        """The second table, of one dtype."""
        steps, close = STEPS[dtype]
        serial = self.train(Kind("serial", ["--strategy", "serial"]), 1, dtype, steps)
        table = table_with("strategy", numbers=[f"{n} ranks" for n in self.options.ranks])
        is_good = True
        for kind in self.kinds:
            if kind.is_exact:
                found = [
                    distance(self.train(kind, ranks, dtype, steps), serial)
                    for ranks in self.options.ranks
                ]
                is_near = all(each <= close for each in found)
                words = [f"{each:.1e}" for each in found]
                table.add_row(kind.name, *words, style=None if is_near else "bold red")
                is_good &= is_near
        self.show(f"{dtype}: largest relative difference of {steps} losses, at most {close}", table)
        return is_good

    def show(self, title: str, table: Table) -> None:
        """A table under its title."""
        self.jobs.title(title)
        print_table(table, self.jobs.console)


class Costs(NamedTuple):
    """Of a rank: bytes sent in a step, on average, over those of 2 Psi elements, and of these what
    leaves its group; bytes kept from step to step, on average and at most, over 16 Psi;
    milliseconds a step, the median.
    """

    sent: float
    between: float
    kept: float
    most: float
    milliseconds: float


def costs(result: dict[str, Any]) -> Costs:
    """What a run of `parallel.train` says.

    Of the traffic what was sent in steps, large and small; of the memory what is kept wherever that
    is.  Groups are those of hierarchical sharding.
    """
    psi, ranks = result["parameters"], result["ranks"]
    sent = sent_in_steps(result["traffic"]["matrices"], ranks)
    group = np.arange(ranks) // choose_group_size(ranks)
    leaving = sent[group[:, None] != group[None, :]]
    whole = result["steps"] * ranks * 2 * psi * 2  # 2 Psi of two bytes, all ranks and steps
    kept = [
        sum(counted for name, (_, counted) in rank.items() if name.partition(",")[0] in KEPT)
        for rank in result["ranks_kept"]
    ]
    return Costs(
        float(sent.sum() / whole),
        float(leaving.sum() / whole),
        sum(kept) / ranks / (16 * psi),
        max(kept) / (16 * psi),
        1e3 * result["seconds_per_step"],
    )


def sent_in_steps(matrices: dict[str, Any], ranks: int) -> NDArray[np.int64]:
    """Bytes from row to column, of all phases but those that a run goes through once."""
    each = [np.array(matrix) for phase, matrix in matrices.items() if phase not in ONCE]
    return sum(each, np.zeros((ranks, ranks), np.int64))


def distance(result: dict[str, Any], serial: dict[str, Any]) -> float:
    """The largest relative difference of the losses; NaN, which is never near, without a result."""
    if not result or not serial or len(result["losses"]) != len(serial["losses"]):
        return float(np.nan)
    return largest_difference(result["losses"], serial["losses"])
