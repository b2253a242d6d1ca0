"""Reports of calls that another thread advances: they ask nothing of the engine, and never fail."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveTimeout, Communicator
from collectives.diagnostics import FlightRecorder, hang_report
from collectives.engines.interpreter import Interpreted
from collectives.engines.progress import ProgressThread
from collectives.engines.threads import ThreadMessages
from collectives.runtime.work import Work
from tests.inside import transport_of


def failing(*_: object) -> Any:
    raise KeyError(0)


def with_late_rank(check: Callable[[Communicator, Work[Any]], None]) -> None:
    """Let rank 0 check an all-reduce that rank 1 makes only after that, and complete it."""

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)
        work = comm.all_reduce(np.ones(4), algorithm="ring", async_op=True)
        if comm.rank == 0:
            check(comm, work)
            comm.send(np.ones(1), 1)
        assert work.wait(20).tolist() == [2.0] * 4
        assert comm.all_reduce(np.ones(1)) == [2.0]

    collectives.run(body, 2, timeout=30)


def test_only_the_thread_that_advances_a_call_asks_about_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    askers = list[str]()
    monkeypatch.setattr(ThreadMessages, "note_completed", lambda _: askers.append("asked"))

    def check(comm: Communicator, work: Work[Any]) -> None:
        with work._lock:  # as another thread does
            with pytest.raises(CollectiveTimeout, match="in round 0 of 2 for a message from rank"):
                work.wait(timeout=0)
            assert comm.last_calls()[-1]["waiting_for"] == [(1, True)]
            assert askers == []
        with pytest.raises(CollectiveTimeout, match="in round 0 of 2 for a message from rank"):
            work.wait(timeout=0)
        assert askers == ["asked"]

    with_late_rank(check)


def test_a_report_that_fails_replaces_neither_the_time_out_nor_the_dump(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(comm: Communicator, work: Work[Any]) -> None:
        transport_of(comm).flight.directory = tmp_path
        with monkeypatch.context() as patch:
            patch.setattr(Interpreted, "position", failing)
            with pytest.raises(CollectiveTimeout) as error:
                work.wait(timeout=0)
        assert error.value.work is work
        first, second, *_ = str(error.value).splitlines()
        assert first == (
            "all_reduce (ring), call 1: rank 0 waited 0.0 s "
            "(a part of this report could not be made: KeyError: 0)"
        )
        assert second == "last calls of rank 0:"
        dump = json.loads((tmp_path / "flight.0.json").read_text())
        hang_report.check(dump)
        assert (dump["calls"][-1]["state"], dump["calls"][-1]["num_rounds"]) == ("under way", "?")

    with_late_rank(check)


def test_a_list_of_calls_that_fails_does_not_replace_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(_: Communicator, work: Work[Any]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(FlightRecorder, "calls", failing)
            with pytest.raises(CollectiveTimeout, match="for a message from rank 1") as error:
                work.wait(timeout=0)
        assert str(error.value).endswith("(a part of this report could not be made: KeyError: 0)")

    with_late_rank(check)


def test_a_call_that_another_thread_completes_meanwhile_does_not_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other thread completes it while the report is made, and its run may serve others."""

    def body(comm: Communicator) -> None:
        work = comm.all_reduce(np.ones(4), algorithm="ring", async_op=True)
        if comm.rank == 1:
            comm.send(np.ones(1), 0)  # and with that its part of the first round
            work.wait()
            return
        comm.recv(np.empty(1), 1)
        work._lock.acquire()

        def complete(*_: object) -> list[dict[str, Any]]:
            while not work._advance(0.0):
                time.sleep(1e-3)
            return []

        with monkeypatch.context() as patch:
            patch.setattr(FlightRecorder, "calls", complete)
            assert work.wait(timeout=0).tolist() == [2.0] * 4
        work._lock.release()

    collectives.run(body, 2, timeout=30)


# Threads that must not end


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[FlightRecorder]:
    """A recorder that listens to SIGUSR1."""
    handler, recorder = signal.getsignal(signal.SIGUSR1), FlightRecorder(0, 1)
    recorder.listen(tmp_path)
    yield recorder
    os.close(signal.set_wakeup_fd(-1))  # which ends the listener
    signal.signal(signal.SIGUSR1, handler)


def test_the_listener_survives_a_dump_that_fails(
    recorder: FlightRecorder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (KeyError(0), RecursionError("deep"), OSError("no space")):
        with monkeypatch.context() as patch:
            patch.setattr(recorder, "report", lambda error=error: (_ for _ in ()).throw(error))
            signal.raise_signal(signal.SIGUSR1)
            wait_until(lambda error=error: str(error) in caplog.text)
    signal.raise_signal(signal.SIGUSR1)
    wait_until((tmp_path / "flight.0.json").exists)
    assert "no dump of rank 0: KeyError: 0" in caplog.text


def test_two_threads_may_dump_at_the_same_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FlightRecorder(0, 1)
    recorder.directory = tmp_path

    def dump() -> None:
        for _ in range(100):
            recorder.dump_if_asked()
            dumps = hang_report.read(hang_report.files(tmp_path))
            assert list(dumps[0]) == [0] and dumps[1] == []

    threads = [threading.Thread(target=dump) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caplog.text == ""
    assert [path.name for path in tmp_path.iterdir()] == ["flight.0.json"]


class Stub:
    """A call in progress."""

    is_done = is_awaited = False

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def progress(self, _: float = 0.0) -> bool:
        if self.error is not None:
            raise self.error
        self.is_done = True
        return True


@pytest.mark.parametrize("error", [KeyError(0), KeyboardInterrupt()])
def test_the_progress_thread_survives_a_call_that_fails(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    thread, good = ProgressThread(), Stub()
    try:
        thread.adopt(Stub(error))
        thread.adopt(good)
        wait_until(lambda: good.is_done)
        is_expected = isinstance(error, KeyboardInterrupt)  # an operator's, which the call keeps
        assert ("no longer advances a call" in caplog.text) != is_expected
    finally:
        thread.stop()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(1e-3)
