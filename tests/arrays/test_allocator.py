"""Memory of large arrays is reused when nothing needs it, and not before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.arrays.allocator import CachingAllocator

MIB = 2**20
BYTE = np.dtype(np.uint8)


@pytest.fixture
def allocator() -> CachingAllocator:
    return CachingAllocator(max_bytes=8 * MIB)


def address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128", "int64,float32"])
def test_later_arrays_of_about_that_size_get_the_memory(
    allocator: CachingAllocator, dtype: str
) -> None:
    kind = np.dtype(dtype)
    x = allocator.empty((3, MIB // 4), kind)
    assert (x.shape, x.dtype) == ((3, MIB // 4), kind)
    assert x.flags.c_contiguous and x.flags.aligned and x.flags.writeable
    first = address(x)
    del x
    again = allocator.empty((3 * MIB // 4 * kind.itemsize - 5,), BYTE)
    assert address(again) == first


@pytest.mark.parametrize("shape", [(129, 256), (2**15,), (2**15 + 1,), (3, 5)])
def test_the_base_of_an_array_is_no_larger_than_the_array(
    allocator: CachingAllocator, shape: tuple[int, ...]
) -> None:
    """Whoever counts what an array keeps alive counts its own bytes, not what is rounded up."""
    x = allocator.empty(shape, np.dtype(np.float64))
    owner = x if x.base is None else x.base
    assert owner.nbytes == x.nbytes and getattr(owner, "base", None) is not x


VIEWS: list[Callable[[Any], Any]] = [
    lambda x: x[7:9],
    lambda x: x.reshape(2, -1).T[5:],
    lambda x: x.view(np.int16)[3:5],
    lambda x: memoryview(x)[:4],
    lambda x: np.asarray(memoryview(x))[:4],
    np.from_dlpack,
]


@pytest.mark.parametrize("view", VIEWS)
def test_memory_is_not_reused_while_a_view_of_it_exists(
    allocator: CachingAllocator, view: Callable[[Any], Any]
) -> None:
    x = allocator.empty((MIB,), BYTE)
    kept = view(x)
    first = address(x)
    del x
    other = allocator.empty((MIB,), BYTE)
    assert address(other) != first
    del kept
    assert address(allocator.empty((MIB,), BYTE)) == first


def test_the_allocator_keeps_a_bounded_number_of_bytes_those_that_came_back_last(
    allocator: CachingAllocator,
) -> None:
    arrays = [allocator.empty((3 * MIB,), BYTE) for _ in range(4)]  # 4 MiB each
    assert allocator.num_idle_bytes == 0
    *_, third, fourth = (address(x) for x in arrays)
    while arrays:
        arrays.pop(0)
        assert allocator.num_idle_bytes <= 8 * MIB
    last = [allocator.empty((4 * MIB,), BYTE) for _ in range(2)]
    assert [address(x) for x in last] == [fourth, third]
    del last
    allocator.empty((9 * MIB,), BYTE)  # more than it may keep at all
    assert allocator.num_idle_bytes == 8 * MIB


def test_threads_never_get_the_same_memory(allocator: CachingAllocator) -> None:
    wrong = []

    def work(number: int) -> None:
        for i in range(300):
            x = allocator.empty((MIB // 2,), BYTE)
            x[::4096] = (number + i) % 251
            y = allocator.empty((MIB,), BYTE)
            y[::4096] = 255
            if (x[::4096] != (number + i) % 251).any():
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(17 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_may_come_back_in_the_middle_of_a_function_of_the_allocator(
    allocator: CachingAllocator,
) -> None:
    """The garbage collector runs where Python makes objects, and deletes arrays there."""
    waiting = [allocator.empty((MIB // 4,), BYTE) for _ in range(16)]
    del waiting
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what other tests have made need not be looked at each time
    try:
        for threshold in range(1, 60):  # each lets it run at another place
            gc.collect()
            gc.set_threshold(threshold)
            cycle: list[Any] = [allocator.empty((MIB // 2,), BYTE)]
            cycle.append(cycle)
            del cycle
            assert allocator.empty((MIB,), BYTE).size == MIB
            assert allocator.num_idle_bytes <= 8 * MIB
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)


def test_the_allocator_makes_what_numpy_makes() -> None:
    for shape in (5, (), (0, 3), (2, 3), [300, 400], (np.int64(400_000),)):
        made, by_numpy = collectives.empty(shape), np.empty(shape)
        assert (made.shape, made.dtype) == (by_numpy.shape, by_numpy.dtype)
    assert collectives.empty(300_000, object)[299_999] is None
    for shape, error in (((2.5,), TypeError), ((-1, -300_000), ValueError), ("ab", TypeError)):
        with pytest.raises(error):
            collectives.empty(shape)


def test_a_result_is_not_overwritten_by_the_next_call() -> None:
    """Although the result itself is gone, and a part of it is kept."""

    def fn(comm: Communicator) -> None:
        x = np.ones(MIB // 4, np.float32)
        kept = comm.all_reduce(x)[5:8]
        work = comm.all_gather(x, async_op=True)
        assert (comm.all_reduce(3 * x) == 6).all()
        assert (work.wait() == 1).all() and (kept == 2).all()

    collectives.run(fn, size=2)
