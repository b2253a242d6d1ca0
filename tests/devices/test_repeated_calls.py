"""Calls that all ranks make again on the same arrays of a device: without another meeting."""

from __future__ import annotations

import ctypes
import random
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.devices import kept, table
from collectives.devices.driver import DriverError
from collectives.devices.execution import OnDevice
from collectives.engines.board import Board
from tests.fakes.device import BACKEND, FakeDeviceArray, on_device, on_host
from tests.fakes.driver import gpu
from tests.inside import kept_executions, loop_of, session_of
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import COLLECTIVES, Job, all_jobs, name_and_options, some_jobs

pytestmark = pytest.mark.usefixtures("new_gpu")


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that have published a record, in this order."""
    published: list[int] = []
    right = Board.publish

    def publish(self: Board, *arguments: Any) -> Any:
        published.append(self.rank)
        return right(self, *arguments)

    monkeypatch.setattr(Board, "publish", publish)
    return published


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=60, **options)


def write(x: FakeDeviceArray, values: np.ndarray) -> None:
    BACKEND.copy(on_device(values), x)


def algorithm(job: Job) -> str:
    return name_and_options(job)[0]


def check_sum(
    comm: Communicator, call: Callable[[], Any], x: FakeDeviceArray, value: float
) -> None:
    write(x, np.full(x.shape, value * (comm.rank + 1)))
    total = value * comm.size * (comm.size + 1) / 2
    assert on_host(call()).tolist() == [total] * x.size


# Results


QUEUE_LENGTHS = {2: 8, 3: 64, 4: 16, 5: 64}  # by the number of ranks


@cache
def jobs_of(collective: str) -> list[Job]:
    """Each algorithm on each number of ranks, and of each kind; on some of them with options."""
    return some_jobs(collective, QUEUE_LENGTHS, name_and_options)


@pytest.mark.parametrize("size", QUEUE_LENGTHS)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.slow
def test_every_algorithm_is_right_when_it_runs_again(collective: str, size: int) -> None:
    gpu().reset(seed=size, queue_length=QUEUE_LENGTHS[size])
    jobs = [job for job in jobs_of(collective) if job.size == size]
    all_of_them = [job for job in all_jobs(size) if job.collective == collective]
    assert {*map(algorithm, jobs)} == {*map(algorithm, all_of_them)}

    def every(comm: Communicator) -> None:
        for job in jobs:
            scenarios.perform_again(comm, job, on_device, on_host, write, num_runs=2)

    run(every, size)
    assert BACKEND.bytes_to_host == 0


def test_counters_that_do_not_rise_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above: awaits are fulfilled by the signals of before."""
    from collectives.devices import placed

    right = placed.table_of

    def table_of(*arguments: Any) -> Any:
        made = right(*arguments)
        made.rows[:, table.VALUE] += made.rows[:, table.RISE]
        made.rows[:, table.RISE] = 0
        return made

    monkeypatch.setattr(placed, "table_of", table_of)

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(16))
        plan = comm.plan.all_reduce(x, algorithm="ring")
        for turn in range(1, 20):
            check_sum(comm, plan.run, x, turn)

    with pytest.raises((AssertionError, collectives.CollectiveError)):
        run(body, 4)
    gpu().violations.clear()


def test_runs_and_calls_do_not_meet_again(records: list[int]) -> None:
    def body(comm: Communicator) -> list[int]:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        ring = {"algorithm": "ring"}  # needs no scratch memory, which may lie elsewhere
        plan = comm.plan.all_reduce(x, out=y, **ring)
        counted = []
        for call in (plan.run, lambda: comm.all_reduce(x, out=y, **ring)):
            for turn in range(1, 12):
                check_sum(comm, call, x, turn)
                counted.append(records.count(comm.rank))
        return counted

    for counted in run(body, 3):
        assert counted == [2] * 11 + [3] * 11  # the links and the plan, then the first call


def with_other_arrays(comm: Communicator) -> None:
    """Calls in which some ranks, all of them, or none have other arrays than in the last call."""
    x, y = on_device(np.ones(6)), on_device(np.ones(6))
    others = [on_device(np.ones(6)) for _ in range(3)]
    for turn in range(1, 40):
        mine = others[turn % 3] if (turn * 7 + comm.rank) % 5 < 2 or turn % 4 == 0 else x
        out = y if turn % 3 else mine
        call = partial(comm.all_reduce, mine, out=out, algorithm=["ring", "one_shot"][turn % 2])
        check_sum(comm, call, mine, turn)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.slow
def test_other_arrays_are_taken_over_without_a_meeting(size: int, records: list[int]) -> None:
    run(with_other_arrays, size)
    assert len(records) <= size * 5  # the links, and two algorithms, each apart and in place


def test_arrays_that_are_not_taken_over_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a rank goes on with the arrays that it knows."""
    right = table.Table.set_starts

    def once(self: table.Table, rows: Any, starts: Any) -> None:
        if id(rows) not in written:
            written.append(id(rows))
            right(self, rows, starts)

    written: list[int] = []
    monkeypatch.setattr(table.Table, "set_starts", once)
    with pytest.raises((AssertionError, collectives.CollectiveError)):
        run(with_other_arrays, 3)
    gpu().violations.clear()


def test_calls_on_the_same_arrays_are_started_by_compiled_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from collectives.devices.loop import Loop

    started: list[int] = []
    right = Loop.run

    def noted(self: Loop, *arguments: int) -> int:
        started.append(right(self, *arguments))
        return started[-1]

    monkeypatch.setattr(Loop, "run", noted)

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        for turn in range(1, 12):
            check_sum(comm, partial(comm.all_reduce, x, out=y, algorithm="ring"), x, turn)
            other = on_device(np.ones(6))
            if turn % 4 == 0:
                check_sum(comm, partial(comm.all_reduce, other, out=y, algorithm="ring"), other, 5)

    run(body, 2)
    assert len(started) >= 2 * 6


def test_calls_that_share_a_run_do_not_use_each_others_arrays() -> None:
    def body(comm: Communicator) -> None:
        x, y, other = (on_device(np.ones(6)) for _ in range(3))
        for turn in range(1, 8):
            check_sum(comm, partial(comm.all_reduce, x, out=y), x, turn)
            check_sum(comm, partial(comm.all_reduce, other), other, turn + 1)

    run(body, 2)


def test_an_array_that_has_another_shape_now_is_looked_at_again() -> None:
    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones((4, 6))), on_device(np.zeros(((2, 1, 1)[comm.rank], 6)))
        for _ in range(3):
            comm.reduce_scatter(x, out=y)
        x.memory.shape = (8, 3)
        with pytest.raises(ValueError, match="shape"):
            comm.reduce_scatter(x, out=y)

    run(body, 3)


@pytest.mark.parametrize("check", [False, True])
def test_no_array_of_the_caller_is_kept(check: bool) -> None:
    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        for _ in range(4):
            comm.all_reduce(x, out=y)
        still_there = weakref.ref(x), weakref.ref(y)
        del x, y
        assert [each() for each in still_there] == [None, None]

    run(body, 2, check=check)


# Runs that must meet again


def test_a_host_array_of_one_rank_lets_all_stage() -> None:
    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(5)), on_device(np.ones(5))
        for turn in range(1, 20):
            if turn % 4 == comm.rank:
                total = comm.all_reduce(np.full(5, float(turn * (comm.rank + 1))))
                assert total.tolist() == [turn * 6.0] * 5
            else:
                check_sum(comm, lambda: comm.all_reduce(x, out=y), x, turn)

    run(body, 3)


def test_a_stream_that_is_captured_is_refused_by_all() -> None:
    def body(comm: Communicator) -> list[str]:
        x, y, refused = on_device(np.ones(6)), on_device(np.ones(6)), []
        again = partial(comm.all_reduce, x, out=y)
        plan = comm.plan.all_reduce(x)
        for turn in range(1, 6):
            for call in (again, plan.run):
                check_sum(comm, call, x, turn)
        for call in (again, plan.run):
            if comm.rank == 1:
                gpu().capturing.add(BACKEND.current_stream().ptr)
            with pytest.raises(collectives.CollectiveError) as caught:
                call()
            gpu().capturing.discard(BACKEND.current_stream().ptr)
            refused.append(str(caught.value))
            check_sum(comm, again, x, 7)
        plan.free()
        return refused

    found = run(body, 3)
    assert found[0] == found[1] == found[2]
    assert all("rank 1: the stream is being captured" in sentence for sentence in found[0])


def test_ranks_that_keep_different_calls_meet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OnDevice._can_run_again

    def can_run_again(self: OnDevice) -> bool:
        forgets = self._transport.rank == self._key.call % 5
        return right(self) and not forgets

    monkeypatch.setattr(OnDevice, "_can_run_again", can_run_again)

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(5)), on_device(np.ones(5))
        for turn in range(1, 30):
            check_sum(comm, lambda: comm.all_reduce(x, out=y), x, turn)

    run(body, 3)


def test_ranks_that_come_while_they_are_looked_for_are_not_elsewhere(
    monkeypatch: pytest.MonkeyPatch, records: list[int]
) -> None:
    right = Board.is_on_host

    def is_on_host(self: Board, rank: int, key: Any) -> bool:
        found = right(self, rank, key)
        time.sleep(0.003)  # meanwhile the others come
        return found

    monkeypatch.setattr(Board, "is_on_host", is_on_host)

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        for turn in range(1, 25):
            time.sleep(0.002 * ((turn + comm.rank) % 4))
            check_sum(comm, partial(comm.all_reduce, x, out=y, algorithm="ring"), x, turn)

    run(body, 4)
    assert len(records) == 4 * 2  # the links, and the first call


def test_more_kinds_of_calls_may_be_made_than_are_kept(records: list[int]) -> None:
    num_calls = kept.MOST_CALLS + 3

    def body(comm: Communicator) -> None:
        arrays = [on_device(np.ones(size)) for size in range(1, num_calls + 1)]
        for turn in range(1, 4):
            for x in arrays if turn % 2 else arrays[::-1]:
                check_sum(comm, lambda x=x: comm.all_reduce(x, out=x), x, turn)

    run(body, 2)
    assert len(records) < 2 * (1 + 3 * num_calls)


def test_an_allocation_at_the_address_of_another_one_is_noticed() -> None:
    """Its peers have the old one open."""

    def body(comm: Communicator) -> None:
        for turn in range(1, 6):
            x = on_device(np.ones(1 << 19))
            write(x, np.full(x.shape, float(turn)))
            assert on_host(comm.all_reduce(x, out=x))[-1] == comm.size * turn
            del x
            comm.barrier()
            gpu().trim()
            comm.barrier()

    run(body, 2)


def test_counters_do_not_overflow(monkeypatch: pytest.MonkeyPatch, records: list[int]) -> None:
    monkeypatch.setattr(table.Table, "most_runs", 4)

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(5))
        plan = comm.plan.all_reduce(x)
        for turn in range(1, 20):
            check_sum(comm, plan.run, x, turn)

    run(body, 3)
    assert 3 * 5 <= len(records) <= 3 * 7


def calls_of_a_kind_under_way(comm: Communicator) -> None:
    """Several at once, whose runs the ranks take for the next calls in different orders."""
    arrays = [on_device(np.ones(6)) for _ in range(4)]
    for turn in range(12):
        for k, x in enumerate(arrays):
            write(x, np.full(6, float(turn + k)))
        several = arrays[: 4 - turn % 4]
        works = [comm.all_reduce(x, async_op=True, algorithm="ring") for x in several]
        for k, work in enumerate(works):
            assert on_host(work.wait()).tolist() == [(turn + k) * comm.size] * 6
        for kind in session_of(comm).pool._kinds.values():
            random.Random(10 * turn + comm.rank).shuffle(kind.idle)


def test_calls_of_one_kind_may_be_under_way_at_once() -> None:
    run(calls_of_a_kind_under_way, 3)
    assert BACKEND.bytes_to_host == 0


# Plans


@pytest.mark.slow
def test_ranks_may_repeat_plans_in_any_order() -> None:
    gpu().reset(seed=3, queue_length=8)

    def body(comm: Communicator) -> None:
        arrays = [on_device(np.ones(6)) for _ in range(4)]
        plans = [comm.plan.all_reduce(x, algorithm="ring") for x in arrays]
        for turn in range(1, 12):
            for k, x in enumerate(arrays):
                write(x, np.full(6, float(turn + k)))
            order = np.random.default_rng([turn, comm.rank]).permutation(4)
            for k in order:
                plans[k].start()
            for k in reversed(order):
                plans[k].wait()
            for k, plan in enumerate(plans):
                assert on_host(plan.result).tolist() == [(turn + k) * comm.size] * 6

    run(body, 3)


@pytest.mark.parametrize("is_plan", [True, False])
def test_a_failure_of_the_driver_in_compiled_code_is_raised(is_plan: bool) -> None:
    words = ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32
    function = ctypes.CFUNCTYPE(ctypes.c_int, *words)(lambda *_: 719)

    def body(comm: Communicator) -> bool:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        plan = comm.plan.all_reduce(x, out=y, algorithm="ring")
        call = plan.run if is_plan else partial(comm.all_reduce, x, out=y, algorithm="ring")
        for _ in range(3):
            call()
        for execution in kept_executions(comm):
            loop = loop_of(execution)
            loop.words[loop.names.WAIT_EVENT] = ctypes.cast(function, ctypes.c_void_p).value
        with pytest.raises(collectives.CollectiveError, match=r"719|half-way") as caught:
            call()
        with pytest.raises((RuntimeError, collectives.CollectiveError), match="fail"):
            call()
        return isinstance(caught.value, DriverError)  # or the other rank was faster

    assert any(run(body, 2))


@pytest.mark.slow
def test_a_freed_plan_gives_its_slot_back() -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(3))
        for turn in range(1, 70):
            plan = comm.plan.all_reduce(x)
            for _ in range(2):
                check_sum(comm, plan.run, x, turn)
            plan.free()

    run(body, 2)
    assert BACKEND.bytes_to_host == 0


def test_a_time_limit_names_who_has_not_come() -> None:
    def body(comm: Communicator) -> str:
        x = on_device(np.ones(4))
        plan = comm.plan.all_reduce(x)
        plan.run()
        text = ""
        if comm.rank == 0:
            with pytest.raises(collectives.CollectiveTimeout) as caught:
                plan.run(timeout=0.3)
            text = str(caught.value)
        comm.barrier()
        if comm.rank:
            plan.run()
        assert on_host(plan.wait())[0] == comm.size
        plan.run()
        return text

    assert "rank 1" in run(body, 3)[0]
