"""Eight or four bits, and a scale a block: exact sizes, bounded errors, and infinities are seen."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parallel.sharding import QuantizedExchange, Sharding
from parallel.sharding.quantization import BLOCK, dequantize, num_blocks, quantize, quantized_bytes

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
SIZES = [0, 1, 3, 255, 256, 257, 1001]

# A float64, x / scale and int8 * scale are rounded to float32: 2**-24 of at most 127 steps each,
# beside the half step of the rounding to int8.
HALF = 0.5 + 3 * 127 * 2.0**-24


def numbers(size: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(size).standard_normal(size).astype(dtype)


def there_and_back(x: Any, block: int = BLOCK, bits: int = 8) -> Any:
    return dequantize(quantize(x, block, bits), len(x), block, bits)


def scale_of_each(packed: Any, size: int, block: int = BLOCK, bits: int = 8) -> Any:
    return packed[(size * bits + 7) // 8 :].copy().view(np.float32).repeat(block)[:size]


both = pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 7)])


@both
@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("size", SIZES)
def test_an_element_takes_its_bits_and_a_block_four_bytes(
    size: int, block: int, bits: int, steps: int
) -> None:
    packed = quantize(numbers(size), block, bits)
    whole, rest = divmod(size, block)
    elements = size if bits == 8 else size // 2 + size % 2
    assert packed.dtype == np.uint8
    assert packed.shape == (quantized_bytes(size, block, bits),)
    assert packed.shape == (elements + 4 * (whole + (rest > 0)),)


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_no_element_moves_by_more_than_half_a_scale(
    size: int, dtype: Any, bits: int, steps: int
) -> None:
    x = numbers(size, dtype)
    packed = quantize(x, bits=bits)
    back = dequantize(packed, size, bits=bits)
    assert back.dtype == np.float32 and back.shape == (size,)
    error = np.abs(back.astype(np.float64) - x.astype(np.float64))
    scales = scale_of_each(packed, size, bits=bits)
    assert np.all(error <= HALF * scales)
    peaks = [
        np.abs(part.astype(np.float32)).max() for part in np.split(x, range(256, size, 256)) if size
    ]
    np.testing.assert_array_equal(scales[::BLOCK], np.array(peaks, np.float32) / np.float32(steps))


@both
def test_half_a_scale_is_reached(bits: int, steps: int) -> None:
    """The bound is not a loose one: 126.5 steps are half-way between two of them."""
    x = np.array([steps, steps - 0.5], np.float32)
    assert there_and_back(x, bits=bits)[1] == steps - 1


@both
def test_elements_are_rounded_to_the_nearest_and_halves_to_even(bits: int, steps: int) -> None:
    x = np.array([steps, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, 0.51], np.float32)
    np.testing.assert_array_equal(there_and_back(x, bits=bits), [steps, 0, 2, 2, 0, -2, -2, 0, 1])


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit", [2.0**-8, 1.0, 4.0])
def test_whole_numbers_of_a_scale_come_back_as_they_were(
    dtype: Any, unit: float, bits: int, steps: int
) -> None:
    x = np.arange(-steps, steps + 1).astype(dtype) * dtype(unit)
    np.testing.assert_array_equal(there_and_back(x, bits=bits), x.astype(np.float32))


def test_two_elements_of_four_bits_are_one_byte_the_first_in_its_lower_half() -> None:
    packed = quantize(np.array([1, -1, 7, -7, -2], np.float32), bits=4)
    assert packed[:3].tolist() == [0xF1, 0x97, 0x0E]


def test_the_same_numbers_give_the_same_bytes() -> None:
    x = numbers(1001)
    np.testing.assert_array_equal(quantize(x), quantize(x.copy()))


def test_the_input_is_not_modified() -> None:
    x = numbers(512)
    before = x.copy()
    packed = quantize(x)
    kept = packed.copy()
    dequantize(packed, 512)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(packed, kept)


def test_zeros_have_scale_zero() -> None:
    packed = quantize(np.zeros(300, np.float32))
    assert not packed.any()
    assert not dequantize(packed, 300).any()


@both
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_with_an_infinity_comes_out_as_nan(
    bad: float, dtype: Any, bits: int, steps: int
) -> None:
    """And the blocks beside it as if it were not there."""
    x = numbers(700, dtype)
    x[300] = bad
    back = there_and_back(x, bits=bits)
    assert np.isnan(back[256:512]).all()
    np.testing.assert_array_equal(back[:256], there_and_back(x[:256], bits=bits))
    np.testing.assert_array_equal(back[512:], there_and_back(x[512:], bits=bits))


def test_what_float32_cannot_hold_is_infinite() -> None:
    assert np.isnan(there_and_back(np.array([1e39, 1.0]))).all()


@both
@pytest.mark.parametrize("peak", ["max", "smallest_normal", "smallest_subnormal"])
def test_the_greatest_and_the_least_numbers_keep_the_bound(
    peak: str, bits: int, steps: int
) -> None:
    """The greatest number stays finite, and what is next to nothing moves by next to nothing."""
    x = np.array([getattr(np.finfo(np.float32), peak), 0], np.float32)
    packed = quantize(x, bits=bits)
    error = np.abs(dequantize(packed, 2, bits=bits) - x).astype(np.float64)
    assert np.all(error <= HALF * scale_of_each(packed, 2, bits=bits))


def test_a_large_number_costs_its_own_block_only() -> None:
    """Block by block the others keep their digits; with one scale for all they become zero."""
    x = numbers(1024)
    x[0] = 1e4
    in_blocks, in_one = there_and_back(x), there_and_back(x, block=1024)
    small = np.abs(x[256:])
    assert np.abs(in_blocks[256:] - x[256:]).max() < small.max() / 127
    assert not in_one[256:].any()


def test_a_block_may_be_longer_than_the_array() -> None:
    """It takes no memory for what is not there."""
    x = numbers(5)
    np.testing.assert_array_equal(there_and_back(x, block=1 << 60), there_and_back(x))


@both
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_scales_may_lie_at_odd_addresses(size: int, bits: int, steps: int) -> None:
    """In a message that holds several arrays, one after the other."""
    x = numbers(size)
    message = np.concatenate([np.zeros(1, np.uint8), quantize(x, bits=bits)])
    back = dequantize(message[1:], size, bits=bits)
    np.testing.assert_array_equal(back, there_and_back(x, bits=bits))


@pytest.mark.parametrize("x", [np.arange(3), np.ones(3, bool), np.ones(3, np.complex64)])
def test_arrays_of_integers_are_refused(x: Any) -> None:
    with pytest.raises(
        TypeError, match=f"only floating-point arrays can be quantized, not {x.dtype}"
    ):
        quantize(x)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_arrays_of_several_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="only 1-d arrays can be quantized"):
        quantize(np.ones(shape, np.float32))


def test_a_block_without_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one element, not 0"):
        num_blocks(3, 0)


@pytest.mark.parametrize("bits", [0, 1, 5, 16])
def test_other_than_eight_or_four_bits_are_refused(bits: int) -> None:
    said = f"numbers can be quantized to 4 or 8 bits, not {bits}"
    for refuse in (
        lambda: quantize(numbers(4), bits=bits),
        lambda: dequantize(quantize(numbers(4)), 4, bits=bits),
        lambda: quantized_bytes(4, bits=bits),
        lambda: QuantizedExchange(BLOCK, "shard", "replicate", bits),
        lambda: Sharding.zeropp(gradient_bits=bits),
    ):
        with pytest.raises(ValueError, match=said):
            refuse()


def test_another_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 quantized elements have shape \(7,\), not \(8,\)"):
        dequantize(quantize(numbers(4)), 3)
    with pytest.raises(ValueError, match=r"4 quantized elements have shape \(6,\), not \(8,\)"):
        dequantize(quantize(numbers(4)), 4, bits=4)
    with pytest.raises(TypeError, match="uint8, not int8"):
        dequantize(quantize(numbers(4)).view(np.int8), 4)
