"""Calls on devices return when their work is enqueued, in the order of streams."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.devices import loop as loop_module
from collectives.engines import RUN_FAILED, deadline_in, poll_until
from tests.device.held_stream import hold, hold_each, released
from tests.fake_device import BACKEND, FakeDeviceArray, FakeStream, on_device, on_host
from tests.fake_driver import gpu

pytestmark = pytest.mark.usefixtures("new_gpu")


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=60, **options)


@pytest.fixture
def word() -> Iterator[np.ndarray]:
    with released() as word:
        yield word


def fill(x: FakeDeviceArray, value: float) -> None:
    """In the order of the current stream."""
    BACKEND.copy(on_device(np.full(x.shape, value)), x)


def contents(x: FakeDeviceArray) -> np.ndarray:
    """A copy, in the order of the current stream."""
    y = BACKEND.empty(x.shape, x.dtype)
    BACKEND.copy(x, y)
    return y


@pytest.mark.parametrize("kind", ["call", "plan"])
def test_a_call_returns_before_the_device_has_begun(kind: str, word: np.ndarray) -> None:
    """The input may be changed, and the output be used, in the order of the stream."""
    gpu().reset(queue_length=400)

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.zeros(6))
        plan = comm.plan.all_reduce(x, out=y)
        call = plan.run if kind == "plan" else partial(comm.all_reduce, x, out=y)
        call()  # the first one loads kernels and agrees on links
        comm.synchronize()
        comm.barrier()
        with BACKEND.on_stream(FakeStream(f"of rank {comm.rank}")):
            hold(BACKEND.current_stream(), word)
            results = []
            for turn in range(5):
                fill(x, turn + comm.rank)
                call()
                results.append(contents(y))
            assert word[0] == 0
            comm.barrier()
            word[:] = 1
            for turn, result in enumerate(results):
                assert on_host(result).tolist() == [3 * turn + 3.0] * 6
        comm.synchronize()
        plan.free()

    run(body, 3)


@pytest.mark.parametrize("is_plan", [False, True])
def test_wait_lets_the_current_stream_wait(is_plan: bool, word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.zeros(6))
        plan = comm.plan.all_reduce(x, out=y)
        start = plan.start if is_plan else partial(comm.all_reduce, x, out=y, async_op=True)
        for _ in range(2):  # the second plan is started by compiled code
            start() or plan
            plan.wait()
            comm.synchronize()
        comm.barrier()
        hold(BACKEND.current_stream(), word)
        fill(x, 5.0)
        work = start() or plan
        with BACKEND.on_stream(FakeStream(f"another of rank {comm.rank}")):
            assert work.wait() is y
            result = contents(y)
            assert not work.test()
            comm.barrier()
            word[:] = 1
            assert on_host(result).tolist() == [15.0] * 6
        assert work.test()
        assert work.wait(host=True) is y
        plan.free()

    run(body, 3)


def test_a_stream_that_does_not_wait_is_too_early(word: np.ndarray) -> None:
    """The negative control of the test above."""

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.zeros(6))
        comm.all_reduce(x, out=y)
        hold_each(comm, BACKEND.current_stream(), word)
        fill(x, 5.0)
        work = comm.all_reduce(x, out=y, async_op=True)
        with BACKEND.on_stream(FakeStream(f"another of rank {comm.rank}")):
            assert on_host(contents(y)).tolist() == [3.0] * 6
        comm.barrier()
        word[:] = 1
        work.wait(host=True)

    run(body, 3)


def test_waiting_on_the_host_is_for_the_device(word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        hold_each(comm, BACKEND.current_stream(), word)
        work = comm.all_reduce(x, async_op=True)
        work.wait()
        comm.barrier()
        with ThreadPoolExecutor(1) as pool:
            ends = [pool.submit(partial(work.wait, host=True)), pool.submit(comm.synchronize)]
            assert not poll_until(lambda: ends[0].done() or ends[1].done(), deadline_in(0.1))
            comm.barrier()
            word[:] = 1
            assert [end.result() for end in ends][1] is None
        assert not comm._session.devices._watch.is_busy

    run(body, 2)


@pytest.mark.parametrize("is_plan", [False, True])
def test_a_time_limit_of_waiting_on_the_host_ends_only_that(
    is_plan: bool, word: np.ndarray
) -> None:
    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        plan = comm.plan.all_reduce(x, out=y)
        start = plan.start if is_plan else partial(comm.all_reduce, x, out=y, async_op=True)
        for _ in range(2):  # the second plan is started by compiled code
            start() or plan
            plan.wait()
        hold_each(comm, BACKEND.current_stream(), word)
        work = start() or plan
        for _ in range(3):
            with pytest.raises(collectives.CollectiveTimeout, match=r"waited 0\.02 s for its"):
                work.wait(timeout=0.02, host=True)
        comm.barrier()
        word[:] = 1
        assert on_host(work.wait(timeout=20, host=True)).tolist() == [2.0] * 6
        plan.free()

    run(body, 2)


def test_each_call_waits_for_the_one_before_it_whatever_its_stream(word: np.ndarray) -> None:
    calls_on_two_streams(word)


def calls_on_two_streams(word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        x, other = on_device(np.ones(6)), FakeStream(f"another of rank {comm.rank}")
        comm.all_reduce(x)
        comm.all_reduce(x, "max")
        hold_each(comm, BACKEND.current_stream(), word)
        comm.all_reduce(x)
        with BACKEND.on_stream(other):
            y = comm.all_gather(x)
            BACKEND.enqueue(lambda: done.append(comm.rank))
        work = comm.all_reduce(x, "max", async_op=True)
        comm.barrier()
        for _ in range(20):
            gpu().progress()
        assert not done
        assert not work.test()
        comm.barrier()
        word[:] = 1
        comm.synchronize()
        other.synchronize()
        assert comm.rank in done
        assert on_host(y).tolist() == [1.0] * 18

    done: list[int] = []
    run(body, 3)


def test_calls_that_do_not_follow_each_other_are_noticed(
    monkeypatch: pytest.MonkeyPatch, word: np.ndarray
) -> None:
    """The negative control of the test above: each has an order of its own."""
    right = loop_module.Loop.__init__

    def alone(self: Any, driver: Any, order: Any, *others: Any) -> None:
        right(self, driver, type(order)(driver, BACKEND, order._held), *others)

    monkeypatch.setattr(loop_module.Loop, "__init__", alone)
    with pytest.raises((AssertionError, collectives.CollectiveError)):
        calls_on_two_streams(word)


def is_held_until_done(
    comm: Communicator, still_there: Callable[[], object], word: np.ndarray
) -> None:
    """An array to which the program refers no more is there until streams are not held."""
    assert still_there() is not None
    comm.barrier()
    word[:] = 1
    comm.synchronize()
    comm.barrier()
    assert still_there() is None


def test_an_asynchronous_call_holds_its_arrays_until_it_is_done(word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        hold_each(comm, BACKEND.current_stream(), word)
        comm.all_reduce(x, async_op=True).wait()
        still_there = weakref.ref(x._memory.base)
        del x
        is_held_until_done(comm, still_there, word)

    run(body, 2)


def test_a_plan_that_was_started_holds_its_arrays_until_it_is_done(word: np.ndarray) -> None:
    """Also if compiled code has started it, and the plan is freed."""

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        plan = comm.plan.all_reduce(x)
        for _ in range(2):
            plan.start()
            plan.wait()
        hold_each(comm, BACKEND.current_stream(), word)
        plan.start()
        plan.wait()
        plan.free()
        still_there = weakref.ref(x._memory.base)
        del x, plan
        is_held_until_done(comm, still_there, word)

    run(body, 2)


def test_a_call_with_a_header_is_enqueued_in_its_order() -> None:
    def body(comm: Communicator) -> None:
        for turn in range(6):
            x = on_device(np.full(4, float(turn))) if comm.rank == 0 else None
            first = comm.broadcast(x, async_op=True)
            second = comm.all_reduce(on_device(np.ones(4)), async_op=True)
            third = comm.scatter(
                on_device(np.arange(3.0)) if comm.rank == 0 else None, async_op=True
            )
            works = [first, second, third]
            for work in works if comm.rank % 2 else works[::-1]:
                work.wait()
            assert on_host(first.wait()).tolist() == [turn] * 4
            assert on_host(second.wait()).tolist() == [3.0] * 4
            assert on_host(third.wait()).tolist() == [comm.rank]

    run(body, 3)
    assert BACKEND.bytes_to_host == 0


def test_asynchronous_calls_of_two_communicators_may_come_in_different_orders() -> None:
    """No device waits for another in a circle, though streams wait for each call."""

    def body(comm: Communicator) -> None:
        other = comm.split(0)
        arrays = [on_device(np.full(5, float(k))) for k in range(2)]
        for turn in range(10):
            order = [0, 1] if (comm.rank + turn) % 2 else [1, 0]
            works = {k: (comm, other)[k].all_reduce(arrays[k], async_op=True) for k in order}
            for k in order:
                assert on_host(works[k].wait(timeout=20)).tolist() == [3.0 * k] * 5
        other.free()

    run(body, 3)


def test_a_call_that_is_refused_after_its_header_lets_later_calls_go_on() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(2):
            call = comm.all_reduce if comm.rank else comm.broadcast
            with pytest.raises(collectives.CollectiveMismatch):
                call(on_device(np.ones(3)), async_op=True).wait()
            work = comm.all_reduce(on_device(np.ones(3)), async_op=True)
            assert on_host(work.wait(timeout=20)).tolist() == [3.0] * 3

    run(body, 3, check=True)


def test_freeing_a_communicator_waits_for_its_calls(word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        other = comm.split(0)
        x = on_device(np.ones(6))
        other.all_reduce(x)
        other.synchronize()
        comm.barrier()
        hold(BACKEND.current_stream(), word)
        y = other.all_reduce(x)
        with ThreadPoolExecutor(1) as pool:
            freed = pool.submit(other.free)
            assert not poll_until(freed.done, deadline_in(0.1))
            comm.barrier()
            word[:] = 1
            freed.result()
        assert on_host(y).tolist() == [2.0] * 6

    run(body, 2)


def test_the_flight_recorder_shows_calls_as_enqueued_until_the_device_has_done_them(
    word: np.ndarray,
) -> None:
    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))

        def states() -> list[str]:
            calls = comm.last_calls()
            return [each["state"] for each in calls if each["collective"] == "all_reduce"]

        comm.all_reduce(x, out=y)
        comm.synchronize()
        comm.barrier()
        assert states() == ["complete"]
        hold(BACKEND.current_stream(), word)
        for _ in range(3):  # compiled code starts the last ones
            comm.all_reduce(x, out=y)
        assert states() == ["complete", *["enqueued"] * 3]
        comm.barrier()
        word[:] = 1
        comm.synchronize()
        assert states() == ["complete"] * 4

    run(body, 2)


def test_finite_mode_looks_at_results_of_asynchronous_calls(word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.full(4, 1.0))
        comm.all_reduce(x)
        work = comm.all_reduce(on_device(np.full(4, np.finfo(float).max)), async_op=True)
        with pytest.raises(collectives.NotFinite):
            work.wait()
        assert on_host(comm.all_reduce(x)).tolist() == [2.0] * 4

    run(body, 2, check="finite")


def test_what_follows_from_a_failure_is_not_taken_for_its_cause() -> None:
    has_failed = threading.Event()

    def body(comm: Communicator) -> str:
        comm.all_reduce(on_device(np.ones(3)))
        comm.synchronize()
        watch, board = comm._session.devices._watch, comm._session.transport.board
        comm.barrier()
        if comm.rank == 1:
            watch.note(RUN_FAILED, "the cause")
            has_failed.set()
        assert has_failed.wait(20)
        watch.look()
        watch.note(RUN_FAILED, "what follows")
        return str(board.failure and board.failure.why)

    assert run(body, 2) == ["the cause"] * 2
