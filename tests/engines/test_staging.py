"""Arrays of a device that are staged in host memory: nothing else of them reaches an engine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveTimeout, Communicator, Operator
from collectives.devices.driver import DriverError
from collectives.engines import deadline_in, poll_until, staging
from tests.fakes.device import BACKEND, FakeDeviceArray, FakeStream, on_device, on_host
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold, released
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import all_jobs


@pytest.fixture(autouse=True)
def _no_violations() -> Iterator[None]:
    BACKEND.reset()
    gpu().reset()
    yield
    gpu().check()


def run(body: Callable[[Communicator], Any], size: int) -> list[Any]:
    return collectives.run(body, size, timeout=60, device="staged")


def hold_stream(word: np.ndarray) -> None:
    """Let what comes next on the current stream wait until the word is 1."""
    gpu().make_current()
    hold(BACKEND.current_stream(), word)


def test_the_host_cannot_look_into_a_fake_device_array() -> None:
    x = on_device(np.ones(3))
    with pytest.raises(TypeError):
        memoryview(x)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        np.add(x, 1.0)
    with pytest.raises(TypeError):
        iter(x)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.slow
def test_every_algorithm_serves_device_arrays(size: int) -> None:
    def every(comm: Communicator) -> None:
        # The way of arrays to the host and back is the same for all sizes.
        for job in all_jobs(size) if size == 3 else all_jobs(size)[size::4]:
            scenarios.perform_on_device(comm, job, on_device, on_host)

    run(every, size)


def test_staged_bytes_are_the_bytes_sent() -> None:
    def body(comm: Communicator) -> int:
        with comm.record() as ledger:
            comm.all_reduce(on_device(np.ones(1000)), algorithm="ring")
        return sum(row.bytes for row in ledger.rows())

    sent = sum(run(body, 4))
    assert sent == 2 * 3 * 8000
    assert BACKEND.bytes_to_host == BACKEND.bytes_to_device == sent


def test_device_arrays_are_combined_on_the_device() -> None:
    run(lambda comm: comm.all_reduce(on_device(np.ones(8)), algorithm="ring"), 4)
    assert BACKEND.num_combined == 4 * 3


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("kind", ["call", "plan"])
def test_a_call_begins_after_what_was_on_the_stream_of_its_caller(
    kind: str, num_before: int
) -> None:
    """Whichever stream is current in the thread that goes on with it, and was in the last run."""

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(1000)), on_device(np.zeros(1000))
        plan = comm.plan.all_reduce(x, out=y)
        start = plan.start if kind == "plan" else partial(comm.all_reduce, x, out=y, async_op=True)
        for _ in range(num_before):
            (start() or plan).wait()
        comm.barrier()
        with BACKEND.on_stream(FakeStream("the caller's")):
            hold_stream(word)
            BACKEND.copy(on_device(np.full(1000, 5.0)), x)
            work = start() or plan
        time.sleep(0.02)
        comm.barrier()
        word[:] = 1
        work.wait()
        with BACKEND.on_stream(FakeStream("another")):  # the result is complete
            assert on_host(y).tolist() == [5.0 * comm.size] * 1000
        plan.free()

    with released() as word:
        run(body, 3)


def test_messages_arrive_while_the_device_copies() -> None:
    """The host waits for no copy: it has posted all receives, though it has sent nothing yet."""
    num_leaving, num_posted = list[int](), list[int]()

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(1000))
        if comm.rank == 0:
            hold_stream(word)
        work: Any = comm.all_to_all(x[: comm.size], async_op=True, algorithm="linear")
        while comm.rank and len(work._run.execution._leaving):  # they have sent
            work.test()
        comm.barrier()
        if comm.rank == 0:
            for _ in range(100):
                work.test()
            num_leaving.append(len(work._run.execution._leaving))
            num_posted.append(len(work._run.execution.messages.waiting_for()))
            word[:] = 1
        work.wait()

    with released() as word:
        run(body, 3)
    assert num_leaving == num_posted == [2]


def test_a_failed_call_keeps_what_the_device_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the device still reads or writes is not used again."""
    monkeypatch.setattr(staging, "_SECONDS_TO_END", 0.05)
    monkeypatch.setattr(staging, "_idle", idle := defaultdict(list))

    def body(comm: Communicator) -> None:
        x, other = on_device(np.ones(1000)), comm.split(0)
        hold_stream(word)
        with pytest.raises(CollectiveTimeout, match="it waits for its device") as caught:
            comm.all_reduce(x, timeout=0.05)
        work: Any = caught.value.work
        execution = work._run.execution
        work.give_up(RuntimeError("no longer wanted"))
        assert execution in comm._session.transport.failed
        assert not idle["fake"]
        other.barrier()
        word[:] = 1
        with BACKEND.on_stream(FakeStream("another")):
            y = other.all_reduce(x)
            assert on_host(y).tolist() == [comm.size] * 1000
        comm._session.transport.failed.clear()  # or all of it would be kept until the process ends

    with released() as word:
        run(body, 2)


def test_a_call_that_fails_gives_its_streams_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_idle", idle := defaultdict(list))

    def fail(left: Any, right: Any) -> Any:
        if left.size > 1:  # else it is tried before the call begins
            raise ZeroDivisionError
        return left

    def body(comm: Communicator) -> None:
        with pytest.raises(ZeroDivisionError):
            comm.all_reduce(on_device(np.ones(8)), Operator.from_function(fail))

    run(body, 2)
    assert [len(pairs) for pairs in idle.values()] == [2]


def test_a_call_whose_end_is_interrupted_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank would otherwise look at it in each later wait."""

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(1000))
        hold_stream(word)
        with pytest.raises(CollectiveTimeout) as caught:
            comm.all_reduce(x, timeout=0.05)
        work: Any = caught.value.work
        with pytest.raises(KeyboardInterrupt):
            work.give_up(RuntimeError("no longer wanted"))
        transport: Any = comm._session.transport
        assert not transport._waiters
        word[:] = 1
        BACKEND.synchronize()
        transport.failed.clear()

    monkeypatch.setattr(staging, "poll_until", interrupt)
    with released() as word:
        run(body, 1 + 1)


def test_a_device_that_fails_ends_the_wait_for_it() -> None:
    """The error is that of the device."""

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(100))
        hold_stream(word)
        BACKEND.enqueue(lambda: 1 / 0)  # a kernel that fails
        work: Any = comm.all_reduce(x, async_op=True)
        execution = work._run.execution
        assert execution._awaited
        word[:] = 1
        assert poll_until(lambda: gpu().progress() and gpu().error, deadline_in(20))
        assert execution.can_move
        assert not execution.is_stuck
        assert not execution.device_row
        try:
            work.wait()
        finally:
            comm._session.transport.failed.clear()

    with released() as word:
        with pytest.raises(DriverError):
            run(body, 1)
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            gpu().reset()


def test_host_memory_that_changes_while_it_is_copied_makes_a_wrong_result() -> None:
    """The negative control of all tests here."""
    host, device = np.zeros(8, np.uint8), on_device(np.ones(1))
    BACKEND.to_device([(device, host)])
    host[:] = 1
    assert on_host(device).view(np.uint8).tolist() == [1] * 8


@pytest.mark.parametrize("scenario", [scenarios.mixed_program, scenarios.plan_reads_afresh])
def test_programs_on_device_arrays_do_what_they_do_on_the_host(scenario: object) -> None:
    run(lambda comm: scenario(comm, on_device, on_host), 3)


def test_one_call_with_arrays_of_two_kinds_is_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(TypeError, match="x is on fake and out on numpy"):
            comm.all_reduce(on_device(np.ones(3)), out=np.ones(3))

    run(body, 2)


def test_results_are_new_device_arrays() -> None:
    (y,) = run(lambda comm: comm.all_reduce(on_device(np.ones(3))), 1)
    assert isinstance(y, FakeDeviceArray)
