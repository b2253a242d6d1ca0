"""When each rank was in which phase and collective call, for chrome://tracing."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from collectives import Communicator, Ledger
from parallel import shards
from parallel.accounts.monitor import PhaseFunction

PHASES, CALLS = 1, 0  # the two tracks of a rank


class Timeline:
    """Records when phases begin and end; `phase` marks them, such as `collectives.phase`."""

    def __init__(self, comm: Communicator, phase: PhaseFunction) -> None:
        self.comm, self._phase = comm, phase
        self.spans: list[tuple[str, float, float]] = []  # label, begin and end in seconds

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """A phase whose times are recorded."""
        began = time.perf_counter()
        with self._phase(label):
            yield
        self.spans.append((label, began, time.perf_counter()))

    def write(self, ledger: Ledger, path: Path) -> None:
        """Write the phases and calls of all ranks to one file, on rank 0.  All ranks call this.

        The times of ranks on different machines are not comparable.
        """
        events_by_rank = gather_json(self.comm, self._events(ledger))
        if events_by_rank is not None:
            path.write_text(json.dumps({"traceEvents": list(chain(*events_by_rank))}))

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


def gather_json(comm: Communicator, value: Any) -> list[Any] | None:
    """Return every rank's value on rank 0, and None on others.  All ranks call this.

    The values consist of what JSON can represent, and may have any length.
    """
    mine = json.dumps(value).encode()
    sizes = comm.all_gather(np.array([len(mine)])).tolist()
    gathered = comm.gather(np.frombuffer(mine, np.uint8), counts=sizes)
    if gathered is None:
        return None
    return [json.loads(bytes(each)) for each in shards.split(gathered, sizes)]
