"""Calls that are one kernel on each rank, whose blocks go on in orders drawn by a seed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, Communicator
from collectives.devices import concurrency, kernel_table
from tests.devices.kernels_of_threads import run_as_kernels
from tests.fakes.device import BACKEND, FakeDeviceArray, on_device, on_host
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import COLLECTIVES, all_jobs, some_jobs

SIZES = 2, 3, 4


@pytest.fixture(autouse=True)
def _kernels(new_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run_as_kernels(monkeypatch)
    yield
    _KEPT.clear()


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=100, **options)


def kept(x: np.ndarray) -> FakeDeviceArray:
    """An array that stays, because a peer's host may enqueue what reads it later.

    The fake GPU cannot know that the memory of ranks that are threads is not used again before.
    """
    _KEPT.append(on_device(x))
    return _KEPT[-1]


_KEPT: list[FakeDeviceArray] = []


def num_launches() -> int:
    return gpu().num_calls["cuLaunchCooperativeKernel"]


def shown_links(comm: Communicator) -> str:
    return str(comm.explain("all_reduce", on_device(np.ones(3))).links)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.slow
def test_every_algorithm_as_a_kernel_gives_the_serial_result(collective: str, size: int) -> None:
    every = some_jobs(collective, SIZES, lambda job: [job.algorithm])
    jobs = [job for job in every if job.size == size]

    def body(comm: Communicator) -> None:
        for job in jobs:
            scenarios.perform_on_device(comm, job, kept, on_host)

    run(body, size)
    assert num_launches() >= len(jobs)
    assert BACKEND.bytes_to_host == 0


def write(x: FakeDeviceArray, values: np.ndarray) -> None:
    BACKEND.copy(on_device(values), x)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_plans_and_repeated_calls_are_right_as_kernels(seed: int) -> None:
    gpu().reset(seed)
    jobs = all_jobs(2 + seed % 3)[seed::60]

    def body(comm: Communicator) -> None:
        for job in jobs:
            scenarios.perform_again(comm, job, kept, on_host, write, num_runs=2)

    run(body, jobs[0].size)
    assert BACKEND.bytes_to_host == 0


def test_a_call_again_is_one_launch() -> None:
    x = [kept(np.ones(64)) for _ in range(2)]

    def body(comm: Communicator) -> None:
        y = kept(np.ones(64))
        for turn in range(4):
            comm.all_reduce(x[comm.rank], out=y, algorithm="ring")
            comm.synchronize()
            comm.barrier()
            if turn == 1:
                gpu().num_calls.clear()
                comm.barrier()

    run(body, 2)
    made = {name: gpu().num_calls[name] for name in ("cuLaunchKernel", "cuStreamBatchMemOp_v2")}
    assert made == {"cuLaunchKernel": 0, "cuStreamBatchMemOp_v2": 0}
    assert num_launches() == 2 * 2


# Who runs kernels


def test_ranks_that_run_at_the_same_time_say_so() -> None:
    def body(comm: Communicator) -> str:
        comm.all_reduce(kept(np.ones(3)), out=kept(np.ones(3)))
        return shown_links(comm)

    shown = "memory of rank 1 is read directly; a kernel runs a whole call"
    assert run(body, 2)[0] == shown


def launches_later(comm: Communicator) -> int:
    """The kernels of two calls, after one by which the ranks agree."""
    x, y = kept(np.ones(6)), kept(np.ones(6))
    comm.all_reduce(x, out=y)
    comm.synchronize()
    comm.barrier()
    before = num_launches()
    for name in ("ring", "two_shot"):
        assert on_host(comm.all_reduce(x, algorithm=name)).tolist() == [comm.size] * 6
    comm.barrier()
    return num_launches() - before


def test_ranks_that_take_turns_run_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu(), "seconds_between", 0.1)

    def body(comm: Communicator) -> str:
        assert launches_later(comm) == 0
        return shown_links(comm)

    assert "ranks take turns: a signal takes 6250 us" in run(body, 2)[0]


def test_ranks_of_which_one_starts_no_kernel_run_none(monkeypatch: pytest.MonkeyPatch) -> None:
    right = concurrency.Handshake.launch

    def launch(self: Any, *arguments: Any) -> None:
        if self._meeting.board.rank != 1:
            right(self, *arguments)

    monkeypatch.setattr(concurrency.Handshake, "launch", launch)

    def body(comm: Communicator) -> str:
        assert launches_later(comm) == 0
        return shown_links(comm)

    shown = run(body, 3)
    assert all("the kernels of the ranks do not end within" in shown[rank] for rank in (0, 2))
    assert "another rank finds that its kernels cannot wait" in shown[1]


def test_large_operations_are_not_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table, "MOST_BYTES", 23)

    def body(comm: Communicator) -> None:
        assert launches_later(comm) == 0

    run(body, 2)


def test_plans_of_large_operations_are_not_kernels() -> None:
    """The kernels of many plans, which ranks start in any order, must have room together."""

    def body(comm: Communicator) -> None:
        for length, num in ((4, comm.size), (5, 0)):
            x, y = kept(np.ones(length)), kept(np.ones(length))
            plan = comm.plan.all_reduce(x, out=y, algorithm="one_shot")
            plan.run()
            comm.barrier()
            before = num_launches()
            assert on_host(plan.run()).tolist() == [comm.size] * length
            comm.barrier()
            assert num_launches() - before == num
            plan.free()

    run(body, 2)


def test_programs_of_too_many_words_are_not_kernels() -> None:
    def body(comm: Communicator) -> None:
        x, y = kept(np.arange(800.0)), kept(np.zeros(800))
        comm.all_reduce(x, out=y)
        for segments, num in ((2, comm.size), (200, 0)):
            comm.barrier()
            before = num_launches()
            y = comm.broadcast(x, root=0, algorithm=f"pipeline(segments={segments})")
            assert on_host(y).tolist() == [*range(800)]
            comm.barrier()
            assert num_launches() - before == num

    run(body, 3)


# What is noticed


def test_a_kernel_that_waits_too_long_is_ended(word: np.ndarray) -> None:
    def body(comm: Communicator) -> str:
        x, y = kept(np.ones(6)), kept(np.ones(6))
        comm.all_reduce(x, out=y, algorithm="ring")
        comm.synchronize()
        comm.barrier()
        if comm.rank == 2:
            hold(BACKEND.current_stream(), word)
            threading.Timer(0.3, word.fill, [1]).start()
        comm.all_reduce(x, out=y, algorithm="ring")
        with pytest.raises(CollectiveError) as caught:
            comm.synchronize(None if comm.rank else 0.1)
        return str(caught.value)

    shown = run(body, 3)
    assert "the device of rank 0 waits for rank 2 at row" in shown[0]
    assert "(0 await ready 2->0 1)" in shown[0]


def faulty_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out all barriers between blocks."""
    right = kernel_table.in_steps

    def in_steps(*arguments: Any) -> Iterator[Any]:
        for step in right(*arguments):
            yield step._replace(is_after_barrier=False)

    monkeypatch.setattr(kernel_table, "in_steps", in_steps)


def test_blocks_that_do_not_wait_for_each_other_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty_words(monkeypatch)

    def body(comm: Communicator) -> None:
        x = kept(np.ones(400))
        for _ in range(3):
            on_host(comm.all_reduce(x, algorithm="ring"))

    run(body, 2)
    with pytest.raises(AssertionError, match=r"nothing orders operation \d of a kernel"):
        gpu().check()


def plans_that_use_slots_again() -> None:
    def body(comm: Communicator) -> None:
        for turn in range(60):
            x = kept(np.full(4, 1.0 + turn))
            plan = comm.plan.all_reduce(x, algorithm=("ring", "two_shot")[turn % 2])
            assert on_host(plan.run()).tolist() == [2.0 * (1 + turn)] * 4
            plan.free()

    run(body, 2)
    gpu().check()


def test_a_counter_of_an_earlier_program_is_not_taken_for_that_of_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans_that_use_slots_again()
    monkeypatch.setattr(concurrency.program, "floor_of", lambda _: 0)  # the control
    with pytest.raises(AssertionError):
        plans_that_use_slots_again()
    gpu().violations.clear()
