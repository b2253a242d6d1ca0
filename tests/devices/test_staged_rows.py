"""Calls on devices of which some messages, or all, turn out to be staged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, CollectiveTimeout, Communicator
from collectives.devices import watch
from collectives.devices.rows import HostRows
from collectives.devices.streams import STREAMS
from collectives.devices.table import ROW_WORDS, TARGET
from collectives.engines import MessageBuffers, PageLockedMemory
from collectives.lowering import Counter, DeviceKind, DeviceOperation
from tests.devices.staged_pairs import stage_pairs
from tests.fakes.device import BACKEND, FakeStream, on_device, on_host
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold, hold_each, released

pytestmark = pytest.mark.usefixtures("new_gpu")


def run(body: Callable[[Communicator], Any], size: int) -> list[Any]:
    return collectives.run(body, size, timeout=60)


@pytest.fixture
def word() -> Iterator[np.ndarray]:
    gpu().make_current()
    with released() as word:
        yield word


def test_a_call_that_another_thread_finds_to_be_staged_is_no_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rank waits in another communicator meanwhile, for ranks that wait for its messages."""
    monkeypatch.setattr(watch, "OFTEN", 1e-4)
    monkeypatch.setattr(watch, "SELDOM", 1e-4)

    def body(comm: Communicator) -> None:
        other = comm.split(0)
        for _ in range(15):
            comm.barrier()
            if comm.rank == 0:
                work = comm.all_reduce(on_device(np.ones(99)), async_op=True, algorithm="ring")
            else:
                time.sleep(0.005)
                work = comm.all_reduce(np.ones(99), async_op=True, algorithm="ring")
                work.wait()
            other.all_reduce(np.ones(3))
            assert on_host(work.wait()).tolist() == [3] * 99

    run(body, 3)


def test_a_later_call_is_enqueued_while_a_staged_one_waits_for_its_stream(word: np.ndarray) -> None:
    """The stream of the staged call may wait for what the program does after the later one."""

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        hold_each(comm, BACKEND.current_stream(), word)
        work = comm.all_reduce(np.ones(6) if comm.rank == 1 else x, async_op=True)
        with BACKEND.on_stream(FakeStream(f"another of rank {comm.rank}")):
            y = comm.all_reduce(x, timeout=20)
            assert on_host(y).tolist() == [2.0] * 6
        assert comm.rank == 1 or not work.test()
        comm.barrier()
        word[:] = 1
        assert on_host(work.wait()).tolist() == [2.0] * 6

    run(body, 2)


@pytest.mark.parametrize("held", [0, 1])
def test_copies_between_host_and_device_do_not_fill_the_queue(
    held: int, monkeypatch: pytest.MonkeyPatch, word: np.ndarray
) -> None:
    """Else the host would wait in the driver, where no time limit ends the wait.

    Rank 0 copies to the host, and rank 1 to the device.
    """
    stage_pairs(monkeypatch)

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(4096))
        call = partial(comm.broadcast, x, out=x, algorithm="pipeline(segments=80)")
        call()
        comm.synchronize()
        comm.barrier()
        if comm.rank == held:
            hold(BACKEND.current_stream(), word)
        work = call(async_op=True)
        for _ in range(3):
            for _ in range(100):
                work.test()
            comm.barrier()
        if comm.rank == held:
            with pytest.raises(CollectiveTimeout):
                work.wait(timeout=0.02)
            word[:] = 1
        work.wait()
        comm.synchronize()

    run(body, 2)


class Sender:
    """The rows of a call that have let the device copy a message to the host.

    `messages`: those of the call.
    """

    def __init__(self, check: Callable[[], object] = lambda: None) -> None:
        gpu().make_current()
        self.messages, self._x = Mock(), on_device(np.ones(8))
        loop = Mock(stream=BACKEND.current_stream().ptr, has_room=lambda _: True)
        loop.order.has_ended = True
        buffers = MessageBuffers(PageLockedMemory(BACKEND))
        self.rows = HostRows(gpu().driver, self.messages, loop, buffers, check)
        send = DeviceOperation(DeviceKind.SEND, 0, Counter(0, 1), 1, size=64)
        table = np.zeros((1, ROW_WORDS), np.int64)
        table[0, TARGET + 1] = self._x.memory.ctypes.data
        assert len([*self.rows.post_receives([send])]) == 1
        assert [*self.rows.run(0, send, table, Mock())] == []


def test_a_message_that_was_sent_is_not_waited_for(word: np.ndarray) -> None:
    """The event of its copy belongs to somebody else then."""
    rows = Sender().rows
    wait = next(rows.finish())
    BACKEND.synchronize()
    rows.progress()  # sends the message
    another = FakeStream("another")
    hold(another, word)
    gpu().driver.call("cuEventRecord", STREAMS.borrow_event(gpu().driver), another.ptr)
    assert wait.is_over()


def test_a_call_is_not_over_before_its_messages_have_left_the_host_memory() -> None:
    """The next call copies other data there."""
    sender = Sender()
    BACKEND.synchronize()
    sender.rows.progress()
    sender.messages.test.side_effect = [False, False, True]
    assert [*sender.rows.finish()] == [None, None]


def test_no_message_is_sent_after_a_failure() -> None:
    """Its data is void, for a rank of another host that does not know of the failure."""

    def check() -> None:
        raise CollectiveError("the communicator has failed")

    sender = Sender(check)
    BACKEND.synchronize()
    for send in (sender.rows.progress, lambda: [*sender.rows.finish()]):
        with pytest.raises(CollectiveError):
            send()
    sender.messages.send.assert_not_called()
