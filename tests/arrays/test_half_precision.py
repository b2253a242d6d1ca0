"""Two-byte floats are computed in float32 and rounded once, by kernels and by NumPy alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import collectives
from collectives.arrays import half_precision, kernels
from collectives.arrays.backends import HOST
from collectives.arrays.half_precision import FEW
from tests.inside import forget_compiled, without_numba
from tests.scenarios.jobs import dtype

FLOAT16, BFLOAT16 = np.dtype("float16"), dtype("bfloat16")
BOTH = pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16], ids=str)
FUNCTIONS = pytest.mark.parametrize("name", ["add", "multiply", "minimum", "maximum"])
EVERY = np.arange(1 << 16, dtype=np.uint16)  # the bits of all numbers
ZEROS_AND_SUBNORMALS = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x007F, 0x807F]
LEAST_AND_GREATEST = [0x0400, 0x8400, 0x0080, 0x8080, 0x7BFF, 0xFBFF, 0x7F7F, 0xFF7F]
INFINITE_AND_NAN = [0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0]


def some_bits() -> list[int]:
    """What may be special in either dtype, and 200 at random."""
    random = np.random.default_rng(7).integers(0, 1 << 16, 200).tolist()
    return [*ZEROS_AND_SUBNORMALS, *LEAST_AND_GREATEST, *INFINITE_AND_NAN, *random]


def num_differing(got: np.ndarray, want: np.ndarray) -> int:
    """How many have other bits.  Every NaN is as good as any."""
    is_other = got.view(np.uint16) != want.view(np.uint16)
    return int(np.count_nonzero(is_other & ~(np.isnan(got) & np.isnan(want))))


def normal(num_elements: int, kind: np.dtype[Any], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(num_elements).astype(kind)


def rounded_once(name: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """What is to come out.  Which of two zeros is the lesser NumPy decides for each dtype."""
    function: np.ufunc = getattr(np, name)
    if name in ("add", "multiply"):
        return np.asarray(function(left, right, dtype=np.float32).astype(left.dtype))
    return np.asarray(function(left, right))


@pytest.fixture(params=["kernels", "NumPy alone"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has asked for no kernel yet, with numba and without it."""
    for name in ("combine", "divide"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name).__wrapped__)
    if request.param == "NumPy alone":
        without_numba(monkeypatch)


BOTH_WAYS = pytest.mark.usefixtures("_way")


@BOTH_WAYS
@BOTH
@FUNCTIONS
@pytest.mark.slow
def test_every_number_combined_with_some_hundred_others_is_rounded_once(
    kind: np.dtype[Any], name: str
) -> None:
    combine = HOST.binary(name, kind)
    left = EVERY.view(kind)
    got = np.empty_like(left)
    with np.errstate(all="ignore"):
        for bits in some_bits():
            right = np.full_like(EVERY, bits).view(kind)
            for operands in [(left, right), (right, left)]:
                combine(*operands, got)
                assert num_differing(got, rounded_once(name, *operands)) == 0, hex(bits)


def refuse(*operands: Any) -> None:
    raise AssertionError("NumPy's own function is asked")


@BOTH
@FUNCTIONS
def test_large_arrays_are_combined_without_numpys_own_function(
    kind: np.dtype[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the test above could see only what NumPy does."""
    assert kernels.combine(name, kind) is not None  # of two zeros NumPy tells which is the lesser
    monkeypatch.setattr(kernels, "numpys", lambda name: refuse)
    combine = half_precision.binary.__wrapped__(name, kind)
    left, right = normal(FEW + 1, kind, 1), normal(FEW + 1, kind, 2)
    want = rounded_once(name, left, right)
    combine(left, right, left)
    assert num_differing(left, want) == 0
    with pytest.raises(AssertionError, match="NumPy's own function is asked"):
        combine(left[:FEW], right[:FEW], left[:FEW])


@BOTH_WAYS
@BOTH
@FUNCTIONS
@pytest.mark.parametrize("place", [0, 1])
def test_the_result_may_take_the_place_of_either(
    kind: np.dtype[Any], name: str, place: int
) -> None:
    for num_elements in (0, 1, FEW, FEW + 1, 32_769):
        operands = [normal(num_elements, kind, seed) for seed in (1, 2)]
        want = rounded_once(name, *operands)
        HOST.binary(name, kind)(*operands, operands[place])
        assert num_differing(operands[place], want) == 0


@BOTH_WAYS
@BOTH
def test_threads_that_combine_at_once_get_right_results(
    kind: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask for the kernel at once, and combine at once."""
    forget_compiled(monkeypatch)
    together, wrong = threading.Barrier(4), list[int]()

    def work(seed: int) -> None:
        left, right = normal(200_000, kind, seed), normal(200_000, kind, seed + 10)
        want, got = left + right, np.empty_like(left)
        together.wait()
        for _ in range(10):
            HOST.binary("add", kind)(left, right, got)
            wrong.append(num_differing(got, want))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 40


@BOTH_WAYS
@BOTH
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 8, 127, 1001, 4097])
def test_every_number_is_divided_and_rounded_once(kind: np.dtype[Any], divisor: int) -> None:
    x = np.resize(EVERY, 98_305).view(kind)
    with np.errstate(invalid="ignore"):
        want = (x.astype(np.float32) / np.float32(divisor)).astype(kind)
        HOST.divide(x, divisor)
    assert num_differing(x, want) == 0


@BOTH_WAYS
@BOTH
def test_ranks_that_are_threads_get_such_sums_and_averages(kind: np.dtype[Any]) -> None:
    inputs = [normal(FEW * 8, kind, seed) for seed in range(2)]
    total = rounded_once("add", *inputs)
    mean = (total.astype(np.float32) / np.float32(2)).astype(kind)
    for op, want in (("sum", total), ("avg", mean)):
        for got in collectives.run(lambda comm, op=op: comm.all_reduce(inputs[comm.rank], op), 2):
            assert num_differing(got, want) == 0


GREATEST = {FLOAT16: 65504.0, BFLOAT16: 2.0**127 * (2 - 2.0**-7)}


@BOTH_WAYS
@BOTH
@pytest.mark.parametrize("name", ["add", "multiply"])
def test_a_result_that_is_too_great_is_infinite_and_says_so(kind: np.dtype[Any], name: str) -> None:
    x = np.full(FEW + 1, GREATEST[kind], kind)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow encountered"):
        HOST.binary(name, kind)(x, x, np.empty_like(x))
    with pytest.warns(RuntimeWarning, match=f"overflow encountered in {name}"):
        HOST.binary(name, kind)(x, x, x)
    assert np.all(np.isposinf(x))


@BOTH_WAYS
@BOTH
def test_what_is_no_number_says_so_if_no_term_was_one(kind: np.dtype[Any]) -> None:
    x = np.full(FEW + 1, np.inf, kind)
    with pytest.warns(RuntimeWarning, match="invalid value encountered in add"):
        HOST.binary("add", kind)(x, -x, x)
    assert np.all(np.isnan(x))
    for name in ("add", "multiply", "minimum", "maximum"):
        HOST.binary(name, kind)(x, x, x)  # a warning is an error in tests


@pytest.mark.parametrize("kind", ["float32", "float64", ">f2", "int16", "complex64"])
def test_everything_else_is_numpys_own(kind: str) -> None:
    for name in ("add", "multiply", "minimum", "maximum"):
        assert HOST.binary(name, np.dtype(kind)) is kernels.numpys(name)
