"""What the torch command measures, with both backends side by side, and the tables of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from bench.case import GLOO
from bench.moe_cases import ms
from bench.report import times_faster, us
from bench.summary import mean_ratio
from parallel.cli import table_with

RING, NCCL = "ring", "nccl"
BACKENDS = (RING, GLOO)
CALLS, DDP, FSDP, START = "all_reduce", "ddp", "fsdp", "start"
HEADS = 4  # of attention, which divide the width of a model


class Both(NamedTuple):
    """The same done with both backends: seconds of each, and what was wrong (None: not checked).

    `amount`: the bytes of a call, the width of a model, the number of ranks that start.
    """

    amount: int
    seconds: dict[str, float]
    wrong: int | None = None

    @property
    def other(self) -> str:
        """The backend beside ours."""
        return next(name for name in self.seconds if name != RING)

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.seconds[self.other] / self.seconds[RING]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict() | {"ratio": self.ratio}


Found = Mapping[str, Sequence[Both]]  # by part


class Part(NamedTuple):
    """A part of the command: its title, what its amounts are, and how seconds are written."""

    title: str
    amount: str
    text: Callable[[float], str]
    has_mean: bool = True


PARTS = {
    CALLS: Part("all_reduce of float32, us", "size (B)", us),
    DDP: Part("A training step with DistributedDataParallel, ms", "hidden", ms),
    FSDP: Part("A training step with fully_shard, ms", "hidden", ms),
    START: Part(
        "From the start of Python to the end of the first all_reduce, ms",
        "ranks",
        ms,
        has_mean=False,
    ),
}


def found_in(result: Mapping[str, Any]) -> dict[str, list[Both]]:
    """From the JSON of a job; of a job that failed, nothing."""
    return {name: [Both(**case) for case in result[name]] for name in PARTS if name in result}


def tables(found: Found) -> Iterator[tuple[str, Table]]:
    """Yield title and table of each part that was measured."""
    for name, cases in found.items():
        if cases:
            yield PARTS[name].title, table(PARTS[name], cases)


def table(part: Part, cases: Iterable[Both]) -> Table:
    """One line for each case, and one of the geometric mean of the ratios."""
    cases = list(cases)
    other = cases[0].other
    made = table_with(numbers=[part.amount, RING, other, f"{other} / {RING}", "wrong"])
    for each in cases:
        seconds = (part.text(each.seconds[name]) for name in (RING, other))
        wrong = "-" if each.wrong is None else str(each.wrong)
        made.add_row(str(each.amount), *seconds, times_faster(each.ratio), wrong)
    if part.has_mean:
        made.add_row("geom. mean", "", "", times_faster(mean(cases)), "")
    return made


def mean(cases: Iterable[Both]) -> float | None:
    """The geometric mean of the ratios."""
    return mean_ratio(each.ratio for each in cases)


def as_dict(found: Found) -> dict[str, Any]:
    """For JSON: every part with its cases, and the means of those that have one."""
    cases = {name: [each.as_dict() for each in both] for name, both in found.items()}
    means = {name: mean(both) for name, both in found.items() if PARTS[name].has_mean}
    return {**cases, "geometric_mean": means}
