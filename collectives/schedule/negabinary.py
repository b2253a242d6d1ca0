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
    """The Bine tree on virtual ranks (root 0), far children first; yields the edges at `vrank`.

    The line begins such that the root stands one third into it, and goes around the ring.  In each
    round every line is cut in halves.  The root keeps the half in which it stands.  The subtree
    below a child is the other half.
    """
    start = -(size // 3) if ceil_log2(size) % 2 else size // 3 + 1 - size
    line, root = range(start, start + size), 0
    here = line[(vrank - start) % size]
    for _ in range(ceil_log2(size)):
        if len(line) == 1:
            yield ()
            continue
        kept, other, child = _halves(line, root)
        if here in (root, child):
            yield (Edge(root % size, child % size, [rank % size for rank in other]),)
        else:
            yield ()
        line, root = (kept, root) if here in kept else (other, child)


def _halves(line: range, root: int) -> tuple[range, range, int]:
    """The half of a line that holds its root, the other half, and the root of that one."""
    num_kept = (len(line) + 1) // 2
    if root in line[:num_kept]:
        other = line[num_kept:]
        return line[:num_kept], other, other[len(other) // 3]
    other = line[:-num_kept]
    return line[-num_kept:], other, other[-1 - len(other) // 3]


# Butterflies, for an even number of ranks


def distance(step: int) -> int:
    """1 - 2 + 4 - 8 ... with a term more in every step: 1, -1, 3, -5, 11, -21, ..."""
    found: int = (1 - (-2) ** (step + 1)) // 3
    return found


def partner(rank: int, size: int, step: int) -> int:
    """The partner in a step of a butterfly: even ranks go `distance` ahead, odd ones as far back.

    With an even number of ranks, each is its partner's partner.
    """
    return (rank + (distance(step) if rank % 2 == 0 else -distance(step))) % size


def window(rank: int, num_steps: int) -> range:
    """The 2**num_steps ranks that `rank` reaches in the first steps: they are consecutive.

    An even rank reaches from 2 + 8 + 32 + ... behind it to 1 + 4 + 16 + ... ahead; an odd one is
    mirrored.  Numbers below 0 and from the number of ranks on go around the ring.
    """
    behind = sum(2**digit for digit in range(1, num_steps, 2))
    ahead = 2**num_steps - 1 - behind
    first = rank - (behind if rank % 2 == 0 else ahead)
    return range(first, first + 2**num_steps)


def is_inside(rank: int, window: range, size: int) -> bool:
    """Whether a rank is in a window on the ring."""
    return (rank - window.start) % size < len(window)


def without(window: range, other: range, size: int) -> list[int]:
    """The ranks of a window, in its order, that are not in the other one."""
    return [rank % size for rank in window if not is_inside(rank, other, size)]


def place(rank: int, size: int) -> int:
    """A new number for each rank, for a power of two of ranks.

    After each step of a butterfly, the ranks that `rank` reaches in the steps left have consecutive
    numbers, of which the number of each rank is one: first all, then a half, then a quarter.
    """
    num_bits = ceil_log2(size)
    even = rank if rank % 2 == 0 else partner(rank, size, num_bits - 1)
    bits = (even // 2 >> bit & 1 for bit in range(num_bits - 1))
    return sum(bit * size >> number + 1 for number, bit in enumerate(bits)) + rank % 2


@lru_cache(maxsize=8)
def routes(size: int) -> tuple[dict[int, int], ...]:
    """How a block moves from rank 0 to each rank, with the last step of a butterfly first.

    For each rank, maps each step in which the block moves to the rank that has it before.
    """
    found = []
    for destination in range(size):
        holder, moves = 0, {}
        for step in reversed(range(ceil_log2(size))):
            if not is_inside(destination, window(holder, step), size):
                moves[step] = holder
                holder = partner(holder, size, step)
        found.append(moves)
    return tuple(found)


def num_hops(size: int) -> int:
    """The number of moves of the `size` blocks of one rank, one for each rank."""
    return sum(map(len, routes(size)))
