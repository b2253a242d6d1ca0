"""The benchmark's own check passes right results of all collectives, and counts wrong elements."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectives
from bench.workloads import collective as bench_case
from bench.workloads.collective import Case, Check, in_place, out_of_place
from collectives.arrays.backends import HOST
from tests.fakes.device import BACKEND, FakeDeviceArray, on_host

SIZE = 3
COLLECTIVES = [name for name in collectives.algorithms.collectives() if name != "barrier"]


def wrong_after(
    collective: str,
    make: Any,
    dtype: Any = np.float32,
    spoil: int = 0,
    backend: Any = HOST,
    counts: Any = None,
) -> list[int]:
    """Wrong elements on each of three ranks after a run; `spoil` elements are changed first."""

    def body(comm):
        size, kind = comm.size, np.dtype(dtype)
        case = Case(collective, comm.rank, size, 60, kind, "sum", 1, backend, counts=counts)
        buffers = make(case)
        check = Check(case)
        check.prepare(buffers)
        getattr(comm, collective)(buffers.x, out=buffers.y, **case.settings)
        if buffers.y is not None and spoil:
            assert type(buffers.y) is FakeDeviceArray or backend is HOST
            on_host(buffers.y)[:spoil] += 1
        return check.num_wrong(buffers.y)

    return collectives.run(body, SIZE)


@pytest.mark.parametrize("backend", [HOST, BACKEND])
@pytest.mark.parametrize("make", [out_of_place, in_place])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_right_results_pass(collective, make, backend, monkeypatch):
    monkeypatch.setattr(bench_case, "WINDOW", 7)  # several windows, the last one short
    if (collective, make) != ("broadcast", out_of_place):
        assert wrong_after(collective, make, backend=backend) == [0] * SIZE


@pytest.mark.parametrize("backend", [HOST, BACKEND])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_wrong_elements_are_counted(collective, backend):
    at_root_only, after_first = [0, 5, 0], [0, 5, 5]
    wanted = {"gather": at_root_only, "reduce": at_root_only, "exscan": after_first}
    wrong = wrong_after(collective, in_place, spoil=5, backend=backend)
    assert wrong == wanted.get(collective, [5] * SIZE)


UNEVEN = dict.fromkeys(("scatter", "gather", "all_gather", "reduce_scatter"), (40, 0, 20))
UNEVEN["all_to_all"] = ((10, 0, 50), (0, 0, 60), (20, 30, 10))


@pytest.mark.parametrize("make", [out_of_place, in_place])
@pytest.mark.parametrize("collective", UNEVEN)
def test_right_results_of_uneven_blocks_pass(collective, make):
    if (collective, make) != ("all_to_all", in_place):
        counts = UNEVEN[collective]
        assert wrong_after(collective, make, counts=counts) == [0] * SIZE


@pytest.mark.parametrize("collective", UNEVEN)
def test_wrong_elements_of_uneven_blocks_are_counted(collective):
    wrong = wrong_after(collective, out_of_place, spoil=5, counts=UNEVEN[collective])
    wanted = {"gather": [0, 5, 0], "scatter": [5, 0, 5], "reduce_scatter": [5, 0, 5]}
    assert wrong == wanted.get(collective, [5] * SIZE)


def test_an_all_to_all_of_uneven_blocks_has_no_place_for_both():
    case = Case("all_to_all", 0, 3, 60, np.dtype("int8"), counts=UNEVEN["all_to_all"])
    assert in_place(case) is None
    assert (case.in_counts, case.out_counts) == ([10, 0, 50], [10, 0, 20])


def test_a_result_that_never_came_is_wrong():
    case = Case("all_reduce", 0, 2, 60, np.dtype("int8"))
    buffers = out_of_place(case)
    check = Check(case)
    check.prepare(buffers)
    assert check.num_wrong(buffers.y) == 60


def test_right_results_of_two_byte_floats_pass():
    assert wrong_after("all_reduce", out_of_place, ml_dtypes.bfloat16) == [0] * SIZE
