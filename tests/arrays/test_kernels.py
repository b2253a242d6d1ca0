"""Kernels give what NumPy gives on this processor, to the bit; every NaN is as good as any."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.arrays import kernels
from collectives.arrays.operators import OPERATORS
from tests.inside import without_numba
from tests.scenarios.jobs import dtype

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
LENGTHS = [*range(71), 1000, 40_003]
PLACEMENTS = ["apart", "left", "right", "both"]


def combinations() -> list[tuple[str, str]]:
    """What reductions need: each function with the dtypes on which an operator allows it."""
    functions = {str(op.function): op for op in OPERATORS.values() if not op.is_average}
    return [
        (function, name)
        for (function, op), name in itertools.product(functions.items(), DTYPES)
        if is_defined(op, dtype(name))
    ]


def is_defined(op: Any, kind: np.dtype[Any]) -> bool:
    try:
        op.check(kind)
    except TypeError:
        return False
    return True


COMBINATIONS = combinations()


def combined(function: str, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Let the kernel write the first elements of `out`; it may be one of the two."""
    call(kernels.combine(function, left.dtype), *(at(x) for x in (out, left, right)), left.size)


def divided(x: np.ndarray, divisor: int) -> None:
    call(kernels.divide(x.dtype), at(x), x.size, divisor)


def call(address: int | None, *arguments: int) -> None:
    assert address is not None
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


def at(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


def numpys(function: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """What is computed without kernels."""
    out = np.empty_like(left)
    with np.errstate(all="ignore"):
        kernels.numpys(function)(left, right, out)
    return out


def numpys_quotient(x: np.ndarray, divisor: int) -> np.ndarray:
    out = x.copy()
    through = np.dtype(np.float32) if x.itemsize == 2 else x.dtype
    with np.errstate(all="ignore"):
        np.divide(x, divisor, out=out, dtype=through, casting="unsafe")
    return out


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Compare real numbers; a complex number is two of them."""
    if got.dtype.kind == "c":
        got, want = (x.view(f"f{x.itemsize // 2}") for x in (got, want))
    differ = got.view(f"u{got.itemsize}") != want.view(f"u{want.itemsize}")
    if got.dtype.kind in "fV":
        with np.errstate(invalid="ignore"):  # some NaN complain
            differ &= ~(np.isnan(got) & np.isnan(want))
    assert not differ.any(), (np.flatnonzero(differ)[:5], got[differ][:5], want[differ][:5])


def special(kind: np.dtype[Any]) -> np.ndarray:
    """Zeros, extremes, infinities, NaN, subnormal numbers, and some ordinary ones."""
    if kind.kind == "b":
        return np.array([False, True])
    if kind.kind in "iu":
        least, greatest = np.iinfo(kind).min, np.iinfo(kind).max
        return np.array([0, 1, 2, 3, least, least + 1, greatest - 1, greatest, greatest // 2], kind)
    if kind.kind == "c":
        parts = special(np.dtype(f"f{kind.itemsize // 2}"))
        return np.array([[x, y] for x in parts for y in parts]).view(kind).reshape(-1)
    width = kind.itemsize * 8
    mantissa = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[kind.name]
    infinity = (1 << width - 1) - (1 << mantissa)
    one = (infinity >> mantissa + 1) << mantissa
    positive = [0, 1, (1 << mantissa) - 1, 1 << mantissa, infinity - 1, infinity, infinity + 1]
    positive += [(1 << width - 1) - 1, one, one + 1, one - 1]
    bits = [sign << width - 1 | x for x in positive for sign in (0, 1)]
    return np.array(bits, f"u{kind.itemsize}").view(kind)


@cache
def ordinary(kind: np.dtype[Any], num_elements: int, seed: int) -> np.ndarray:
    """At random, not to be changed; sums and products of floats neither overflow nor vanish."""
    random = np.random.default_rng(seed)
    if kind.kind in "biu":
        values = random.integers(0, 256, num_elements * kind.itemsize, dtype=np.uint8).view(kind)
        return values % 2 == 1 if kind.kind == "b" else values
    if kind.kind == "c":
        part = np.dtype(f"f{kind.itemsize // 2}")
        return random.standard_normal(2 * num_elements).astype(part).view(kind)
    return random.standard_normal(num_elements).astype(kind)


def padded(x: np.ndarray) -> np.ndarray:
    """A copy with one element more, which no kernel is to write."""
    return np.concatenate([x, x[:1] if x.size else special(x.dtype)[:1]])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("function", "name"), COMBINATIONS)
@pytest.mark.slow
def test_special_values_are_combined_as_numpy_combines_them(
    function: str, name: str, placement: str
) -> None:
    values = special(dtype(name))
    check(function, np.repeat(values, values.size), np.tile(values, values.size), placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("function", "name"), COMBINATIONS)
@pytest.mark.slow
def test_arrays_of_all_lengths_are_combined_as_numpy_combines_them(
    function: str, name: str, placement: str
) -> None:
    for length in LENGTHS:
        left, right = (ordinary(dtype(name), length, seed) for seed in (1, 2))
        check(function, left, right, placement)


def check(function: str, left: np.ndarray, right: np.ndarray, placement: str) -> None:
    """Combine into memory that is one of the two or is apart, and has one element more."""
    left, right = padded(left), padded(right)
    if placement == "both":
        right = left
    out = {"apart": np.zeros_like(left), "right": right}.get(placement, left)
    want = padded(numpys(function, left[:-1], right[:-1]))
    want[-1] = out[-1]
    combined(function, left[:-1], right[:-1], out)
    assert_same_bits(out, want)


@pytest.mark.parametrize("first_is_left", [True, False])
@pytest.mark.parametrize(
    ("function", "name"), [pair for pair in COMBINATIONS if pair[1] in ("float16", "bfloat16")]
)
def test_every_two_byte_float_is_combined_as_numpy_combines_it(
    function: str, name: str, first_is_left: bool
) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype(name))
    others = [*special(dtype(name)), *ordinary(dtype(name), 20, 3)]
    out = np.empty_like(every)
    for other in others:
        pair = every, np.full_like(every, other)
        left, right = pair if first_is_left else pair[::-1]
        combined(function, left, right, out)
        assert_same_bits(out, numpys(function, left, right))


@pytest.mark.parametrize(("function", "name"), COMBINATIONS)
def test_arrays_may_begin_at_any_address(function: str, name: str) -> None:
    kind, length = dtype(name), 67
    left, right = ordinary(kind, length, 4), ordinary(kind, length, 5)
    for offset in range(1, kind.itemsize + 1):
        memory = np.zeros(3 * (left.nbytes + 64), np.uint8)
        places = [
            memory[start + offset :][: left.nbytes]
            for start in range(0, 3 * left.nbytes, left.nbytes + 7)
        ]
        views = [place.view(kind) for place in places]
        views[0][:], views[1][:] = left, right
        combined(function, *views)
        assert_same_bits(views[2].copy(), numpys(function, left, right))


@pytest.mark.parametrize("name", FLOATS + COMPLEX)
def test_quotients_are_numpys_to_the_bit(name: str) -> None:
    kind = dtype(name)
    values = np.arange(1 << 16, dtype=np.uint16).view(kind) if kind.itemsize == 2 else special(kind)
    for divisor in (1, 2, 3, 7, 10, 64, 1001, 65_537):
        for x in (values, *(padded(ordinary(kind, length, 6)) for length in LENGTHS)):
            want = numpys_quotient(x, divisor)
            want[-1], got = x[-1], x.copy()
            divided(got[:-1], divisor)
            assert_same_bits(got, want)


def test_arrays_at_any_address_are_divided() -> None:
    memory = np.zeros(8 * 33 + 3, np.uint8)
    x = memory[3:].view(np.float64)
    x[:] = ordinary(np.dtype("float64"), 33, 7)
    want = numpys_quotient(x, 3)
    divided(x, 3)
    assert_same_bits(x.copy(), want)


NOT_SERVED: list[tuple[str, Any]] = [
    ("add", np.longdouble),
    ("add", np.clongdouble),
    ("add", ">f4"),
    ("add", ">i8"),
    ("add", [("x", "f4"), ("y", "i4")]),
    ("add", object),
    ("add", "m8[s]"),
    ("maximum", "M8[s]"),
    ("add", "S4"),
    ("add", bool),
    ("multiply", bool),
    ("minimum", np.complex64),
    ("bitwise_and", np.float32),
    ("subtract", np.float32),
    ("no such function", np.float32),
]


@pytest.mark.parametrize(("function", "kind"), NOT_SERVED, ids=str)
def test_dtypes_and_functions_without_a_kernel_get_none(function: str, kind: Any) -> None:
    assert kernels.combine(function, np.dtype(kind)) is None


def test_no_kernel_serves_other_foreign_dtypes() -> None:
    for foreign in (ml_dtypes.float8_e4m3, ml_dtypes.int4):
        assert kernels.combine("add", np.dtype(foreign)) is None
        assert kernels.divide(np.dtype(foreign)) is None


@pytest.mark.parametrize(
    "kind", [np.int64, np.bool_, np.longdouble, ">f8", object, "m8[s]"], ids=str
)
def test_dtypes_that_no_kernel_divides_get_none(kind: Any) -> None:
    assert kernels.divide(np.dtype(kind)) is None


def test_without_numba_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    without_numba(monkeypatch)
    assert kernels.combine.__wrapped__("add", np.dtype("float32")) is None
    assert kernels.divide.__wrapped__(np.dtype("float32")) is None


def test_there_is_no_kernel_for_float16_where_the_processor_does_not_convert_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from collectives.arrays import loops

    monkeypatch.setattr(loops, "has_float16", lambda: False)
    assert kernels.combine.__wrapped__("add", np.dtype("float16")) is None
    assert kernels.divide.__wrapped__(np.dtype("float16")) is None
    assert kernels.combine.__wrapped__("add", np.dtype("float32")) is not None


@pytest.mark.parametrize(
    ("of_two_zeros", "comparison"), [("left", "<="), ("right", "<"), ("the negative", None)]
)
def test_numpy_is_asked_which_zero_is_the_lesser(
    monkeypatch: pytest.MonkeyPatch, of_two_zeros: str, comparison: str | None
) -> None:
    def minimum(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        out[...] = {"left": left, "right": right, "the negative": -0.0}[of_two_zeros]

    monkeypatch.setattr(kernels, "numpys", lambda function: minimum)
    assert kernels.comparison_of("minimum", np.dtype("float32")) == comparison


@pytest.mark.parametrize(
    ("is_rounded", "operation"),
    [((True, True), "multiply"), ((False, True), "fused multiply"), ((True, False), None)],
)
def test_numpy_is_asked_which_products_of_complex_numbers_it_rounds(
    monkeypatch: pytest.MonkeyPatch, is_rounded: tuple[bool, bool], operation: str | None
) -> None:
    def part(*products: np.ndarray) -> np.ndarray:
        terms = [
            x.astype("f4") if once else x for x, once in zip(products, is_rounded, strict=True)
        ]
        return np.add(*terms, dtype=np.float64).astype("f4")

    def multiply(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
        x, y = x.astype("c16"), y.astype("c16")  # in which the products of complex64 are exact
        out.real = part(x.real * y.real, -x.imag * y.imag)
        out.imag = part(x.real * y.imag, x.imag * y.real)

    monkeypatch.setattr(kernels, "numpys", lambda function: multiply)
    assert kernels.complex_multiply(np.dtype("complex64")) == operation


def test_equal_kernels_have_one_address() -> None:
    assert kernels.combine("add", np.dtype("float32")) == kernels.combine("add", np.dtype("=f4"))


def test_common_combinations_have_kernels_to_compile_ahead() -> None:
    common = list(kernels.common())
    assert ("add", np.dtype("float32")) in common and ("add", dtype("bfloat16")) in common
    assert all(kernels.combine(function, kind) is not None for function, kind in common)
