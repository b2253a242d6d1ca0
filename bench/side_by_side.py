"""Times contenders on the same buffers, side by side, and then checks one run of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from bench.case import Buffers, Case, num_wrong, prepare
from bench.timing import SMALL, Effort, times
from bench.ways import Contender


class Outcome(NamedTuple):
    """Of one contender: seconds per call, and wrong elements on all ranks (None: not checked)."""

    seconds: float
    wrong: int | None


def outcomes(
    case: Case,
    buffers: Buffers,
    contenders: Sequence[Contender],
    effort: Effort,
    *,
    is_checked: bool = True,
) -> list[Outcome]:
    """What comes of each contender, the same on every rank.  They are freed."""
    runs, is_small = [each.run for each in contenders], case.num_bytes < SMALL
    seconds = times(runs, buffers.x, is_small=is_small, effort=effort)
    wrong = [_wrong(case, buffers, each) if is_checked else None for each in contenders]
    for each in contenders:
        each.free()
    return [Outcome(*found) for found in zip(seconds, wrong, strict=True)]


def _wrong(case: Case, buffers: Buffers, made: Contender) -> int:
    """Wrong elements on all ranks after one run."""
    prepare(case, buffers)
    made.run()
    return int(MPI.COMM_WORLD.allreduce(num_wrong(case, made.result)))
