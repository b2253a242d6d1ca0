"""What a call will send, from the programs of all ranks, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.programs import Counts, Program, compile_call
from collectives.schedule import Topology
from collectives.selection.select import choose, num_bytes_of


class Prediction(NamedTuple):
    """What all ranks send in one call.

    Attributes
    ----------
    messages, bytes : array
        The messages and bytes from each rank (row) to each rank (column), int64 (size, size).
    scratch : tuple of int
        The bytes of scratch memory that each rank needs.
    """

    messages: NDArray[np.int64]
    bytes: NDArray[np.int64]
    scratch: tuple[int, ...]


def predict(
    collective: str,
    size: int,
    counts: int | Sequence[Any],
    *,
    itemsize: int = 1,
    algorithm: str | None = None,
    root: int = 0,
    in_place: bool = False,
    topology: Topology | None = None,
    on_device: bool = False,
) -> Prediction:
    """Return what the ranks will send in a call, without sending anything.

    Parameters
    ----------
    collective : str
    size : int
        The number of ranks.
    counts : int or sequence
        The elements of the vector; for `scatter`, `gather`, `all_gather` and `reduce_scatter` those
        of each rank's part; for `all_to_all` a table from each rank to each.
    itemsize : int
        The bytes of an element.
    algorithm : str, optional
        Its name; None: as a call chooses it without measured decisions.
    root : int
        The root of a rooted collective.
    in_place : bool
        Whether each rank's input and output share memory: they are the same vector, or one is this
        rank's part of the other.  It changes the scratch memory, and no message.
    topology : Topology, optional
        The hosts of the ranks; None: all are on one host.
    on_device : bool
        Whether the ranks read each other's arrays on GPUs; see `choose`.

    Returns
    -------
    Prediction
        It is exact for any algorithm and for uneven parts.

    Raises
    ------
    TypeError, ValueError
        If the algorithm does not exist or cannot serve.

    Examples
    --------
    >>> import collectives
    >>> collectives.predict("all_reduce", 2, 1000, itemsize=8, algorithm="ring").bytes
    array([[   0, 8000],
           [8000,    0]])
    """
    programs_by_rank = programs(
        collective,
        size,
        counts,
        itemsize=itemsize,
        algorithm=algorithm,
        root=root,
        in_place=in_place,
        topology=topology,
        on_device=on_device,
    )
    sent = np.zeros((2, size, size), np.int64)
    for rank, program in enumerate(programs_by_rank):
        for _, peer, num_bytes, segments in program.sent:
            sent[:, rank, peer] += segments, num_bytes
    return Prediction(sent[0], sent[1], tuple(program.num_scratch for program in programs_by_rank))


def programs(
    collective: str,
    size: int,
    counts: int | Sequence[Any],
    *,
    itemsize: int = 1,
    algorithm: str | None = None,
    root: int = 0,
    in_place: bool = False,
    topology: Topology | None = None,
    on_device: bool = False,
    ranks: Iterable[int] | None = None,
) -> list[Program]:
    """Return the programs of all ranks in a call, or of some `ranks`.

    The other arguments and the errors are those of `predict`.
    """
    elements = _hashable(counts)
    num_bytes = num_bytes_of(elements, itemsize)
    chosen = choose(
        *(collective, algorithm, size, num_bytes),
        topology=topology,
        itemsize=itemsize,
        on_device=on_device,
    )
    spec = chosen.spec(elements, itemsize, root)

    def compiled(rank: int) -> Program:
        aliasing = _offset(collective, elements, rank) if in_place else spec.aliasing
        return compile_call(spec._replace(aliasing=aliasing), rank, size)

    return [compiled(rank) for rank in (range(size) if ranks is None else ranks)]


def _offset(collective: str, counts: Counts, rank: int) -> int:
    """Return the offset of a rank's output from its input, if one is its part of the other."""
    if isinstance(counts, int):
        return 0
    if collective not in ("all_gather", "reduce_scatter"):
        raise ValueError(f"{collective} divides its arrays in a way that is never in place")
    start = sum(count for count in counts[:rank] if isinstance(count, int))
    return start if collective == "reduce_scatter" else -start


def _hashable(counts: int | Sequence[Any]) -> Any:
    """Return counts as the number, tuple, or tuple of tuples of a `CallSpec`."""
    return counts if isinstance(counts, int) else tuple(map(_hashable, counts))
