"""Two-byte floats are combined as NumPy and ml_dtypes combine them, to the bit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from collectives import halves
from collectives.arrays import HOST
from tests.scenarios import dtype

FLOAT16, BFLOAT16 = np.dtype("float16"), dtype("bfloat16")
OURS = [(dtype(kind), name) for kind, name in halves._OURS]
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


@pytest.mark.parametrize(("kind", "name"), OURS, ids=str)
def test_every_number_with_some_hundred_others(kind: np.dtype[Any], name: str) -> None:
    combine, numpys = HOST.binary(name, kind), getattr(np, name)
    left = EVERY.view(kind)
    got = np.empty_like(left)
    with np.errstate(all="ignore"):
        for bits in some_bits():
            right = np.full_like(EVERY, bits).view(kind)
            for operands in [(left, right), (right, left)]:
                combine(*operands, got)
                assert num_differing(got, numpys(*operands)) == 0, hex(bits)


def refuse(left: Any, right: Any, out: Any) -> None:
    raise AssertionError("NumPy's own function is asked")


@pytest.mark.parametrize("name", ["add", "minimum", "maximum"])
def test_float16_without_numpys_help(name: str) -> None:
    """Where a NaN or an infinity is in every block, the test above sees only what NumPy does."""
    combine, numpys = halves._by_blocks(refuse, halves._OURS["float16", name]), getattr(np, name)
    every = EVERY.view(FLOAT16)
    for bits in (bits for bits in some_bits() if bits & 0x7C00 != 0x7C00):
        value = np.uint16(bits).view(FLOAT16)
        with np.errstate(all="ignore"):
            is_finite = np.isfinite(every + value)
        fits = is_finite if numpys is np.add else ~np.isnan(every)
        left = np.resize(every[fits], 1 << 16)
        right = np.full_like(left, value)
        got = np.empty_like(left)
        combine(left, right, got)
        assert num_differing(got, numpys(left, right)) == 0, hex(bits)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("kind", "name"), OURS, ids=str)
def test_the_result_may_take_the_place_of_either(
    kind: np.dtype[Any], name: str, place: int
) -> None:
    for num_elements in (0, 1, halves._FEW, halves._FEW + 1, halves._BLOCK, halves._BLOCK + 1):
        operands = [normal(num_elements, kind, seed) for seed in (1, 2)]
        want = getattr(np, name)(*operands)
        HOST.binary(name, kind)(*operands, operands[place])
        assert num_differing(operands[place], want) == 0


@pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16], ids=str)
def test_threads_do_not_meet(kind: np.dtype[Any]) -> None:
    """The interpreter changes threads between any two steps of a combination."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        left, right = normal(200_000, kind, seed), normal(200_000, kind, seed + 10)
        want, got = left + right, np.empty_like(left)
        for _ in range(10):
            HOST.binary("add", kind)(left, right, got)
            wrong.append(num_differing(got, want))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 40


@pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 8, 127, 1001, 4097])
def test_every_number_divided(kind: np.dtype[Any], divisor: int) -> None:
    x = np.resize(EVERY, 3 * halves._BLOCK + 1).view(kind)
    with np.errstate(invalid="ignore"):
        want = (x.astype(np.float32) / np.float32(divisor)).astype(kind)
        HOST.divide(x, divisor)
    assert num_differing(x, want) == 0


def test_a_sum_that_is_too_great_is_infinite_and_says_so() -> None:
    x = np.full(halves._FEW + 1, 65504, FLOAT16)  # the greatest there is
    with pytest.warns(RuntimeWarning, match="overflow encountered in add"):
        HOST.binary("add", FLOAT16)(x, np.full_like(x, 16), x)
    assert np.all(np.isposinf(x))


@pytest.mark.parametrize("kind", ["float32", "float64", ">f2", "int16", "complex64"])
def test_everything_else_is_numpys_own(kind: str) -> None:
    for name in ("add", "multiply", "minimum", "maximum"):
        assert HOST.binary(name, np.dtype(kind)) is halves.numpys(name)
