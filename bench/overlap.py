"""How much of an all-reduce is hidden beside something else: a product, a sleep, a Python loop.

    python -m collectives.launch -n 2 -m bench overlap
    python -m collectives.launch -n 2 -m bench overlap --beside sleep --beside loop

Times an all-reduce and something else that takes about as long, in turn and at once: started with
async_op=True, then the other, then wait().  While the program is busy nobody lets the all-reduce go
on, or a thread does (progress="thread"), or the program itself, which does the other in slices and
calls test() after each.  All of it takes turns on the same buffers; medians, of which the slowest
rank's counts.  Hidden is the time saved, as a fraction of the all-reduce's.

The other is a float32 matrix product, which holds a core; a sleep, which holds nothing; or a loop
of Python instructions, which holds a core and the interpreter.

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
from bench.others import KINDS, Product
from parallel.cli import at_least, print_table, table_with


class Overlap(NamedTuple):
    """Seconds, with one way to let the all-reduce go on: a thread or not, slices or not.

    `beside`: what the other is; `other`: what it takes alone.
    """

    beside: str
    progress: str | None
    slices: int
    all_reduce: float
    other: float
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


def ways(result: Mapping[str, Any]) -> list[Overlap]:
    """What a job wrote to its JSON file."""
    found = result.get("ways", [])
    return [Overlap(**{name: way[name] for name in Overlap._fields}) for way in found]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    add("--size", type=sizes.parse, default="64M", help="bytes to all-reduce; default: %(default)s")
    add("--beside", action="append", choices=KINDS, metavar="WHAT",
        help=f"{', '.join(KINDS)}; may be repeated; default: {Product.name}")  # fmt: skip
    add("-n", dest="samples", type=at_least(1), default=20, metavar="N",
        help="samples of each; default: %(default)s")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write everything to FILE")


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status."""
    from bench import hiding  # noqa: PLC0415 - this starts MPI, which other commands must not

    return hiding.run(options)


def show(facts: Mapping[str, Any], found: Sequence[Overlap], console: Console) -> None:
    """What was measured, what there was to run on, and the table."""
    others = [f"{KINDS[name].words} {amount}" for name, amount in facts["amounts"].items()]
    console.print(
        f"{facts['mpi']}, {facts['ranks']} ranks, float32: all-reduce of "
        f"{sizes.text(facts['size'])}, {', '.join(others)}"
    )
    console.print(cores_in_words(facts["cores"], facts["ranks_per_host"]))
    print_table(table(found), console)


def cores_in_words(cores: int, ranks: int) -> str:
    """What there is to run on, and what follows from it."""
    words = f"{cores} cores for {ranks} ranks, {cores / ranks:.3g} for each"
    if cores >= 2 * ranks:
        return words
    return f"{words}: a thread without a core of its own only takes time from what computes"


def table(found: Sequence[Overlap]) -> Table:
    """One line for each way, in ms."""
    made = table_with("who lets it go on", "beside", numbers=["all-reduce ms", "beside ms",
        "in turn ms", "at once ms", "hidden"])  # fmt: skip
    for each in found:
        seconds = (each.all_reduce, each.other, each.in_turn, each.at_once)
        made.add_row(*who(each), *(f"{s * 1e3:.2f}" for s in seconds), f"{each.hidden:.0%}")
    return made


def who(each: Overlap) -> tuple[str, str]:
    """The first two columns."""
    helpers = ["a thread"] * bool(each.progress) + ["test()"] * (each.slices > 1)
    pieces = "one piece" if each.slices == 1 else f"{each.slices} slices"
    return " and ".join(helpers) or "nobody", f"{each.beside}, {pieces}"
