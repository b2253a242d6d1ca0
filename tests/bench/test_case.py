"""The benchmark's own check passes right results of all collectives, and counts wrong elements."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectives
from bench import case as bench_case
from bench.case import Case, in_place, num_wrong, out_of_place, prepare
from collectives.arrays.backends import HOST
from tests.fake_device import BACKEND, FakeDeviceArray, on_host

SIZE = 3
COLLECTIVES = [name for name in collectives.algorithms.collectives() if name != "barrier"]


def wrong_after(
    collective: str, make: Any, dtype: Any = np.float32, spoil: int = 0, backend: Any = HOST
) -> list[int]:
    """Wrong elements on each of three ranks after a run; `spoil` elements are changed first."""

    def body(comm):
        case = Case(collective, comm.rank, comm.size, 60, np.dtype(dtype), "sum", 1, backend)
        buffers = make(case)
        prepare(case, buffers)
        getattr(comm, collective)(buffers.x, out=buffers.y, **case.settings)
        if buffers.y is not None and spoil:
            assert type(buffers.y) is FakeDeviceArray or backend is HOST
            on_host(buffers.y)[:spoil] += 1
        return num_wrong(case, buffers.y)

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
    found = wrong_after(collective, in_place, spoil=5, backend=backend)
    assert found == wanted.get(collective, [5] * SIZE)


def test_a_result_that_never_came_is_wrong():
    case = Case("all_reduce", 0, 2, 60, np.dtype("int8"))
    buffers = out_of_place(case)
    prepare(case, buffers)
    assert num_wrong(case, buffers.y) == 60


def test_two_byte_floats():
    assert wrong_after("all_reduce", out_of_place, ml_dtypes.bfloat16) == [0] * SIZE
