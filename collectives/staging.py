"""Device buffers through page-locked host memory: an exchange around an exchange.

No device pointer ever reaches the engine, so it works with every MPI.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.arrays import Array, Backend, Bytes
from collectives.transport import Exchange, Transport

Pairs = Sequence[tuple[Array, Bytes]]


class StagedExchange:
    """Brings what is sent to the host, exchanges it there, and brings what came to the device."""

    def __init__(self, backend: Backend, inner: Exchange, leaving: Pairs, arriving: Pairs) -> None:
        self._backend, self._inner = backend, inner
        self._leaving, self._arriving = leaving, arriving
        self._is_active = False

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
    leaving = [(array, backend.host_buffer(array)) for _, array in sends]
    arriving = [(array, backend.host_buffer(array)) for _, array in receives]
    exchange = transport.exchange(
        [(peer, host) for (peer, _), (_, host) in zip(sends, leaving, strict=True)],
        [(peer, host) for (peer, _), (_, host) in zip(receives, arriving, strict=True)],
        tag,
        is_kept,
    )
    if backend.is_host:
        return exchange
    return StagedExchange(backend, exchange, leaving, arriving)
