"""Python threads that call at the same time: each on a communicator of its own, or refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator
from tests.covering import pairwise

pytestmark = pytest.mark.mpi


def in_threads(functions: list[Callable[[], None]]) -> None:
    """Run functions at the same time, and raise what the first of them raised."""
    errors: list[BaseException] = []

    def with_checks(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    checked = [partial(with_checks, function) for function in functions]
    threads = [threading.Thread(target=run, daemon=True) for run in checked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    ("timeout", "progress", "is_async"), pairwise([None, 30.0], [None, "thread"], [False, True])
)
def test_threads_may_call_at_once_on_a_communicator_each(
    mpi_world: MPI.Intracomm, timeout: float | None, progress: str | None, is_async: bool
) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.fail("this MPI does not let several threads call at once")
    comms = [
        collectives.wrap(mpi_world, timeout=timeout, progress=progress, check=False)
        for _ in range(3)
    ]

    def calls(comm: Communicator, number: int) -> None:
        total = sum(range(comm.size))
        for step in range(30):
            x = np.full(1 + 97 * number + step % 7, float(comm.rank + step))
            got = comm.all_reduce(x, async_op=is_async)
            got = got.wait() if is_async else got
            assert np.all(got == total + comm.size * step)
            whole = comm.all_gather(np.array([comm.rank * 10 + number]))
            assert whole.tolist() == [10 * rank + number for rank in range(comm.size)]
            shared = comm.broadcast(x if comm.rank == 0 else None)  # with a header
            assert shared[0] == step

    in_threads([lambda c=c, n=n: calls(c, n) for n, c in enumerate(comms)])
    for comm in comms:
        comm.free()


def test_threads_on_one_communicator_are_refused(mpi_world: MPI.Intracomm) -> None:
    comm = collectives.wrap(mpi_world, check=False)
    is_calling, is_refused, lengths = threading.Event(), list[str](), list[int]()

    def combine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        lengths.append(left.size)
        if len(lengths) > 1:  # the first is the rehearsal
            is_calling.set()
            while not is_refused:
                time.sleep(0.001)
        return left + right

    def other() -> None:
        assert is_calling.wait(30)
        try:
            comm.barrier()
        except RuntimeError as error:
            is_refused.append(str(error))
        else:
            is_refused.append("")

    if comm.size == 2:  # there both ranks combine in the only round
        op = collectives.Operator.from_function(combine, commutative=True)
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        assert comm.all_reduce(np.ones(1), op, algorithm="recursive_doubling")[0] == 2
        thread.join(30)
        assert "another call is being made on this communicator" in is_refused[0]
    assert comm.all_reduce(np.ones(1))[0] == comm.size
    comm.free()
