"""The three columns: what a strategy says it sends, what the library recorded, what MPI counted.

**predicted** comes from the closed formulas of the algorithms' registry and the strategy's list of
calls; **recorded** from the library's ledger; **observed** from the MPI library's own counters,
read at both ends of every phase.  All count payload bytes and messages of all ranks together.  They
are equal, or `TrafficTable.check` raises.
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
Key: TypeAlias = tuple[str, str]  # (phase, collective)

OUTSIDE = "(outside every phase)"
ALL = "(together)"
NOT_OPENED = "not monitored"


class TrafficMismatch(Exception):  # noqa: N818 - as the others of its kind are named
    """The columns differ.  The message names every row that does."""


POINT_TO_POINT = ("send", "send_recv")
OF_VECTORS = ("broadcast", "reduce", "all_reduce")  # cut by the algorithm, if at all


@dataclass(frozen=True)
class PredictedCall:
    """`count` calls of a collective by this algorithm, each on a whole array of `nbytes` bytes.

    By all ranks, or in each of `groups` groups of `ranks` ranks.  A "send" is one message of that
    size; nobody counts their calls, for every rank numbers its own.
    """

    phase: str
    collective: str
    algorithm: str
    nbytes: int
    count: int = 1
    ranks: int | None = None
    groups: int = 1

    def sent(self, size: int) -> Tally:
        """What all of `size` ranks together send in all of these calls.

        A call without messages (of one rank) leaves no record: it is not counted.
        """
        size, calls = self.ranks or size, self.count * self.groups
        if self.collective in POINT_TO_POINT:
            return Tally(None, calls, calls * self.nbytes)
        run = collectives.choose(self.collective, self.algorithm, size, self.nbytes)
        messages = run.algorithm.messages(p=size, n=self.nbytes, **run.options)
        messages *= run.segments * calls
        total = run.algorithm.total_bytes(p=size, n=self.nbytes, **run.options) * calls
        if messages != int(messages) or total != int(total):
            raise ValueError(f"the formula of {self} gives a broken number for {size} ranks")
        return Tally(calls if messages else 0, int(messages), int(total))


@dataclass(frozen=True)
class PredictedScatter(PredictedCall):
    """A linear scatter of uneven parts: the root sends all but the `kept` bytes of its own."""

    kept: int = 0

    def sent(self, size: int) -> Tally:
        calls, nbytes = self.count, self.nbytes - self.kept
        return Tally(calls, calls * (size - 1), calls * nbytes) if size > 1 else Tally()


def sends_alike(collective: str, algorithm: str, size: int) -> bool:
    """Whether so many ranks together send every part of the whole equally often.

    What they send is then proportional to the whole, into whatever parts it is divided; otherwise
    the formulas hold for equal parts only.
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
    """Calls (None where nobody can know), messages and bytes."""

    calls: int | None = 0
    messages: int = 0
    bytes: int = 0

    def plus(self, other: Tally) -> Tally:
        """The sum of two tallies."""
        calls = None if self.calls is None or other.calls is None else self.calls + other.calls
        return Tally(calls, self.messages + other.messages, self.bytes + other.bytes)

    def __str__(self) -> str:
        calls = "" if self.calls is None else f"{self.calls} calls, "
        return f"{calls}{self.messages} messages, {self.bytes} bytes"

    @property
    def volume(self) -> tuple[int, int]:
        """What went over the wire: messages and bytes."""
        return self.messages, self.bytes


class TrafficRow(NamedTuple):
    """One row of the table.

    `observed` is None where MPI was not watched, and in the rows of a phase whose calls may overlap
    in time: of those it saw the sum, which has a row of its own below them.
    """

    phase: str
    collective: str
    predicted: Tally
    recorded: Tally
    observed: Tally | None

    @property
    def is_equal(self) -> bool:
        """Whether the columns agree, in calls too where both know of them."""
        tallies = [self.recorded] if self.observed is None else [self.recorded, self.observed]
        known = {self.predicted.calls, self.recorded.calls} - {None}
        return len(known) < 2 and all(t.volume == self.predicted.volume for t in tallies)

    def __str__(self) -> str:
        parts = {"predicted": self.predicted, "recorded": self.recorded, "observed": self.observed}
        said = [f"{column} {tally}" for column, tally in parts.items() if tally is not None]
        return f"{self.phase}/{self.collective}: {'; '.join(said)}"


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
    """The rows, the p x p matrix of bytes, and the verdict; on rank 0, of gathered columns."""

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
        self.matrices = matrices(ledger)
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
        """For JSON: rows as nested dictionaries, matrices as lists, why nothing was observed."""
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


def predicted(calls: Iterable[PredictedCall], size: int) -> dict[Key, Tally]:
    """The sum of the predicted calls per (phase, collective)."""
    tallies: dict[Key, Tally] = {}
    for call in calls:
        key = call.phase, call.collective
        tallies[key] = tallies.get(key, Tally()).plus(call.sent(size))
    return tallies


def recorded(ledger: Ledger) -> dict[Key, Tally]:
    """The ledger's messages per (phase, collective); no label is shown as `OUTSIDE`."""
    by: Any = ledger.summary(by=("phase", "collective"))
    return {
        (phase or OUTSIDE, collective): Tally(
            None if collective in POINT_TO_POINT else s.calls, s.messages, s.bytes
        )
        for (phase, collective), s in by.items()
    }


def matrices(ledger: Ledger) -> dict[str, Int64]:
    """Of each outermost phase p x p bytes recorded, from row to column; no label is `OUTSIDE`."""
    found: dict[str, Int64] = defaultdict(lambda: np.zeros((ledger.size, ledger.size), np.int64))
    for row in ledger.rows():
        found[row.phase.partition("/")[0] or OUTSIDE][row.src, row.dst] += row.bytes
    return dict(found)


def rows_of(
    predicted: dict[Key, Tally], recorded: dict[Key, Tally], observed: Observed | None
) -> list[TrafficRow]:
    """One row for whatever any column knows of, the predicted ones first, by watched phase."""
    keys = list(predicted | recorded)
    rows = {key: (predicted.get(key, Tally()), recorded.get(key, Tally())) for key in keys}
    if observed is None:
        return [TrafficRow(*key, *rows[key], None) for key in keys]
    within: dict[str, list[Key]] = {}
    for key in keys:
        within.setdefault(watched(key[0], observed), []).append(key)
    for phase, sent in observed.phases.items():
        if sent.any():
            within.setdefault(phase, [])
    return [row for phase, keys in within.items() for row in group(phase, keys, rows, observed)]


def watched(phase: str, observed: Observed) -> str:
    """The watched phase in which the calls of this one were made."""
    outer = [label for label in observed.phases if f"{phase}/".startswith(f"{label}/")]
    return max(outer, key=len, default=OUTSIDE)


def group(
    phase: str, keys: list[Key], rows: dict[Key, tuple[Tally, Tally]], observed: Observed
) -> list[TrafficRow]:
    """The rows of one watched phase, with their sum if there are several (or none)."""
    seen = observed.tally(phase)
    if len(keys) == 1:
        return [TrafficRow(*keys[0], *rows[keys[0]], seen)]
    each = [TrafficRow(*key, *rows[key], None) for key in keys]
    said = reduce(Tally.plus, (row.predicted for row in each), Tally())
    sent = reduce(Tally.plus, (row.recorded for row in each), Tally())
    return [*each, TrafficRow(phase, ALL if keys else "?", said, sent, seen)]
