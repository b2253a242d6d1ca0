"""The oracle against cases small enough to be written down."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from bench.workloads.expected import expected

A, B = np.array([1, 2, 3]), np.array([10, 20, 30])


def same(results, wanted):
    """Whether lists of arrays (or None) agree in every element."""
    return [None if r is None else r.tolist() for r in results] == wanted


def test_collectives_that_move_give_the_blocks_of_the_others():
    assert same(expected("broadcast", [A, B], root=1), [[10, 20, 30]] * 2)
    assert same(expected("scatter", [A, B], root=1), [[10, 20], [30]])
    assert same(expected("gather", [A, B], root=1), [None, [1, 2, 3, 10, 20, 30]])
    assert same(expected("all_gather", [A, B]), [[1, 2, 3, 10, 20, 30]] * 2)
    assert same(expected("all_to_all", [A, B]), [[1, 2, 10, 20], [3, 30]])


def test_collectives_that_reduce_give_sums():
    assert same(expected("reduce", [A, B], root=1), [None, [11, 22, 33]])
    assert same(expected("all_reduce", [A, B]), [[11, 22, 33]] * 2)
    assert same(expected("reduce_scatter", [A, B]), [[11, 22], [33]])


def test_scans_give_sums_of_the_ranks_before():
    assert same(expected("scan", [A, B, A]), [[1, 2, 3], [11, 22, 33], [12, 24, 36]])
    assert same(expected("exscan", [A, B, A]), [None, [1, 2, 3], [11, 22, 33]])


def test_an_operator_that_is_a_function_is_applied_in_rank_order():
    inputs = [np.array([3]), np.array([5]), np.array([7])]
    results = expected("scan", inputs, op=lambda left, right: 10 * left + right)
    assert same(results, [[3], [35], [357]])


def test_counts_divide_the_result():
    assert same(expected("scatter", [A, B], counts=[0, 3]), [[], [1, 2, 3]])
    assert same(expected("reduce_scatter", [A, B], counts=[1, 2]), [[11], [22, 33]])
    table = [[1, 2], [3, 0]]
    assert same(expected("all_to_all", [A, B], counts=table), [[1, 10, 20, 30], [2, 3]])
    with pytest.raises(ValueError, match="do not add up to 3 rows"):
        expected("scatter", [A, B], counts=[1, 1])


@pytest.mark.parametrize(
    ("op", "wanted"),
    [("sum", 9), ("prod", 18), ("min", 3), ("max", 6), ("and", 2), ("or", 7), ("xor", 5)],
)
def test_every_operator_is_applied(op, wanted):
    inputs = [np.array([6]), np.array([3])]
    assert same(expected("all_reduce", inputs, op=op), [[wanted]] * 2)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_average_keeps_the_dtype(dtype):
    result = expected("all_reduce", [np.array([3.0], dtype), np.array([4.0], dtype)], op="avg")[0]
    assert result is not None and result.dtype == dtype
    assert result.tolist() == [3.5]


def test_rows_and_single_numbers_are_served():
    rows = np.arange(6).reshape(3, 2)
    assert same(expected("scatter", [rows, rows]), [[[0, 1], [2, 3]], [[4, 5]]])
    assert same(expected("all_gather", [np.array(1.0), np.array(2.0)]), [[1.0, 2.0]] * 2)


def test_results_share_no_memory():
    results = expected("broadcast", [A, B])
    assert not np.shares_memory(results[0], A)
    assert not np.shares_memory(results[0], results[1])
    assert not np.shares_memory(expected("scan", [A, B])[0], A)


def test_an_unknown_collective_is_refused():
    with pytest.raises(ValueError, match="unknown collective 'allreduce'"):
        expected("allreduce", [A, B])
