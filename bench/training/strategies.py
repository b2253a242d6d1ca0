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
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.commands.jobs import Jobs, starting_jobs
from bench.commands.options import COUNT, add_jobs, add_output, option
from bench.provenance import provenance
from collectives.console import Command, Number, Refused, Table, at_least, console_for, write_json
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch.mpirun import find_mpirun
from parallel import choose_group_size

STEPS = {"float64": (100, 1e-9), "float32": (20, 1e-5)}  # so many, and so close
RANKS = (1, 2, 3, 4, 5, 8)
KEPT = "parameters", "gradients", "optimizer", "master"
PRICE = 5  # steps of which traffic, memory and time are told
HEADS = 4  # of attention
BATCH = 19  # rows of all ranks together: of 2 to 8 ranks none can divide it equally
ONCE = "start", "finish"  # outermost phases of what is sent before all steps or after them


class Kind(NamedTuple):
    """A strategy with its options."""

    name: str
    options: str  # of `parallel.train`, behind --strategy
    is_exact: bool = True  # whether its losses are to be those of one rank
    two_bytes: str = "float16"  # the dtype of the first table

    @property
    def words(self) -> list[str]:
        """The options as words."""
        return ["--strategy", *self.options.split()]


KINDS = (
    Kind("server-sync", "server-sync"),
    Kind("server-async", "server-async --staleness-bound 2", is_exact=False),
    Kind("ddp", "ddp"),
    Kind("ddp, float16 hook", "ddp --hook float16", is_exact=False),
    Kind("ddp, int8 hook", "ddp --hook int8", is_exact=False),
    Kind("ddp, PowerSGD 4", "ddp --hook powersgd:4", is_exact=False),
    Kind("zero1", "zero1"),
    Kind("zero2", "zero2"),
    Kind("zero3", "zero3"),
    Kind("zero3, kept", "zero3 --keep-after-forward"),
    Kind("zero3, host", "zero3 --offload host"),
    Kind("hsdp", "hsdp"),
    Kind("zeropp", "zeropp", is_exact=False),
    Kind("local-updates, 5", "local-updates --every 5", is_exact=False, two_bytes="bfloat16"),
)


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    about = "this one; may be given several times; default: all"
    names = [kind.name for kind in KINDS]
    option(parse, "--only", about, action="append", choices=names, metavar="STRATEGY")
    about = "default: 1,2,3,4,5,8"
    parse.add_argument("--ranks", type=numbers, default=RANKS, metavar="N,N", help=about)
    option(parse, "--layers", "blocks of the model", default=2, **COUNT)
    option(parse, "--hidden", "width of the model", default=32, **COUNT)
    option(parse, "--micro-batches", "of each rank", default=1, **COUNT)
    about = "file or directory to learn; default: Python's own library"
    option(parse, "--text", about, metavar="PATH")
    option(parse, "--price-only", "only the first table", action="store_true")
    add_jobs(parse, 300.0, has_quick=False)
    add_output(parse)


def numbers(word: str) -> tuple[int, ...]:
    """Return (2, 4) for "2,4", each at least 1; an argument type."""
    return tuple(map(at_least(1), word.split(",")))


def run(options: argparse.Namespace) -> int:
    """Print both tables; return 0, or 1 if something differs.  Raises Refused."""
    refuse(options)
    console = console_for(0, options)
    with starting_jobs(console, options) as jobs:
        strategies = Strategies(options, jobs)
        is_good = strategies.run()
    write_json(as_dict(strategies.kinds, max(options.ranks), jobs.results), options.json)
    failed = [name for name, status in jobs.statuses.items() if status]
    said = f"failed: {'; '.join(failed)}" if failed else f"all {len(jobs.statuses)} jobs ended well"
    console.print(f"{said}: traffic, memory and parameters compared in each")
    return 0 if is_good and not failed else 1


def refuse(options: argparse.Namespace) -> None:
    """Raise Refused, before any job, if `parallel.train` would refuse the batch or the model."""
    parts = options.micro_batches
    if too_many := [str(ranks) for ranks in options.ranks if ranks * parts > BATCH]:
        raise Refused(
            f"a global batch of {BATCH} cannot be divided among {', '.join(too_many)} ranks"
            f" with {parts} micro-batches each"
        )
    if options.hidden % HEADS:
        raise Refused(f"{HEADS} heads do not divide a width of {options.hidden}")


def as_dict(kinds: Sequence[Kind], ranks: int, results: dict[str, Any]) -> dict[str, Any]:
    """Return the first table, and what every job found, for JSON."""
    priced = {kind.name: results.get(job_name(kind, kind.two_bytes, ranks)) for kind in kinds}
    return {
        "provenance": provenance() | {"mpi": mpi_name()},
        "costs": {name: list(costs(result)) for name, result in priced.items() if result},
        "jobs": results,
    }


def job_name(kind: Kind, dtype: str, ranks: int) -> str:
    """Return the name of a job."""
    return f"{kind.name} {dtype} on {ranks}"


def mpi_name() -> str:
    """Return the MPI that the jobs ran under."""
    vendor = find_mpirun().vendor
    try:
        return f"{vendor} {version(vendor)}"
    except PackageNotFoundError:  # the system's
        return vendor


class Strategies:
    """The jobs, one after the other, and what they found."""

    def __init__(self, options: argparse.Namespace, jobs: Jobs) -> None:
        self.options, self.jobs = options, jobs
        self.kinds = [kind for kind in KINDS if not options.only or kind.name in options.only]
        self.mpi_args = MPIRUN_ARGS if find_mpirun().vendor == "openmpi" else ()

    def run(self) -> bool:
        """Return whether all losses are near enough."""
        self.price(max(self.options.ranks))
        near_enough = [self.equality(dtype) for dtype in STEPS if not self.options.price_only]
        return all(near_enough)

    def train(self, kind: Kind, ranks: int, dtype: str, steps: int) -> dict[str, Any]:
        """Return what a run says of itself; nothing if it failed."""
        o = self.options
        model = f"--layers {o.layers} --hidden {o.hidden} --context 16 --heads {HEADS}"
        rows = f"--batch {BATCH} --micro-batches {o.micro_batches}"
        command = ["-m", "parallel.train", *kind.words, "--dtype", dtype, "--steps", str(steps)]
        command += [*model.split(), *rows.split()]
        command += ["--text", o.text] if o.text is not None else []
        name = job_name(kind, dtype, ranks)
        return self.jobs.run(name, ranks, command, self.mpi_args, is_quiet=True)[1]

    def price(self, ranks: int) -> None:
        """Print the first table."""
        heads = ["sent / 2 Psi", "between groups", "kept / 16 Psi", "at most", "ms a step"]
        table = Table("strategy", *(Number(head, ".3f") for head in heads))
        for kind in self.kinds:
            if result := self.train(kind, ranks, kind.two_bytes, PRICE):
                table.add(kind.name, *costs(result))
        self.show(f"Psi parameters in two bytes on {ranks} ranks, per rank (mean) and step", table)

    def equality(self, dtype: str) -> bool:
        """Print the second table, of one dtype; return whether all losses are near enough."""
        steps, close = STEPS[dtype]
        serial = self.train(Kind("serial", "serial"), 1, dtype, steps)
        table = Table("strategy", *(Number(f"{n} ranks", ".1e") for n in self.options.ranks))
        is_good = True
        for kind in filter(lambda kind: kind.is_exact, self.kinds):
            distances = [
                distance(self.train(kind, ranks, dtype, steps), serial)
                for ranks in self.options.ranks
            ]
            is_near = all(difference <= close for difference in distances)
            table.add(kind.name, *distances, is_wrong=not is_near)
            is_good &= is_near
        self.show(f"{dtype}: largest relative difference of {steps} losses, at most {close}", table)
        return is_good

    def show(self, title: str, table: Table) -> None:
        """Print a table under its title."""
        self.jobs.title(title)
        table.print(self.jobs.console)


class Costs(NamedTuple):
    """What a strategy costs a rank."""

    sent: float  # bytes in a step, on average, over those of 2 Psi elements
    between: float  # the part of them that leaves its group
    kept: float  # bytes from step to step, on average, over 16 Psi
    most: float  # the same, at most
    milliseconds: float  # of a step, the median


def costs(result: dict[str, Any]) -> Costs:
    """Return the costs of a run of `parallel.train`.

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
    """Return bytes from row to column, of all phases but those that a run has once."""
    phases = [np.array(matrix) for phase, matrix in matrices.items() if phase not in ONCE]
    return sum(phases, np.zeros((ranks, ranks), np.int64))


def distance(result: dict[str, Any], serial: dict[str, Any]) -> float:
    """Return the largest relative difference of the losses; NaN, never near, without a result."""
    if not result or not serial or len(result["losses"]) != len(serial["losses"]):
        return float(np.nan)
    return largest_difference(result["losses"], serial["losses"])


def largest_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference; NaN, which no tolerance admits, if there is one."""
    wanted = np.array(reference)
    return float(np.max(np.abs(np.array(ours) - wanted) / np.abs(wanted)))


COMMAND = Command("bench.training.strategies", __doc__, add_options, run)
