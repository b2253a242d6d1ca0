"""Where the arrays of `device_program.py` are: on a GPU with CuPy, or on the fake GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from collectives import Communicator

GARBAGE = 0xCB  # every byte of what is written late, until then
_CYCLES = 1 << 19  # of the slow kernel: a quarter of a millisecond, or the turn of a process
_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""


class OnCupy:
    """A GPU, of which ranks use another one each if there are several.

    `large`: elements of a large array.  `stride`: every which of many calls is made.
    `are_kernels`: whether a kernel runs each call.
    """

    large, stride, are_kernels = 5_000_011, 1, False

    def __init__(self, comm: Communicator) -> None:
        import cupy

        self.cupy = cupy
        comm.use_gpu()
        self._spin = cupy.RawKernel(_SPIN, "spin")
        self._bytes_staged = 0
        self._count_what_is_staged()

    def _count_what_is_staged(self) -> None:
        from collectives.arrays.backends import CupyBackend

        right = CupyBackend.to_host

        def to_host(backend: CupyBackend, pairs: Any) -> None:
            self._bytes_staged += sum(host.size for _, host in pairs)
            right(backend, pairs)

        CupyBackend.to_host = to_host  # type: ignore[method-assign]

    @property
    def bytes_staged(self) -> int:
        """The bytes that messages have brought to the host."""
        return self._bytes_staged

    def on_device(self, x: np.ndarray) -> Any:
        """A copy on the device."""
        return self.cupy.asarray(x)

    def on_host(self, x: Any) -> Any:
        """A copy on the host."""
        return self.cupy.asnumpy(x) if isinstance(x, self.cupy.ndarray) else x

    def late(self, x: np.ndarray) -> Any:
        """An array that will have these contents when the current stream has done slow work."""
        source, target = self.cupy.asarray(x), self.cupy.empty(x.shape, x.dtype)
        if x.nbytes:
            target.data.memset_async(GARBAGE, x.nbytes)
        self._spin((1,), (1,), (_CYCLES,))
        target[...] = source
        return target

    def new_stream(self) -> Any:
        """A stream that does not wait for the null stream."""
        return self.cupy.cuda.Stream(non_blocking=True)

    def on_stream(self, stream: Any) -> Any:
        """A context in which a stream is the current one."""
        return stream

    def current_stream(self) -> Any:
        """The stream that is current."""
        return self.cupy.cuda.get_current_stream()

    def not_exportable(self) -> Any:
        """A context in which new memory cannot be opened in other processes."""
        return self.cupy.cuda.using_allocator(self.cupy.cuda.MemoryAsyncPool().malloc)

    def free_unused(self) -> None:
        """Give memory without arrays back to the driver."""
        self.cupy.get_default_memory_pool().free_all_blocks()

    def capture(self, stream: Any) -> None:
        """Record what is put on a stream from now on for a graph, in the place of doing it."""
        stream.begin_capture()

    def end_capture(self, stream: Any) -> None:
        """Forget what was recorded."""
        stream.end_capture()

    def check(self) -> None:
        """Raise the error of anything that has failed on the device."""
        self.cupy.cuda.Device().synchronize()


class OnFake:
    """A fake GPU for each rank, which is as late as CUDA allows."""

    large, stride, are_kernels = 50_011, 11, False

    def __init__(self, comm: Communicator) -> None:
        from tests.fakes import device
        from tests.fakes.driver import gpu

        self.fake, self.gpu = device, gpu()
        self.gpu.uuid = b"GPU of rank %4d" % comm.rank
        self.gpu.reset(seed=comm.rank + 17, queue_length=64)
        self.gpu.go_on_alone()
        self.on_host = device.on_host
        self._is_exportable = True

    @property
    def bytes_staged(self) -> int:
        return self.fake.BACKEND.bytes_to_host

    def on_device(self, x: np.ndarray) -> Any:
        return self.fake.on_device(x, self._is_exportable)

    def late(self, x: np.ndarray) -> Any:
        source, target = self.on_device(x), self.on_device(np.empty_like(x))
        self.fake.BACKEND.enqueue(lambda: target.memory.view(np.uint8).fill(GARBAGE))
        self.fake.BACKEND.copy(source, target)
        return target

    def new_stream(self) -> Any:
        return self.fake.FakeStream("the caller's")

    def on_stream(self, stream: Any) -> Any:
        return self.fake.BACKEND.on_stream(stream)

    def current_stream(self) -> Any:
        return self.fake.BACKEND.current_stream()

    @contextmanager
    def not_exportable(self) -> Iterator[None]:
        self._is_exportable = False
        yield
        self._is_exportable = True

    def free_unused(self) -> None:
        """Give memory without arrays back, also what peers have open."""
        self.gpu.trim()
        others = [line for line in self.gpu.violations if "memory was freed that" not in line]
        self.gpu.violations[:] = others

    def capture(self, stream: Any) -> None:
        self.gpu.capturing.add(stream.ptr)

    def end_capture(self, stream: Any) -> None:
        self.gpu.capturing.discard(stream.ptr)

    def check(self) -> None:
        self.gpu.check()


class KernelsOnCupy(OnCupy):
    """A GPU on which a kernel runs each call: ranks have a GPU each, or MPS runs."""

    are_kernels = True


class KernelsOnFake(OnFake):
    """The fake GPU on which a kernel runs each call, though ranks take turns."""

    are_kernels, stride = True, 37

    def __init__(self, rank: int) -> None:
        from collectives.devices import concurrency, kernel_table

        super().__init__(rank)
        self.gpu.has_interpreter, self.gpu.seconds_between = True, 1e-6
        concurrency.SECONDS = 20.0
        kernel_table.BYTES_OF_A_BLOCK = 256


Place = OnCupy | OnFake
PLACES = {
    "cupy": OnCupy,
    "fake": OnFake,
    "kernels on cupy": KernelsOnCupy,
    "kernels on fake": KernelsOnFake,
}
