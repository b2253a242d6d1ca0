"""The communication thread: the same programs, and progress while nobody waits."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator
from collectives.diagnostics import hang_report
from tests.scenarios.operators import failing
from tests.scenarios.sessions import SCENARIOS

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_programs_run_while_a_thread_advances_the_calls(
    mpi_world: MPI.Intracomm, scenario: Callable[[Communicator], None]
) -> None:
    scenario(collectives.world(progress="thread"))


def test_every_kind_of_progress_has_a_world_of_its_own(world: Communicator) -> None:
    other = collectives.world(progress="thread")
    assert other is collectives.world(progress="thread") and other is not world
    assert collectives.world(progress=None) is world


def test_only_a_thread_can_be_asked_for(mpi_world: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match="progress must be None or 'thread', not 'magic'"):
        collectives.wrap(mpi_world, progress="magic")


def test_a_failure_in_the_thread_is_raised_by_the_wait(mpi_world: MPI.Intracomm) -> None:
    if mpi_world.size != 2:  # there both ranks fail in the only round
        return
    comm = collectives.wrap(mpi_world, progress="thread")
    op = failing(ArithmeticError("on purpose"))
    work = comm.all_reduce(np.ones(3), op, async_op=True, algorithm="recursive_doubling")
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="on purpose"):
            work.wait()
    assert comm.all_reduce(np.ones(3), async_op=True).wait()[0] == 2
    comm.free()


def test_the_thread_goes_on_with_what_somebody_has_waited_for_in_vain(
    mpi_world: MPI.Intracomm,
) -> None:
    if mpi_world.size == 1:
        return
    comm = collectives.wrap(mpi_world, progress="thread")
    if comm.rank == 0:  # before the others call it
        work = comm.barrier(async_op=True)
        for _ in range(20):
            with pytest.raises(collectives.CollectiveTimeout):
                work.wait(0.0)
    mpi_world.Barrier()
    if comm.rank != 0:
        work = comm.barrier(async_op=True)
    deadline = time.monotonic() + 10
    while not work.is_done and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert work.is_done
    comm.free()


def test_what_follows_a_call_is_done_once_by_the_thread_or_by_whoever_waits(
    mpi_world: MPI.Intracomm, world: Communicator
) -> None:
    comm, done_by = collectives.world(progress="thread"), list[str]()

    def follow() -> None:
        done_by.append(threading.current_thread().name)

    if comm.rank == 0:  # without it the others cannot be over
        mpi_world.Barrier()
    work = comm.barrier(async_op=True)
    if comm.rank != 0:
        work.add_done_callback(follow)
        assert not done_by
        mpi_world.Barrier()
    deadline = time.monotonic() + 10
    while comm.rank != 0 and not done_by and time.monotonic() < deadline:
        time.sleep(0.001)
    work.wait()
    work.add_done_callback(follow)
    assert done_by == ["collectives"] * (comm.rank != 0) + ["MainThread"]
    awaited = world.barrier(async_op=True)  # of which no thread knows
    awaited.add_done_callback(follow)
    awaited.wait()
    assert done_by[-1] == "MainThread"


def test_the_thread_is_one_for_all_communicators(mpi_world: MPI.Intracomm) -> None:
    num_threads, ours = threading.active_count(), collectives.world(progress="thread")
    for _ in range(3):
        comm = collectives.wrap(mpi_world, progress="thread")
        assert comm._session.thread is ours._session.thread
        comm.free()
    assert threading.active_count() <= num_threads + 1


@pytest.mark.parametrize("limit", [None, 30])
def test_plans_with_and_without_a_thread_may_wait_for_each_other(
    world: Communicator, limit: float | None
) -> None:
    other = collectives.world(progress="thread")
    work = world.all_reduce(np.ones(300_000), async_op=True, algorithm="ring")
    if world.rank % 2:
        work.wait(limit)
        other.barrier(timeout=limit)
    else:  # waits until the others are here, who need our part of the all-reduce
        other.barrier(timeout=limit)
        work.wait(limit)


def test_a_plan_that_is_over_can_be_started_at_once() -> None:
    comm = collectives.world(progress="thread")
    x, out = np.zeros(8), np.zeros(8)
    plan = comm.plan.all_reduce(x, out=out, algorithm="ring")
    for number in range(50):
        x[:] = number
        plan.start()
        while not plan.test():
            pass
        assert (out == comm.size * number).all()
    plan.free()


def test_a_call_is_waited_for_while_the_thread_makes_it_go_on() -> None:
    comm = collectives.world(progress="thread")
    for length in (1, 1000, 300_000) * 5:
        work = comm.all_reduce(np.ones(length), async_op=True)
        time.sleep(0.001 * (length % 7))
        assert work.wait()[0] == comm.size


def has_ended_while_we_slept(comm: Communicator) -> bool:
    """Whether the second of three rounds, and what follows, happened without a call of ours."""
    x = np.full(300_000, 1.0)
    work = comm.all_reduce(x, async_op=True, algorithm="ring")
    deadline = time.monotonic() + 10
    while not work.is_done and time.monotonic() < deadline:
        time.sleep(0.01)
        if comm._session.thread is None and deadline - time.monotonic() < 9.5:
            break
    has_ended = work.is_done
    assert work.wait()[0] == comm.size
    return has_ended


def test_what_was_started_goes_on_without_being_waited_for(world: Communicator) -> None:
    assert has_ended_while_we_slept(collectives.world(progress="thread"))
    assert world.size == 1 or not has_ended_while_we_slept(world)
    world.barrier()


def test_a_call_that_was_waited_for_is_released(mpi_world: MPI.Intracomm) -> None:
    """The thread forgets it at once, so that its arrays can be freed; before, it need not."""
    comm = collectives.wrap(mpi_world, progress="thread")
    work = comm.all_reduce(np.ones(1 << 16), async_op=True)
    refers = weakref.ref(work)
    work.wait()
    del work
    assert refers() is None
    comm.free()


@pytest.mark.parametrize("length", [3, 3000])
def test_time_limits_while_the_thread_advances_the_calls_change_nothing(
    mpi_world: MPI.Intracomm, length: int
) -> None:
    """A time-out reports all calls, and the thread posts and completes messages of others."""
    comms = [collectives.wrap(mpi_world, progress="thread", timeout=20) for _ in range(2)]
    draw, reports = random.Random(mpi_world.rank), list[str]()
    x, total = np.full(length, 1.0 + mpi_world.rank), sum(range(mpi_world.size + 1))
    # 40 rounds of all ranks together: on few cores, a round of many ranks takes long.
    for number in range(-(-40 // mpi_world.size)):
        if number % mpi_world.size == mpi_world.rank:
            time.sleep(5e-3)  # then the others time out, also on a machine that does nothing else
        works = [comm.all_reduce(x, async_op=True) for _ in range(10) for comm in comms]
        for work in works:
            limit = draw.choice((0.0, 1e-4, 1e-3))
            try:
                y = work.wait(limit)
            except collectives.CollectiveTimeout as error:
                reports.append(str(error))
                y = work.wait()
            assert (y == total).all()
    assert mpi_world.size == 1 or mpi_world.allreduce(len(reports)) > 0
    assert all(" s in round " in report.splitlines()[0] for report in reports)
    for comm in comms:
        comm.free()


def test_another_thread_may_report_the_calls_at_any_time(world: Communicator) -> None:
    """As the listener to SIGUSR1 does."""
    flight, is_over, num_reports = world._session.transport.flight, threading.Event(), [0]
    threaded, faults = collectives.world(progress="thread"), list[Exception]()

    def report() -> None:
        try:
            while not is_over.is_set():
                hang_report.check(flight.report())
                num_reports[0] += 1
        except Exception as error:  # noqa: BLE001 - asserted below
            faults.append(error)

    reporter = threading.Thread(target=report)
    reporter.start()
    while smallest(world, num_reports[0]) < 50 and not largest(world, len(faults)):
        for length in (3, 3000, 100_000):
            assert world.all_reduce(np.ones(length))[0] == world.size
            work = threaded.all_reduce(np.ones(length), async_op=True)
            assert world.all_to_all(np.ones(world.size)).sum() == world.size
            assert work.wait()[0] == world.size
    is_over.set()
    reporter.join()
    assert faults == []


def smallest(comm: Communicator, number: int) -> int:
    """The smallest number of all ranks."""
    return int(comm.all_reduce(np.array([number]), "min")[0])


def largest(comm: Communicator, number: int) -> int:
    """The largest number of all ranks."""
    return int(comm.all_reduce(np.array([number]), "max")[0])
