"""What one case of a job took, side by side: seconds of each contender."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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
