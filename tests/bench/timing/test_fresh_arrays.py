"""Calls on fresh arrays: no address comes again soon, and the result can be checked."""

from __future__ import annotations

import numpy as np
import pytest

from bench.timing.fresh_arrays import ARENA, LINE, SLACK, Fresh


def fresh(num_elements: int) -> Fresh:
    x = np.arange(num_elements, dtype=np.float32)
    return Fresh(lambda x: 2 * x, x, np.empty_like(x))


@pytest.mark.parametrize(
    ("num_bytes", "count"), [(8, 100_000), (4096, 10_000), (ARENA, SLACK // LINE)]
)
def test_no_two_inputs_are_the_same(num_bytes, count):
    inputs = fresh(num_bytes // 4).inputs(count)
    assert len({x.ctypes.data for x in inputs}) == count
    assert {x.nbytes for x in inputs} == {num_bytes}


@pytest.mark.parametrize("num_bytes", [4, 8, 1000, ARENA, ARENA + 4])
def test_inputs_lie_in_the_arena(num_bytes):
    calls = fresh(num_bytes // 4)
    for x in calls.inputs(3000):
        assert x.nbytes == num_bytes and x.flags.c_contiguous and x.base is not None


def test_inputs_of_one_sample_do_not_overlap():
    begins = sorted(x.ctypes.data for x in fresh(25).inputs(200))
    assert min(np.diff(begins)) >= 100


def test_inputs_hold_zeros():
    assert not any(x.any() for x in fresh(100).inputs(200))


def test_one_call_on_the_arrays_of_the_case_can_be_checked():
    calls = fresh(5)
    calls()
    assert calls.y.tolist() == [0, 2, 4, 6, 8]
