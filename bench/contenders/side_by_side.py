"""Times contenders on the same buffers, side by side, and then checks one run of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from bench.contenders.contender import Contender
from bench.timing.interleaved import SMALL, Effort, raced
from bench.timing.quartiles import Samples
from bench.workloads.collective import Buffers, Case, Check


class Outcome(NamedTuple):
    """What comes of a contender: its samples, and wrong elements on all ranks.

    There are no samples if an attempt failed, and no wrong elements if none was checked.
    """

    samples: Samples | None
    wrong: int | None

    @property
    def seconds(self) -> float:
        """The time of a call: the median of the slowest rank."""
        assert self.samples is not None, "only an attempt can fail"
        return self.samples.slowest


FAILED = Outcome(None, None)


def outcomes(
    case: Case,
    buffers: Buffers,
    contenders: Sequence[Contender],
    effort: Effort,
    *,
    checks: int = 1,
) -> list[Outcome]:
    """Return what comes of each contender, the same on every rank.

    The results of some runs of each, `checks`, are checked.  Contenders are freed.
    """
    runs = [contender.run for contender in contenders]
    attempts = [contender.attempt for contender in contenders]
    is_small, end = case.num_bytes < SMALL, case.backend.synchronize
    samples = raced(runs, attempts, buffers.x, is_small=is_small, effort=effort, end=end)
    results = [Outcome(timing, None) for timing in samples]
    if checks:
        check = Check(case)
        results = [
            checked(check, buffers, contender, timing, checks) if timing is not None else FAILED
            for contender, timing in zip(contenders, samples, strict=True)
        ]
    for contender in contenders:
        contender.free()
    return results


def checked(
    check: Check, buffers: Buffers, made: Contender, samples: Samples, checks: int
) -> Outcome:
    """Return the outcome after the first run that has wrong elements, of so many runs."""

    def num_wrong() -> int:
        check.prepare(buffers)
        made.run()
        return check.num_wrong(made.result)

    wrong = 0
    while checks and not wrong:
        if (mine := made.attempt(num_wrong)) is None:
            return FAILED
        wrong, checks = int(MPI.COMM_WORLD.allreduce(mine)), checks - 1
    return Outcome(samples, wrong)
