"""Payloads: how far rounding goes, and how many bytes a row has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe.exchange.payload import BLOCK, PAYLOADS, decode, encode, form_of


def rows(n: int, dim: int) -> Any:
    return np.random.default_rng(1).standard_normal((n, dim)).astype(np.float32)


@pytest.mark.parametrize("dim", [1, 5, BLOCK, BLOCK + 1, 1024])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_row_has_as_many_bytes_as_its_form_says(payload: str, dim: int) -> None:
    for n in (0, 1, 7):
        packed, form = encode(rows(n, dim), payload), form_of(payload, dim, 4)
        assert packed.shape == (n, form.width) and packed.dtype.itemsize == form.itemsize
        assert decode(packed, payload, dim, np.float32).shape == (n, dim)
    # 7168 elements in 8 bits, as DeepEP sends them but for its 16 bytes of indices.
    assert form_of("int8", 7168, 2).width == 7408 - 16


@pytest.mark.parametrize("dim", [5, 300])
def test_int8_rounds_by_at_most_half_a_scale(dim: int) -> None:
    x = rows(9, dim)
    back = decode(encode(x, "int8"), "int8", dim, np.float32)
    for start in range(0, dim, BLOCK):
        part = slice(start, start + BLOCK)
        half = np.abs(x[:, part]).max(axis=1, keepdims=True) / 127 / 2
        error = np.abs(x - back)[:, part]
        assert (error <= half * (1 + 1e-5)).all() and error.max() > half.max() / 2


@pytest.mark.parametrize("payload", ["bfloat16", "int8"])
def test_infinities_and_nans_are_not_lost(payload: str) -> None:
    x = rows(3, 6)
    x[1, 2] = np.inf
    back = decode(encode(x, payload), payload, 6, np.float32)
    assert not np.isfinite(back[1, 2]) and np.isfinite(back[[0, 2]]).all()


def test_zeros_stay_zero_and_rows_do_not_depend_on_each_other() -> None:
    x = rows(4, 200)
    x[2] = 0
    back = decode(encode(x, "int8"), "int8", 200, np.float32)
    assert not back[2].any()
    np.testing.assert_array_equal(
        decode(encode(x[1:2], "int8"), "int8", 200, np.float32), back[1:2]
    )
