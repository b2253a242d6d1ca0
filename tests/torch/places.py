"""Where the tensors of `device_program.py` are: on a GPU, or in the memory of the fake GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from collectives.torch import any_source, backend
from collectives.torch.tensors import HOST_MEMORY, Memory, Tensor
from tests.fakes.device import BACKEND, FakeDeviceArray, FakeStream
from tests.fakes.driver import gpu

_CYCLES = 1 << 20  # of slow work: some hundred microseconds


class FakeMemory(Memory):
    """The memory of the fake GPU: to PyTorch, its tensors are tensors of the host.

    PyTorch's current stream is the fake GPU's.  `kept`: what was asked to be kept on a stream.
    `futures`: the streams that were current when they were completed.  `end`: of the last of these.
    """

    backend = BACKEND

    def __init__(self) -> None:
        self.kept: list[tuple[int, str]] = []
        self.futures: list[str] = []
        self.end: Any = None

    def has(self, tensor: Tensor) -> bool:
        return _is_on_fake(tensor.data_ptr())

    def share(self, bits: Tensor) -> FakeDeviceArray:
        return FakeDeviceArray(bits.numpy())

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        if not num_elements:
            return torch.empty(0, dtype=dtype)
        size = num_elements * torch.empty(0, dtype=dtype).element_size()
        return torch.from_numpy(gpu().array(size, "uint8")).view(dtype)

    def in_order(self) -> AbstractContextManager[None]:
        return BACKEND.on_stream(BACKEND.current_stream())

    def beside(self) -> AbstractContextManager[None]:
        return BACKEND.on_stream(FakeStream("beside"))

    def new_future(self) -> Any:
        return _Future(self)

    def copy(self, source: Tensor, target: Tensor) -> None:
        spans = ([_span(x)] if self.has(x) else [] for x in (source, target))
        BACKEND.enqueue(lambda: target.copy_(source), *spans)
        if not self.has(target):  # as PyTorch does
            BACKEND.synchronize()

    def keep(self, tensor: Tensor) -> None:
        assert self.has(tensor), "only the allocator of a GPU keeps memory for streams"
        self.kept.append((tensor.data_ptr(), BACKEND.current_stream().name))


class _Future(torch.futures.Future):
    """It notes the end of the stream that is current at its completion, as those on GPUs do."""

    def __new__(cls, memory: FakeMemory) -> Any:
        return super().__new__(cls)

    def __init__(self, memory: FakeMemory) -> None:
        super().__init__()
        self._memory = memory

    def set_result(self, result: Any) -> None:
        self._memory.futures.append(BACKEND.current_stream().name)
        self._memory.end = BACKEND.record()
        super().set_result(result)


def _is_on_fake(address: int) -> bool:
    with gpu().lock:
        return gpu().memory.find(address) is not None


def _span(tensor: Tensor) -> FakeDeviceArray:
    """All memory that a tensor, which need not be contiguous, may be part of."""
    return FakeDeviceArray(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy())


class OnFake:
    """The fake GPU, which is as late as CUDA allows."""

    def __init__(self, memory: FakeMemory) -> None:
        self.memory = memory

    def find_memory(self, tensor: Tensor) -> Memory:
        """What stands for `devices.memory_of`."""
        return self.memory if self.memory.has(tensor) else HOST_MEMORY

    def on_device(self, x: Tensor) -> Tensor:
        """A copy on the device, as it is now."""
        new = self.memory.empty(x.numel(), x.dtype).view(x.shape)
        new.copy_(x)
        return new

    def on_host(self, x: Tensor) -> Tensor:
        """A copy on the host, after what is on the current stream."""
        BACKEND.synchronize()
        return x.clone()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy in the order of the current stream."""
        self.memory.copy(source, target)

    def new_stream(self) -> Any:
        return FakeStream("the caller's")

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return BACKEND.on_stream(stream)

    def be_slow(self) -> None:
        """Put slow work on the current stream."""

    def value_of(self, future: Any) -> Any:
        """The value of a future, for which the current stream waits."""
        value = future.wait()
        self.memory.end.join()
        return value


class OnCuda:
    """A GPU, of which ranks use another one each if there are several."""

    def __init__(self, rank: int) -> None:
        torch.cuda.set_device(rank % torch.cuda.device_count())

    def on_device(self, x: Tensor) -> Tensor:
        return x.cuda()

    def on_host(self, x: Tensor) -> Tensor:
        return x.cpu()

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def new_stream(self) -> Any:
        return torch.cuda.Stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def be_slow(self) -> None:
        torch.cuda._sleep(_CYCLES)

    def value_of(self, future: Any) -> Any:
        return future.wait()


Place = OnCuda | OnFake


@contextmanager
def fake_place(patch: Any) -> Iterator[OnFake]:
    """Let tensors in the memory of the fake GPU be on a device."""
    place = OnFake(FakeMemory())
    for module in (backend, any_source):
        patch.setattr(module, "memory_of", place.find_memory)
    yield place
