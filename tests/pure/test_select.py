"""Selection: a named algorithm runs or is refused, and the default can always run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectives import algorithms, select
from collectives.reduction import operator


@pytest.mark.parametrize("collective", algorithms.collectives())
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 33])
def test_there_is_a_default_for_every_size(collective: str, size: int) -> None:
    for num_bytes in (0, 8, 2**15, 2**15 + 1, 2**20, 2**40):
        assert select.choose(collective, None, size, num_bytes, None).serves(size)


def test_an_operator_that_is_not_commutative_needs_an_ordered_algorithm() -> None:
    matmul = replace(operator("sum"), name="matmul", is_commutative=False)
    with pytest.raises(ValueError, match="needs a commutative operator; matmul is not"):
        select.choose("all_reduce", "ring", 4, 8, matmul)
    assert select.choose("all_reduce", "recursive_doubling", 4, 8, matmul).is_ordered
    assert select.choose("all_reduce", None, 4, 2**30, operator("sum")).name == "ring"


def test_a_pipeline_gets_segments_that_stay_in_cache() -> None:
    chain = algorithms.info("broadcast", "chain")
    assert select.options(chain, 0) == {"segments": 1}
    assert select.options(chain, 4 * select.SEGMENT_BYTES + 1) == {"segments": 5}
    assert select.options(algorithms.info("broadcast", "binomial"), 2**30) == {}
