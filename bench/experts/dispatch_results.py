"""The cases of the moe command, the goals for them, and the tables of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from collectives.console import Number, Table

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

    `cores` is the fraction of the cores that the ranks had.
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


class JobResult(NamedTuple):
    """What a job has found on its number of ranks."""

    ranks: int
    dispatched: list[Dispatched]
    sliced: list[Sliced]
    hosts: list[Bytes]

    @classmethod
    def of(cls, ranks: int, result: Mapping[str, Any]) -> JobResult:
        """Return the JSON that the job wrote; nothing of a job that failed."""
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


def goals(jobs: Iterable[JobResult]) -> Iterator[Goal]:
    """Yield what is demanded: with one expert for each token, no fewer bytes between hosts."""
    for job in jobs:
        on = f"on {job.ranks} ranks"
        for case in job.dispatched:
            yield Goal(f"{case.gate} {on}: {THEIRS} / ours", FASTER, case.ratio)
        for sliced in job.sliced:
            yield Goal(f"{sliced.gate} {on}: one part / several", 1 - NOISE, sliced.ratio)
        for sent in job.hosts:
            if sent.gate != GATES[0]:
                yield Goal(f"{sent.gate} {on}: bytes, {FLAT} / {HIERARCHICAL}", 1.0, sent.ratio)


def tables(jobs: Sequence[JobResult]) -> dict[str, Table]:
    """Return the tables of what was measured by their titles, in ms or bytes."""
    columns = {"gate": "", "ranks": "d"}
    times, ratio = dict.fromkeys((THEIRS, OURS), ".2f"), {"ratio": ".2f"}
    dispatched = table(**columns, **times, **ratio, cores=".2f", wrong="d")
    sliced = table(**columns, **dict.fromkeys((f"parts {n}" for n in PARTS), ".2f"), **ratio)
    hosts = table(**columns, **dict.fromkeys((FLAT, HIERARCHICAL), "d"), **ratio)
    for job in jobs:
        for case in job.dispatched:
            taken = (1e3 * case.seconds[name] for name in (THEIRS, OURS))
            wrong = sum(case.wrong.values())
            dispatched.add(case.gate, job.ranks, *taken, case.ratio, case.cores, wrong)
        for sliced_case in job.sliced:
            taken = (1e3 * seconds for seconds in sliced_case.seconds.values())
            sliced.add(sliced_case.gate, job.ranks, *taken, sliced_case.ratio)
        for sent in job.hosts:
            between = (sent.between[way] for way in (FLAT, HIERARCHICAL))
            hosts.add(sent.gate, job.ranks, *between, sent.ratio)
    return {
        "Dispatch and combine, experts copy: ms": dispatched,
        "Forward with experts of two linear layers, in parts: ms": sliced,
        **(
            {f"Bytes between hosts of {HOSTS} ranks in one forward pass": hosts}
            if hosts.rows
            else {}
        ),
    }


def table(**forms: str) -> Table:
    """Return a table of columns with these heads and forms; a column of words has none."""
    return Table(*(Number(head, form) if form else head for head, form in forms.items()))


def goal_table(goals: Iterable[Goal]) -> Table:
    """Return a line for each goal; those missed in red."""
    made = table(goal="", **{"more than": ".2f", "found": ".2f"}, verdict="")
    for goal in goals:
        verdict = "met" if goal.is_met else "missed"
        made.add(goal.what, goal.least, goal.found, verdict, is_wrong=not goal.is_met)
    return made
