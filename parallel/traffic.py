"""The three columns: what a strategy says it sends, what the library recorded, what MPI counted.

**predicted** comes from the closed formulas of the algorithms' registry and the strategy's list of
calls; **recorded** from the library's ledger; **observed** from the MPI library's own counters,
read at both ends of every phase.  All count payload bytes and messages of all ranks together.  They
are equal, or `TrafficTable.check` raises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import collectives
from collectives import Communicator, Ledger, MonitorUnavailable

Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Key: TypeAlias = tuple[str, str]  # (phase, collective)

OUTSIDE = "(outside every phase)"
NOT_OPENED = "not monitored"


class TrafficMismatch(Exception):  # noqa: N818 - as the others of its kind are named
    """The columns differ.  The message names every row that does."""


@dataclass(frozen=True)
class PredictedCall:
    """`count` calls of a collective by this algorithm, each on a whole array of `nbytes` bytes."""

    phase: str
    collective: str
    algorithm: str
    nbytes: int
    count: int = 1

    def sent(self, size: int) -> Tally:
        """What all of `size` ranks together send in all of these calls."""
        run = collectives.choose(self.collective, self.algorithm, size, self.nbytes)
        messages = run.algorithm.messages(p=size, n=self.nbytes, **run.options)
        messages *= run.segments * self.count
        total = run.algorithm.total(p=size, n=self.nbytes, **run.options) * self.count
        if messages != int(messages) or total != int(total):
            raise ValueError(f"the formula of {self} gives a broken number for {size} ranks")
        return Tally(self.count, int(messages), int(total))


class Tally(NamedTuple):
    """Calls (None where nobody can know), messages and bytes."""

    calls: int | None = 0
    messages: int = 0
    bytes: int = 0

    def plus(self, other: Tally) -> Tally:
        """The sum of two tallies."""
        calls = None if self.calls is None or other.calls is None else self.calls + other.calls
        return Tally(calls, self.messages + other.messages, self.bytes + other.bytes)

    @property
    def volume(self) -> tuple[int, int]:
        """What went over the wire: messages and bytes."""
        return self.messages, self.bytes


class TrafficRow(NamedTuple):
    """One row of the table; `observed` is None where MPI was not watched."""

    phase: str
    collective: str
    predicted: Tally
    recorded: Tally
    observed: Tally | None

    @property
    def is_equal(self) -> bool:
        """Whether the columns agree.  A call without messages (one rank) leaves no record."""
        tallies = [self.recorded] if self.observed is None else [self.recorded, self.observed]
        calls = self.predicted.calls if self.predicted.messages else 0
        same = all(tally.volume == self.predicted.volume for tally in tallies)
        return same and self.recorded.calls == calls

    def __str__(self) -> str:
        parts = {"predicted": self.predicted, "recorded": self.recorded, "observed": self.observed}
        said = [f"{k} {t.messages} messages, {t.bytes} bytes" for k, t in parts.items() if t]
        calls = f"calls {self.predicted.calls} and {self.recorded.calls}"
        return f"{self.phase}/{self.collective}: {'; '.join(said)}; {calls}"


class Observed(NamedTuple):
    """What MPI counted on all ranks: per phase, (2, p, p) int64: messages and bytes, src x dst."""

    phases: dict[str, Int64]

    def tally(self, phase: str) -> Tally:
        """What all ranks together sent in a phase."""
        messages, nbytes = self.phases[phase].sum(axis=(1, 2)) if phase in self.phases else (0, 0)
        return Tally(None, int(messages), int(nbytes))

    def matrix(self) -> Int64:
        """p x p bytes, from row to column, all phases."""
        return np.sum(list(self.phases.values()), axis=0)[1]  # type: ignore[no-any-return]


class Witness:
    """Reads MPI's own counters at both ends of every phase.  `comm` spans the whole job.

        with Witness(comm) as witness, comm.record() as ledger:
            with witness.phase("loss"):          # instead of collectives.phase("loss")
                comm.all_reduce(loss)
        observed = witness.gather()

    What left while the witness was open but in no phase is kept as a phase of its own, so that
    nothing is sent unseen.  Where there are no counters `reason` says why, and nothing is observed.
    Phases of a witness do not nest.
    """

    def __init__(self, comm: Communicator, *, is_wanted: bool = True) -> None:
        self.comm = comm
        self.reason: str | None = None if is_wanted else NOT_OPENED
        self.counters: Any = None
        self.sent: dict[str, Int64] = defaultdict(lambda: np.zeros((2, comm.size), np.int64))
        if is_wanted:
            self._open()

    def _open(self) -> None:
        try:
            self.counters = self.comm.counters()
        except MonitorUnavailable as why:
            self.reason = str(why)

    def __enter__(self) -> Witness:
        self._opened_at = self._read()
        return self

    def __exit__(self, *failure: object) -> None:
        seen = sum(self.sent.values(), np.zeros((2, self.comm.size), np.int64))
        self.sent[OUTSIDE] += self._read() - self._opened_at - seen
        if self.counters is not None:
            self.counters.close()

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """A phase of the ledger, whose messages are also counted by MPI."""
        before = self._read()
        with collectives.phase(label):
            yield
        self.sent[label] += self._read() - before

    def _read(self) -> Int64:
        """(2, p) so far: messages and bytes from this rank to each other."""
        if self.counters is None:
            return np.zeros((2, self.comm.size), np.int64)
        return np.array(self.counters.read(), dtype=np.int64)

    def gather(self) -> Observed | None:
        """Every rank's counts on rank 0; None elsewhere, and where there are no counters.

        Collective: every rank must have had the same phases.  Call it after the recorded region.
        """
        if self.counters is None:
            return None
        p = self.comm.size
        labels = sorted(self.sent)
        counts = np.zeros((len(labels), 2, p, p), np.int64)
        counts[:, :, self.comm.rank] = [self.sent[label] for label in labels]
        whole = self.comm.reduce(counts, op="sum", root=0)
        return None if whole is None else Observed(dict(zip(labels, whole, strict=True)))


class TrafficTable:
    """The rows, the p x p matrix of bytes, and the verdict.  Made on rank 0, of gathered columns.

    ValueError if a phase is predicted to hold two kinds of collective: MPI's counters know no
    collectives, so that the observed column could not be told apart.
    """

    def __init__(
        self,
        calls: Iterable[PredictedCall],
        ledger: Ledger,
        observed: Observed | None,
        *,
        size: int,
        reason: str | None = NOT_OPENED,
    ) -> None:
        self.size, self.observed = size, observed
        self.reason = reason if observed is None else None
        self.matrix: Int64 = ledger.matrix()
        self.rows = rows_of(predicted(calls, size), recorded(ledger), observed)

    def check(self) -> str:
        """One sentence on what was compared.  Raises TrafficMismatch where the columns differ."""
        wrong = [str(row) for row in self.rows if not row.is_equal]
        if self.observed is not None and not np.array_equal(self.matrix, self.observed.matrix()):
            wrong.append("the matrix of bytes recorded is not the one observed")
        if wrong:
            raise TrafficMismatch("predicted, recorded and observed differ:\n" + "\n".join(wrong))
        if self.observed is None:
            return (
                "predicted = recorded, to the byte; two columns compared, for MPI was not observed"
            )
        return "predicted = recorded = observed by MPI, to the byte"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: rows as nested dictionaries, the matrix as lists, why nothing was observed."""
        rows = [
            {name: value._asdict() if isinstance(value, Tally) else value
             for name, value in row._asdict().items()}
            for row in self.rows
        ]  # fmt: skip
        return {"rows": rows, "matrix": self.matrix.tolist(), "not_observed": self.reason}


def predicted(calls: Iterable[PredictedCall], size: int) -> dict[Key, Tally]:
    """The sum of the predicted calls per (phase, collective)."""
    tallies: dict[Key, Tally] = {}
    kinds: dict[str, str] = {}
    for call in calls:
        key = call.phase, call.collective
        if kinds.setdefault(*key) != call.collective:
            raise ValueError(f"phase {call.phase!r} holds two kinds of collective:"
                             f" {kinds[call.phase]} and {call.collective}")  # fmt: skip
        tallies[key] = tallies.get(key, Tally()).plus(call.sent(size))
    return tallies


def recorded(ledger: Ledger) -> dict[Key, Tally]:
    """The ledger's messages per (phase, collective); no label is shown as `OUTSIDE`."""
    by: Any = ledger.summary(by=("phase", "collective"))
    return {
        (phase or OUTSIDE, collective): Tally(s.calls, s.messages, s.bytes)
        for (phase, collective), s in by.items()
    }


def rows_of(
    predicted: dict[Key, Tally], recorded: dict[Key, Tally], observed: Observed | None
) -> list[TrafficRow]:
    """One row for whatever any column knows of, the predicted ones first."""
    keys = list(predicted | recorded)
    keys += [(phase, "?") for phase in strangers(keys, observed)]
    seen = beside(keys, observed)
    return [
        TrafficRow(*key, predicted.get(key, Tally()), recorded.get(key, Tally()), seen[key])
        for key in keys
    ]


def beside(keys: list[Key], observed: Observed | None) -> dict[Key, Tally | None]:
    """What MPI saw in each phase, beside the first collective of that phase."""
    if observed is None:
        return dict.fromkeys(keys)
    first = {phase: (phase, collective) for phase, collective in reversed(keys)}
    return {key: observed.tally(key[0]) if first[key[0]] == key else Tally(None) for key in keys}


def strangers(keys: list[Key], observed: Observed | None) -> list[str]:
    """Phases in which MPI saw messages that neither formula nor ledger knows of."""
    known = {phase for phase, _ in keys}
    phases = observed.phases if observed is not None else {}
    return [phase for phase, sent in phases.items() if phase not in known and sent.any()]
