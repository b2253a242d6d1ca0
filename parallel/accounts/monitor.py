"""What MPI counts, phase by phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import collectives
from collectives import Communicator, MonitorUnavailable
from parallel.accounts.calls import Int64, Tally

PhaseFunction: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Called with a label; returns a context manager, such as `collectives.phase`."""

OUTSIDE = "(outside every phase)"
NOT_OPENED = "not monitored"


class ObservedTraffic(NamedTuple):
    """What MPI counted on p ranks: for each phase an int64 array (2, p, p).

    The first index selects messages or bytes, the second the source, the third the destination.
    """

    phases: dict[str, Int64]

    def tally(self, phase: str) -> Tally:
        """Return what all ranks together sent in a phase."""
        messages, nbytes = self.phases[phase].sum(axis=(1, 2)) if phase in self.phases else (0, 0)
        return Tally(None, int(messages), int(nbytes))

    def matrix(self) -> Int64:
        """Return the messages and bytes of all phases, int64 (2, p, p)."""
        return np.sum(list(self.phases.values()), axis=0)  # type: ignore[no-any-return]


class TrafficMonitor:
    """Reads MPI's own counters at the beginning and the end of every phase.

        with TrafficMonitor(comm) as monitor, comm.record() as ledger:
            with monitor.phase("loss"):          # instead of collectives.phase("loss")
                comm.all_reduce(loss)
        observed = monitor.gather()

    What is sent inside the outer ``with`` but in no phase counts as a phase of its own.  Phases of
    a monitor do not nest.

    `comm` is that of all ranks of the job.  Unless `is_wanted`, no counters are read.  The
    attribute ``reason`` says why nothing is observed, such as an MPI without counters; it is None
    if MPI's counters are read.
    """

    def __init__(self, comm: Communicator, *, is_wanted: bool = True) -> None:
        self.comm = comm
        self.reason: str | None = None if is_wanted else NOT_OPENED
        self.sent: dict[str, Int64] = defaultdict(lambda: np.zeros((2, comm.size), np.int64))
        try:
            self.counters: Any = comm.counters() if is_wanted else None
        except MonitorUnavailable as why:
            self.counters, self.reason = None, str(why)

    def __enter__(self) -> TrafficMonitor:
        self._opened_at = self._read()
        return self

    def __exit__(self, *failure: object) -> None:
        seen = sum(self.sent.values(), np.zeros((2, self.comm.size), np.int64))
        self.sent[OUTSIDE] += self._read() - self._opened_at - seen
        if self.counters is not None:
            self.counters.close()

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Return a context manager: phase `label` of the ledger, whose messages MPI counts too."""
        before = self._read()
        with collectives.phase(label):
            yield
        self.sent[label] += self._read() - before

    def _read(self) -> Int64:
        """Return the messages and bytes from this rank to each rank so far: int64 (2, p)."""
        if self.counters is None:
            return np.zeros((2, self.comm.size), np.int64)
        return np.array(self.counters.read(), dtype=np.int64)

    def gather(self) -> ObservedTraffic | None:
        """Return all ranks' counts on rank 0; None on others, and without counters.

        A collective call, to be made outside the recorded region.  All ranks must have passed the
        same phases.
        """
        if self.counters is None:
            return None
        p = self.comm.size
        labels = sorted(self.sent)
        counts = np.zeros((len(labels), 2, p, p), np.int64)
        counts[:, :, self.comm.rank] = [self.sent[label] for label in labels]
        whole = self.comm.reduce(counts, op="sum", root=0)
        return None if whole is None else ObservedTraffic(dict(zip(labels, whole, strict=True)))
