"""The loops of `kernels`, in Python for numba, with LLVM's instructions for single elements.

Importing this file imports numba, so `kernels` imports it for the first kernel.

Elements are loaded and stored with alignment 1, so an array may begin at any address.  float16 and
bfloat16 become float32 when they are loaded, and are rounded once, when they are stored.  A complex
number is two values, its real and its imaginary part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

COMBINE = "void(int64, int64, int64, int64)"
DIVIDE = "void(int64, int64, int64)"

Builder = Any  # llvmlite has no types
Value = Any

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_IN_MEMORY = {
    "bool": ir.IntType(8),
    **{f"{sign}int{bits}": ir.IntType(bits) for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": _HALF,
    "bfloat16": _I16,
    "float32": _FLOAT,
    "float64": _DOUBLE,
    "complex64": _FLOAT,
    "complex128": _DOUBLE,
}
DTYPES = frozenset(_IN_MEMORY)


def has_float16() -> bool:
    """Return whether the processor converts float16.

    If it does not, LLVM calls functions that are missing.
    """
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple.startswith(("aarch64", "arm64")) or "+f16c" in features.split(",")


def combining(operation: str, dtype: str) -> Callable[..., None]:
    """Return the loop that combines n elements.

    `operation` is a key of `_OPERATIONS`, a comparison (see `_left_where`), or "fused multiply".
    """
    dtype, width = _as_parts(operation, dtype)

    def combine(dst: int, left: int, right: int, n: int) -> None:
        # LLVM uses its fast loop only if `dst` overlaps no source.  It need not test that where the
        # code says that the two are the same.
        if dst == left:
            for i in range(n * width):
                _combine(operation, dtype, dst, dst, right, i)
        elif dst == right:
            for i in range(n * width):
                _combine(operation, dtype, dst, left, dst, i)
        else:
            for i in range(n * width):
                _combine(operation, dtype, dst, left, right, i)

    return combine


def _as_parts(operation: str, dtype: str) -> tuple[str, int]:
    """Return the dtype of an element's parts and their number.

    Complex numbers are added part by part, as plain floats.
    """
    parts = {"complex64": "float32", "complex128": "float64"}
    return (parts[dtype], 2) if operation == "add" and dtype in parts else (dtype, 1)


def dividing(dtype: str) -> Callable[..., None]:
    """Return the loop that divides n floating-point or complex numbers in place."""

    def divide(address: int, n: int, divisor: int) -> None:
        for i in range(n):
            _divide(dtype, address, i, divisor)

    return divide


def _type_combine(
    context: Any, operation: Any, dtype: Any, dst: Any, left: Any, right: Any, i: Any
) -> Any:
    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, _, dst, left, right, i = arguments
        x, y = (_load(b, dtype.literal_value, address, i) for address in (left, right))
        result = _combined(b, operation.literal_value, dtype.literal_value, x, y)
        _store(b, dtype.literal_value, dst, i, result)
        return context.get_dummy_value()

    return types.void(operation, dtype, dst, left, right, i), emit


def _type_divide(context: Any, dtype: Any, address: Any, i: Any, divisor: Any) -> Any:
    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        _, address, i, divisor = arguments
        x = _load(b, dtype.literal_value, address, i)
        result = _quotient(b, x, b.sitofp(divisor, x[0].type))
        _store(b, dtype.literal_value, address, i, result)
        return context.get_dummy_value()

    return types.void(dtype, address, i, divisor), emit


# They are globals because numba identifies cached code by the contents of closures, and intrinsics
# differ from process to process.
_combine: Any = intrinsic(prefer_literal=True)(_type_combine)
_divide: Any = intrinsic(prefer_literal=True)(_type_divide)


def _load(b: Builder, dtype: str, address: Value, i: Value) -> list[Value]:
    """Return the one or two values of an element."""
    values = [b.load(place, align=1) for place in _places(b, dtype, address, i)]
    if dtype == "float16":
        return [b.fpext(bits, _FLOAT) for bits in values]
    if dtype == "bfloat16":
        return [b.bitcast(b.shl(b.zext(bits, _I32), _I32(16)), _FLOAT) for bits in values]
    if dtype == "bool":
        return [b.icmp_unsigned("!=", byte, byte.type(0)) for byte in values]
    return values


def _store(b: Builder, dtype: str, address: Value, i: Value, values: list[Value]) -> None:
    if dtype == "float16":
        values = [b.fptrunc(x, _HALF) for x in values]
    elif dtype == "bfloat16":
        values = [_to_bfloat16(b, x) for x in values]
    elif dtype == "bool":
        values = [b.zext(x, _IN_MEMORY[dtype]) for x in values]
    for value, place in zip(values, _places(b, dtype, address, i), strict=True):
        b.store(value, place, align=1)


def _places(b: Builder, dtype: str, address: Value, i: Value) -> list[Value]:
    first = b.inttoptr(address, _IN_MEMORY[dtype].as_pointer())
    if not dtype.startswith("complex"):
        return [b.gep(first, [i])]
    real = b.shl(i, i.type(1))
    return [b.gep(first, [real]), b.gep(first, [b.or_(real, i.type(1))])]


def _to_bfloat16(b: Builder, x: Value) -> Value:
    """Return the upper half of a float32, rounded to the nearest, ties to even.

    The lower half of a NaN that comes from bfloat16 is zero, so no NaN is rounded to infinity.
    """
    bits = b.bitcast(x, _I32)
    last = b.and_(b.lshr(bits, _I32(16)), _I32(1))
    just_under_half = b.add(last, _I32(0x7FFF))  # or a half, if the last bit that is kept is odd
    return b.trunc(b.lshr(b.add(bits, just_under_half), _I32(16)), _I16)


def _is_nan(b: Builder, x: Value) -> Value:
    return b.fcmp_unordered("uno", x, x)


def _is_float(x: Value) -> bool:
    return x.type in (_FLOAT, _DOUBLE)


def _combined(
    b: Builder, operation: str, dtype: str, x: list[Value], y: list[Value]
) -> list[Value]:
    if operation in _COMPARISONS:
        return [_left_where(b, operation, dtype, *x, *y)]
    if dtype.startswith("complex"):
        return _complex_product(b, x, y, fused=operation == "fused multiply")
    return [_OPERATIONS[operation](b, *x, *y)]


def _add(b: Builder, x: Value, y: Value) -> Value:
    return b.fadd(x, y) if _is_float(x) else b.add(x, y)


def _multiply(b: Builder, x: Value, y: Value) -> Value:
    return b.fmul(x, y) if _is_float(x) else b.mul(x, y)


_COMPARISONS = ("<", "<=", ">", ">=")
_OPERATIONS: dict[str, Callable[[Builder, Value, Value], Value]] = {
    "add": _add,
    "multiply": _multiply,
    "bitwise_and": lambda b, x, y: b.and_(x, y),
    "bitwise_or": lambda b, x, y: b.or_(x, y),
    "bitwise_xor": lambda b, x, y: b.xor(x, y),
}


def _left_where(b: Builder, comparison: str, dtype: str, x: Value, y: Value) -> Value:
    """Return `x` if the comparison holds or `x` is a NaN, else `y`."""
    if _is_float(x):
        is_left = b.or_(b.fcmp_ordered(comparison, x, y), _is_nan(b, x))
    elif dtype.startswith("int"):
        is_left = b.icmp_signed(comparison, x, y)
    else:
        is_left = b.icmp_unsigned(comparison, x, y)
    return b.select(is_left, x, y)


def _complex_product(b: Builder, x: list[Value], y: list[Value], *, fused: bool) -> list[Value]:
    """Return a product, whose parts are sums of two products.

    With `fused`, the first of the two is not rounded.
    """
    (x_real, x_imaginary), (y_real, y_imaginary) = x, y
    real = x_real, y_real, b.fneg(b.fmul(x_imaginary, y_imaginary))
    imaginary = x_real, y_imaginary, b.fmul(x_imaginary, y_real)
    if fused:
        return [b.fma(*real), b.fma(*imaginary)]
    return [b.fadd(b.fmul(u, v), w) for u, v, w in (real, imaginary)]


def _quotient(b: Builder, x: list[Value], divisor: Value) -> list[Value]:
    """Return the quotient; a complex number is divided, as in NumPy, by a complex divisor."""
    if len(x) == 1:
        return [b.fdiv(x[0], divisor)]
    (real, imaginary), zero = x, divisor.type(0.0)
    scale = b.fdiv(divisor.type(1.0), divisor)
    return [
        b.fmul(b.fadd(real, b.fmul(imaginary, zero)), scale),
        b.fmul(b.fsub(imaginary, b.fmul(real, zero)), scale),
    ]
