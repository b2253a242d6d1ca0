"""Where an algorithm promises the same bits on all ranks, random floats agree bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import collectives
from collectives import Communicator, algorithms

NAMES = algorithms.names("all_reduce")
PROMISING = [name for name in NAMES if algorithms.info("all_reduce", name).is_bitwise]
OTHERS = [name for name in NAMES if name not in PROMISING]
SIZES = [2, 3, 4, 5, 6, 8, 9, 16]


def num_differing(name: str, size: int, dtype: str) -> int:
    """How many of 500 sums of random floats have not the same bits on all ranks."""

    def total(comm: Communicator) -> np.ndarray:
        random = np.random.default_rng(comm.rank)
        x = random.standard_normal(500).astype(dtype)
        return comm.all_reduce(x, algorithm=name)

    rows = [row.view(np.uint8).reshape(500, -1) for row in collectives.run(total, size)]
    return int(np.count_nonzero(np.any(np.stack(rows) != rows[0], axis=(0, 2))))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", PROMISING)
@pytest.mark.slow
def test_all_ranks_get_the_same_bits(name: str, dtype: str) -> None:
    sizes = [size for size in SIZES if algorithms.info("all_reduce", name).serves(size)]
    assert [num_differing(name, size, dtype) for size in sizes] == [0] * len(sizes)


@pytest.mark.parametrize("name", OTHERS)
def test_without_the_promise_the_last_bits_do_differ(name: str) -> None:
    size = 9 if name in ("recursive_multiplying", "tripling") else 8
    assert num_differing(name, size, "float32") > 50


def test_the_promise_is_not_given_lightly() -> None:
    assert OTHERS == ["recursive_multiplying", "one_shot", "swing_latency", "census", "tripling"]
