"""The words of a row: an operation with addresses, which the compiled loop enqueues."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.lowering import MOST_OPERANDS, DeviceKind

Words = NDArray[np.int64]

# The words of a row; see `enqueue`.
KIND, SIZE, NUM_OPERANDS, LEFTS, TARGET, COUNTER, VALUE, RISE, ROW_WORDS = (
    *(0, 1, 2, 3, 4, 13, 14, 15),
    16,
)
PLACES = slice(TARGET, TARGET + 1 + MOST_OPERANDS)  # the target, then the operands
ON_HOST = len(DeviceKind)  # added to the kind of what another thread's events order
KERNEL = 2 * ON_HOST  # the kind of a whole program, which `SIZE` blocks of a kernel run


def copy_row(target: int, source: int, size: int) -> Words:
    """Return a row, with addresses, that copies some bytes."""
    row = np.zeros((1, ROW_WORDS), np.int64)
    row[0, [KIND, SIZE, TARGET, TARGET + 1]] = DeviceKind.COPY, size, target, source
    return row


def most_runs(rise: int) -> int:
    """Return how often counters can rise by so much: their values have 31 bits."""
    return (2**31 - 1) // max(rise, 1)
