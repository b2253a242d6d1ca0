"""The results of jobs: seconds of each contender of a case, and the hidden share of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Timed(NamedTuple):
    """A case: the selected algorithm, and seconds and wrong elements of each contender.

    `size`: bytes of the whole vector.  `cores`: the fraction of the cores that the ranks had.
    """

    collective: str
    size: int
    algorithm: str
    seconds: dict[str, float]
    wrong: dict[str, int]
    cores: float


ENOUGH = 0.97  # of the cores: with less a case was disturbed
Times = Mapping[tuple[str, str, int], Timed]  # by job, collective and size


def less_disturbed(one: Timed, other: Timed) -> Timed:
    """That of two timings in which the ranks had more of the cores; all that was wrong counts."""
    wrong = {name: one.wrong[name] + other.wrong[name] for name in one.wrong}
    return max(one, other, key=lambda timed: timed.cores)._replace(wrong=wrong)


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


def overlaps(result: Mapping[str, Any]) -> list[Overlap]:
    """What a job wrote to its JSON file."""
    found = result.get("ways", [])
    return [Overlap(**{name: way[name] for name in Overlap._fields}) for way in found]
