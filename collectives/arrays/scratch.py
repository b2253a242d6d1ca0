"""Scratch memory of a communicator: what one call gives back the next one takes."""

from __future__ import annotations

import numpy as np

from collectives.arrays.backends import Array, Bytes

MAX_BYTES = 64 * 2**20  # that wait for somebody to take them
_UNIT = 4096  # bytes; sizes are rounded up to a power of two of these


class ScratchPool:
    """Buffers that were given back, the latest first; boundedly many bytes of them."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self.num_bytes = 0

    def take(self, num_bytes: int) -> Bytes:
        """A buffer of so many bytes, with arbitrary contents."""
        room = _room(num_bytes)
        for number, memory in enumerate(self._free):
            if memory.size == room:
                del self._free[number]
                self.num_bytes -= room
                return memory[:num_bytes]
        return np.empty(room, np.uint8)[:num_bytes]

    def give(self, buffer: Array | None) -> None:
        """Give a buffer back that nobody uses any more."""
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
    """The size of the buffer for so many bytes."""
    return _UNIT << max(-(-num_bytes // _UNIT) - 1, 0).bit_length()
