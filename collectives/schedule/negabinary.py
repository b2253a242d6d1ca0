"""Bine (binomial negabinary) trees and butterflies: partners a third nearer than binomial ones.

De Sensi et al., "Bine trees: enhancing collective operations by optimizing communication locality",
2025, and "Swing: short-cutting rings for higher bandwidth allreduce", 2024.  Distances are those on
a ring of all ranks.  A binomial tree cuts a line of ranks in halves and connects their first ranks.
A Bine tree connects ranks that stand one third into each half, counted from the cut, and are p/3
apart instead of p/2.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from collectives.schedule.trees import Edge, Edges, ceil_log2

# Trees, for any number of ranks


def tree(vrank: int, size: int) -> Iterator[Edges]:
    """Yield the edges at `vrank` of the Bine tree on virtual ranks (root 0), far children first.

    All ranks are a line around the ring that has the root one third from one of its ends.  In each
    round every line is cut in halves.  Its root keeps the half in which it stands, and a child gets
    the other half as its subtree.
    """
    # From which end does not matter; in this way powers of two have the trees of the paper.
    start = -(size // 3) if ceil_log2(size) % 2 else size // 3 + 1 - size
    line, root = range(start, start + size), 0
    here = line[(vrank - start) % size]
    for _ in range(ceil_log2(size)):
        if len(line) == 1:
            yield ()
            continue
        kept, other, child = halves(line, root)
        if here in (root, child):
            yield (Edge(root % size, child % size, [rank % size for rank in other]),)
        else:
            yield ()
        line, root = (kept, root) if here in kept else (other, child)


def halves(line: range, root: int) -> tuple[range, range, int]:
    """Return the half of a line with its root, the other half, and the root of that.

    The root of the other half is one third into it.
    """
    num_kept = (len(line) + 1) // 2
    if root in line[:num_kept]:
        other = line[num_kept:]
        return line[:num_kept], other, other[len(other) // 3]
    other = line[:-num_kept]
    return line[-num_kept:], other, other[-1 - len(other) // 3]


# Butterflies, for an even number of ranks


def distance(step: int) -> int:
    """Return 1 - 2 + 4 - 8 ... with a term more in every step: 1, -1, 3, -5, 11, -21, ..."""
    total: int = (1 - (-2) ** (step + 1)) // 3
    return total


def partner(rank: int, size: int, step: int) -> int:
    """Return the partner in a step of a butterfly.

    Even ranks go `distance` ahead, odd ones as far back.  With an even number of ranks, each is its
    partner's partner.
    """
    return (rank + (distance(step) if rank % 2 == 0 else -distance(step))) % size


def window(rank: int, num_steps: int) -> range:
    """Return the 2**num_steps consecutive ranks that `rank` reaches in the first steps.

    The steps are those of a butterfly.  An even rank reaches from 2 + 8 + 32 + ... behind it to 1 +
    4 + 16 + ... ahead; an odd one is mirrored.  Numbers below 0 and from the number of ranks on go
    around the ring.
    """
    behind = sum(2**digit for digit in range(1, num_steps, 2))
    ahead = 2**num_steps - 1 - behind
    first = rank - (behind if rank % 2 == 0 else ahead)
    return range(first, first + 2**num_steps)


def is_inside(rank: int, window: range, size: int) -> bool:
    """Return whether a rank is in a window on the ring."""
    return (rank - window.start) % size < len(window)


def without(window: range, other: range, size: int) -> list[int]:
    """Return the ranks of a window, in its order, that are not in the other one."""
    return [rank % size for rank in window if not is_inside(rank, other, size)]


def place(rank: int, size: int) -> int:
    """Return the number of the piece that belongs to `rank`, for a power of two of ranks.

    The ranks that `rank` can still reach are all before the first step of a butterfly, half of them
    after it, then a quarter.  Pieces are numbered so that those of such a set are consecutive.
    """
    num_steps = ceil_log2(size)
    even = rank if rank % 2 == 0 else partner(rank, size, num_steps - 1)
    bits = (even // 2 >> step & 1 for step in range(num_steps - 1))
    return sum(bit * size >> step + 1 for step, bit in enumerate(bits)) + rank % 2


@lru_cache(maxsize=8)
def routes(size: int) -> tuple[dict[int, int], ...]:
    """Return the ways of blocks from rank 0 to each rank, with the last step of a butterfly first.

    The way to a rank maps each step in which its block moves to the rank that sends it.
    """
    ways = []
    for destination in range(size):
        holder, moves = 0, {}
        for step in reversed(range(ceil_log2(size))):
            if not is_inside(destination, window(holder, step), size):
                moves[step] = holder
                holder = partner(holder, size, step)
        ways.append(moves)
    return tuple(ways)


def num_hops(size: int) -> int:
    """Return how many times the blocks of one rank move, all together, on these ways."""
    return sum(map(len, routes(size)))
