"""Device buffers through page-locked host memory: an exchange around an exchange.

No device pointer ever reaches the engine, so it works with every MPI.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.arrays import Array, Backend, Bytes
from collectives.transport import Exchange, Transport


class StagedExchange:
    """Brings what is sent to the host, exchanges it there, and brings what came to the device."""

    def __init__(
        self,
        backend: Backend,
        transport: Transport,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Array]],
        tag: int,
        is_kept: bool,
    ) -> None:
        self._backend = backend
        self._outgoing, host_sends = self._mirrored(sends)
        self._arriving, host_receives = self._mirrored(receives)
        self._inner: Exchange = transport.exchange(host_sends, host_receives, tag, is_kept)
        self._is_active = False

    def _mirrored(
        self, parcels: Sequence[tuple[int, Array]]
    ) -> tuple[list[tuple[Array, Bytes]], list[tuple[int, Bytes]]]:
        pairs = [(array, self._backend.host_buffer(array)) for _, array in parcels]
        return pairs, [(peer, host) for (peer, _), (_, host) in zip(parcels, pairs, strict=True)]

    def start(self) -> None:
        self._backend.to_host(self._outgoing)
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

    def waiting_for(self) -> list[str]:
        return self._inner.waiting_for()

    def free(self) -> None:
        self._inner.free()


def prepare(
    backend: Backend,
    transport: Transport,
    sends: Sequence[tuple[int, Array]],
    receives: Sequence[tuple[int, Array]],
    tag: int,
    is_kept: bool,
) -> Exchange:
    """An exchange of flat arrays: directly from host memory, staged from anywhere else."""
    if not backend.is_host:
        return StagedExchange(backend, transport, sends, receives, tag, is_kept)
    out, into = (
        [(peer, backend.host_buffer(array)) for peer, array in parcels]
        for parcels in (sends, receives)
    )
    return transport.exchange(out, into, tag, is_kept)
