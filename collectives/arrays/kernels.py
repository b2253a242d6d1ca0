"""Kernels: compiled loops that combine and divide arrays in host memory, called by address.

Their results are NumPy's, to the bit; only a NaN may have another sign or payload.  If numba is
missing, or a kernel could not give NumPy's result, there is no kernel, and the caller uses NumPy.
Arrays need no alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from collectives.arrays import jit

KINDS = {
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
    """Return the address of the kernel for the NumPy function of this name, or None.

    It is `void(int64 dst, int64 left, int64 right, int64 n)`: three addresses and the number of
    elements.  `dst` is `left`, `right` or both, or it overlaps neither.
    """
    if kind(dtype) not in KINDS.get(function, "") or not _is_served(dtype):
        return None
    operation = _operation(function, dtype)
    if operation is None:
        return None
    from collectives.arrays import loops  # noqa: PLC0415 - imports numba

    return jit.pointer(loops.combining(operation, dtype.name), loops.COMBINE)


@cache
def divide(dtype: np.dtype[Any]) -> int | None:
    """Return the address of the kernel that divides floating-point or complex numbers, or None.

    It is `void(int64 address, int64 n, int64 divisor)`, and works in place.
    """
    if kind(dtype) not in "fc" or not _is_served(dtype):
        return None
    from collectives.arrays import loops  # noqa: PLC0415 - imports numba

    return jit.pointer(loops.dividing(dtype.name), loops.DIVIDE)


def common() -> Iterator[tuple[str, np.dtype[Any]]]:
    """Yield the kernels that are worth compiling before they are needed."""
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
    """Return NumPy's kind letter.

    It is "f" for bfloat16, and "?" for other dtypes that are not NumPy's.
    """
    is_native = dtype.type.__module__ == "numpy"
    return "f" if is_bfloat16(dtype) else dtype.kind if is_native else "?"


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Return whether this is the bfloat16 of ml_dtypes, which is not imported for it."""
    is_foreign = dtype.itemsize == 2 and dtype.type.__module__.startswith("ml_dtypes")
    return is_foreign and dtype.name == "bfloat16"


@cache
def numpys(name: str) -> Callable[..., object]:
    """Return NumPy's own function of this name, for `out` as the third argument."""
    function: np.ufunc = getattr(np, name)
    if function not in (np.maximum, np.minimum):
        return function  # a third positional argument is faster than `out=`
    return lambda left, right, out: function(left, right, out=out)  # without `out=` these two warn


def _is_served(dtype: np.dtype[Any]) -> bool:
    """Return whether kernels can load elements of this dtype; not of `long double`, for example."""
    if jit.why_unavailable() is not None or not dtype.isnative:
        return False
    from collectives.arrays import loops  # noqa: PLC0415 - imports numba

    return dtype.name in loops.DTYPES and (dtype != np.float16 or loops.has_float16())


def _operation(function: str, dtype: np.dtype[Any]) -> str | None:
    """Return the operation of `loops` that gives NumPy's result on this processor, or None."""
    if function in ("minimum", "maximum"):
        return comparison_of(function, dtype)
    if function == "multiply" and dtype.kind == "c":
        return complex_multiply(dtype)
    return function


def comparison_of(function: str, dtype: np.dtype[Any]) -> str | None:
    """Return the comparison for which NumPy takes the left element; it matters for 0.0 and -0.0."""
    strict, or_equal = ("<", "<=") if function == "minimum" else (">", ">=")
    if kind(dtype) != "f":
        return strict
    signs = np.signbit(_numpys(function, [0.0, -0.0], [-0.0, 0.0], dtype))
    return {(False, True): or_equal, (True, False): strict}.get(tuple(signs.tolist()))


def complex_multiply(dtype: np.dtype[Any]) -> str | None:
    """Return "multiply" if NumPy rounds each product, "fused multiply" if not the first; else None.

    Each part of a complex product is the sum of two products, here of -+1 and +-(1 - e * e), in
    either order.  If both are rounded, the sum is 0; by fused multiply-add one is not rounded.
    """
    e = 2.0 ** (-14 if dtype == np.complex64 else -30)  # 1 - e * e is rounded to 1
    left = [1 + e + 1j, 1 + e - 1j, 1 + (1 + e) * 1j, 1 + (1 + e) * 1j]
    right = [1 - e + 1j, 1 + (1 - e) * 1j, 1 + (1 - e) * 1j, 1 - e - 1j]
    product = _numpys("multiply", left, right, dtype)
    parts = product[0].real, product[1].imag, product[2].real, product[3].imag
    return {(0, 0, 0, 0): "multiply", (-e * e, -e * e, 0, 0): "fused multiply"}.get(parts)


def _numpys(function: str, left: object, right: object, dtype: np.dtype[Any]) -> Any:
    """Return NumPy's result on this processor."""
    out = np.empty_like(left, dtype)
    numpys(function)(np.array(left, dtype), np.array(right, dtype), out)
    return out
