"""Boxes: the parts of parameters in which checkpoints are written and read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from parallel.nn import ParameterSpec, Shape


class Box(NamedTuple):
    """Elements ``start[i] : start[i] + shape[i]`` of every dimension i of an array."""

    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the elements of both; None if there are none."""
        starts = tuple(map(max, self.start, other.start))
        stops = tuple(map(min, self.stops(), other.stops()))
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, shape) if all(n > 0 for n in shape) else None

    def stops(self) -> Shape:
        """Return where it ends in every dimension."""
        return tuple(start + n for start, n in zip(self.start, self.shape, strict=True))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the index of this box in the array that contains the `other` one alone."""
        starts = (a - b for a, b in zip(self.start, other.start, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(starts, self.shape, strict=True))


class Piece(NamedTuple):
    """A box of a parameter, and where its elements are in its flat unit."""

    name: str
    box: Box
    flat: slice


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


def pieces_of(unit: str, specs: Mapping[str, ParameterSpec], part: slice) -> Iterator[Piece]:
    """Yield the boxes of the parameters in a `part` of a flat unit."""
    start = 0
    for key, spec in specs.items():
        low, high = max(part.start, start), min(part.stop, start + spec.size)
        at = low
        for box in boxes_of_range(spec.shape or (1,), low - start, high - start):
            yield Piece(f"{unit}.{key}", box, slice(at, at + box.size))
            at += box.size
        start += spec.size
