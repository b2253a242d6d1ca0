"""What every rank did when, in one file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel.accounts.monitor import CALLS, PHASES, Timeline

PAUSE = 0.02  # seconds


def written(path: Path, ranks: int) -> list[dict[str, Any]]:
    """The events of a run: two phases with a call each, and one call outside of any."""

    def fn(comm: Communicator) -> None:
        timeline = Timeline(comm, collectives.phase)
        with comm.record() as ledger:
            with timeline.phase("backward"):
                with collectives.phase("inner"):
                    comm.all_reduce(np.zeros(1000), algorithm="ring")
                time.sleep(PAUSE * (1 + comm.rank))
            comm.all_reduce(np.zeros(1))
            with timeline.phase("loss"):
                comm.all_reduce(np.zeros(2), algorithm="recursive_doubling")
        timeline.write(ledger, path)
        assert comm.rank or path.exists()

    collectives.run(fn, size=ranks)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def of(events: list[dict[str, Any]], rank: int, track: int) -> list[dict[str, Any]]:
    """A rank's bars of a track, in the order of time."""
    mine = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, track)]
    return sorted(mine, key=lambda event: float(event["ts"]))


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_file_has_the_phases_and_calls_of_every_rank(tmp_path: Path, ranks: int) -> None:
    events = written(tmp_path / "trace.json", ranks)
    assert {event["pid"] for event in events} == set(range(ranks))
    for rank in range(ranks):
        assert [span["name"] for span in of(events, rank, PHASES)] == ["backward", "loss"]
        if ranks > 1:
            calls = [(call["name"], call["cat"]) for call in of(events, rank, CALLS)]
            assert calls[0] == ("all_reduce (ring)", "backward/inner")
            assert calls[1][1] == ""
            assert calls[2] == ("all_reduce (recursive_doubling)", "loss")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_tracks_have_names(tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", 2)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    wanted = {PHASES: "phases", CALLS: "collective calls"}
    assert names == {(rank, track): name for rank in (0, 1) for track, name in wanted.items()}


def test_times_are_microseconds_of_one_clock(tmp_path: Path) -> None:
    """A phase lasts as long as what it does, and a call lies in its phase if it was made there."""
    events = written(tmp_path / "trace.json", 3)
    for rank in range(3):
        backward, loss = of(events, rank, PHASES)
        assert backward["dur"] >= 1e6 * PAUSE * (1 + rank)
        first, outside, last = of(events, rank, CALLS)
        assert lies_in(first, backward) and lies_in(last, loss)
        assert not lies_in(outside, backward) and not lies_in(outside, loss)
    starts = [of(events, rank, PHASES)[0]["ts"] for rank in range(3)]
    assert max(starts) - min(starts) < 60e6  # of the same run


def lies_in(call: dict[str, Any], span: dict[str, Any]) -> bool:
    ends = [each["ts"] + each["dur"] for each in (call, span)]
    return bool(span["ts"] <= call["ts"] and ends[0] <= ends[1])


def test_what_marks_phases_otherwise_is_called_too() -> None:
    """The monitor's phases count messages: theirs is the inside."""
    marked: list[tuple[str, str]] = []

    @contextmanager
    def phase(label: str) -> Iterator[None]:
        marked.append(("begin", label))
        yield
        marked.append(("end", label))

    def fn(comm: Communicator) -> None:
        timeline = Timeline(comm, phase)
        with timeline.phase("update"):
            assert marked == [("begin", "update")] and not timeline.spans
        assert [label for label, *_ in timeline.spans] == ["update"]

    collectives.run(fn, size=1)
    assert marked == [("begin", "update"), ("end", "update")]
