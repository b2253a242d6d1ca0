"""Page-locked host memory for messages between an array on a device and one on the host."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from collectives.arrays import Backend, Bytes

_MOST_IDLE = 4  # pieces of a size
_LEAST = 512  # bytes of a piece


class Pinned:
    """Pieces of page-locked memory; to allocate one may wait for all streams of the process."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._idle = defaultdict[int, list[Bytes]](list)  # by size

    def has(self, num_bytes: int) -> bool:
        """Return whether there is an idle piece for a message."""
        return bool(self._idle[_size(num_bytes)])

    def take(self, num_bytes: int) -> Bytes:
        """Return a piece of at least this size."""
        size = _size(num_bytes)
        try:
            return self._idle[size].pop()
        except IndexError:
            return self._backend.host_buffer(np.broadcast_to(np.uint8(0), size))

    def give_back(self, piece: Bytes) -> None:
        """Let other messages use a piece."""
        if len(idle := self._idle[piece.size]) < _MOST_IDLE:
            idle.append(piece)


def _size(num_bytes: int) -> int:
    return 1 << (max(num_bytes, _LEAST) - 1).bit_length()
