"""Compare what a strategy predicts to send, what the library recorded and what MPI observed.

**Predicted** comes from the closed formulas of the algorithms and the strategy's list of calls,
**recorded** from the library's ledger, **observed** from the MPI library's own counters, which are
read at the beginning and the end of every phase.  All three count the messages and payload bytes
of all ranks together.  `TrafficTable.check` raises unless they are equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import collectives
from collectives import Communicator, Ledger, MonitorUnavailable

Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
RowKey: TypeAlias = tuple[str, str]  # (phase, collective)

OUTSIDE = "(outside every phase)"
ALL = "(together)"
NOT_OPENED = "not monitored"


class TrafficMismatch(Exception):  # noqa: N818 - named like the errors of `collectives`
    """Predicted, recorded and observed traffic differ.  The message names every row that does."""


POINT_TO_POINT = ("send", "send_recv")
OF_VECTORS = ("broadcast", "reduce", "all_reduce")  # the algorithm decides how to divide these


@dataclass(frozen=True)
class PredictedCall:
    """Equal calls of one collective that a strategy will make.

    Attributes
    ----------
    phase : str
        The label of the phase in which the calls are made.
    collective : str
        Such as ``"all_reduce"``; or ``"send"``, of which each call is one message.
    algorithm : str
        By which the collective is called.
    nbytes : int
        The bytes of the whole array: the vector of an all-reduce, all blocks of an all-gather.
    num_calls : int
        How many calls each group makes.
    num_ranks : int, optional
        The number of ranks of a group; by default all.
    num_groups : int
        The number of groups that make these calls.

    Examples
    --------
    >>> from parallel import PredictedCall
    >>> PredictedCall("loss", "all_reduce", "recursive_doubling", 16, num_calls=3).sent(4)
    Tally(calls=3, messages=24, bytes=384)
    """

    phase: str
    collective: str
    algorithm: str
    nbytes: int
    num_calls: int = 1
    num_ranks: int | None = None
    num_groups: int = 1

    def sent(self, size: int) -> Tally:
        """Return what all `size` ranks of the communicator together send in all of these calls.

        A call without messages (of one rank) leaves no record and is not counted.  The number of
        calls of a "send" is None: each rank numbers its own.  Raises ValueError if the algorithm
        does not serve this number of ranks, or if its formula does not give an integer.
        """
        size, calls = self.num_ranks or size, self.num_calls * self.num_groups
        if self.collective in POINT_TO_POINT:
            return Tally(None, calls, calls * self.nbytes)
        run = collectives.choose(self.collective, self.algorithm, size, self.nbytes)
        messages = run.algorithm.messages(p=size, n=self.nbytes, **run.options)
        messages *= run.segments * calls
        total = run.algorithm.total_bytes(p=size, n=self.nbytes, **run.options) * calls
        if messages != int(messages) or total != int(total):
            raise ValueError(f"the formula of {self} gives no integer for {size} ranks")
        return Tally(calls if messages else 0, int(messages), int(total))


@dataclass(frozen=True)
class PredictedScatter(PredictedCall):
    """Linear scatters of uneven parts: the root sends all but its own part, of `root_bytes`."""

    root_bytes: int = 0

    def sent(self, size: int) -> Tally:
        calls, nbytes = self.num_calls, self.nbytes - self.root_bytes
        return Tally(calls, calls * (size - 1), calls * nbytes) if size > 1 else Tally()


def sends_blocks_equally(collective: str, algorithm: str, size: int) -> bool:
    """Return whether `size` ranks together send every block equally often.

    The bytes they send are then proportional to the whole array, however it is divided; otherwise
    the formulas hold for equal blocks only.
    """
    chosen = collectives.choose(collective, algorithm, size, 0)
    if collective in OF_VECTORS and chosen.algorithm.pieces(p=size, **chosen.options) == 1:
        return True  # blocks are whole vectors
    times = Counter(
        block
        for rank in range(size)
        for operations in chosen.algorithm.schedule(rank, size, **chosen.options)
        for sent in operations
        if sent.kind == "send"
        for block in sent.blocks
    )
    return len(set(times.values())) <= 1


class Tally(NamedTuple):
    """Numbers of calls (None where they cannot be counted), messages and bytes."""

    calls: int | None = 0
    messages: int = 0
    bytes: int = 0

    def plus(self, other: Tally) -> Tally:
        """Return the sum of two tallies."""
        calls = None if self.calls is None or other.calls is None else self.calls + other.calls
        return Tally(calls, self.messages + other.messages, self.bytes + other.bytes)

    def __str__(self) -> str:
        calls = "" if self.calls is None else f"{self.calls} calls, "
        return f"{calls}{self.messages} messages, {self.bytes} bytes"

    @property
    def volume(self) -> tuple[int, int]:
        """The number of messages and of bytes."""
        return self.messages, self.bytes


class TrafficRow(NamedTuple):
    """One row of the table: a collective in a phase.

    `observed` is None without MPI's counters, and in a phase with several rows: MPI counts these
    together, and their sum has a row of its own below them.
    """

    phase: str
    collective: str
    predicted: Tally
    recorded: Tally
    observed: Tally | None

    @property
    def is_equal(self) -> bool:
        """Whether messages and bytes are equal, and the numbers of calls where both are known."""
        tallies = [self.recorded] if self.observed is None else [self.recorded, self.observed]
        known = {self.predicted.calls, self.recorded.calls} - {None}
        return len(known) < 2 and all(t.volume == self.predicted.volume for t in tallies)

    def __str__(self) -> str:
        parts = {"predicted": self.predicted, "recorded": self.recorded, "observed": self.observed}
        columns = [f"{column} {tally}" for column, tally in parts.items() if tally is not None]
        return f"{self.phase}/{self.collective}: {'; '.join(columns)}"


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
        """Return the bytes of all phases, int64 (p, p), from row to column."""
        return np.sum(list(self.phases.values()), axis=0)[1]  # type: ignore[no-any-return]


class TrafficMonitor:
    """Reads MPI's own counters at the beginning and the end of every phase.

        with TrafficMonitor(comm) as monitor, comm.record() as ledger:
            with monitor.phase("loss"):          # instead of collectives.phase("loss")
                comm.all_reduce(loss)
        observed = monitor.gather()

    What is sent inside the outer ``with`` but in no phase counts as a phase of its own.  Phases of
    a monitor do not nest.

    Parameters
    ----------
    comm : Communicator
        Of all ranks of the job.
    is_wanted : bool
        False: read no counters, and observe nothing.

    Attributes
    ----------
    reason : str or None
        Why nothing is observed, such as an MPI without counters; None if MPI's counters are read.
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


class TrafficTable:
    """Predicted, recorded and observed traffic side by side; made on rank 0.

    Parameters
    ----------
    calls : iterable of PredictedCall
        As `Strategy.traffic` returns them.
    ledger : Ledger
        Of all ranks, as ``ledger.gather()`` returns it on rank 0.
    observed : ObservedTraffic or None
        As `TrafficMonitor.gather` returns it on rank 0.
    size : int
        The number of ranks.
    reason : str, optional
        Why nothing was observed.

    Attributes
    ----------
    rows : list of TrafficRow
        Those with predicted traffic first.
    matrix : array of int64, (size, size)
        The recorded bytes, from row to column.
    matrices : dict of str to array
        The same for each outermost phase.

    Examples
    --------
    >>> import numpy as np, collectives
    >>> from parallel import PredictedCall, TrafficTable
    >>> def table(comm):
    ...     with comm.record() as ledger, collectives.phase("sum"):
    ...         comm.all_reduce(np.ones(4), algorithm="ring")
    ...     ledger, calls = ledger.gather(), [PredictedCall("sum", "all_reduce", "ring", 32)]
    ...     return ledger and TrafficTable(calls, ledger, None, size=comm.size).rows[0]
    >>> print(collectives.run(table, size=2)[0])
    sum/all_reduce: predicted 1 calls, 4 messages, 64 bytes; recorded 1 calls, 4 messages, 64 bytes
    """

    def __init__(
        self,
        calls: Iterable[PredictedCall],
        ledger: Ledger,
        observed: ObservedTraffic | None,
        *,
        size: int,
        reason: str | None = NOT_OPENED,
    ) -> None:
        self.size, self.observed = size, observed
        self.reason = reason if observed is None else None
        self.matrix: Int64 = ledger.matrix()
        self.matrices = matrices(ledger)
        self.rows = rows_of(predicted(calls, size), recorded(ledger), observed)

    def check(self) -> str:
        """Return a sentence on what was compared.  Raise TrafficMismatch if columns differ."""
        wrong = [str(row) for row in self.rows if not row.is_equal]
        if self.observed is not None and not np.array_equal(self.matrix, self.observed.matrix()):
            wrong.append("the matrix of bytes recorded is not the one observed")
        if wrong:
            raise TrafficMismatch("predicted, recorded and observed differ:\n" + "\n".join(wrong))
        if self.observed is None:
            return "predicted = recorded, to the byte (two columns compared: MPI was not observed)"
        return "predicted = recorded = observed by MPI, to the byte"

    def as_dict(self) -> dict[str, Any]:
        """Return the table for JSON: rows as dictionaries, matrices as lists, and `reason`."""
        rows = [
            {name: value._asdict() if isinstance(value, Tally) else value
             for name, value in row._asdict().items()}
            for row in self.rows
        ]  # fmt: skip
        parts = {phase: matrix.tolist() for phase, matrix in self.matrices.items()}
        return {
            "rows": rows, "matrix": self.matrix.tolist(), "matrices": parts,
            "not_observed": self.reason,
        }  # fmt: skip


def predicted(calls: Iterable[PredictedCall], size: int) -> dict[RowKey, Tally]:
    """Return the sum of the predicted calls by (phase, collective)."""
    tallies: dict[RowKey, Tally] = {}
    for call in calls:
        key = call.phase, call.collective
        tallies[key] = tallies.get(key, Tally()).plus(call.sent(size))
    return tallies


def recorded(ledger: Ledger) -> dict[RowKey, Tally]:
    """Return the ledger's messages by (phase, collective); no phase has the label `OUTSIDE`."""
    by: Any = ledger.summary(by=("phase", "collective"))
    return {
        (phase or OUTSIDE, collective): Tally(
            None if collective in POINT_TO_POINT else s.calls, s.messages, s.bytes
        )
        for (phase, collective), s in by.items()
    }


def matrices(ledger: Ledger) -> dict[str, Int64]:
    """Return the recorded bytes, (p, p), by outermost phase; no phase has the label `OUTSIDE`."""
    found: dict[str, Int64] = defaultdict(lambda: np.zeros((ledger.size, ledger.size), np.int64))
    for row in ledger.rows():
        found[row.phase.partition("/")[0] or OUTSIDE][row.src, row.dst] += row.bytes
    return dict(found)


def rows_of(
    predicted: dict[RowKey, Tally], recorded: dict[RowKey, Tally], observed: ObservedTraffic | None
) -> list[TrafficRow]:
    """Return a row for each (phase, collective) of any column, grouped by observed phase."""
    keys = list(predicted | recorded)
    rows = {key: (predicted.get(key, Tally()), recorded.get(key, Tally())) for key in keys}
    if observed is None:
        return [TrafficRow(*key, *rows[key], None) for key in keys]
    within: dict[str, list[RowKey]] = {}
    for key in keys:
        within.setdefault(observed_phase(key[0], observed), []).append(key)
    for phase, sent in observed.phases.items():
        if sent.any():
            within.setdefault(phase, [])
    return [
        row for phase, keys in within.items() for row in rows_of_phase(phase, keys, rows, observed)
    ]


def observed_phase(phase: str, observed: ObservedTraffic) -> str:
    """Return the observed phase that contains `phase`."""
    outer = [label for label in observed.phases if f"{phase}/".startswith(f"{label}/")]
    return max(outer, key=len, default=OUTSIDE)


def rows_of_phase(
    phase: str,
    keys: list[RowKey],
    rows: dict[RowKey, tuple[Tally, Tally]],
    observed: ObservedTraffic,
) -> list[TrafficRow]:
    """Return the rows of one observed phase, and their sum if there are several (or none)."""
    seen = observed.tally(phase)
    if len(keys) == 1:
        return [TrafficRow(*keys[0], *rows[keys[0]], seen)]
    each = [TrafficRow(*key, *rows[key], None) for key in keys]
    predicted = reduce(Tally.plus, (row.predicted for row in each), Tally())
    recorded = reduce(Tally.plus, (row.recorded for row in each), Tally())
    return [*each, TrafficRow(phase, ALL if keys else "?", predicted, recorded, seen)]
