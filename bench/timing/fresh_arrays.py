"""Calls on arrays that no earlier call has used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collectives.arrays.backends import Array

LINE = 64  # bytes of a cache line: inputs begin with one, and share none
ARENA, SLACK = 8 << 20, 64 << 10  # bytes for inputs, and by how much the place of each may move


class Fresh:
    """A call that gets another input every time, and makes the array for its result itself.

    Called itself, it makes one call on the arrays of its case, so that the result can be checked.
    `results` are those of the last sample.  They are kept until the next sample has its own, so
    that no call gets the memory of one shortly before.
    """

    def __init__(self, call: Callable[[Array], Array], x: Array, y: Array) -> None:
        self.call, self.x, self.y = call, x, y
        self.results: list[Array] = []
        self._stride = -(-x.nbytes // LINE) * LINE
        # Written, for untouched pages would all be one page of zeros, which every cache holds.
        self._arena = np.full(max(ARENA, self._stride) + SLACK, 0, np.uint8)
        self._place = self._lap = 0

    def __call__(self) -> None:
        self.y[...] = self.call(self.x)

    def inputs(self, count: int) -> list[Array]:
        """Return inputs, each at another address; they are zeros unless they are overwritten."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Array:
        """Return memory behind the last; at the end of the arena begin again, one line on."""
        if self._place + self._stride > self._arena.size:
            self._lap += 1
            self._place = self._lap * LINE % SLACK
        memory = self._arena[self._place :][: self.x.nbytes]
        self._place += self._stride
        return memory.view(self.x.dtype)
