"""Compare what a training run predicts to send, what the library recorded, and what MPI observed.

**Predicted** comes from the list of actions of a step and the schedules of the collectives,
**recorded** from the library's ledger, **observed** from MPI's own counters, read at the beginning
and the end of every phase.  All count messages and payload bytes, from each rank to each, and must
be equal: in every row of the table, in every phase, and along every axis of the mesh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from collectives import Ledger
from parallel.accounts.calls import UNCOUNTED, Int64, PredictedCall, Tally
from parallel.accounts.monitor import NOT_OPENED, OUTSIDE, ObservedTraffic

ALL = "(together)"


class TrafficMismatch(Exception):  # noqa: N818 - named like the errors of `collectives`
    """Predicted, recorded and observed traffic differ.  The message names every row that does."""


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


class Sent(NamedTuple):
    """What is sent by one collective in one phase along one axis."""

    phase: str
    collective: str
    axis: str
    calls: int | None  # None where calls cannot be counted
    matrix: Int64  # messages and bytes from each rank to each, (2, p, p)

    @property
    def outer(self) -> str:
        """The outermost phase."""
        return self.phase.partition("/")[0]

    @property
    def tally(self) -> Tally:
        """The sums over all ranks."""
        return Tally(self.calls, *map(int, self.matrix.sum(axis=(1, 2))))


def sent_by(call: PredictedCall, size: int) -> Sent:
    """Return what a predicted call sends among `size` ranks."""
    matrix = call.matrices(size)
    return Sent(call.phase, call.collective, call.axis, call.tally(matrix).calls, matrix)


def sent_in(ledger: Ledger) -> list[Sent]:
    """Return what a ledger of all ranks has recorded; no phase has the label `OUTSIDE`."""
    shape = 2, ledger.size, ledger.size
    matrices: dict[Any, Int64] = defaultdict(lambda: np.zeros(shape, np.int64))
    for row in ledger.rows():
        matrix = matrices[row.phase, row.collective, row.axis]
        matrix[:, row.src, row.dst] += row.segments, row.bytes
    calls: Any = ledger.summary(by=("phase", "collective", "axis"))
    return [
        Sent(
            phase or OUTSIDE, collective, axis,
            None if collective in UNCOUNTED else calls[phase, collective, axis].calls, matrix,
        )
        for (phase, collective, axis), matrix in matrices.items()
    ]  # fmt: skip


class TrafficTable:
    """Predicted, recorded and observed traffic side by side; made on rank 0.

    `calls` are those of `Trainer.traffic`, `ledger` is that of all ranks (``ledger.gather()``), and
    `observed` what `TrafficMonitor.gather` returned, or None for some `reason`.  `size` is the
    number of ranks.

    Attributes
    ----------
    rows : list of TrafficRow
        Those with predicted traffic first.
    matrix, matrices
        The recorded bytes from row to column, and those of each outermost phase.
    axes : dict of str to array
        The recorded messages and bytes of each axis, (2, size, size).

    Examples
    --------
    >>> import numpy as np, collectives
    >>> from parallel import PredictedCall, TrafficTable
    >>> def table(comm):
    ...     with comm.record() as ledger, collectives.phase("sum"):
    ...         comm.all_reduce(np.ones(4), algorithm="ring")
    ...     ledger, calls = ledger.gather(), [PredictedCall("sum", "all_reduce", "ring", 4, 8)]
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
        self.predicted = [sent_by(call, size) for call in calls]
        recorded = sent_in(ledger)
        self.axes = sums(recorded, lambda sent: sent.axis)
        self._phases = sums(recorded, lambda sent: sent.outer)
        self.matrices = {phase: matrix[1] for phase, matrix in self._phases.items()}
        self.matrix: Int64 = sum(self.matrices.values(), np.zeros((size, size), np.int64))
        self.rows = rows_of(self.predicted, recorded, observed)

    def check(self) -> str:
        """Return a sentence on what was compared.  Raise TrafficMismatch if columns differ."""
        wrong = [str(row) for row in self.rows if not row.is_equal]
        by_axis = sums(self.predicted, lambda sent: sent.axis)
        wrong += differences("axis", "recorded", by_axis, self.axes)
        by_phase = sums(self.predicted, lambda sent: sent.outer)
        wrong += differences("phase", "recorded", by_phase, self._phases)
        if (observed := self.observed) is not None:
            by_phase = sums(self.predicted, lambda sent: observed_phase(sent.phase, observed))
            wrong += differences("phase", "observed", by_phase, observed.phases)
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
        return {
            "rows": rows, "matrix": self.matrix.tolist(),
            "matrices": {phase: matrix.tolist() for phase, matrix in self.matrices.items()},
            "axes": {axis: matrix.tolist() for axis, matrix in self.axes.items()},
            "not_observed": self.reason,
        }  # fmt: skip


def differences(
    by: str, column: str, predicted: dict[str, Int64], seen: dict[str, Int64]
) -> list[str]:
    """Return a sentence for each axis or phase in which two columns' matrices differ."""
    wrong = [k for k in predicted | seen if np.any(predicted.get(k, 0) - seen.get(k, 0))]
    names = [f"{by} {key}" if key else f"messages without {by}" for key in wrong]
    return [f"{name}: the matrix predicted is not the one {column}" for name in names]


def sums(sent: Iterable[Sent], key: Callable[[Sent], str]) -> dict[str, Int64]:
    """Return the matrices added up by `key`, without those that are zero."""
    found: dict[str, Int64] = {}
    for each in sent:
        if each.matrix.any():
            found[key(each)] = found.get(key(each), 0) + each.matrix
    return found


def rows_of(
    predicted: Iterable[Sent], recorded: Iterable[Sent], observed: ObservedTraffic | None
) -> list[TrafficRow]:
    """Return a row for each (phase, collective) of any column, grouped by observed phase."""
    tallies: dict[tuple[str, str], list[Tally]] = {}
    for column, sent in enumerate((predicted, recorded)):
        for each in sent:
            row = tallies.setdefault((each.phase, each.collective), [Tally(), Tally()])
            row[column] = row[column].plus(each.tally)
    rows = [TrafficRow(*key, row[0], row[1], None) for key, row in tallies.items()]
    if observed is None:
        return rows
    within: dict[str, list[TrafficRow]] = {}
    for each_row in rows:
        within.setdefault(observed_phase(each_row.phase, observed), []).append(each_row)
    for phase, matrix in observed.phases.items():
        if matrix.any():
            within.setdefault(phase, [])
    return [
        row
        for phase, rows in within.items()
        for row in with_observed(phase, rows, observed.tally(phase))
    ]


def observed_phase(phase: str, observed: ObservedTraffic) -> str:
    """Return the observed phase that contains `phase`."""
    outer = [label for label in observed.phases if f"{phase}/".startswith(f"{label}/")]
    return max(outer, key=len, default=OUTSIDE)


def with_observed(phase: str, rows: list[TrafficRow], seen: Tally) -> list[TrafficRow]:
    """Return the rows of one observed phase, and their sum if there are several (or none)."""
    if len(rows) == 1:
        return [rows[0]._replace(observed=seen)]
    predicted = reduce(Tally.plus, (row.predicted for row in rows), Tally())
    recorded = reduce(Tally.plus, (row.recorded for row in rows), Tally())
    return [*rows, TrafficRow(phase, ALL if rows else "?", predicted, recorded, seen)]
