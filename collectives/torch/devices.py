"""The memory of GPUs: tensors there are CuPy arrays, and calls on them in the order of streams."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from collectives.arrays import backend_of_kind
from collectives.torch.tensors import HOST_MEMORY, Array, Memory, Tensor

NO_CUPY = (
    "without CuPy, CUDA tensors are copied to host memory and back; pip install cupy-cuda12x or "
    "cupy-cuda13x lets them stay on the GPU"
)


def memory_of(tensor: Tensor) -> Memory:
    """Return the memory in which a call on a tensor is made: the tensor's own, or host memory."""
    return memory_on_gpu(tensor.device) if tensor.is_cuda else HOST_MEMORY


def wait_for_streams() -> None:
    """Wait on the host for PyTorch's current stream, if this process uses a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


class CudaMemory(Memory):
    """The memory of one GPU.

    Its tensors are handed over by DLPack, without a copy and without naming a stream: calls are
    made on PyTorch's own stream.
    """

    def __init__(self, device: torch.device) -> None:
        import cupy  # noqa: PLC0415 - only when a tensor on a GPU is sent

        self.device, self._cupy = device, cupy
        with cupy.cuda.Device(device.index):
            self.backend = backend_of_kind("cupy")

    def has(self, tensor: Tensor) -> bool:
        return bool(tensor.device == self.device)

    def share(self, bits: Tensor) -> Array:
        return self._cupy.from_dlpack(torch.utils.dlpack.to_dlpack(bits))

    @contextmanager
    def in_order(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            stream = stream_for_cupy(torch.cuda.current_stream().cuda_stream, self.device.index)
            with self.backend.on_stream(stream):
                yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        with torch.cuda.stream(torch.cuda.Stream(self.device)), self.in_order():
            yield

    def new_future(self) -> Any:
        return torch.futures.Future(devices=[self.device])

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))


@lru_cache(maxsize=256)
def stream_for_cupy(pointer: int, device: int) -> Any:
    """Return PyTorch's stream as a stream of CuPy."""
    import cupy  # noqa: PLC0415 - see `CudaMemory`

    with warnings.catch_warnings():
        # CuPy 14 prefers `Stream.from_external`, whose result destroys the stream when it ends.
        warnings.simplefilter("ignore", DeprecationWarning)
        return cupy.cuda.ExternalStream(pointer, device)


@cache
def memory_on_gpu(device: torch.device) -> Memory:
    """Return the memory of a GPU; without CuPy, warn once and return host memory."""
    if find_spec("cupy") is None:
        warnings.warn(NO_CUPY, stacklevel=2)
        return HOST_MEMORY
    return CudaMemory(device)
