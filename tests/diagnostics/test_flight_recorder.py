"""The last calls of a rank are always known, and a time-out tells them."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives import CollectiveTimeout, Communicator
from collectives.diagnostics.flight_recorder import NUM_CALLS
from tests.inside import transport_of


def test_the_last_calls_are_known_with_what_became_of_them() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3), algorithm="ring")
        work = comm.all_gather(np.ones(2), async_op=True)
        work.wait()
        pair = comm.split(0)
        assert pair is not None
        pair.barrier()
        calls = comm.last_calls()
        names = [(call["call"], call["collective"], call["state"]) for call in calls]
        assert names == [
            ("1", "all_reduce", "complete"),
            ("2", "all_gather", "complete"),
            ("3", "split", "complete"),
            ("[0,1]1", "barrier", "complete"),
        ]
        assert calls[0]["bytes"] == 24 and calls[0]["algorithm"] == "ring"
        assert [(call["members"], call["ordinal"]) for call in calls[2:]] == [
            ((0, 1), 1),
            ((0, 1), 2),
        ]

    collectives.run(body, 2, timeout=20)


def test_no_more_than_the_last_256_are_kept() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(NUM_CALLS + 10):
            comm.barrier()
        calls = comm.last_calls()
        assert len(calls) == NUM_CALLS == 256
        assert [calls[0]["call"], calls[-1]["call"]] == ["11", "266"]

    collectives.run(body, 2, timeout=20)


def test_what_is_under_way_tells_where_it_stands() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)  # until rank 0 has looked
        work = comm.all_reduce(np.ones(4), algorithm="ring", async_op=True)
        if comm.rank == 0:
            last = comm.last_calls()[-1]
            assert last["state"] == "under way"
            assert (last["round"], last["num_rounds"]) == (0, "2")
            assert last["waiting_for"] == [(1, True)]
            comm.send(np.ones(1), 1)
        work.wait()

    collectives.run(body, 2, timeout=20)


def test_what_failed_is_known_as_failed() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(collectives.CollectiveMismatch):
            comm.all_reduce(np.ones(1 + comm.rank), algorithm="ring")
        assert comm.last_calls()[-1]["state"] == "failed"

    collectives.run(body, 2, timeout=20)


def test_logs_of_freed_communicators_are_bounded_also_after_a_failure() -> None:
    def body(comm: Communicator) -> None:
        flight = transport_of(comm).flight
        num_logs = len(flight.logs)
        for has_failed in (False, True):
            group = comm.split(0)
            assert group is not None
            group.send_recv(np.ones(1), group.rank, group.rank)
            if has_failed:
                with pytest.raises(collectives.CollectiveMismatch):
                    group.all_reduce(np.ones(1 + comm.rank), algorithm="ring")
            group.free()
            assert len(flight.logs) == num_logs, has_failed

    collectives.run(body, 2, timeout=20)


def timed_out(size: int, tmp_path: Path | None = None) -> str:
    """What rank 0 says when the last rank comes too late to an all-reduce."""

    def body(comm: Communicator) -> str:
        if tmp_path is not None:
            transport_of(comm).flight.directory = tmp_path
        comm.barrier()
        if comm.rank == size - 1:
            time.sleep(0.4)
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout) as error:
                comm.all_reduce(np.ones(4), algorithm="ring", timeout=0.1)
            error.value.work.wait(timeout=30)
            return str(error.value)
        comm.all_reduce(np.ones(4), algorithm="ring")
        return ""

    return collectives.run(body, size, timeout=20)[0]


def test_a_time_out_shows_the_schedules_with_its_place_and_the_last_calls() -> None:
    lines = timed_out(3).splitlines()
    assert lines[0].endswith("waited 0.1 s in round 0 of 4 for a message from rank 2")
    assert lines[1].split() == ["rank", "round", "0", "round", "1", "round", "2", "round", "3"]
    assert lines[2].startswith("0     [")
    assert [line[0] for line in lines[3:5]] == ["1", "2"] and "[" not in lines[3] + lines[4]
    assert lines[5] == "last calls of rank 0:"
    assert lines[6].startswith("  2 all_reduce (ring), ")
    assert lines[6].endswith("under way in round 0 of 4 for a message from rank 2")
    assert lines[7].startswith("  1 barrier (dissemination), ")


def test_a_time_out_says_for_whom_each_call_under_way_waits() -> None:
    """By the numbers that ranks have in the job, also on a communicator of some of them."""

    def body(comm: Communicator) -> str:
        half = comm.split(comm.rank % 2)
        assert half is not None
        if comm.rank == 3:
            time.sleep(0.4)
        start = partial(Communicator.all_reduce, algorithm="ring", async_op=True)
        works = [start(on, np.ones(4)) for on in (half, comm)]
        said = ""
        if comm.rank == 1:
            with pytest.raises(CollectiveTimeout) as error:
                works[1].wait(timeout=0.1)
            said = str(error.value)
        for work in works:
            work.wait(timeout=20)
        return said

    said = collectives.run(body, 4, timeout=20)[1]
    calls = re.findall(r"^  (\S*) all_reduce .* under way .* from rank (\d)$", said, re.MULTILINE)
    assert calls == [("2", "0"), ("[1,3]1", "3")]


def test_among_many_ranks_only_those_concerned_and_the_rounds_near_are_shown() -> None:
    lines = timed_out(20).splitlines()
    assert lines[1].split()[-1] == "3"
    assert [line.split()[0] for line in lines[2:4]] == ["0", "19"]
    assert lines[4] == "last calls of rank 0:"


def test_a_dump_that_cannot_be_written_does_not_hide_the_time_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert "waited 0.1 s" in timed_out(2, tmp_path / "file")
    assert "no dump of rank 0" in caplog.text


def test_a_time_out_dumps_if_somebody_asked_for_it(tmp_path: Path) -> None:
    timed_out(2, tmp_path)
    dump = json.loads((tmp_path / "flight.0.json").read_text())
    assert (dump["rank"], dump["size"]) == (0, 2)
    assert dump["calls"][-1]["state"] == "under way"
    assert "test_flight_recorder.py" in dump["at"][-1]
    assert not list(tmp_path.glob("*.part"))
