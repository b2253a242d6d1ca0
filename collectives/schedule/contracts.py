"""The contract of each collective: which rank has which blocks before it, and which after it.

Values need no line of their own.  A block that several ranks hold before is reduced: afterwards it
must be the combination of all those contributions (for a scan: of those that come first), each
exactly once.  A block that one rank holds before is moved.  The layout of in- and output follows as
well: a rank's blocks are consecutive, in the order given here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from collectives.schedule import trees
from collectives.schedule.rounds import Block


class Case(NamedTuple):
    """One instance of a collective.

    Attributes
    ----------
    size : int
        The number of ranks.
    root : int
        0 if the collective has none.
    num_pieces : int
        The pieces of the vector, or of every block where there is one for each rank.
    num_shards : int
        The number of logical shards of a reduction, of which each rank brings several; 0: each rank
        brings one contribution.
    """

    size: int
    root: int = 0
    num_pieces: int = 1
    num_shards: int = 0


class Piece(NamedTuple):
    """A part of a block that an algorithm cuts up: the `block`, and the `number` of the part."""

    block: Block
    number: int


BlocksOf = Callable[[int, Case], Sequence[Block]]


class Spec(NamedTuple):
    """A collective: the blocks rank r holds before and after it, and whether it reduces.

    Attributes
    ----------
    before, after : function
        Called with a rank and a `Case`; return the blocks in order.
    is_rooted : bool
        Whether it takes a root.
    is_reduction : bool
    has_pieces : bool
        Whether its blocks are numbered pieces of one vector (as many as the algorithm likes);
        otherwise there is one block per rank or per pair of ranks.
    takes : function, optional
        Called with `source` and `rank`; returns whether what `source` brings to a reduction is part
        of the rank's result.  None if it always is.
    """

    before: BlocksOf
    after: BlocksOf
    is_rooted: bool = False
    is_reduction: bool = False
    has_pieces: bool = False
    takes: Callable[[int, int], bool] | None = None


def _pieces(rank: int, case: Case) -> Sequence[Block]:
    return range(case.num_pieces)


def _after_first(rank: int, case: Case) -> Sequence[Block]:
    return _pieces(rank, case) if rank > 0 else ()


def _all_ranks(rank: int, case: Case) -> Sequence[Block]:
    return range(case.size)


def _own(rank: int, case: Case) -> Sequence[Block]:
    return (rank,)


def _from_me(rank: int, case: Case) -> Sequence[Block]:
    return [(rank, destination) for destination in range(case.size)]


def _to_me(rank: int, case: Case) -> Sequence[Block]:
    return [(source, rank) for source in range(case.size)]


def _at_root(blocks: BlocksOf) -> BlocksOf:
    return lambda rank, case: blocks(rank, case) if rank == case.root else ()


SPECS: dict[str, Spec] = {
    "broadcast": Spec(_at_root(_pieces), _pieces, is_rooted=True, has_pieces=True),
    "reduce": Spec(_pieces, _at_root(_pieces), is_rooted=True, is_reduction=True, has_pieces=True),
    "all_reduce": Spec(_pieces, _pieces, is_reduction=True, has_pieces=True),
    "scatter": Spec(_at_root(_all_ranks), _own, is_rooted=True),
    "gather": Spec(_own, _at_root(_all_ranks), is_rooted=True),
    "all_gather": Spec(_own, _all_ranks),
    "reduce_scatter": Spec(_all_ranks, _own, is_reduction=True),
    "all_to_all": Spec(_from_me, _to_me),
    "scan": Spec(_pieces, _pieces, is_reduction=True, has_pieces=True, takes=operator.le),
    "exscan": Spec(_pieces, _after_first, is_reduction=True, has_pieces=True, takes=operator.lt),
    # A barrier gathers the arrivals of all ranks; its blocks have no bytes.
    "barrier": Spec(_own, _all_ranks),
}


def before(collective: str, rank: int, case: Case) -> Sequence[Block]:
    """Return the blocks, in order, that `rank` holds before the collective.

    The blocks of a logical shard have its number as their label.
    """
    blocks = _cut(SPECS[collective], SPECS[collective].before(rank, case), case)
    if not case.num_shards:
        return blocks
    own = trees.groups(case.num_shards, case.size)[rank]
    return [(shard, block) for shard in own for block in blocks]


def after(collective: str, rank: int, case: Case) -> Sequence[Block]:
    """Return the blocks, in order, that `rank` must hold after the collective."""
    return _cut(SPECS[collective], SPECS[collective].after(rank, case), case)


def _cut(spec: Spec, blocks: Sequence[Block], case: Case) -> Sequence[Block]:
    if spec.has_pieces or case.num_pieces == 1:
        return blocks
    return [Piece(block, number) for block in blocks for number in range(case.num_pieces)]


def brought(collective: str, rank: int, case: Case) -> dict[Block, tuple[int, Block]]:
    """Return what `rank` brings under each name: the contribution (source, block).

    The source is the rank, or the logical shard.
    """
    names = before(collective, rank, case)
    if case.num_shards:
        return {name: cast("tuple[int, Block]", name) for name in names}
    return {name: (rank, name) for name in names}


def holders(collective: str, case: Case) -> dict[Block, list[int]]:
    """Return the ranks (or shards) that have each block before the collective, in order."""
    held: dict[Block, list[int]] = {}
    for rank in range(case.size):
        for source, block in brought(collective, rank, case).values():
            held.setdefault(block, []).append(source)
    return held


def contributions(collective: str, rank: int, sources: Sequence[int]) -> Sequence[int]:
    """Return the sources of a block, in order, that the result of `rank` takes."""
    takes = SPECS[collective].takes
    return sources if takes is None else [source for source in sources if takes(source, rank)]
