"""Scratch memory of a communicator, which later calls reuse."""

from __future__ import annotations

import numpy as np

from collectives.arrays.backends import Array, Bytes

MAX_BYTES = 64 * 2**20  # of idle buffers
_UNIT = 4096  # bytes; sizes are rounded up to a power of two times this


class ScratchPool:
    """Idle buffers, the latest first, of a bounded number of bytes."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self.num_bytes = 0

    def take(self, num_bytes: int) -> Bytes:
        """A buffer of `num_bytes` bytes, with arbitrary contents."""
        room = _room(num_bytes)
        for number, memory in enumerate(self._free):
            if memory.size == room:
                del self._free[number]
                self.num_bytes -= room
                return memory[:num_bytes]
        return np.empty(room, np.uint8)[:num_bytes]

    def give(self, buffer: Array | None) -> None:
        """Return a buffer that is no longer used."""
        if buffer is None:
            return
        memory = buffer
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        self._free.insert(0, memory)
        self.num_bytes += memory.size
        while self.num_bytes > MAX_BYTES:
            self.num_bytes -= self._free.pop().size


def _room(num_bytes: int) -> int:
    """The size of the buffer for `num_bytes` bytes."""
    return _UNIT << max(-(-num_bytes // _UNIT) - 1, 0).bit_length()
