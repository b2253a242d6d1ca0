"""The algorithms that can run a case."""

from __future__ import annotations

from bench.workloads.collective import Case
from collectives import algorithms
from collectives.schedule.contracts import SPECS
from collectives.selection import select


def check_schedule(case: Case, name: str) -> None:
    """Raise ValueError or ScheduleError if an algorithm cannot run this case after all."""
    algorithm, options, *_ = select.choose(
        case.collective, name, case.size, case.num_bytes, topology=case.topology
    )
    root = case.root if SPECS[case.collective].is_rooted else None
    algorithm.schedule(case.rank, case.size, root, **options)


def every_algorithm(collective: str, size: int) -> list[str]:
    """Return the names of those that can run on so many ranks."""
    names = algorithms.names(collective)
    return [name for name in names if algorithms.info(collective, name).serves(size)]
