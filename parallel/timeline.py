"""What every rank did when: phases of training and collective calls, for chrome://tracing."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from collectives import Communicator, Ledger
from parallel.account import gather_json
from parallel.strategy import Phase

PHASES, CALLS = 1, 0  # the two tracks of a rank


class Timeline:
    """Phases as they pass; `phase` is what marks them otherwise, and is called as well."""

    def __init__(self, comm: Communicator, phase: Phase) -> None:
        self.comm, self._phase = comm, phase
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """A phase, with the time it takes."""
        began = time.perf_counter()
        with self._phase(label):
            yield
        self.spans.append((label, began, time.perf_counter()))

    def write(self, ledger: Ledger, path: Path) -> None:
        """All ranks' phases and calls, in one file that rank 0 writes.  All ranks call this.

        Times are comparable where ranks share a clock: on one machine.
        """
        every = gather_json(self.comm, self._events(ledger))
        if every is None:
            return
        events = [event for each in every for event in each]
        path.write_text(json.dumps({"traceEvents": events}))

    def _events(self, ledger: Ledger) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "calls.json")
            ledger.to_chrome_trace(file)
            calls: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
        rank = self.comm.rank
        names = {PHASES: "phases", CALLS: "collective calls"}
        tracks = [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}
            for tid, name in names.items()
        ]
        spans = [
            {"name": label, "ph": "X", "pid": rank, "tid": PHASES,
             "ts": began * 1e6, "dur": (ended - began) * 1e6}
            for label, began, ended in self.spans
        ]  # fmt: skip
        return [*tracks, *spans, *calls]
