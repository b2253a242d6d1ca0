"""What goes wrong on devices of ranks that are processes; `test_failures.py` starts it.

Its arguments name some of the functions below.  All raise an error for what is wrong.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator
from collectives.devices.watched import WatchedRows
from collectives.engines import Board, deadline_in, poll_until
from tests.devices.programs import Programs
from tests.fakes.device import BACKEND, on_device, on_host
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold, released
from tests.inside import watch_of

PROGRAMS = Programs()


def with_links(world: Communicator, **options: Any) -> Communicator:
    """A communicator that may fail, whose ranks have called each other on devices."""
    comm = collectives.wrap(MPI.COMM_WORLD, **options)
    for name in ("ring", "one_shot"):
        comm.all_reduce(on_device(np.ones(6)), algorithm=name)
    comm.synchronize()
    world.barrier()
    return comm


def later(action: Callable[[], object], seconds: float = 0.8) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def after_failure(comm: Communicator, action: Callable[[], object]) -> None:
    """Do something when this rank knows that the communicator has failed, or after 5 seconds."""
    watch = watch_of(comm)

    def wait_and_act() -> None:
        poll_until(lambda: watch.failure is not None, deadline_in(5.0))
        action()

    threading.Thread(target=wait_and_act).start()


def freeze_rank_1(comm: Communicator, after: int = 0) -> None:
    """Let the device of rank 1 execute only so many operations."""
    gpu().num_left = after if comm.rank == 1 else math.inf


def thaw() -> None:
    gpu().num_left = math.inf


def is_busy(comm: Communicator) -> bool:
    return watch_of(comm).is_busy


def is_refused(comm: Communicator, kind: Any = collectives.CollectiveError) -> None:
    """The next calls are refused, as soon as the failure is known.

    Nothing is left on a stream, and the communicator can be freed.
    """
    comm.timeout, watch = 5.0, watch_of(comm)
    assert poll_until(lambda: watch.failure is not None, deadline_in(5.0))
    for call in (comm.barrier, partial(comm.all_reduce, on_device(np.ones(2))), comm.synchronize):
        with pytest.raises(kind):
            call()
    assert poll_until(lambda: not is_busy(comm), deadline_in(20))
    calls = comm.last_calls()[-3:]
    assert {each["state"] for each in calls} <= {"complete", "failed"}, calls
    comm.free()


@PROGRAMS.together
def a_device_that_is_waited_for_too_long(world: Communicator) -> None:
    for name in ("ring", "one_shot"):
        comm = with_links(world)
        freeze_rank_1(comm)
        comm.all_reduce(on_device(np.ones(6)), algorithm=name)
        world.barrier()  # all ranks return, before one of them gives up
        after_failure(comm, thaw)
        with pytest.raises(collectives.CollectiveTimeout) as caught:
            comm.synchronize(timeout=None if comm.rank == 1 else 1.0)
        place = r"rank [012] at row \d+ of \d+ \(\d+ await ready \d->\d \d\) more than 1.0 s"
        assert re.search(f"device of rank [02] waits for {place}", str(caught.value)), caught.value
        assert f"all_reduce ({name})" in str(caught.value)
        assert name == "ring" or "waits for rank 1 at" in str(caught.value)
        assert comm.rank != 1 or "says:" in str(caught.value)
        is_refused(comm)


@PROGRAMS.on_its_own
def a_device_that_stands_still_after_any_operation(world: Communicator) -> None:
    """What is known to be complete is right, and if it is void all ranks know that.

    With the argument "control", a rank that gives up does not let the others know.
    """
    if "control" in sys.argv:
        Board.note_failure = lambda *_: None  # type: ignore[method-assign]
    for name, step in (("ring", 3), ("one_shot", 1)):  # test_device_that_stops.py draws many others
        after = 0
        while stands_still(world, name, after):
            after += step
        assert after > 5


def stands_still(world: Communicator, name: str, after: int) -> bool:
    """Make two calls; return whether a device has waited for that of rank 1."""
    comm, has_failed = with_links(world), False
    freeze_rank_1(comm, after)
    after_failure(comm, thaw)
    results = [comm.all_reduce(on_device(np.ones(6)), algorithm=name) for _ in range(2)]
    world.barrier()  # all ranks return, before one of them gives up
    try:
        comm.synchronize(timeout=None if comm.rank == 1 else 0.3)
    except collectives.CollectiveTimeout:
        has_failed = True
    if not has_failed:
        assert [on_host(y).tolist() for y in results] == [[3.0] * 6] * 2, (name, after)
    has_failed = bool(world.all_reduce(np.array([has_failed]), "or")[0])
    if has_failed:
        is_refused(comm)
    else:
        comm.free()
    return has_failed


@PROGRAMS.together
def a_message_that_is_waited_for_too_long(world: Communicator) -> None:
    comm, _ = with_a_message_of_a_frozen_rank(world)
    world.barrier()  # all ranks return, before one of them gives up
    after_failure(comm, thaw)
    with pytest.raises(collectives.CollectiveTimeout) as caught:
        synchronize_again(comm, 0.3 if comm.rank == 2 else None)
    sentence = "a message of 48 bytes from rank 1: the device of rank 2 waits for rank 1 at row 0"
    assert sentence in str(caught.value)
    is_refused(comm)


def synchronize_again(comm: Communicator, timeout: float | None = None) -> None:
    """Until that fails; rank 0 has its message when rank 2 still waits for rank 1."""
    deadline = deadline_in(20)
    assert not poll_until(lambda: comm.synchronize(timeout), deadline)


def with_a_message_of_a_frozen_rank(world: Communicator) -> tuple[Communicator, Any]:
    """A communicator on which rank 2 waits for a message of rank 1, and an array."""
    comm, x = with_links(world), on_device(np.ones(6))
    pass_around(comm, x)
    comm.synchronize()
    world.barrier()
    freeze_rank_1(comm)
    pass_around(comm, x)
    return comm, x


def pass_around(comm: Communicator, x: Any) -> Any:
    return comm.send_recv(x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)


@PROGRAMS.together
def a_time_limit_of_a_message_counts_from_the_moment_when_its_stream_comes_to_it(
    world: Communicator,
) -> None:
    comm, x = with_links(world), on_device(np.ones(6))
    pass_around(comm, x)
    comm.synchronize()
    comm.timeout = 1.5
    with released() as word:
        hold(BACKEND.current_stream(), word)
        y = pass_around(comm, pass_around(comm, x))
        later(partial(word.fill, 1), 3.0)
        comm.synchronize()
        assert on_host(y).tolist() == [1.0] * 6
    comm.free()


@PROGRAMS.together
def a_time_limit_of_a_call_counts_from_the_moment_when_its_stream_comes_to_it(
    world: Communicator,
) -> None:
    comm = with_links(world)
    comm.timeout = 1.5
    with released() as word:
        hold(BACKEND.current_stream(), word)
        works = [comm.all_reduce(on_device(np.ones(6)), async_op=True) for _ in range(3)]
        y = comm.all_reduce(on_device(np.ones(6)))
        later(partial(word.fill, 1), 3.0)
        comm.synchronize()
        assert on_host(y).tolist() == [comm.size] * 6
        assert all(work.test() for work in works)
    comm.free()


@PROGRAMS.together
def a_time_limit_of_a_call_ends_the_wait_of_a_device_though_nobody_waits_on_the_host(
    world: Communicator,
) -> None:
    comm = with_links(world)
    freeze_rank_1(comm)
    with released() as word:
        hold(BACKEND.current_stream(), word)
        work = comm.all_reduce(on_device(np.ones(6)), async_op=True, timeout=0.3)
        comm.all_reduce(on_device(np.ones(6)), algorithm="one_shot")
        world.barrier()  # all ranks return, before the time of the first call begins
        word[:] = 1
        work.wait(timeout=20)
        assert not work.test()
        after_failure(comm, thaw)
        BACKEND.synchronize()

    def has_timed_out() -> None:
        for ask in (work.test, partial(work.wait, host=True)):
            with pytest.raises(collectives.CollectiveTimeout):
                ask()

    has_timed_out()
    is_refused(comm)
    has_timed_out()


@PROGRAMS.together
def a_slow_peer_that_writes_smaller_values_back(world: Communicator) -> None:
    """The device of rank 1 makes the first run when those of the others have been let go.

    With the argument "control", these are let go only once, and wait for ever.
    """
    is_control, comm, right = "control" in sys.argv, with_links(world), WatchedRows.let_go
    seconds = 2.0 if is_control else 20.0
    if is_control:
        WatchedRows.let_go = cache(right)  # type: ignore[assignment]
    plan = comm.plan.all_reduce(on_device(np.ones(6)), algorithm="one_shot")
    plan.run()
    comm.synchronize()
    with released() as word:
        freeze_rank_1(comm)
        plan.run()
        first = BACKEND.record()
        hold(BACKEND.current_stream(), word)
        plan.run()
        world.barrier()  # all ranks return, before one of them gives up
        with pytest.raises(collectives.CollectiveTimeout):
            comm.synchronize(timeout=0.3)  # gives up while the streams are held
        world.barrier()  # the devices of the others have been let go
        thaw()
        assert poll_until(lambda: first.is_complete, deadline_in(20))
        world.barrier()  # the device of rank 1 has made the first run
        word[:] = comm.rank != 1
        is_over = comm.rank == 1 or poll_until(lambda: not is_busy(comm), deadline_in(seconds))
        assert all(world.all_gather(np.array([is_over]))) != is_control
        word[:] = 1
        WatchedRows.let_go = right  # type: ignore[method-assign]
    is_refused(comm)


@PROGRAMS.together
def a_stopped_rank(world: Communicator) -> None:
    comm = with_links(world)
    processes = world.all_gather(np.array([os.getpid()]))
    freeze_rank_1(comm)
    comm.all_reduce(on_device(np.ones(6)), algorithm="ring")
    world.barrier()
    if comm.rank == 1:
        after_failure(comm, thaw)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif comm.rank == 0:
        after_failure(comm, lambda: os.kill(int(processes[1]), signal.SIGCONT))
    with pytest.raises(collectives.CollectiveTimeout, match=r"device of rank [02] waits for rank"):
        comm.synchronize(timeout=None if comm.rank == 1 else 0.4)
    is_refused(comm)


@PROGRAMS.together
def a_driver_that_fails_in_the_middle_of_a_call(world: Communicator) -> None:
    """No rank waits for that one, though there is no time limit; also if compiled code calls."""
    for kind in ("call", "plan", "same arrays", "asynchronous"):
        comm, x, y = with_links(world), on_device(np.ones(6)), on_device(np.ones(6))
        ring = partial(comm.all_reduce, x, out=y, algorithm="ring")
        plan = comm.plan.all_reduce(x, out=y, algorithm="ring")
        calls: dict[str, Callable[[], Any]] = {
            "call": partial(comm.all_reduce, x, algorithm="ring"),
            "plan": plan.run,
            "same arrays": ring,
            "asynchronous": lambda ring=ring: ring(async_op=True).wait(),
        }
        for _ in range(3):
            ring(), plan.run()
        comm.synchronize()
        world.barrier()
        if comm.rank == 1:
            error = pytest.raises(collectives.CollectiveError, match="error 400")
            with gpu().kernels.lost(), error:
                calls[kind]()
        else:
            with pytest.raises(collectives.CollectiveError, match=r"rank 1 says: .* half-way"):
                call_and_synchronize(calls[kind], comm)
        is_refused(comm)


def call_and_synchronize(call: Callable[[], Any], comm: Communicator) -> None:
    call()
    comm.synchronize()


@PROGRAMS.on_its_own
def a_driver_that_fails_after_a_call_is_enqueued(world: Communicator) -> None:
    comm = with_links(world)
    freeze_rank_1(comm)
    work = comm.all_reduce(on_device(np.ones(6)), algorithm="ring", async_op=True)
    work.wait()
    world.barrier()
    if comm.rank == 1:
        gpu().error = 700
    with pytest.raises(
        collectives.CollectiveError, match="the GPU of rank 1 has failed with error"
    ):
        comm.synchronize()
    with pytest.raises(
        collectives.CollectiveError, match="the GPU of rank 1 has failed with error"
    ):
        work.test()
    world.barrier()
    gpu().error = 0
    thaw()
    with pytest.raises(collectives.CollectiveError, match="unusable"):
        comm.all_reduce(on_device(np.ones(6)))


@PROGRAMS.on_its_own
def a_rank_that_ends_with_calls_on_its_stream(world: Communicator) -> None:
    """Nobody's device waits for one that has ended."""

    def check() -> None:  # is called after what is registered later
        if watch.is_busy:
            print("the device is still at work", flush=True)
            os._exit(1)

    atexit.register(check)
    comm = with_links(world)
    watch = watch_of(comm)
    freeze_rank_1(comm)
    for _ in range(5):
        comm.all_reduce(on_device(np.ones(6)))
    later(thaw)


@PROGRAMS.together
def a_child_process_does_not_wait_for_the_device_of_its_parent(world: Communicator) -> None:
    comm = with_links(world)
    with released() as word:
        hold(BACKEND.current_stream(), word)
        y = comm.all_reduce(on_device(np.ones(6)))
        child = os.fork()
        if not child:
            atexit._run_exitfuncs()  # what Python itself calls when a process exits
            os._exit(0)
        assert poll_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, deadline_in(10))
        word[:] = 1
        assert on_host(y).tolist() == [comm.size] * 6
    comm.free()


@PROGRAMS.on_its_own
def a_rank_that_is_killed(world: Communicator) -> None:
    comm, other = with_links(world), with_links(world)
    other.all_reduce(on_device(np.ones(6)))
    BACKEND.synchronize()
    world.barrier()
    freeze_rank_1(comm)
    comm.all_reduce(on_device(np.ones(6)), algorithm="ring")
    world.barrier()
    if comm.rank == 1:
        time.sleep(0.5)  # until the others have left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(collectives.PeerFailed, match=r"rank 1 has died; .* at row") as caught:
        comm.synchronize()
    with pytest.raises(collectives.PeerFailed, match="rank 1 has died"):
        other.synchronize()  # its device has done all, but perhaps with memory of the dead
    assert caught.value.ranks == (1,)
    BACKEND.synchronize()
    with pytest.raises(collectives.PeerFailed):
        comm.all_reduce(on_device(np.ones(6)))
    alive = world.shrink(timeout=20)
    assert on_host(alive.all_reduce(on_device(np.ones(6)))).tolist() == [alive.size] * 6
    alive.synchronize()
    alive.barrier()
    print("a survivor is right", flush=True)
    os._exit(0)


@PROGRAMS.on_its_own
def a_sender_that_is_killed(world: Communicator) -> None:
    comm, x = with_a_message_of_a_frozen_rank(world)
    world.barrier()
    if comm.rank == 1:
        time.sleep(0.5)  # until the others have left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(collectives.PeerFailed, match=r"rank 1 has died") as caught:
        synchronize_again(comm)
    assert caught.value.ranks == (1,)
    BACKEND.synchronize()  # nobody's stream waits
    with pytest.raises(collectives.PeerFailed):
        comm.send(x, 2 - comm.rank)
    print("a survivor is right", flush=True)
    os._exit(0)


if __name__ == "__main__":
    PROGRAMS.run([name for name in sys.argv[1:] if name != "control"], queue_length=400)
