"""Tensors as contiguous arrays, which the library sends and fills, in the memory where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from ml_dtypes import bfloat16

from collectives.arrays import HOST, Backend

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = Any
Finish = Callable[[], None]

# Tensors of these dtypes are NumPy arrays as they are.
_SHARED = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
# Tensors of other dtypes are sent as integers of the same size; only bfloat16 can be combined.
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_NO_STREAM = nullcontext()  # on the host


def can_be_combined(dtype: torch.dtype) -> bool:
    """Return whether reductions take tensors of this dtype."""
    return dtype in _SHARED or dtype is torch.bfloat16


class Filled(NamedTuple):
    """An array for a result; `finish` copies it to the tensors, unless it shares their memory."""

    array: Array
    finish: Finish | None = None


class Memory:
    """Host memory, and the tensors in it.  Tensors elsewhere are copied to it and back.

    A subclass is the memory of a device.

    Attributes
    ----------
    device : torch.device
        The device of its tensors.
    backend : Backend
        The backend of its arrays.
    """

    device = torch.device("cpu")
    backend: Backend = HOST

    # What is different on a device

    def share(self, bits: Tensor) -> Array:
        """Return the array that shares the memory of a tensor of a dtype that NumPy has."""
        return bits.numpy()

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is here."""
        return bool(tensor.is_cpu)

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a new vector."""
        return torch.empty(num_elements, dtype=dtype, device=self.device)

    def in_order(self) -> AbstractContextManager[object]:
        """Return a context in which the library's calls follow PyTorch's current stream."""
        return _NO_STREAM

    def beside(self) -> AbstractContextManager[object]:
        """Return a context as `in_order` does, with a new stream as PyTorch's current one."""
        return _NO_STREAM

    def new_future(self) -> Any:
        """Return a future of tensors that are here."""
        return torch.futures.Future()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy one tensor to another, of which one is here, on the current stream."""
        target.copy_(source)

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor until the current stream has done what is on it now."""

    # Tensors as arrays

    def array_of(self, tensor: Tensor) -> Array:
        """Return the array that shares the memory of a plain tensor."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.dtype in _SHARED:
            return self.share(tensor)
        bits = self.share(tensor.view(_BITS[tensor.element_size()]))
        return bits.view(bfloat16) if tensor.dtype is torch.bfloat16 else bits

    def is_plain(self, tensor: Tensor) -> bool:
        """Return whether the memory of a tensor can be sent and filled as it is."""
        if self.has(tensor) and tensor.layout is torch.strided and tensor.is_contiguous():
            return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        return False

    def in_place(self, tensor: Tensor) -> Filled:
        """Return an array with the values of a tensor, which the result replaces."""
        if self.is_plain(tensor):
            return Filled(self.array_of(tensor))
        check_filled([tensor])
        copy = self._copied([tensor])
        array = self.array_of(copy).reshape(tuple(tensor.shape))
        return Filled(array, partial(self._divide, copy, [tensor]))

    def sent(self, tensors: Sequence[Tensor]) -> Array:
        """Return the elements of the tensors, one tensor after the other, as a vector to read."""
        first = tensors[0]
        if len(tensors) > 1 or not self.is_plain(first):
            first = self._copied(tensors)
        return self.array_of(first).reshape(-1)

    def filled(self, tensors: Sequence[Tensor]) -> Filled:
        """Return a vector for the elements of the tensors, one tensor after the other."""
        first = tensors[0]
        if len(tensors) == 1 and self.is_plain(first):
            return Filled(self.array_of(first).reshape(-1))
        check_filled(tensors)
        for tensor in tensors:
            self._wait_for_other(tensor)
        vector = self._vector(tensors)
        return Filled(self.array_of(vector), partial(self._divide, vector, tensors))

    def _vector(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a new vector for the elements of the tensors."""
        return self.empty(sum(tensor.numel() for tensor in tensors), tensors[0].dtype)

    def _copied(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a vector with the elements of the tensors, copied on the current stream."""
        for tensor in tensors:
            _check(tensor)
        vector = self._vector(tensors)
        for part, tensor in _parts(vector, tensors):
            self.copy(tensor.detach(), part)
        return vector

    def _divide(self, vector: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the parts of a vector to the tensors, on the current stream."""
        for part, tensor in _parts(vector, tensors):
            self.copy(part, tensor.detach())
            if self.has(tensor):
                self.keep(tensor)
        self.keep(vector)

    def _wait_for_other(self, tensor: Tensor) -> None:
        """Wait for the device of a tensor that is not here, which may still use the tensor."""
        if not self.has(tensor) and not tensor.is_cpu:
            torch.accelerator.current_stream(tensor.device).synchronize()


HOST_MEMORY = Memory()


def _parts(vector: Tensor, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the parts of a vector, in the shapes of the tensors, and the tensors."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    return [(part.view(x.shape), x) for part, x in zip(parts, tensors, strict=True)]


def check_filled(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError or TypeError if a tensor cannot be filled.

    In an expanded tensor, for example, several elements are one.
    """
    for tensor in tensors:
        _check(tensor)
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError("a tensor to be filled has elements that share memory; clone it first")


def _check(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(f"a tensor must be dense, not of layout {tensor.layout}")
    if tensor.is_quantized:
        raise TypeError(f"a quantized tensor ({tensor.dtype}) cannot be sent")
