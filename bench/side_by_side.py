"""Times contenders on the same buffers, side by side, and then checks one run of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from bench.case import Buffers, Case, num_wrong, prepare
from bench.samples import Samples
from bench.timing import SMALL, Effort, sampled
from bench.ways import Contender


class Outcome(NamedTuple):
    """Of one contender: its samples, and wrong elements on all ranks (None: not checked)."""

    samples: Samples
    wrong: int | None

    @property
    def seconds(self) -> float:
        """The time of a call: the median of the slowest rank."""
        return self.samples.slowest


def outcomes(
    case: Case,
    buffers: Buffers,
    contenders: Sequence[Contender],
    effort: Effort,
    *,
    checks: int = 1,
) -> list[Outcome]:
    """What comes of each contender, the same on every rank.  They are freed.

    `checks`: runs of each contender whose results are checked.
    """
    runs, is_small = [each.run for each in contenders], case.num_bytes < SMALL
    end = case.backend.synchronize
    samples = sampled(runs, buffers.x, is_small=is_small, effort=effort, end=end)
    wrong = [_wrong(case, buffers, each, checks) if checks else None for each in contenders]
    for each in contenders:
        each.free()
    return [Outcome(*found) for found in zip(samples, wrong, strict=True)]


def _wrong(case: Case, buffers: Buffers, made: Contender, checks: int) -> int:
    """Wrong elements on all ranks after the first run that has any, of so many runs."""
    for _ in range(checks):
        prepare(case, buffers)
        made.run()
        if wrong := int(MPI.COMM_WORLD.allreduce(num_wrong(case, made.result))):
            return wrong
    return 0
