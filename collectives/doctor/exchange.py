"""What pairs of ranks do to find out whether MPI takes addresses of device memory.

    mpirun -n 2 python -m collectives.doctor.exchange

They exchange messages whose ends are in memory of a device or of the host, and compare what has
arrived.  An MPI that does not take such addresses ends a rank, loses data, or waits for ever.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import Backend, Bytes, backend_of_kind
from collectives.devices import DirectMemory, driver_of

SIZES = (8, 4096, 2**16, 2**20, 2**24)
"""In bytes: MPI sends small messages at once, and large ones when the receiver asks for them."""
KINDS = (("device", "device"), ("device", "host"), ("host", "device"))
"""Where messages are sent from and received into."""
WRONG = "What has arrived is not what was sent: "
"""Begins the sentence of a rank that has received something else."""
ERROR = "A rank has raised "
"""Begins the sentence of a rank with an error."""


class Message(NamedTuple):
    """A kind of message."""

    num_bytes: int
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes from {self.source} to {self.target} memory"


MESSAGES = [Message(size, *kind) for size in SIZES for kind in KINDS]


class Buffers:
    """Memory for messages on a device and on the host."""

    def __init__(self, backend: Backend) -> None:
        self._driver, self._device = driver_of(backend), DirectMemory(backend)
        self._stream = int(backend.current_stream().ptr)

    def new(self, num_bytes: int, where: str) -> Bytes:
        """Return memory of one kind."""
        on_host = np.empty(num_bytes, np.uint8)
        return on_host if where == "host" else self._device.new(num_bytes)

    def write(self, buffer: Bytes, where: str, data: Bytes) -> None:
        """Write data to a buffer, and wait for that."""
        if where == "host":
            buffer[:] = data
        else:
            self._copy("cuMemcpyHtoDAsync_v2", buffer, data)

    def read(self, buffer: Bytes, where: str) -> Bytes:
        """Return what is in a buffer."""
        if where == "host":
            return buffer
        data = np.empty(buffer.size, np.uint8)
        self._copy("cuMemcpyDtoHAsync_v2", data, buffer)
        return data

    def _copy(self, function: str, target: Bytes, source: Bytes) -> None:
        addresses = target.ctypes.data, source.ctypes.data
        self._driver.call(function, *addresses, source.size, self._stream)
        self._driver.call("cuStreamSynchronize", self._stream)


def is_right(comm: Any, buffers: Buffers, message: Message) -> bool:
    """Send a message to the other rank, which sends one here; return whether that is right."""
    me, other = comm.rank, comm.rank ^ 1
    sent = buffers.new(message.num_bytes, message.source)
    received = buffers.new(message.num_bytes, message.target)
    buffers.write(sent, message.source, _data(me, message))
    buffers.write(received, message.target, ~_data(other, message))
    requests = comm.Irecv(received, other), comm.Isend(sent, other)
    for request in requests:
        request.Wait()
    return np.array_equal(buffers.read(received, message.target), _data(other, message))


def _data(rank: int, message: Message) -> Bytes:
    """Return what a rank sends."""
    seed = rank, MESSAGES.index(message)
    return np.random.default_rng(seed).integers(0, 256, message.num_bytes, np.uint8)


def run(comm: Any, backend: Backend) -> int:
    """Exchange all messages, and say which one begins; return the exit status."""
    with backend.on_stream(backend.current_stream()):
        buffers = Buffers(backend)
        for message in MESSAGES:
            if comm.rank == 0:
                _say(str(message))
            if not is_right(comm, buffers, message):
                _say(f"{WRONG}{message}, on rank {comm.rank}")
                return 1
    return 0


def _say(line: str) -> None:
    """Write a line at once: the process may crash."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Exchange messages between GPUs; return the exit status.

    There is one GPU for each rank if there are several.  A last rank that has no other one does
    nothing.
    """
    try:
        return _run_on_gpus()
    except Exception as error:  # noqa: BLE001 - of CuPy, of the driver or of MPI
        _say(f"{ERROR}{type(error).__name__}: {error}")
        return 1


def _run_on_gpus() -> int:
    import cupy  # noqa: PLC0415 - this is a job on GPUs
    from mpi4py import MPI  # noqa: PLC0415 - as above

    comm = MPI.COMM_WORLD
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    return run(comm, backend_of_kind("cupy")) if comm.rank ^ 1 < comm.size else 0


if __name__ == "__main__":
    sys.exit(main())
