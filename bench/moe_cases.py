"""The cases of the moe command, the goals for them, and the tables of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from parallel.cli import table_with

RANKS = (2, 4)
GATES = ("switch", "gshard", "stable:4")  # with one, two and four experts for each token
SLICED = ("gshard",)
PARTS = (1, 2, 4)
HOSTS = 2  # ranks of a host, where bytes between hosts are counted
OURS, THEIRS = "ours", "Alltoallv"
FLAT, HIERARCHICAL = "flat", "hierarchical"
FASTER = 1.3  # than mpi4py's, at least
NOISE = 0.03  # by which the time of parts may differ from that of one by chance


class Dispatched(NamedTuple):
    """Dispatch and combine: seconds and wrong elements of each contender.

    `cores`: the fraction of the cores that the ranks had.
    """

    gate: str
    seconds: dict[str, float]
    wrong: dict[str, int]
    cores: float

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.seconds[THEIRS] / self.seconds[OURS]


class Sliced(NamedTuple):
    """A forward pass with experts that compute: seconds by the number of parts."""

    gate: str
    seconds: dict[str, float]

    @property
    def ratio(self) -> float:
        """How many times faster the slowest of several parts is than one part."""
        one, *others = (self.seconds[str(parts)] for parts in PARTS)
        return one / max(others)


class Bytes(NamedTuple):
    """The bytes between hosts of one forward pass, by way."""

    gate: str
    between: dict[str, int]

    @property
    def ratio(self) -> float:
        """How many times fewer the hierarchical way sends."""
        return self.between[FLAT] / self.between[HIERARCHICAL]


class Found(NamedTuple):
    """What a job has found on its number of ranks."""

    ranks: int
    dispatched: list[Dispatched]
    sliced: list[Sliced]
    hosts: list[Bytes]

    @classmethod
    def of(cls, ranks: int, result: Mapping[str, Any]) -> Found:
        """From the JSON that the job wrote; of a job that failed, nothing."""
        return cls(
            ranks,
            [Dispatched(**case) for case in result.get("dispatched", [])],
            [Sliced(**case) for case in result.get("sliced", [])],
            [Bytes(**case) for case in result.get("hosts", [])],
        )


class Goal(NamedTuple):
    """A bound that a ratio must exceed, and what was found of it."""

    what: str
    least: float
    found: float

    @property
    def is_met(self) -> bool:
        """Whether the ratio is greater than the bound."""
        return self.found > self.least


def goals(found: Iterable[Found]) -> Iterator[Goal]:
    """Yield what is demanded.  Of one expert for each token, no fewer bytes between hosts are."""
    for job in found:
        on = f"on {job.ranks} ranks"
        for case in job.dispatched:
            yield Goal(f"{case.gate} {on}: {THEIRS} / ours", FASTER, case.ratio)
        for sliced in job.sliced:
            yield Goal(f"{sliced.gate} {on}: one part / several", 1 - NOISE, sliced.ratio)
        for case_of_hosts in job.hosts:
            if case_of_hosts.gate != GATES[0]:
                yield Goal(
                    f"{case_of_hosts.gate} {on}: bytes, {FLAT} / {HIERARCHICAL}",
                    1.0,
                    case_of_hosts.ratio,
                )


# Tables


def tables(found: Sequence[Found]) -> Iterator[tuple[str, Table]]:
    """Yield title and table of what was measured."""
    yield "Dispatch and combine, experts copy: ms", dispatch_table(found)
    yield "Forward with experts of two linear layers, in parts: ms", slice_table(found)
    if any(job.hosts for job in found):
        yield f"Bytes between hosts of {HOSTS} ranks in one forward pass", host_table(found)


def dispatch_table(found: Iterable[Found]) -> Table:
    """One line for each gate and number of ranks."""
    table = table_with("gate", numbers=["ranks", THEIRS, OURS, "ratio", "cores", "wrong"])
    for job in found:
        for case in job.dispatched:
            cells = [ms(case.seconds[THEIRS]), ms(case.seconds[OURS]), f"{case.ratio:.2f}"]
            checks = [f"{case.cores:.2f}", str(sum(case.wrong.values()))]
            table.add_row(case.gate, str(job.ranks), *cells, *checks)
    return table


def slice_table(found: Iterable[Found]) -> Table:
    """One line for each gate and number of ranks, with a column for each number of parts."""
    table = table_with("gate", numbers=["ranks", *(f"parts {n}" for n in PARTS), "ratio"])
    for job in found:
        for case in job.sliced:
            cells = [ms(seconds) for seconds in case.seconds.values()]
            table.add_row(case.gate, str(job.ranks), *cells, f"{case.ratio:.2f}")
    return table


def host_table(found: Iterable[Found]) -> Table:
    """One line for each gate."""
    table = table_with("gate", numbers=["ranks", FLAT, HIERARCHICAL, "ratio"])
    for job in found:
        for case in job.hosts:
            sent = (str(case.between[way]) for way in (FLAT, HIERARCHICAL))
            table.add_row(case.gate, str(job.ranks), *sent, f"{case.ratio:.2f}")
    return table


def goal_table(found: Iterable[Goal]) -> Table:
    """One line for each goal; those missed in red."""
    table = table_with("goal", numbers=["more than", "found", "verdict"])
    for each in found:
        verdict, style = ("met", None) if each.is_met else ("missed", "bold red")
        table.add_row(each.what, f"{each.least:.2f}", f"{each.found:.2f}", verdict, style=style)
    return table


def ms(seconds: float) -> str:
    """Seconds as text, in milliseconds."""
    return f"{seconds * 1e3:.2f}"
