"""Device buffers through page-locked host memory: an exchange around an exchange.

No device pointer ever reaches the engine, so it works with every MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from collectives.arrays import Array, Backend, Bytes
from collectives.flight_recorder import Waiting
from collectives.transport import Action, Exchange, Transport

Pairs = Sequence[tuple[Array, Bytes]]


class PinnedMemory:
    """Page-locked host memory for messages.

    Lanes that follow each other in the same slot use the same memory.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._buffers: dict[tuple[object, ...], Bytes] = {}

    def pairs(self, arrays: Sequence[Array], *place: object) -> list[tuple[Array, Bytes]]:
        """Each array with its host memory.  `place`: what else is at this place comes later."""
        return [(array, self._buffer(array, (*place, i))) for i, array in enumerate(arrays)]

    def _buffer(self, array: Array, place: tuple[object, ...]) -> Bytes:
        num_bytes = array.size * array.dtype.itemsize
        kept = self._buffers.get(place)
        if kept is None or kept.size < num_bytes:
            kept = self._buffers[place] = self.backend.host_buffer(array)
        return kept[:num_bytes]


class StagedExchange:
    """Brings what is sent to the host, exchanges it there, and brings what came to the device."""

    def __init__(self, backend: Backend, inner: Exchange, leaving: Pairs, arriving: Pairs) -> None:
        self._backend, self._inner = backend, inner
        self._leaving, self._arriving = leaving, arriving
        self._is_active = False
        self.starts: list[Action] = [self.start]
        self.waits: list[Action] = [partial(self.wait, None)]

    def start(self) -> None:
        self._backend.to_host(self._leaving)
        self._inner.start()
        self._is_active = True

    def test(self) -> bool:
        return self._landed(self._inner.test())

    def wait(self, deadline: float | None) -> bool:
        return self._landed(self._inner.wait(deadline))

    def _landed(self, is_complete: bool) -> bool:
        if is_complete and self._is_active:
            self._backend.to_device(self._arriving)
            self._is_active = False
        return is_complete

    def retag(self, tag: int) -> None:
        self._inner.retag(tag)

    def waiting_for(self) -> list[Waiting]:
        return self._inner.waiting_for()

    def abandon(self) -> bool:
        return self._inner.abandon()

    def free(self) -> None:
        self._inner.free()


def prepare(
    pinned: PinnedMemory,
    place: tuple[int, int],
    transport: Transport,
    sends: Sequence[tuple[int, Array]],
    receives: Sequence[tuple[int, Array]],
    tag: int,
    is_kept: bool,
) -> StagedExchange:
    """An exchange of flat device arrays.  `place`: the slot and the round it belongs to."""
    leaving = pinned.pairs([array for _, array in sends], *place, "leaving")
    arriving = pinned.pairs([array for _, array in receives], *place, "arriving")
    exchange = transport.exchange(
        [(peer, host) for (peer, _), (_, host) in zip(sends, leaving, strict=True)],
        [(peer, host) for (peer, _), (_, host) in zip(receives, arriving, strict=True)],
        tag,
        is_kept,
    )
    return StagedExchange(pinned.backend, exchange, leaving, arriving)
