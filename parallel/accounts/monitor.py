"""What is measured in every phase: the messages that MPI counts, and the time."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import collectives
from collectives import Communicator, Ledger, MonitorUnavailable
from parallel.accounts.calls import Int64
from parallel.mesh import split

PhaseFunction: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Called with a label; returns a context manager, such as `collectives.phase`."""

OUTSIDE = "(outside every phase)"
NOT_OPENED = "not monitored"
PHASES, CALLS = 1, 0  # the two tracks of a rank in a timeline
TRACKS = {PHASES: "phases", CALLS: "collective calls"}


class TrafficMonitor:
    """Reads MPI's own counters at the beginning and the end of every phase.

        with TrafficMonitor(comm) as monitor, comm.record() as ledger:
            with monitor.phase("loss"):          # instead of collectives.phase("loss")
                comm.all_reduce(loss)
        observed = monitor.gather()

    What is sent inside the outer ``with`` but in no phase counts as a phase of its own.  Phases of
    a monitor do not nest.  `comm` has all ranks of the job.  Unless `is_wanted`, no counters
    are read.  The attribute ``reason`` says why not, such as an MPI without counters, or is None.
    """

    def __init__(self, comm: Communicator, *, is_wanted: bool = True) -> None:
        self.comm = comm
        self.reason: str | None = None if is_wanted else NOT_OPENED
        self.sent: dict[str, Any] = defaultdict(int)  # messages and bytes to each rank: (2, p)
        self._last: Any = 0
        try:
            self.counters: Any = comm.counters() if is_wanted else None
        except MonitorUnavailable as why:
            self.counters, self.reason = None, str(why)

    def __enter__(self) -> TrafficMonitor:
        self._count(OUTSIDE)
        self.sent.clear()  # what was sent earlier
        return self

    def __exit__(self, *failure: object) -> None:
        self._count(OUTSIDE)
        if self.counters is not None:
            self.counters.close()

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Return a context manager: phase `label` of the ledger, in which MPI counts too."""
        self._count(OUTSIDE)
        with collectives.phase(label):
            yield
        self._count(label)

    def _count(self, label: str) -> None:
        """Add what this rank has sent since the last call."""
        if self.counters is not None:
            now = np.array(self.counters.read(), np.int64)
            self.sent[label] += now - self._last
            self._last = now

    def gather(self) -> dict[str, Int64] | None:
        """Return, for each phase, the messages and bytes from each rank to each: int64 (2, p, p).

        The result is None on other ranks than 0, and without counters.  All ranks call this outside
        the recorded region.
        """
        if self.counters is None:
            return None
        sent = {label: np.asarray(row).tolist() for label, row in self.sent.items()}
        if (ranks := gather_json(self.comm, sent)) is None:
            return None
        labels = dict.fromkeys(label for counts in ranks for label in counts)
        empty = [[0] * self.comm.size] * 2
        return {
            label: np.array([counts.get(label, empty) for counts in ranks], np.int64).swapaxes(0, 1)
            for label in labels
        }


class Timeline:
    """Records when phases begin and end; `phase` marks them, such as `collectives.phase`."""

    def __init__(self, comm: Communicator, phase: PhaseFunction) -> None:
        self.comm, self._phase = comm, phase
        self.spans: list[tuple[str, float, float]] = []  # label, begin and end in seconds

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Return a context manager: a phase whose times are recorded."""
        began = time.perf_counter()
        with self._phase(label):
            yield
        self.spans.append((label, began, time.perf_counter()))

    def write(self, ledger: Ledger, path: Path) -> None:
        """Write the phases and calls of all ranks for chrome://tracing.  All ranks call this."""
        calls, spans = ledger.gather(), gather_json(self.comm, self.spans)
        if calls is None or spans is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "calls.json")
            calls.to_chrome_trace(file)
            events = json.loads(file.read_text())["traceEvents"]
        for rank, spans_of_rank in enumerate(spans):
            for tid, name in TRACKS.items():
                named = {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid}
                events.append(named | {"args": {"name": name}})
            for label, began, ended in spans_of_rank:
                times = {"ts": began * 1e6, "dur": (ended - began) * 1e6}
                events.append({"name": label, "ph": "X", "pid": rank, "tid": PHASES} | times)
        path.write_text(json.dumps({"traceEvents": events}))


def gather_json(comm: Communicator, value: Any) -> list[Any] | None:
    """Return every rank's value, for JSON, on rank 0; None on others.  All ranks call this."""
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = comm.all_gather(np.array([mine.size])).tolist()
    if (gathered := comm.gather(mine, counts=sizes)) is None:
        return None
    return [json.loads(bytes(part)) for part in split(gathered, sizes)]
