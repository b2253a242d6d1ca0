"""Calls on devices of which some messages, or all, turn out to be staged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import collectives
from collectives import CollectiveTimeout, Communicator
from collectives.devices import watch
from collectives.devices.links import Proposal
from collectives.devices.rows import HostRows
from collectives.devices.streams import STREAMS
from collectives.devices.table import ROW_WORDS, TARGET
from collectives.engines import PinnedMemory
from collectives.lowering import Counter, DeviceKind, DeviceOperation
from tests.device.held_stream import hold, released
from tests.fake_device import BACKEND, FakeStream, on_device, on_host
from tests.fake_driver import gpu

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
    monkeypatch.setattr(watch, "_OFTEN", 1e-4)
    monkeypatch.setattr(watch, "_SELDOM", 1e-4)

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


def test_copies_to_the_host_do_not_fill_the_queue(
    monkeypatch: pytest.MonkeyPatch, word: np.ndarray
) -> None:
    """Else the host would wait in the driver, where no time limit ends the wait."""
    pairs = lambda self, verdicts: combinations(verdicts, 2)  # noqa: E731
    monkeypatch.setattr(Proposal, "_staged_pairs", pairs)

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(4096))
        call = partial(comm.broadcast, x, out=x, algorithm="pipeline(segments=60)")
        call()
        comm.synchronize()
        comm.barrier()
        if comm.rank == 0:
            hold(BACKEND.current_stream(), word)
            with pytest.raises(CollectiveTimeout) as caught:
                call(timeout=0.2)
            word[:] = 1
            caught.value.work.wait()  # type: ignore[union-attr]
        else:
            call()
        comm.synchronize()

    run(body, 2)


def test_a_message_that_was_sent_is_not_waited_for(word: np.ndarray) -> None:
    """The event of its copy belongs to somebody else then."""
    gpu().make_current()
    driver, stream = gpu().driver, BACKEND.current_stream()
    loop = Mock(stream=stream.ptr, has_room=lambda _: True)
    rows = HostRows(driver, Mock(), loop, PinnedMemory(BACKEND), lambda: None)
    x = on_device(np.ones(8))
    send = DeviceOperation(DeviceKind.SEND, 0, Counter(0, 1), 1, size=64)
    table = np.zeros((1, ROW_WORDS), np.int64)
    table[0, TARGET + 1] = x._memory.ctypes.data
    loop.order.has_ended = True
    assert len([*rows.post_receives([send])]) == 1
    assert [*rows.run(0, send, table, Mock())] == []
    wait = next(rows.finish())
    BACKEND.synchronize()
    rows.progress()  # sends the message
    another = FakeStream("another")
    hold(another, word)
    driver.call("cuEventRecord", STREAMS.borrow_event(driver), another.ptr)
    assert wait.is_over()
