"""Where the elements of a parameter are: which box of it each rank of a mesh has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from collectives import even_counts
from parallel.mesh import Mesh

Shape: TypeAlias = tuple[int, ...]


class Box(NamedTuple):
    """Elements ``start[i] : start[i] + shape[i]`` of every dimension i of an array."""

    start: Shape
    shape: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in the array."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Return the elements of both; None if there are none."""
        both = [
            (max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(self.slices, other.slices, strict=True)
        ]
        start, shape = tuple(a for a, _ in both), tuple(stop - a for a, stop in both)
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def within(self, other: Box) -> Box:
        """Return this box in the array that contains the `other` one alone."""
        return Box(tuple(a - b for a, b in zip(self.start, other.start, strict=True)), self.shape)


@dataclass(frozen=True)
class Placement:
    """The shape of a parameter, and how the ranks of a mesh divide it.

    Attributes
    ----------
    shape : tuple of int
        Of the whole parameter.
    splits : tuple of (int, str)
        Dimensions and axes of a mesh: the ranks along the axis divide the dimension, as evenly as
        possible.  Ranks along all other axes have the same box.

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
    splits: tuple[tuple[int, str], ...] = field(default=(), kw_only=True)

    @property
    def size(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)

    def box(self, mesh: Mesh, rank: int | None = None) -> Box:
        """Return the elements that a `rank` of a `mesh` has, by default this rank."""
        start, shape = [0] * len(self.shape), list(self.shape)
        for dim, axis in self.splits:
            if axis in mesh.axes:
                counts, index = even_counts(shape[dim], mesh.axes[axis]), mesh.index(axis, rank)
                start[dim] += sum(counts[:index])
                shape[dim] = counts[index]
        return Box(tuple(start), tuple(shape))


class Piece(NamedTuple):
    """A box of a whole parameter, and where its elements are in a part of a flat array."""

    name: str
    box: Box
    flat: slice


def pieces_of(boxes: Mapping[str, Box], part: slice) -> Iterator[Piece]:
    """Yield what a `part` of a flat array contains, in which `boxes` follow each other."""
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
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # a part of one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start % row else 0)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.start), (1, *box.shape))
