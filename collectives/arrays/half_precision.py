"""Combine and divide float16 and bfloat16 in host memory, for callers in Python.

It uses compiled kernels if there are any, else NumPy, which takes at least 10 times as long.  Both
compute in float32 and round once to two bytes; only a NaN may have another sign or payload.  Both
follow `numpy.errstate`: overflows and invalid operations give NumPy's warnings or errors.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import kernels

FEW = 1 << 11  # elements up to which NumPy's own function is as fast
COMBINE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_DIVIDE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)

# C's <fenv.h>, and two float32 numbers that raise these flags when they are added to themselves or
# multiplied by themselves: the largest number, and a signalling NaN.
_fenv = ctypes.CDLL(None)
_OVERFLOW = 4 if os.uname().machine in ("aarch64", "arm64") else 8
_INVALID = 1
_RAISES = np.array([0x7F7FFFFF, 0x7F800001], np.uint32).view(np.float32)


@cache
def binary(function: str, dtype: np.dtype[Any]) -> Callable[..., object]:
    """Return the fastest function that computes what the NumPy function of this name does."""
    plain = kernels.numpys(function)
    if dtype.itemsize != 2 or kernels.kind(dtype) != "f" or not dtype.isnative:
        return plain

    def combine(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any], /) -> None:
        address = kernels.combine(function, dtype) if left.size > FEW else None
        if address is None:
            plain(left, right, out)
            return
        _fenv.feclearexcept(_OVERFLOW | _INVALID)
        COMBINE(address)(out.ctypes.data, left.ctypes.data, right.ctypes.data, left.size)
        if function in ("add", "multiply"):  # comparing NaN may raise a flag too
            _warn(plain, _fenv.fetestexcept(_OVERFLOW | _INVALID))

    return combine


def divide(x: NDArray[Any], divisor: int) -> None:
    """Divide a flat array in place, in float32, where the divisor is exact, and round once."""
    address = kernels.divide(x.dtype) if x.size > FEW else None
    if address is None:
        np.divide(x, divisor, out=x, dtype=np.float32, casting="unsafe")
    else:
        _DIVIDE(address)(x.ctypes.data, x.size, divisor)


def _warn(function: Callable[..., object], flags: int) -> None:
    """Let NumPy warn or raise for the flags of a kernel, by an operation with the same flags."""
    for flag, x in zip((_OVERFLOW, _INVALID), _RAISES, strict=True):
        if flags & flag:
            function(x, x)
