"""Where the elements of a parameter are: which box of it each rank of a mesh has.

Flat arrays and batches have contiguous parts, as even as possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

from parallel.mesh.mesh import AXES, Mesh

Shape: TypeAlias = tuple[int, ...]
Split: TypeAlias = tuple[int, str] | tuple[int, str, int]


@lru_cache(maxsize=4096)
def span(total: int, num_ranks: int, rank: int) -> slice:
    """Return the part of ``range(total)`` that belongs to `rank`, as `even_counts` divides it."""
    size, num_larger = divmod(total, num_ranks)
    start = rank * size + min(rank, num_larger)
    return slice(start, start + size + (rank < num_larger))


def length(part: slice) -> int:
    """Return the number of elements of a slice with explicit start and stop."""
    return int(part.stop - part.start)


def split(x: Any, sizes: Iterable[int]) -> list[Any]:
    """Return views of consecutive parts of a 1-d array, of the given sizes."""
    return [x[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


class Box(NamedTuple):
    """Elements ``start[i] : start[i] + shape[i]`` of every dimension i of an array."""

    start: Shape
    shape: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in the array."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Return the box of the elements in both boxes; None if there are none."""
        both = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(self.slices, other.slices, strict=True)
        ]
        shape = tuple(map(length, both))
        return Box(tuple(part.start for part in both), shape) if all(n > 0 for n in shape) else None

    def within(self, other: Box) -> Box:
        """Return this box as a box of the array that contains the `other` box alone."""
        return Box(tuple(a - b for a, b in zip(self.start, other.start, strict=True)), self.shape)


@dataclass(frozen=True)
class Placement:
    """The shape of a parameter, and how the ranks of a mesh divide it.

    Attributes
    ----------
    shape : tuple of int
        The shape of the whole parameter.
    splits : tuple of (int, str) or (int, str, int)
        Dimensions and axes of a mesh: the ranks along the axis divide the dimension, as evenly as
        possible; or, with a third number, in whole blocks of so many elements.  Ranks along all
        other axes have the same box.  Raises ValueError for a dimension or an axis that does not
        exist, for an axis that occurs twice, and for blocks that do not divide the dimension.
    partial : tuple of str
        Axes along which ranks have the same box, and gradients that are parts of a sum.  (Axes
        along which ranks compute different tokens belong to the sharding, and are not here.)
        Raises ValueError for an axis that does not exist or that divides the parameter.

    Examples
    --------
    >>> import collectives
    >>> from parallel import Mesh, Placement
    >>> by_rows = Placement((5, 3), splits=((0, "tensor"),))
    >>> def box(comm):
    ...     return by_rows.box(Mesh(comm, data=2, tensor=2))
    >>> print(*collectives.run(box, size=4)[2:])
    Box(start=(0, 0), shape=(3, 3)) Box(start=(3, 0), shape=(2, 3))
    """

    shape: Shape
    splits: tuple[Split, ...] = field(default=(), kw_only=True)
    partial: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        axes = self.split_axes
        for dim, axis, *block in self.splits:
            if axis not in AXES:
                raise ValueError(f"there is no axis {axis!r}; choose from {', '.join(AXES)}")
            if axes.count(axis) > 1:
                raise ValueError(f"splits has the axis {axis!r} twice: it divides one dimension")
            if not isinstance(dim, int) or not 0 <= dim < len(self.shape):
                raise ValueError(f"splits has the dimension {dim!r} of a shape {self.shape}")
            if block and self.shape[dim] % block[0]:
                raise ValueError(f"blocks of {block[0]} do not divide {self.shape[dim]} elements")
        for axis in self.partial:
            if axis not in AXES or axis in axes:
                raise ValueError(f"partial has {axis!r}: it must be an axis that divides nothing")

    @property
    def split_axes(self) -> list[str]:
        """The axes along which ranks divide the parameter."""
        return [axis for _, axis, *_ in self.splits]

    @property
    def size(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)

    def box(self, mesh: Mesh, rank: int | None = None) -> Box:
        """Return the elements that a `rank` of a `mesh` has, by default this rank."""
        start, shape = [0] * len(self.shape), list(self.shape)
        for dim, axis, *block in self.splits:
            if axis in mesh.axes:
                unit = block[0] if block else 1
                part = span(shape[dim] // unit, mesh.axes[axis], mesh.index(axis, rank))
                start[dim] += unit * part.start
                shape[dim] = unit * length(part)
        return Box(tuple(start), tuple(shape))


class Piece(NamedTuple):
    """A box of a whole parameter, and where its elements are in a part of a flat array."""

    name: str
    box: Box
    flat: slice


def pieces_of(boxes: Mapping[str, Box], part: slice) -> Iterator[Piece]:
    """Yield the pieces in a `part` of a flat array, in which `boxes` follow each other."""
    start = 0
    for name, (offset, shape) in boxes.items():
        size = math.prod(shape)
        low, high = max(part.start, start), min(part.stop, start + size)
        at = low
        for box in boxes_of_range(shape or (1,), low - start, high - start):
            moved = tuple(a + b for a, b in zip(box.start, offset or (0,), strict=True))
            first, at = at, at + math.prod(box.shape)
            yield Piece(name, Box(moved, box.shape), slice(first - part.start, at - part.start))
        start += size


def boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements `start` to `stop` of an array: at most 2 d - 1, in order."""
    if start >= stop:
        return
    row = math.prod(shape[1:])
    first = min(-(-start // row) * row, stop)  # the elements from first to last are whole rows
    last = max(stop // row * row, first)
    yield from _in_row(shape, start, first)
    if first < last:
        yield Box((first // row, *(0,) * (len(shape) - 1)), ((last - first) // row, *shape[1:]))
    yield from _in_row(shape, last, stop)


def _in_row(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    index = start // row
    for box in boxes_of_range(shape[1:], start - index * row, stop - index * row):
        yield Box((index, *box.start), (1, *box.shape))
