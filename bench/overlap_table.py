"""The output of the overlap command: how much of an all-reduce each variant hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import sizes
from bench.others import KINDS
from bench.timed import Overlap
from parallel.cli import print_table, table_with


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
    made = table_with(
        "who lets it go on",
        "beside",
        numbers=["all-reduce ms", "beside ms", "in turn ms", "at once ms", "hidden"],
    )
    for each in found:
        seconds = (each.all_reduce, each.other, each.in_turn, each.at_once)
        made.add_row(*who(each), *(f"{s * 1e3:.2f}" for s in seconds), f"{each.hidden:.0%}")
    return made


def who(each: Overlap) -> tuple[str, str]:
    """The first two columns."""
    helpers = ["a thread"] * bool(each.progress) + ["test()"] * (each.slices > 1)
    pieces = "one piece" if each.slices == 1 else f"{each.slices} slices"
    return " and ".join(helpers) or "nobody", f"{each.beside}, {pieces}"
