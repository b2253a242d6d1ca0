"""Runs programs on device memory; messages are staged in page-locked host memory.

MPI never receives a device pointer, so every MPI works.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Array, Backend, Bytes
from collectives.engines.interpreter import Interpreted
from collectives.engines.transport import Messages, Operands
from collectives.programs import Kind, Program, Row


class PinnedMemory:
    """Page-locked host memory for messages: one buffer for each slot, which grows as needed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[int, Bytes] = {}

    @property
    def is_used(self) -> bool:
        """Whether there is any buffer."""
        return bool(self._buffers)

    def buffer(self, slot: int, array: Array) -> Bytes:
        """A buffer of as many bytes as the array has."""
        num_bytes = array.size * array.dtype.itemsize
        kept = self._buffers.get(slot)
        if kept is None or kept.size < num_bytes:
            kept = self._buffers[slot] = self._backend.host_buffer(array)
        return kept[:num_bytes]


class Staged(Interpreted):
    """An execution on device memory: copies sends to the host, and received data to the device.

    Consecutive sends are copied to the host together, and so are the receives of one WAIT to the
    device.  All work is in order with the stream that was current in the thread that began the run,
    whichever thread continues it.
    """

    def __init__(
        self,
        program: Program,
        operands: Operands,
        messages: Messages,
        host_calls: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(program, operands, messages, host_calls)
        self._pinned = PinnedMemory(operands.backend)  # kept from run to run of a plan
        self._arriving: dict[int, tuple[Array, Bytes]] = {}
        self._leaving: dict[int, Bytes] = {}
        self._copying: set[int] = set()  # slots whose host memory the device may still read

    def detach(self) -> None:
        self._finish_copies()
        self._pinned = PinnedMemory(self.memory.backend)
        super().detach()

    def restart(self, number: int, *, is_async: bool = False) -> None:
        super().restart(number)
        self._stream = self.memory.backend.current_stream()

    def advance(self, seconds: float) -> bool:
        with self.memory.backend.on_stream(self._stream):
            return super().advance(seconds)

    def receive(self, row: Row) -> None:
        array, host = self._pair(row)
        self._arriving[row.slot] = array, host
        self.messages.receive(row.slot, row.peer, host)

    def send(self, row: Row) -> None:
        if row.slot not in self._leaving:
            self._bring_to_host()
        self.messages.send(row.slot, row.peer, self._leaving.pop(row.slot))

    def _bring_to_host(self) -> None:
        """Copy what this row and the sends that follow it send."""
        pairs = []
        for row in self.program.listed[self.row :]:
            if row.kind != Kind.SEND:
                break
            pairs.append(self._pair(row))
            self._leaving[row.slot] = pairs[-1][1]
        self.memory.backend.to_host(pairs)
        self._copying.clear()  # it has waited for the stream

    def _pair(self, row: Row) -> tuple[Array, Bytes]:
        if row.slot in self._copying:
            self._finish_copies()
        array = self.memory.view(row.buffer, row.offset, row.size)
        return array, self._pinned.buffer(row.slot, array)

    def arrived(self, row: Row) -> None:
        receives = range(row.slot, row.slot + row.peer)
        self.memory.backend.to_device([self._arriving.pop(slot) for slot in receives])
        self._copying.update(receives)

    def completed(self) -> None:
        # The caller may use the result on another stream.
        self.memory.backend.synchronize()
        self._copying.clear()

    def _finish_copies(self) -> None:
        """Wait until the device has read all host memory."""
        if self._copying:
            with self.memory.backend.on_stream(self._stream):
                self.memory.backend.synchronize()
            self._copying.clear()
