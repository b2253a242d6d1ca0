"""What ledgers, the flight recorder and errors show of a run: its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives.diagnostics import Position, Recorder
from collectives.programs import CallSpec
from collectives.schedule import SPECS, grid

_MAX_ROWS = 16  # ranks whose schedules a time-out shows
_MAX_ROUNDS = 4  # rounds that it shows before the current one, and after it


class Shown(NamedTuple):
    """What is shown of a run.

    `num_rounds`: as text.  `position`: returns a text that shows a position in the schedules of the
    ranks.
    """

    recorder: Recorder
    num_rounds: str
    position: Callable[[Position], str] | None = None


def schedule_grid(spec: CallSpec, rank: int, size: int, position: Position) -> str:
    """The schedules, with the cell where this rank waits; of many ranks, only those concerned."""
    algorithm, here = spec.algorithm, position.round
    root = spec.root if SPECS[spec.collective].is_rooted else None
    with_peers = {rank, *(waiting.peer for waiting in position.waiting_for)}
    ranks = range(size) if size <= _MAX_ROWS else sorted(with_peers)
    schedules = {each: algorithm.schedule(each, size, root, **dict(spec.options)) for each in ranks}
    return grid(schedules, (rank, here), range(max(0, here - _MAX_ROUNDS), here + _MAX_ROUNDS))
