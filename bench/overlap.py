"""How much of an all-reduce is hidden behind a matrix product.

    python -m collectives.launch -n 2 -m bench overlap

Times an all-reduce and a float32 product that takes about as long, in turn and at once: started
with async_op=True, then the product, then wait().  While the program computes nobody lets the
all-reduce go on, or a thread does (progress="thread"), or the program itself, which computes the
product in slices and calls test() after each.  All of it takes turns on the same buffers; medians,
of which the slowest rank's counts.  Hidden is the time saved, as a fraction of the all-reduce's.

Under a bare mpirun set OMP_NUM_THREADS=1, as the launcher does.  The exit status is 1 if any
element of a result is wrong, 2 if there is only one rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench import sizes
from parallel.show import print_table, table_with
from parallel.train import at_least

SLICES = 16


class Overlap(NamedTuple):
    """Seconds, with one way to let the all-reduce go on: a thread or not, slices or not."""

    progress: str | None
    slices: int
    all_reduce: float
    product: float
    in_turn: float
    at_once: float
    wrong: int

    @property
    def hidden(self) -> float:
        """What was saved, as a fraction of the all-reduce; negative if it took longer."""
        return (self.in_turn - self.at_once) / self.all_reduce

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict() | {"hidden": self.hidden}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    add("--size", type=sizes.parse, default="64M", help="bytes to all-reduce; default: %(default)s")
    add("-n", dest="samples", type=at_least(1), default=20, metavar="N",
        help="samples of each; default: %(default)s")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write everything to FILE")


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status."""
    from bench import hiding  # noqa: PLC0415 - this starts MPI, which other commands must not

    return hiding.run(options)


def show(facts: Mapping[str, Any], found: Sequence[Overlap], console: Console) -> None:
    """What was measured, what there was to run on, and the table."""
    console.print(
        f"{facts['mpi']}, {facts['ranks']} ranks, float32: all-reduce of "
        f"{sizes.text(facts['size'])}, product of two matrices of order {facts['order']}"
    )
    console.print(cores_in_words(facts["cores"], facts["ranks_per_host"]))
    print_table(table(found), console)


def cores_in_words(cores: int, ranks: int) -> str:
    """What there is to run on, and what follows from it."""
    words = f"{cores} cores for {ranks} ranks, {cores / ranks:.3g} for each"
    if cores >= 2 * ranks:
        return words
    return f"{words}: a thread without a core of its own only takes time from the product"


def table(found: Sequence[Overlap]) -> Table:
    """One line for each way, in ms."""
    made = table_with("who lets it go on", "product", numbers=["all-reduce ms", "product ms",
        "in turn ms", "at once ms", "hidden"])  # fmt: skip
    for each in found:
        seconds = (each.all_reduce, each.product, each.in_turn, each.at_once)
        made.add_row(*who(each), *(f"{s * 1e3:.2f}" for s in seconds), f"{each.hidden:.0%}")
    return made


def who(each: Overlap) -> tuple[str, str]:
    """The first two columns."""
    helpers = ["a thread"] * bool(each.progress) + ["test()"] * (each.slices > 1)
    product = "one piece" if each.slices == 1 else f"{each.slices} slices"
    return " and ".join(helpers) or "nobody", product
