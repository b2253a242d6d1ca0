"""Compiled loops that combine and divide arrays in host memory, called by their addresses.

What comes out is what NumPy computes, to the bit; only a NaN may have another sign or
payload.  There are no kernels without numba, and none for what they do not compute so: the caller
then lets NumPy do it.  Arrays need no alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from collectives.arrays import jit

_KINDS = {
    "add": "iufc",
    "multiply": "iufc",
    "minimum": "biuf",
    "maximum": "biuf",
    "bitwise_and": "biu",
    "bitwise_or": "biu",
    "bitwise_xor": "biu",
}


@cache
def combine(function: str, dtype: np.dtype[Any]) -> int | None:
    """The address of what combines arrays as the NumPy function of this name, or None.

    It is `void(int64 dst, int64 left, int64 right, int64 n)`: three addresses and the number of
    elements.  `dst` is `left`, `right` or both, or it overlaps neither.
    """
    if kind(dtype) not in _KINDS.get(function, "") or not _is_served(dtype):
        return None
    operation = _operation(function, dtype)
    if operation is None:
        return None
    from collectives.arrays import loops  # noqa: PLC0415 - imports numba

    return jit.pointer(loops.combining(operation, dtype.name), loops.COMBINE)


@cache
def divide(dtype: np.dtype[Any]) -> int | None:
    """The address of what divides an array of floating-point or complex numbers, or None.

    It is `void(int64 address, int64 n, int64 divisor)`, and works in place.
    """
    if kind(dtype) not in "fc" or not _is_served(dtype):
        return None
    from collectives.arrays import loops  # noqa: PLC0415 - imports numba

    return jit.pointer(loops.dividing(dtype.name), loops.DIVIDE)


def common() -> Iterator[tuple[str, np.dtype[Any]]]:
    """What is worth compiling before it is needed."""
    for name in ("float32", "float64", "int32", "int64"):
        for function in ("add", "multiply", "minimum", "maximum"):
            yield function, np.dtype(name)
    yield "add", np.dtype("float16")
    try:
        import ml_dtypes  # noqa: PLC0415 - not installed everywhere
    except ImportError:
        return
    yield "add", np.dtype(ml_dtypes.bfloat16)


def kind(dtype: np.dtype[Any]) -> str:
    """NumPy's kind letter; bfloat16 counts as a float, no other foreign dtype as anything."""
    is_native = dtype.type.__module__ == "numpy"
    return "f" if is_bfloat16(dtype) else dtype.kind if is_native else "?"


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether this is ml_dtypes' bfloat16, asked without importing ml_dtypes."""
    is_foreign = dtype.itemsize == 2 and dtype.type.__module__.startswith("ml_dtypes")
    return is_foreign and dtype.name == "bfloat16"


@cache
def numpys(name: str) -> Callable[..., object]:
    """NumPy's own function of this name, for `out` as the third argument."""
    function: np.ufunc = getattr(np, name)
    if function not in (np.maximum, np.minimum):
        return function  # which is quicker that way than by a keyword
    return lambda left, right, out: function(left, right, out=out)  # these two warn otherwise


def _is_served(dtype: np.dtype[Any]) -> bool:
    """Whether elements of this dtype can be loaded; those of `long double`, for one, cannot."""
    if jit.why_unavailable() is not None or not dtype.isnative:
        return False
    from collectives.arrays import loops  # noqa: PLC0415 - imports numba

    return dtype.name in loops.DTYPES and (dtype != np.float16 or loops.has_float16())


def _operation(function: str, dtype: np.dtype[Any]) -> str | None:
    """What `loops` calls it.  Where processors differ, NumPy is asked what it does on this one."""
    if function in ("minimum", "maximum"):
        return _comparison(function, dtype)
    if function == "multiply" and dtype.kind == "c":
        return _complex_multiply(dtype)
    return function


def _comparison(function: str, dtype: np.dtype[Any]) -> str | None:
    """How two elements compare if the left one is taken: it matters for zeros, which are equal."""
    strict, or_equal = ("<", "<=") if function == "minimum" else (">", ">=")
    if kind(dtype) != "f":
        return strict
    signs = np.signbit(_numpys(function, [0.0, -0.0], [-0.0, 0.0], dtype))
    return {(False, True): or_equal, (True, False): strict}.get(tuple(signs.tolist()))


def _complex_multiply(dtype: np.dtype[Any]) -> str | None:
    """Whether NumPy rounds all products, or adds them to the first ones before these are rounded.

    Each part of a product is the sum of two products, here of -+1 and +-(1 - e * e), in either
    order.  Both rounded, they cancel out.
    """
    e = 2.0 ** (-14 if dtype == np.complex64 else -30)  # 1 - e * e is rounded to 1
    left = [1 + e + 1j, 1 + e - 1j, 1 + (1 + e) * 1j, 1 + (1 + e) * 1j]
    right = [1 - e + 1j, 1 + (1 - e) * 1j, 1 + (1 - e) * 1j, 1 - e - 1j]
    product = _numpys("multiply", left, right, dtype)
    parts = product[0].real, product[1].imag, product[2].real, product[3].imag
    return {(0, 0, 0, 0): "multiply", (-e * e, -e * e, 0, 0): "fused multiply"}.get(parts)


def _numpys(function: str, left: object, right: object, dtype: np.dtype[Any]) -> Any:
    """What NumPy computes on this processor."""
    out = np.empty_like(left, dtype)
    numpys(function)(np.array(left, dtype), np.array(right, dtype), out)
    return out
