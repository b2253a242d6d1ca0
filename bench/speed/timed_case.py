"""What the jobs of `bench speed` find: seconds of each contender of a case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ENOUGH = 0.97  # of the cores: with less a case was disturbed


class Timed(NamedTuple):
    """A case: the selected algorithm, and seconds and wrong elements of each contender."""

    collective: str
    size: int  # bytes of the whole vector
    algorithm: str
    seconds: dict[str, float]
    wrong: dict[str, int]
    cores: float  # the fraction of the cores that the ranks had


Times = Mapping[tuple[str, str, int], Timed]  # by job, collective and size


def less_disturbed(one: Timed, other: Timed) -> Timed:
    """Return the timing in which the ranks had more of the cores; all that was wrong counts."""
    wrong = {name: one.wrong[name] + other.wrong[name] for name in one.wrong}
    return max(one, other, key=lambda timed: timed.cores)._replace(wrong=wrong)
