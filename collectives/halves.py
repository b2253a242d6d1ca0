"""Two-byte floats in host memory, combined faster than NumPy does it and with the same result.

NumPy takes these numbers one at a time; here many at a time go through float32, or through integers
that are their bits.  What comes out is what NumPy's function of the same name gives: computed in
float32 and rounded once to two bytes.  Only a NaN may have another sign.

Subnormal float16 are added as subnormal float32.  A program that has its processor take those for
zero gets zero.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collectives.arrays import Array, BinaryFunction

# (left, right, out): combines at most `_BLOCK` elements, or returns False with `out` as it was.
OnBlock = Callable[["Array", "Array", "Array"], bool]

_BLOCK = 1 << 15  # elements that are worked on at a time, so that all of it stays in the cache
_FEW = 1 << 12  # elements up to which NumPy's own function is as fast
_ALL = 1 << 16  # different float16
_INFINITY = 0x7C00  # the bits of float16; those of a NaN are greater
_OVERFLOW = np.float32(65520 * 2.0**-112)  # the least sum that float16 rounds to infinity, scaled


def binary(function: str, dtype: np.dtype[Any]) -> BinaryFunction:
    """The fastest we have that does what the NumPy function of this name does for this dtype."""
    plain = numpys(function)
    ours = _OURS.get((dtype.name, function)) if dtype.itemsize == 2 and dtype.isnative else None
    return _by_blocks(plain, ours) if ours else plain


@cache
def numpys(name: str) -> BinaryFunction:
    """NumPy's own function of this name, for `out` as the third argument."""
    function: np.ufunc = getattr(np, name)
    if function not in (np.maximum, np.minimum):
        return function  # which is quicker that way than by a keyword
    return lambda left, right, out: function(left, right, out=out)  # these two warn otherwise


def divide(x: Array, divisor: int) -> None:
    """Divide a flat array in place: in float32, in which the divisor is exact, and rounded once."""
    if x.dtype == np.float16 and x.size > _ALL:
        quotients = _quotients(divisor)
        for (block,) in _blocks(x):
            np.take(quotients, block.view(np.uint16), out=block, mode="wrap")  # "raise" would copy
    else:
        np.divide(x, divisor, out=x, dtype=np.float32, casting="unsafe")


@lru_cache(maxsize=8)
def _quotients(divisor: int) -> Array:
    """Every float16 divided by this, in the order of their bits."""
    every = np.arange(_ALL, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):  # some NaN complain
        divide(every, divisor)
    return every


def _blocks(*arrays: Array) -> Iterator[list[Array]]:
    """The same elements of each of these flat arrays, so many at a time as the cache holds."""
    for start in range(0, arrays[0].size, _BLOCK):
        yield [x[start : start + _BLOCK] for x in arrays]


def _by_blocks(function: BinaryFunction, on_block: OnBlock) -> BinaryFunction:
    """NumPy's own function combines few elements, and the blocks that the other returns."""

    def combine(left: Array, right: Array, out: Array, /) -> None:
        if left.size <= _FEW:
            function(left, right, out)
            return
        for block in _blocks(left, right, out):
            if not on_block(*block):
                function(*block)

    return combine


class _Scratch(threading.local):
    """Memory for blocks on the way, of each thread its own; new memory each time would be slow."""

    def __init__(self) -> None:
        memory = np.empty(12 * _BLOCK + 64, np.uint8)
        start = -memory.ctypes.data % 64  # where a cache line begins: a seventh faster
        self.memory = memory[start : start + 12 * _BLOCK]

    def rows(self, num_rows: int, length: int, dtype: type[np.number[Any]]) -> Array:
        """So many arrays of `length` elements, at most 12 bytes for each element."""
        return self.memory.view(dtype)[: num_rows * length].reshape(num_rows, length)


_scratch = _Scratch()


def _through_float32(function: np.ufunc) -> OnBlock:
    """NumPy's function on copies; for bfloat16, which are converted fast."""

    def on_copies(left: Array, right: Array, out: Array) -> bool:
        terms = _scratch.rows(2, left.size, np.float32)
        terms[0], terms[1] = left, right
        function(terms[0], terms[1], out=terms[0])
        out[...] = terms[0]
        return True

    return on_copies


def _add(left: Array, right: Array, out: Array) -> bool:
    """Sums of float16, unless there is a NaN or an infinity among terms and sums.

    The bits of a float16 in a float32, exponent under exponent, are that number times 2^-112; zero
    and subnormal ones too.  So the terms are added as float32, and of the sum 13 bits are rounded
    away.  Only infinities and NaN would be taken for numbers.
    """
    scratch = _scratch.rows(3, left.size, np.int32)
    terms, spare, total = scratch[:2], scratch[0], scratch[2]
    terms[0], terms[1] = left.view(np.int16), right.view(np.int16)  # the sign fills the upper half
    np.left_shift(terms, 13, out=terms)
    np.bitwise_and(terms, ~0x70001FFF, out=terms)
    floats = scratch.view(np.float32)
    np.add(floats[0], floats[1], out=floats[2])
    if floats.max() >= _OVERFLOW or floats.min() <= -_OVERFLOW:
        return False
    # To the nearest, halves to even: add just under a half, and a bit more if the last bit is odd.
    # The sign is added to the bit above the exponent, from where the shift brings it to its place.
    np.right_shift(total, 13, out=spare)
    np.bitwise_and(spare, 1 << 28 | 1, out=spare)
    np.add(spare, 0xFFF, out=spare)
    np.add(total, spare, out=total)
    np.right_shift(total, 13, out=total)
    out.view(np.int16)[...] = total
    return True


def _left_where(compare: np.ufunc) -> OnBlock:
    """Of each two float16 the left one if they compare so, else the right one; unless NaN."""

    def choose(left: Array, right: Array, out: Array) -> bool:
        left, right, out = (x.view(np.int16) for x in (left, right, out))
        scratch = _scratch.rows(4, left.size, np.int16)
        keys, signs = scratch[:2], scratch[2:]
        keys[0], keys[1] = left, right
        # Sign and magnitude become an integer of that sign: 0 for both zeros, which are equal.
        np.right_shift(keys, 15, out=signs)  # 0 or -1
        np.bitwise_and(keys, 0x7FFF, out=keys)
        np.bitwise_xor(keys, signs, out=keys)
        np.subtract(keys, signs, out=keys)
        if keys.max() > _INFINITY or keys.min() < -_INFINITY:
            return False
        # No branches, which on random numbers would take more time than all of this.
        is_left, change = signs
        compare(keys[0], keys[1], out=is_left)
        np.bitwise_xor(left, right, out=change)
        np.multiply(change, is_left, out=change)
        np.bitwise_xor(right, change, out=out)
        return True

    return choose


_OURS: dict[tuple[str, str], OnBlock] = {
    ("bfloat16", "add"): _through_float32(np.add),
    ("bfloat16", "multiply"): _through_float32(np.multiply),
    ("float16", "add"): _add,
    ("float16", "minimum"): _left_where(np.less_equal),
    ("float16", "maximum"): _left_where(np.greater_equal),
}
