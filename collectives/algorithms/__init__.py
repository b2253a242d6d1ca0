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
    """Return the names of the algorithms of a collective.

    Raises
    ------
    ValueError
        If the collective is unknown.
    """
    if collective not in REGISTRY:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(REGISTRY)}")
    return list(REGISTRY[collective])


def info(collective: str, name: str) -> Algorithm:
    """Return the `Algorithm` of this collective and name: formulas, restrictions, source.

    Raises
    ------
    ValueError
        If `collective` or `name` is unknown.
    """
    if name not in names(collective):
        known = ", ".join(REGISTRY[collective])
        raise ValueError(f"unknown algorithm {name!r} for {collective}; known: {known}")
    return REGISTRY[collective][name]


def schedule(
    collective: str, name: str, *, rank: int, size: int, root: int | None = None, **options: Option
) -> Schedule:
    """Return the rounds of one rank, as a list of tuples of `collectives.schedule.Operation`.

    Parameters
    ----------
    collective, name : str
        Which algorithm.
    rank, size : int
        Which rank, of how many.
    root : int, optional
        The root, if the collective has one; by default rank 0.
    **options : int or Topology
        The options of the algorithm.

    Raises
    ------
    ValueError
        If the algorithm cannot serve this rank, size, root or option.

    Examples
    --------
    >>> from collectives import algorithms
    >>> for operations in algorithms.schedule("all_gather", "ring", rank=2, size=3):
    ...     print([(op.kind, op.peer, op.blocks) for op in operations])
    [('send', 1, (2,)), ('recv', 0, (0,))]
    [('send', 1, (0,)), ('recv', 0, (1,))]
    """
    return info(collective, name).schedule(rank, size, root, **options)


def grid(collective: str, name: str, size: int, root: int | None = None, **options: Option) -> str:
    """Return the rounds of all ranks as text: a row for each rank, a column for each round.

    The arguments `collective`, `name`, `size`, `root` and `options` are as in `schedule`.

    Examples
    --------
    >>> from collectives import algorithms
    >>> print(algorithms.grid("all_gather", "ring", size=3))
    rank  round 0    round 1
    0     >2:0 <1:1  >2:1 <1:2
    1     >0:1 <2:2  >0:2 <2:0
    2     >1:2 <0:0  >1:0 <0:1
    """
    entry = info(collective, name)
    return vocabulary.grid([entry.schedule(rank, size, root, **options) for rank in range(size)])


def verify(
    collective: str, name: str, size: int, root: int | None = None, **options: Option
) -> None:
    """Prove an algorithm for `size` ranks and `root`.

    The arguments `collective`, `name`, `size`, `root` and `options` are as in `schedule`.

    Raises
    ------
    ScheduleError
        If the algorithm is wrong.  The message ends with the grid, with the wrong cell marked.
    """
    info(collective, name).verify(size, root, **options)
