"""Tensors as contiguous arrays in host memory, which the library sends and fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from ml_dtypes import bfloat16

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = Any
Finish = Callable[[], None]

# Tensors of these dtypes are NumPy arrays as they are.
_SHARED = frozenset(
    {
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    }
)  # fmt: skip
# Those of others are sent as integers of the same size; of these only bfloat16 can be combined.
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def can_be_combined(dtype: torch.dtype) -> bool:
    """Whether reductions take tensors of this dtype."""
    return dtype in _SHARED or dtype is torch.bfloat16


def array_of(tensor: Tensor) -> Array:
    """The array that shares the memory of a plain tensor."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype in _SHARED:
        return tensor.numpy()
    bits = tensor.view(_BITS[tensor.element_size()]).numpy()
    return bits.view(bfloat16) if tensor.dtype is torch.bfloat16 else bits


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory of a tensor can be sent and filled as it is."""
    if tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous():
        return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return False


class Filled(NamedTuple):
    """An array for a result.  `finish`: copies it to the tensors, unless it shares their memory."""

    array: Array
    finish: Finish | None = None


def in_place(tensor: Tensor) -> Filled:
    """An array with the values of a tensor, which the result replaces."""
    if is_plain(tensor):
        return Filled(array_of(tensor))
    check_filled([tensor])
    copy = _copied(tensor)
    return Filled(array_of(copy), partial(_write_back, copy, tensor))


def sent(tensors: Sequence[Tensor]) -> Array:
    """The elements of the tensors, one tensor after the other, as a vector to be read."""
    arrays = [array_of(t if is_plain(t) else _copied(t)).reshape(-1) for t in tensors]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def filled(tensors: Sequence[Tensor]) -> Filled:
    """A vector for the elements of the tensors, one tensor after the other."""
    first = tensors[0]
    if len(tensors) == 1 and is_plain(first):
        return Filled(array_of(first).reshape(-1))
    check_filled(tensors)
    for tensor in tensors:
        _wait_for_device(tensor)
    vector = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=first.dtype)
    return Filled(array_of(vector), partial(_divide, vector, tensors))


def _copied(tensor: Tensor) -> Tensor:
    """A plain copy in host memory, for which the device's current stream is waited for."""
    _check(tensor)
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _write_back(copy: Tensor, tensor: Tensor) -> None:
    tensor.detach().copy_(copy)


def _divide(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of a vector to the tensors."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        _write_back(part.view(tensor.shape), tensor)


def _wait_for_device(tensor: Tensor) -> None:
    """Wait for what was queued on the tensor's device, which may still use the tensor."""
    if not tensor.is_cpu:
        torch.accelerator.current_stream(tensor.device).synchronize()


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
