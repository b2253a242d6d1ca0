"""The source of the kernels of a GPU, in CUDA C++: what combines and divides arrays.

Their results are equal to the results of the host, to the bit; only a NaN may have another sign or
payload.  One rule is fixed here that the host's NumPy chooses by its processor: each product in a
product of complex numbers is rounded.

An address is a multiple of what CUDA requires of the dtype, which for a complex number is the size
of its real part.  The result is one of the operands, or overlaps none.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from collectives.arrays import HOST, OPERATORS, has_infinities

OPTIONS = ("--std=c++14", "--fmad=false")  # of the compiler; no product is fused with a sum

_VECTOR = 16  # bytes that a thread loads at once

_FUNCTIONS = {op.function: op for op in OPERATORS.values() if not op.is_average}
_STORED = {
    "bool": "unsigned char",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float16": "unsigned short",
    "bfloat16": "unsigned short",
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}
DTYPES = (*_STORED,)  # that kernels can load

# Source is put together from these parts.  `Stored` is the type of an element in memory, `Value`
# that in which it is computed; `value` and `stored` convert.

_PLAIN = """
__device__ Value value(Stored x) { return x; }
__device__ Stored stored(Value x) { return (Stored)x; }
"""

_BOOL = """
__device__ Value value(Stored x) { return x != 0; }
__device__ Stored stored(Value x) { return x; }
"""

_BITS = """
union Bits {
    float number;
    unsigned int bits;
};
"""

_FLOAT16 = """
__device__ Value value(Stored half) {
    Bits x;
    x.bits = (half & 0x7FFFu) << 13;
    x.number *= 5192296858534827628530496329220096.0f;  // 2**112, between the two exponents
    if (x.number >= 65536.0f) x.bits |= 0x7F800000u;    // infinite, or not a number
    x.bits |= (half & 0x8000u) << 16;
    return x.number;
}

__device__ Stored stored(Value number) {
    Bits x, sum;
    x.number = number;
    const unsigned int sign = x.bits >> 16 & 0x8000u;
    x.bits &= 0x7FFFFFFFu;
    sum.number = x.number + 0.5f;  // its last bit has the weight of a subnormal number's
    const unsigned int subnormal = sum.bits - 0x3F000000u;
    const unsigned int normal = (x.bits - (112u << 23) + 0xFFFu + (x.bits >> 13 & 1u)) >> 13;
    const unsigned int finite = x.number < 6.103515625e-05f ? subnormal : normal;
    const unsigned int other = x.number >= 65520.0f ? 0x7C00u : 0x7E00u;
    return sign | (x.number < 65520.0f ? finite : other);
}
"""

_BFLOAT16 = """
__device__ Value value(Stored upper) {
    Bits x;
    x.bits = (unsigned int)upper << 16;
    return x.number;
}

__device__ Stored stored(Value number) {
    Bits x;
    x.number = number;
    if (x.number != x.number) return 0x7FC0u;  // rounding would make a zero of CUDA's own NaN
    return (x.bits + 0x7FFFu + (x.bits >> 16 & 1u)) >> 16;
}
"""

_COMPLEX = """
template <typename Part>
struct Complex {
    Part real, imaginary;
};

template <typename Part>
__device__ Complex<Part> operator+(Complex<Part> x, Complex<Part> y) {
    return {x.real + y.real, x.imaginary + y.imaginary};
}

template <typename Part>
__device__ Complex<Part> operator*(Complex<Part> x, Complex<Part> y) {
    return {x.real * y.real - x.imaginary * y.imaginary,
            x.real * y.imaginary + x.imaginary * y.real};
}

// As NumPy divides by a complex number whose imaginary part is 0.
template <typename Part>
__device__ Complex<Part> operator/(Complex<Part> x, Part divisor) {
    const Part zero = 0, scale = 1 / divisor;
    return {(x.real + x.imaginary * zero) * scale, (x.imaginary - x.real * zero) * scale};
}
"""

# Operands may be in memory that another process writes between kernels, so pointers are neither
# `restrict` nor loaded through the read-only cache.
_UNITS = """
typedef long long Word;

struct Single {
    Stored elements[1];
};

union Vector {
    uint4 bytes;
    Stored elements[sizeof(uint4) / sizeof(Stored)];
};

template <typename Unit>
__device__ Unit& at(Word address, Word i) { return ((Unit*)address)[i]; }

__device__ Word thread() { return (Word)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ Word num_threads() { return (Word)gridDim.x * blockDim.x; }

// The vectors among the elements; none if an address does not allow it.
__device__ Word num_vectors(Word addresses, Word num_elements) {
    return addresses % sizeof(Vector) ? 0 : num_elements * sizeof(Stored) / sizeof(Vector);
}
"""

UNTYPED = "typedef unsigned char Stored;\n" + _UNITS  # of arrays that are only copied

_COMBINE = """
template <typename Unit>
__device__ void swap(Unit& left, Unit& right) {
    const Unit other = left;
    left = right;
    right = other;
}

template <typename Unit>
__device__ void combine_units(Word out, Word lefts, Word num_operands, const Word (&operands)[8],
                              Word begin, Word end) {
    for (Word i = begin + thread(); i < end; i += num_threads()) {
        Unit units[8];  // all are on their way before the first is needed
        #pragma unroll
        for (int k = 0; k < 8; k++)
            if (k < num_operands) units[k] = at<Unit>(operands[k], i);
        #pragma unroll
        for (int k = 1; k < 8; k++) {
            if (k >= num_operands) continue;
            if (lefts >> k & 1) swap(units[0], units[k]);
            #pragma unroll
            for (int j = 0; j < sizeof(Unit) / sizeof(Stored); j++)
                units[0].elements[j] = combined(units[0].elements[j], units[k].elements[j]);
        }
        at<Unit>(out, i) = units[0];
    }
}

__device__ void combine_all(Word out, Word lefts, Word num_operands, const Word (&operands)[8],
                            Word num_elements) {
    Word addresses = out;
    #pragma unroll
    for (int k = 0; k < 8; k++)
        if (k < num_operands) addresses |= operands[k];
    const Word vectors = num_vectors(addresses, num_elements);
    const Word rest = vectors * sizeof(Vector) / sizeof(Stored);
    combine_units<Vector>(out, lefts, num_operands, operands, 0, vectors);
    combine_units<Single>(out, lefts, num_operands, operands, rest, num_elements);
}
"""

_COMBINE_KERNEL = """
extern "C" __global__ void combine(Word out, Word lefts, Word num_operands, Word num_elements,
                                   Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h) {
    const Word operands[8] = {a, b, c, d, e, f, g, h};
    combine_all(out, lefts, num_operands, operands, num_elements);
}
"""

_DIVIDE = """
template <typename Unit>
__device__ void divide_units(Word address, Real divisor, Word begin, Word end) {
    for (Word i = begin + thread(); i < end; i += num_threads()) {
        Unit unit = at<Unit>(address, i);
        #pragma unroll
        for (int j = 0; j < sizeof(Unit) / sizeof(Stored); j++)
            unit.elements[j] = stored(value(unit.elements[j]) / divisor);
        at<Unit>(address, i) = unit;
    }
}

__device__ void divide_all(Word address, Word num_elements, Word divisor) {
    const Word vectors = num_vectors(address, num_elements);
    const Word rest = vectors * sizeof(Vector) / sizeof(Stored);
    divide_units<Vector>(address, (Real)divisor, 0, vectors);
    divide_units<Single>(address, (Real)divisor, rest, num_elements);
}
"""

_DIVIDE_KERNEL = """
extern "C" __global__ void divide(Word address, Word num_elements, Word divisor) {
    divide_all(address, num_elements, divisor);
}
"""


def combine_source(function: str, dtype: np.dtype[Any]) -> str | None:
    """Return the source of the kernel `combine` for the NumPy function of this name, or None."""
    source = combining(function, dtype)
    return source and source + _COMBINE_KERNEL


def divide_source(dtype: np.dtype[Any]) -> str | None:
    """Return the source of the kernel `divide`, or None."""
    source = dividing(dtype)
    return source and _types(dtype, _value("add", dtype)) + _UNITS + source + _DIVIDE_KERNEL


def combining(function: str, dtype: np.dtype[Any]) -> str | None:
    """Return the source of types, units, and the function that combines elements.

    None if the function or the dtype is not served.
    """
    result = _result(function, dtype) if _is_served(function, dtype) else None
    if result is None:
        return None
    combined = f"""
__device__ Stored combined(Stored left, Stored right) {{
    const Value x = value(left), y = value(right);
    return stored({result});
}}
"""
    return _types(dtype, _value(function, dtype)) + combined + _UNITS + _COMBINE


def dividing(dtype: np.dtype[Any]) -> str | None:
    """Return the source of the functions that divide elements, or None.

    It follows the source of types and units.
    """
    if not has_infinities(dtype) or not _is_served("add", dtype):
        return None
    real = "double" if dtype.name in ("float64", "complex128") else "float"
    return f"typedef {real} Real;\n{_DIVIDE}"


def _is_served(function: str, dtype: np.dtype[Any]) -> bool:
    """Return whether an operator with this function serves the dtype, and kernels can load it."""
    op = _FUNCTIONS.get(function)
    if op is None or not dtype.isnative or dtype.name not in _STORED:
        return False
    try:
        op.check(dtype)
    except TypeError:
        return False
    return True


def _types(dtype: np.dtype[Any], value: str) -> str:
    """Return the source of the types of elements and values, and of their conversions."""
    name = dtype.name
    before = _COMPLEX if dtype.kind == "c" else _BITS if dtype.itemsize == 2 else ""
    convert = {"bool": _BOOL, "float16": _FLOAT16, "bfloat16": _BFLOAT16}.get(name, _PLAIN)
    return f"{before}\ntypedef {_STORED[name]} Stored;\ntypedef {value} Value;\n{convert}"


def _value(function: str, dtype: np.dtype[Any]) -> str:
    """Return the type in which elements are computed.

    Integers that are combined are unsigned, because signed ones must not overflow in C++.
    """
    if dtype.itemsize == 2 and has_infinities(dtype):
        return "float"
    if dtype.kind in "iu" and function not in ("minimum", "maximum"):
        return "unsigned long long"
    return _STORED[dtype.name]


def _result(function: str, dtype: np.dtype[Any]) -> str | None:
    """Return the expression that combines x and y; None if NumPy's way is not known."""
    if function in ("minimum", "maximum"):
        comparison = comparison_of(function, dtype)
        return comparison and f"x {comparison} y || x != x ? x : y"
    signs = {"add": "+", "multiply": "*", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
    return f"x {signs[function]} y"


@cache
def comparison_of(function: str, dtype: np.dtype[Any]) -> str | None:
    """Return the comparison for which NumPy takes the left element; it matters for 0.0 and -0.0."""
    strict, or_equal = ("<", "<=") if function == "minimum" else (">", ">=")
    if not has_infinities(dtype):
        return strict
    left, right = np.array([0.0, -0.0], dtype), np.array([-0.0, 0.0], dtype)
    HOST.binary(function, dtype)(left, right, out := np.empty_like(left))
    return {(False, True): or_equal, (True, False): strict}.get(tuple(np.signbit(out).tolist()))
