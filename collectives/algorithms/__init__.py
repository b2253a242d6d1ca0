"""Every algorithm: one file per collective, one function per algorithm.

    names("all_reduce")                                the names, in the order of the file
    info("all_reduce", "ring")                         restrictions, formulas, source
    schedule("all_reduce", "ring", rank=2, size=5)     the rounds of one rank
    grid("all_reduce", "ring", size=5)                 the rounds of all ranks, as a table of text
    verify("all_reduce", "ring", size=5)               prove it, or raise ScheduleError
    register("all_reduce")                             add one of your own

Nothing here knows bytes, buffers, offsets, arrays or MPI.
"""

from __future__ import annotations

from collectives.algorithms import (  # noqa: F401 - importing a file registers its algorithms
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    exscan,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)
from collectives.algorithms.algorithm import Algorithm
from collectives.algorithms.extending import register
from collectives.algorithms.formulas import Formula, Option
from collectives.algorithms.registry import REGISTRY
from collectives.schedule import SPECS, Schedule
from collectives.schedule import rounds as vocabulary

__all__ = [
    "Algorithm",
    "Formula",
    "Option",
    "collectives",
    "grid",
    "info",
    "names",
    "register",
    "schedule",
    "verify",
]


def collectives() -> list[str]:
    """Return the names of all collectives, such as "all_reduce"."""
    return list(SPECS)


def names(collective: str) -> list[str]:
    """Return the names of the algorithms of a collective.  Raises ValueError for an unknown one."""
    if collective not in REGISTRY:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(REGISTRY)}")
    return list(REGISTRY[collective])


def info(collective: str, name: str) -> Algorithm:
    """Return the `Algorithm` of this collective and name: formulas, restrictions, source.

    Raises ValueError for an unknown `collective` or `name`.
    """
    if name not in names(collective):
        known = ", ".join(REGISTRY[collective])
        raise ValueError(f"unknown algorithm {name!r} for {collective}; known: {known}")
    return REGISTRY[collective][name]


def schedule(
    collective: str, name: str, *, rank: int, size: int, root: int | None = None, **options: Option
) -> Schedule:
    """Return the rounds of one rank, as a list of tuples of `collectives.schedule.Operation`.

        schedule("all_reduce", "ring", rank=2, size=5)

    `collective` and `name` say which algorithm, `rank` and `size` which rank of how many.  `root`
    is 0 if it is not given and the collective has one; `options` are those of the algorithm.
    Raises ValueError for a rank, size, root or option that the algorithm cannot serve.
    """
    return info(collective, name).schedule(rank, size, root, **options)


def grid(collective: str, name: str, size: int, root: int | None = None, **options: Option) -> str:
    """Return the rounds of all ranks as text: a row for each rank, a column for each round.

    The arguments `collective`, `name`, `size`, `root` and `options` are those of `schedule`.
    """
    entry = info(collective, name)
    return vocabulary.grid([entry.schedule(rank, size, root, **options) for rank in range(size)])


def verify(
    collective: str, name: str, size: int, root: int | None = None, **options: Option
) -> None:
    """Prove an algorithm for `size` ranks and `root`; raise `ScheduleError` if it is wrong.

    The message of the error ends with the grid, in which the wrong cell is marked.  The arguments
    `collective`, `name`, `size`, `root` and `options` are those of `schedule`.
    """
    info(collective, name).verify(size, root, **options)
