"""The ledger of calls on devices: the link of each message, and the same bytes for all links."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import permutations
from typing import Any, Literal

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, Communicator, Ledger
from collectives.devices import clock as clock_module
from collectives.devices import watch
from collectives.devices.clock import Clock, TimedEvent
from collectives.devices.driver import DriverError
from collectives.diagnostics.ledger import Row
from collectives.engines import deadline_in, poll_until
from tests.devices.staged_pairs import stage_pairs
from tests.fakes.device import BACKEND, on_device, on_host
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold, hold_each, released
from tests.inside import session_of
from tests.scenarios.jobs import Job, all_jobs, call

pytestmark = pytest.mark.usefixtures("new_gpu")

SLACK = 0.05  # seconds by which a reading may be wrong on a busy machine


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=60, **options)


def links_of(rows: list[Row]) -> set[str]:
    """The links of the calls that a test makes; the library's own messages are on the host."""
    return {row.link for row in rows if row.collective == "all_reduce"}


def all_reduce(kind: str, on: Callable[[np.ndarray], Any] = on_device) -> Callable[..., Ledger]:
    """What calls all_reduce a few times, and returns the ledger of all ranks on rank 0."""

    def body(comm: Communicator) -> Ledger | None:
        x = on(np.ones(12))
        y = on(np.ones(12))
        plan = comm.plan.all_reduce(x, algorithm="ring")
        for _ in range(3):
            with comm.record() as ledger:
                if kind == "plan":
                    plan.run()
                elif kind == "call":
                    comm.all_reduce(x, out=y, algorithm="ring")
                else:
                    comm.all_reduce(x, async_op=True, algorithm="ring").wait()
            whole = ledger.gather()
        comm.synchronize()
        plan.free()
        return whole

    return body


@pytest.mark.parametrize("kind", ["call", "async", "plan"])
@pytest.mark.parametrize(("device", "link"), [("auto", "thread"), ("staged", "staged")])
def test_a_message_has_its_link(kind: str, device: Literal["auto", "staged"], link: str) -> None:
    ledger, *_ = run(all_reduce(kind), 3, device=device)
    assert links_of(ledger.rows()) == {link}
    assert ledger.matrix().sum() == 2 * 2 * 96  # 2 (p - 1) n


def test_a_message_from_host_memory_has_no_device() -> None:
    ledger, *_ = run(all_reduce("call", np.copy), 3)
    assert links_of(ledger.rows()) == {"host"}


def test_pairs_of_ranks_may_have_different_links(monkeypatch: pytest.MonkeyPatch) -> None:
    stage_pairs(monkeypatch, lambda *pair: 1 in pair)
    ledger, *_ = run(all_reduce("call"), 3)
    found = {(row.src, row.dst): row.link for row in ledger.rows()}
    assert found == {
        pair: "staged" if 1 in pair else "thread" for pair in permutations(range(3), 2)
    }


def test_a_call_with_arrays_of_both_kinds_is_staged_where_there_is_a_device() -> None:
    def body(comm: Communicator) -> set[str]:
        with comm.record() as ledger:
            x = np.ones(12) if comm.rank == 1 else on_device(np.ones(12))
            comm.all_reduce(x, algorithm="ring")
        return links_of(ledger.rows())

    assert run(body, 3) == [{"staged"}, {"host"}, {"staged"}]


def test_a_message_of_a_call_that_is_not_complete_has_no_link() -> None:
    has_looked = threading.Event()

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(12))
        assert comm.rank == 0 or has_looked.wait(20)
        with comm.record() as ledger:
            work = comm.all_reduce(x, async_op=True, algorithm="ring")
            if comm.rank == 0:
                assert links_of(ledger.rows()) == {""}
                has_looked.set()
            work.wait()
        assert links_of(ledger.rows()) == {"thread"}

    run(body, 3)


@pytest.mark.parametrize("device", ["auto", "staged"])
@pytest.mark.slow
def test_every_algorithm_sends_on_devices_what_it_sends_on_the_host(
    device: Literal["auto", "staged"],
) -> None:
    def recorded(comm: Communicator, job: Job, on: Callable[[np.ndarray], Any]) -> list[Row]:
        with comm.record() as ledger:
            call(comm, job, on(job.inputs()[comm.rank]), on_host)
        return [row._replace(call="", link="") for row in ledger.rows()]

    def body(comm: Communicator) -> None:
        for job in all_jobs(comm.size)[::7]:
            assert recorded(comm, job, on_device) == recorded(comm, job, np.copy), job
        comm.synchronize()

    run(body, 3, device=device)
    assert (BACKEND.bytes_to_host > 0) == (device == "staged")


# Times


@pytest.mark.parametrize("finds_out", ["synchronize", "the watch"])
def test_a_call_ends_when_the_device_has_done_it(finds_out: str) -> None:
    """Its entry has no end before, though the call has returned."""

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(12)), on_device(np.ones(12))
        for _ in range(2):
            comm.all_reduce(x, out=y)
        hold_each(comm, BACKEND.current_stream(), word)
        with comm.record() as ledger:
            comm.all_reduce(x, out=y)
            comm.all_reduce(x, out=y, async_op=True).wait()
        comm.barrier()
        time.sleep(0.15)  # longer than the watch takes between two looks
        assert [entry.finished for entry in ledger.entries[:2]] == [0.0, 0.0]
        comm.barrier()
        released_at.append(time.perf_counter())
        word[:] = 1
        if finds_out == "synchronize":
            comm.synchronize()
        else:
            assert poll_until(lambda: ledger.entries[1].finished, deadline_in(20))
        first, second = (entry.finished for entry in ledger.entries[:2])
        assert min(released_at) - SLACK < first < second < time.perf_counter() + SLACK

    released_at = list[float]()
    with released() as word:
        run(body, 3)


def test_the_time_at_which_a_device_came_to_an_event_is_that_of_the_host() -> None:
    gpu().make_current()
    clock, stream = Clock(gpu().driver), BACKEND.current_stream().ptr
    with released() as word:
        hold(BACKEND.current_stream(), word)
        reading, event = clock.read(), TimedEvent(gpu().driver, stream)
        with pytest.raises(DriverError, match="600"):  # it is not there yet
            clock.seconds(reading, event)
        time.sleep(2 * SLACK)
        before = time.perf_counter()
        word[:] = 1
        gpu().synchronize(stream)
        after = time.perf_counter()
    assert before - SLACK < clock.seconds(reading, event) < after + SLACK
    assert clock.read() is reading


def test_a_device_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last reading serves, if there is one."""
    monkeypatch.setattr(clock_module, "SECONDS", 0.0)
    gpu().make_current()
    clock, never_read = Clock(gpu().driver), Clock(gpu().driver)
    reading = clock.read()
    gpu().num_left = 0  # it stands still
    assert clock.read() is reading
    with pytest.raises(TimeoutError):
        never_read.read()


def test_a_call_whose_time_is_not_known_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Clock) -> None:
        raise TimeoutError("the device does not answer")

    monkeypatch.setattr(Clock, "read", never)

    def body(comm: Communicator) -> None:
        with comm.record() as ledger:
            y = comm.all_reduce(on_device(np.ones(12)))
        assert on_host(y).tolist() == [comm.size] * 12
        comm.synchronize()
        assert [entry.finished for entry in ledger.entries if entry.call.sent] == [0.0]

    run(body, 2)


def test_a_clock_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of the host and of a device do not go alike."""
    gpu().make_current()
    driver = gpu().driver
    first = Clock(driver).read()
    monkeypatch.setattr(clock_module, "SECONDS", 0.0)
    clock = Clock(driver)
    readings = [clock.read() for _ in range(2)]
    assert first.seconds < readings[0].seconds < readings[1].seconds


@pytest.mark.slow
def test_a_call_that_the_device_does_not_end_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SECONDS_TO_END", 0.5)

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(12)), on_device(np.ones(12))
        comm.all_reduce(x, out=y)
        hold_each(comm, BACKEND.current_stream(), word)
        with comm.record() as ledger:
            comm.all_reduce(x, out=y)
        comm.barrier()
        session_of(comm).devices.give_up()
        with pytest.raises(CollectiveError):
            comm.synchronize()
        assert [entry.finished for entry in ledger.entries if entry.call.sent] == [0.0]
        both_have_looked.wait()
        word[:] = 1

    both_have_looked = threading.Barrier(2, timeout=20)
    with released() as word:
        run(body, 1 + 1)
