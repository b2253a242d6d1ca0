"""The engine of threads: programs run, and what cannot go on says so instead of hanging."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.engines import deadline_in, poll_until
from collectives.engines.threads import ThreadTransport, World
from tests.scenarios.sessions import SCENARIOS
from tests.switching import switching_every


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
@pytest.mark.slow
def test_programs_run_on_threads(scenario: Callable[[Communicator], None], size: int) -> None:
    collectives.run(scenario, size, timeout=30)


def test_results_come_in_rank_order() -> None:
    assert collectives.run(lambda comm: comm.rank * 10, 5) == [0, 10, 20, 30, 40]


def test_the_first_error_is_raised_and_frees_the_others() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        comm.barrier()

    begin = time.perf_counter()
    with pytest.raises(KeyError, match="mine"):
        collectives.run(body, 3)
    assert time.perf_counter() - begin < 5


def test_no_thread_of_a_rank_pauses_when_a_call_has_collected_a_message_for_another_one() -> None:
    """Otherwise nobody would go on with the other one, and the ranks would seem deadlocked."""
    world = World(2)
    sender, receiver = (ThreadTransport(world, range(2), rank) for rank in range(2))
    calls = [receiver.messages(tag=5) for _ in range(3)]
    for messages in calls:
        messages.receive(0, 0, np.empty(3, np.uint8))

    def serve(number: int) -> None:
        """Let the last call collect a message for the call of this number."""
        sender.messages(tag=5).send(0, 1, np.arange(3, dtype=np.uint8))
        assert not calls[-1].test(range(1), 1)
        assert calls[number].test(range(1), 1)

    def pause(seconds: float) -> float:
        return seconds_of(lambda: receiver.pause(deadline_in(seconds), 0))

    with ThreadPoolExecutor(1) as other:
        serve(0)
        assert pause(5) < 1 and other.submit(pause, 5).result() < 1
        assert pause(0.1) >= 0.1 and other.submit(pause, 0.1).result() >= 0.1  # nothing is new
        paused = other.submit(pause, 5)
        assert poll_until(lambda: is_waiting(world, 1), deadline_in(5))
        serve(1)
        assert paused.result() < 4
    calls[-1].abandon()


def is_waiting(world: World, rank: int) -> bool:
    """Whether a thread of a rank waits to be notified."""
    with world.lock:
        return bool(world.arrived[rank]._waiters)  # type: ignore[attr-defined]


def seconds_of(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def test_threads_of_a_rank_that_receive_with_the_same_tag_lose_no_message() -> None:
    """They collect each other's messages."""

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            for number in range(4 * 250):
                comm.send(np.array([number]), 0)
            return
        received, faults = list[int](), list[Exception]()

        def receive() -> None:
            try:
                for _ in range(250):
                    received.append(int(comm.recv(np.empty(1, int), 1, timeout=25)[0]))
            except Exception as error:  # noqa: BLE001 - asserted below
                faults.append(error)

        threads = [threading.Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert sorted(received) == [*range(4 * 250)]

    with switching_every(1e-6):
        collectives.run(body, 2, timeout=30)


def test_a_thread_that_waits_beside_the_thread_of_its_rank_is_no_deadlock() -> None:
    """The ranks wait in a circle, which the thread of rank 0 ends."""

    def body(comm: Communicator) -> None:
        first, second, x = comm.split(0), comm.split(0), np.ones(1)

        def relay() -> None:
            if comm.rank:
                first.send(second.recv(x, 0), 0)
            else:
                assert first.recv(x, 1)[0] == 7.0

        with ThreadPoolExecutor(1) as pool:
            relayed = pool.submit(relay)
            if comm.rank == 0:
                world = comm._session.transport.world
                assert poll_until(lambda: len(world.waiting) == 2 or world.failure, deadline_in(20))
                second.send(np.full(1, 7.0), 1)
            relayed.result()

    collectives.run(body, 2, timeout=30)


def test_ranks_that_wait_in_a_circle_are_told_at_once() -> None:
    def body(comm: Communicator) -> None:
        comm.recv(np.empty(1), (comm.rank + 1) % comm.size)

    with pytest.raises(collectives.CollectiveMismatch, match="rank 0 waits for rank 1; rank 1"):
        collectives.run(body, 3)


def test_a_circle_is_noticed_with_several_calls_under_way() -> None:
    def body(comm: Communicator) -> None:
        peer = (comm.rank + 1) % comm.size
        works = [comm.recv(np.empty(1), peer, tag=tag, async_op=True) for tag in (1, 2)]
        for work in works:
            work.wait()

    with pytest.raises(collectives.CollectiveMismatch, match="deadlock"):
        collectives.run(body, 3, timeout=20)


def test_an_error_frees_ranks_that_have_several_calls_under_way() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        works = [comm.all_reduce(np.ones(3), async_op=True) for _ in range(2)]
        works[0].wait()

    begin = time.perf_counter()
    with pytest.raises(KeyError, match="mine"):
        collectives.run(body, 3)
    assert time.perf_counter() - begin < 5


def test_the_first_error_is_raised_though_another_rank_never_ends() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        time.sleep(3)

    with pytest.raises(KeyError, match="mine"):
        collectives.run(body, 2, timeout=0.5)


def test_waiting_with_a_time_limit_is_no_deadlock() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(collectives.CollectiveTimeout) as error:
                comm.recv(np.empty(1), 1, timeout=0.1)
            comm.send(np.ones(1), 1)
            assert error.value.work.wait(timeout=30)[0] == 2
        else:
            comm.recv(np.empty(1), 0)
            comm.send(np.full(1, 2.0), 0)

    collectives.run(body, 2, timeout=20)


def test_mail_is_cleared_away() -> None:
    def body(comm: Communicator) -> int:
        for _ in range(20):
            comm.all_reduce(np.ones(5), algorithm="ring")
        comm.barrier()
        return len(comm._session.transport.world.mail)

    assert min(collectives.run(body, 3)) == 0


def test_a_mismatch_is_raised_by_the_call_that_mismatched() -> None:
    def body(comm: Communicator) -> None:
        good = comm.all_reduce(np.ones(4), async_op=True)
        bad = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
        assert good.wait()[0] == comm.size
        with pytest.raises(collectives.CollectiveMismatch, match="same call"):
            bad.wait()
        with pytest.raises(collectives.CollectiveMismatch):
            bad.wait()

    collectives.run(body, 2, timeout=20)


def test_a_rank_that_left_early_is_noticed() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank:
            comm.barrier()

    with pytest.raises(collectives.CollectiveMismatch, match="waits for rank"):
        collectives.run(body, 3)


def test_a_rank_that_never_ends_is_named() -> None:
    with pytest.raises(collectives.CollectiveTimeout, match="rank 1 is still running after"):
        collectives.run(lambda comm: time.sleep(2 * comm.rank), 2, timeout=0.2)


def test_there_is_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        collectives.run(lambda comm: None, 0)


def test_threads_have_no_mpi_to_count() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(collectives.MonitorUnavailable, match="no MPI"):
            comm.counters()

    collectives.run(body, 1)
