"""Calls on devices return when their work is enqueued, in the order of streams."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.devices import enqueue, kept
from collectives.devices import loop as loop_module
from collectives.devices.links import Links
from collectives.devices.meeting import Wait, Waits
from collectives.devices.order import Held, Order
from collectives.devices.rows import HostRows
from collectives.devices.streams import STREAMS
from collectives.engines import RUN_FAILED, Board, deadline_in, poll_until
from tests.devices.threads_with_counters import use_counters
from tests.fakes.device import (
    BACKEND,
    FakeDeviceArray,
    FakeStream,
    contents,
    fill,
    on_device,
    on_host,
)
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold, hold_each
from tests.inside import (
    board_of,
    execution_of,
    has_free_slots_only,
    kept_executions,
    loop_of,
    scratch_of,
    transport_of,
    watch_of,
)

pytestmark = pytest.mark.usefixtures("new_gpu")


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=60, **options)


@pytest.fixture
def may_go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is not set, calls stop half-way, before a stream waits for another rank."""
    right, may_go_on = HostRows.await_word, threading.Event()

    def await_later(self: HostRows, *arguments: Any) -> Waits:
        yield Wait(may_go_on.is_set, list, is_at_work=True)
        yield from right(self, *arguments)

    monkeypatch.setattr(HostRows, "await_word", await_later)
    may_go_on.set()
    return may_go_on


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
        assert not watch_of(comm).is_busy

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
        work.wait(timeout=20)  # until it is enqueued
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


def test_the_rest_of_a_call_that_takes_too_long_begins_after_its_first_part(
    may_go_on: threading.Event, word: np.ndarray
) -> None:
    """The first part is on the caller's stream, the rest on that of the communicator."""
    together = threading.Barrier(2, timeout=20)

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.zeros(6))
        call = partial(comm.all_reduce, x, out=y, algorithm="one_shot")
        call()
        hold_each(comm, BACKEND.current_stream(), word)
        may_go_on.clear()
        fill(x, 5.0)
        with pytest.raises(collectives.CollectiveTimeout) as caught:
            call(timeout=0.2)
        together.wait()
        may_go_on.set()
        caught.value.work.wait()
        result = contents(y)
        assert word[0] == 0
        comm.barrier()
        word[:] = 1
        assert on_host(result).tolist() == [10.0] * 6

    run(body, 2)


def test_calls_that_do_not_follow_each_other_are_noticed(
    monkeypatch: pytest.MonkeyPatch, word: np.ndarray
) -> None:
    """The negative control of the test above: each has an order of its own."""
    right = loop_module.Loop.__init__

    def alone(self: Any, driver: Any, order: Any, *others: Any, **options: Any) -> None:
        right(self, driver, type(order)(driver, BACKEND, order._held), *others, **options)

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
        still_there = weakref.ref(x.memory.base)
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
        still_there = weakref.ref(x.memory.base)
        del x, plan
        is_held_until_done(comm, still_there, word)

    run(body, 2)


@pytest.mark.parametrize("kind", ["plan", "call"])
def test_scratch_memory_is_held_until_its_runs_are_done(
    kind: str, monkeypatch: pytest.MonkeyPatch, word: np.ndarray
) -> None:
    """Also if the plan is freed, or the call is forgotten for another one."""
    monkeypatch.setattr(kept, "MOST_CALLS", 1)

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        again = partial(comm.all_reduce, x, out=y, algorithm="two_shot")
        if kind == "plan":
            plan = comm.plan.all_reduce(x, out=y, algorithm="two_shot")
        call = plan.run if kind == "plan" else again
        call()
        (execution,) = kept_executions(comm)
        still_there = weakref.ref(scratch_of(execution).memory.base)
        del execution
        hold_each(comm, BACKEND.current_stream(), word)
        call()
        if kind == "plan":
            plan.free()
        else:
            comm.all_reduce(x, out=y, algorithm="ring")
        is_held_until_done(comm, still_there, word)

    run(body, 3)


def test_a_freed_plan_gives_its_slot_back_when_the_device_has_done_it(word: np.ndarray) -> None:
    """Its last run is on the caller's stream; until then the device uses the counters there."""

    def body(comm: Communicator) -> None:
        board = board_of(comm)
        plan = comm.plan.all_reduce(on_device(np.ones(6)))
        plan.run()
        hold_each(comm, BACKEND.current_stream(), word)
        plan.run()
        plan.free()
        gpu().execute(1000)
        watch_of(comm).release()
        comm.barrier()
        assert not has_free_slots_only(board)
        comm.barrier()
        word[:] = 1
        comm.synchronize()
        assert poll_until(lambda: has_free_slots_only(board), deadline_in(20))

    run(body, 2)


def test_what_is_kept_until_a_part_of_a_run_has_ended_does_not_stand_for_the_rest(
    word: np.ndarray,
) -> None:
    gpu().make_current()
    driver, stream, held, ended = gpu().driver, BACKEND.current_stream(), Held(), list[str]()
    order = Order(driver, BACKEND, held)
    order.words[[enqueue.IS_OPEN, enqueue.NUM_RUNS]] = 1
    driver.call("cuEventRecord", order.stream.event, stream.ptr)
    order.after_all(partial(ended.append, "a part"))
    hold(stream, word)
    driver.call("cuEventRecord", order.stream.event, stream.ptr)
    order.words[enqueue.IS_OPEN] = 0
    order.after_all(partial(ended.append, "the rest"))
    gpu().execute(1000)
    held.release()
    assert ended == ["a part"]
    word[:] = 1
    gpu().synchronize(order.stream.handle)
    held.release()
    assert ended == ["a part", "the rest"]


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


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_call_on_known_memory_does_not_overtake_one_on_new_memory(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier call must wait until its ranks may open the memory.

    `is_kept`: whether the ranks have made calls of both kinds before, on other arrays.
    """
    may_block, new = threading.Event(), set[int]()

    def is_open(_: Links, record: Any) -> bool:
        return new.isdisjoint(record["buffers"]["address"].tolist())

    monkeypatch.setattr(Links, "is_open", is_open)
    monkeypatch.setattr(STREAMS, "may_block", lambda _: may_block.is_set())

    def body(comm: Communicator) -> None:
        first = partial(comm.all_reduce, algorithm="ring", async_op=True)
        second = partial(comm.all_reduce, algorithm="one_shot", async_op=True)
        for call in (first, second) if is_kept else ():
            call(on_device(np.ones(6)), out=on_device(np.ones(6))).wait()
        x, y, z = (on_device(np.ones(6)) for _ in range(3))
        new.add(x.memory.ctypes.data)
        comm.barrier()
        works = [first(x, out=y), second(y, out=z)]
        for _ in range(5):
            for _ in range(20):
                assert not any(work.test() for work in works)
            comm.barrier()
        may_block.set()
        works[0].wait()
        assert on_host(works[1].wait()).tolist() == [9.0] * 6

    run(body, 3)


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
        watch, board = watch_of(comm), board_of(comm)
        comm.barrier()
        if comm.rank == 1:
            watch.note(RUN_FAILED, "the cause")
            has_failed.set()
        assert has_failed.wait(20)
        watch.look()
        watch.note(RUN_FAILED, "what follows")
        return str(board.failure and board.failure.why)

    assert run(body, 2) == ["the cause"] * 2


def test_a_call_that_is_abandoned_half_way_keeps_its_arrays_while_the_device_uses_them(
    may_go_on: threading.Event, word: np.ndarray
) -> None:
    together = threading.Barrier(2, timeout=20)

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        hold_each(comm, BACKEND.current_stream(), word)
        may_go_on.clear()
        abandon_half_way(comm, x, together)
        still_there = weakref.ref(x.memory.base)
        del x
        assert still_there() is not None
        together.wait()
        word[:] = 1
        assert poll_until(lambda: not watch_of(comm).is_busy, deadline_in(20))
        transport_of(comm).failed.clear()  # which nothing uses any more

    run(body, 2)


def abandon_half_way(comm: Communicator, x: FakeDeviceArray, together: threading.Barrier) -> None:
    """Abandon a call of which a part is enqueued on each rank."""
    work: Any = comm.all_reduce(x, async_op=True)
    assert poll_until(lambda: work.test() or loop_of(execution_of(work)).is_open, deadline_in(20))
    together.wait()
    work.expire(0.0)


def test_a_failure_is_raised_when_the_device_has_ended(word: np.ndarray) -> None:
    """Until then it uses arrays that the program may change after that."""
    together = threading.Barrier(2, timeout=20)

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        hold_each(comm, BACKEND.current_stream(), word)
        comm.all_reduce(x)
        together.wait()
        watch_of(comm).note(RUN_FAILED, "the cause")
        threading.Timer(0.2, word.fill, [1]).start()
        with pytest.raises(collectives.CollectiveError, match="the cause"):
            comm.synchronize()
        assert word[0] == 1

    run(body, 2)


def test_a_device_does_not_wait_for_a_rank_before_its_stream_comes_to_the_call(
    monkeypatch: pytest.MonkeyPatch, word: np.ndarray
) -> None:
    """So no time limit counts until then."""
    use_counters(monkeypatch)

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        comm.all_reduce(x, out=y)
        hold_each(comm, BACKEND.current_stream(), word)
        for _ in range(2):
            comm.all_reduce(x, out=y)
        gpu().execute(1000)
        watch = watch_of(comm)
        watch.look(limit=0.0)
        assert watch.failure is None
        comm.barrier()
        word[:] = 1
        comm.synchronize()
        assert on_host(y).tolist() == [2.0] * 6

    run(body, 2)


def test_a_rank_that_has_died_after_a_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may have been read after that."""
    together, dead = threading.Barrier(2, timeout=20), set[int]()
    monkeypatch.setattr(Board, "is_dead", lambda _, rank: rank in dead)

    def body(comm: Communicator) -> None:
        comm.all_reduce(on_device(np.ones(6)))
        comm.synchronize()
        together.wait()
        dead.add(1)
        with pytest.raises(collectives.PeerFailed, match="rank 1 has died") as caught:
            comm.synchronize()
        assert caught.value.ranks == (1,)

    run(body, 2)
