"""What `bench overlap` finds: how much of an all-reduce each variant hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from bench.overlap.other_work import KINDS
from bench.workloads import sizes
from collectives.console import Number, Table


class Overlap(NamedTuple):
    """Seconds of an all-reduce and other work, with one way to let the all-reduce go on."""

    beside: str  # what the other work is
    progress: str | None  # "thread" if a thread lets the all-reduce go on
    slices: int  # of the other work; after each the program calls test()
    all_reduce: float
    other: float
    in_turn: float
    at_once: float
    wrong: int  # elements

    @property
    def hidden(self) -> float:
        """What was saved, as a fraction of the all-reduce; negative if it took longer."""
        return (self.in_turn - self.at_once) / self.all_reduce

    @property
    def who(self) -> str:
        """Who lets the all-reduce go on."""
        helpers = ["a thread"] * bool(self.progress) + ["test()"] * (self.slices > 1)
        return " and ".join(helpers) or "nobody"

    @property
    def what(self) -> str:
        """The other work."""
        pieces = "one piece" if self.slices == 1 else f"{self.slices} slices"
        return f"{self.beside}, {pieces}"

    def as_dict(self) -> dict[str, Any]:
        """Return the overlap for JSON."""
        return self._asdict() | {"hidden": self.hidden}


def overlaps(result: Mapping[str, Any]) -> list[Overlap]:
    """Return what a job wrote to its JSON file."""
    ways = result.get("ways", [])
    return [Overlap(**{name: way[name] for name in Overlap._fields}) for way in ways]


def show(facts: Mapping[str, Any], measured: Sequence[Overlap], console: Console) -> None:
    """Print what was measured, what there was to run on, and the table."""
    others = [f"{KINDS[name].words} {amount}" for name, amount in facts["amounts"].items()]
    console.print(
        f"{facts['mpi']}, {facts['ranks']} ranks, float32: all-reduce of "
        f"{sizes.text(facts['size'])}, {', '.join(others)}"
    )
    console.print(cores_in_words(facts["cores"], facts["ranks_per_host"]))
    times = [Number(f"{what} ms", ".2f") for what in ("all-reduce", "beside", "in turn", "at once")]
    table = Table("who lets it go on", "beside", *times, Number("hidden", ".0%"))
    for overlap in measured:
        seconds = (overlap.all_reduce, overlap.other, overlap.in_turn, overlap.at_once)
        table.add(overlap.who, overlap.what, *(1e3 * taken for taken in seconds), overlap.hidden)
    table.print(console)


def cores_in_words(cores: int, ranks: int) -> str:
    """Return what there is to run on, and what follows from it."""
    words = f"{cores} cores for {ranks} ranks, {cores / ranks:.3g} for each"
    if cores >= 2 * ranks:
        return words
    return f"{words}: a thread without a core of its own only takes time from what computes"
