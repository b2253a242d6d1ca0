"""Blocks tile their buffers exactly."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.schedule.layout import Region, by_pair, by_rank, consecutive, even_counts


@pytest.mark.parametrize("n", [0, 1, 5, 16, 17, 1000])
@pytest.mark.parametrize("p", [1, 2, 3, 7, 16, 40])
def test_even_counts_are_those_of_numpys_array_split(n: int, p: int) -> None:
    assert even_counts(n, p) == tuple(len(part) for part in np.array_split(np.arange(n), p))


def test_consecutive_blocks_follow_one_another() -> None:
    regions = consecutive("output", ["a", "b", "c"], {"a": 2, "b": 0, "c": 3})
    extents = {"a": (0, 2), "b": (2, 2), "c": (2, 5)}
    assert regions == {block: Region("output", *extent) for block, extent in extents.items()}


def test_blocks_have_their_names() -> None:
    assert by_rank((4, 5)) == {0: 4, 1: 5}
    assert by_pair(((1, 2), (3, 4))) == {(0, 0): 1, (0, 1): 2, (1, 0): 3, (1, 1): 4}
