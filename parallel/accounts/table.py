"""Compare what a training run predicts to send, what the library recorded, and what MPI observed.

All three count messages and payload bytes from each rank to each, and must be equal: in every row
of the table, in every phase, and along every axis of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from collectives import Ledger
from parallel.accounts.calls import UNCOUNTED, UNPREDICTED, Int64, PredictedCall, Tally
from parallel.accounts.monitor import NOT_OPENED, OUTSIDE

ALL = "(together)"


class TrafficMismatch(Exception):  # noqa: N818 - named like the errors of `collectives`
    """Predicted, recorded and observed traffic differ.  The message names every row that does."""


class TrafficRow(NamedTuple):
    """One row of the table: a collective in a phase."""

    phase: str
    collective: str
    predicted: Tally = Tally()
    recorded: Tally = Tally()
    # None without MPI's counters, and in a phase with several rows: MPI counts these together, and
    # their sum has a row of its own below them.
    observed: Tally | None = None

    @property
    def columns(self) -> dict[str, Tally]:
        """The names and tallies of the columns that are known."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tally)}

    @property
    def is_equal(self) -> bool:
        """Whether messages and bytes are equal, and the numbers of calls where both are known."""
        calls = {tally.calls for tally in self.columns.values()} - {None}
        sent = {(tally.messages, tally.bytes) for tally in self.columns.values()}
        return len(calls) < 2 and len(sent) == 1

    def __str__(self) -> str:
        columns = [f"{name} {tally}" for name, tally in self.columns.items()]
        return f"{self.phase}/{self.collective}: {'; '.join(columns)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the row as what JSON can represent."""
        return self._asdict() | {name: tally._asdict() for name, tally in self.columns.items()}


class Sent(NamedTuple):
    """What is sent by one collective in one phase along one axis."""

    phase: str
    collective: str
    axis: str
    tally: Tally
    matrix: Int64  # messages and bytes from each rank to each, (2, p, p)


def by_phase(sent: Sent) -> str:
    """Return the outermost phase."""
    return sent.phase.partition("/")[0]


by_axis: Callable[[Sent], str] = attrgetter("axis")


def sent_in(ledger: Ledger) -> list[Sent]:
    """Return what a ledger of all ranks has recorded; no phase has the label `OUTSIDE`.

    Envelopes are left out: whether a message has one depends on the GPUs.
    """
    summary = ledger.summary(by=("phase", "collective", "axis"))
    matrices = {key: np.zeros((2, ledger.size, ledger.size), np.int64) for key in summary}
    for row in ledger.rows():
        matrix = matrices[row.phase, row.collective, row.axis]
        matrix[:, row.src, row.dst] += row.segments, row.bytes
    rows = []
    for (phase, collective, axis), (calls, *volume) in summary.items():
        if collective in UNPREDICTED:
            continue
        tally = Tally(None if collective in UNCOUNTED else calls, *volume)
        matrix = matrices[phase, collective, axis]
        rows.append(Sent(phase or OUTSIDE, collective, axis, tally, matrix))
    return rows


class TrafficTable:
    """Predicted, recorded and observed traffic side by side; made on rank 0.

    `calls` is the result of `Trainer.traffic`, `ledger` the ledger of all ranks
    (``ledger.gather()``), and `observed` the result of `TrafficMonitor.gather`, or None for some
    `reason`.  `size` is the number of ranks.

    Attributes
    ----------
    rows : list of TrafficRow
        The rows with predicted traffic come first.
    matrix, matrices
        The recorded bytes from row to column, of all phases and of each outermost phase.
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
        observed: dict[str, Int64] | None,
        *,
        size: int,
        reason: str | None = NOT_OPENED,
    ) -> None:
        self.observed = observed
        self.reason = reason if observed is None else None
        self.predicted = [
            Sent(call.phase, call.collective, call.axis, call.tally(matrix), matrix)
            for call in calls
            for matrix in [call.matrices(size)]
        ]
        recorded = sent_in(ledger)
        self.axes, self._phases = sums(recorded, by_axis), sums(recorded, by_phase)
        self.matrices = {phase: matrix[1] for phase, matrix in self._phases.items()}
        self.matrix: Int64 = sum(self.matrices.values(), np.zeros((size, size), np.int64))
        rows = rows_of(self.predicted, recorded)
        self.rows = rows if observed is None else with_observed(rows, observed)

    def check(self) -> str:
        """Return a sentence on what was compared.  Raise TrafficMismatch if columns differ."""
        wrong = [str(row) for row in self.rows if not row.is_equal]
        compared = [("axis", "recorded", by_axis, self.axes)]
        compared.append(("phase", "recorded", by_phase, self._phases))
        if (observed := self.observed) is not None:
            compared.append(
                ("phase", "observed", lambda sent: observed_phase(sent.phase, observed), observed)
            )
        for by, column, key, seen in compared:
            predicted = sums(self.predicted, key)
            for part in predicted | seen:
                if np.any(predicted.get(part, 0) - seen.get(part, 0)):
                    name = f"{by} {part}" if part else f"messages without {by}"
                    wrong.append(f"{name}: the matrix predicted is not the one {column}")
        if wrong:
            raise TrafficMismatch("predicted, recorded and observed differ:\n" + "\n".join(wrong))
        if observed is None:
            return "predicted = recorded, to the byte (two columns compared: MPI was not observed)"
        return "predicted = recorded = observed by MPI, to the byte"

    def as_dict(self) -> dict[str, Any]:
        """Return the table for JSON: rows as dictionaries, matrices as lists, and `reason`."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "matrix": self.matrix.tolist(),
            "matrices": {phase: matrix.tolist() for phase, matrix in self.matrices.items()},
            "axes": {axis: matrix.tolist() for axis, matrix in self.axes.items()},
            "not_observed": self.reason,
        }


def observed_phase(phase: str, observed: Iterable[str]) -> str:
    """Return the observed phase that contains `phase`."""
    outer = [label for label in observed if f"{phase}/".startswith(f"{label}/")]
    return max(outer, key=len, default=OUTSIDE)


def sums(sent: Iterable[Sent], key: Callable[[Sent], str]) -> dict[str, Int64]:
    """Return the matrices added up by `key`, without matrices of zeros."""
    totals: dict[str, Int64] = {}
    for row in sent:
        if row.matrix.any():
            totals[key(row)] = totals.get(key(row), 0) + row.matrix
    return totals


def rows_of(predicted: Iterable[Sent], recorded: Iterable[Sent]) -> list[TrafficRow]:
    """Return a row for each (phase, collective) of either column."""
    rows: dict[tuple[str, str], TrafficRow] = {}
    for column, sent in (("predicted", predicted), ("recorded", recorded)):
        for item in sent:
            row = rows.get(item[:2]) or TrafficRow(*item[:2])
            total = getattr(row, column).plus(item.tally)
            rows[item[:2]] = row._replace(**{column: total})
    return list(rows.values())


def with_observed(rows: list[TrafficRow], observed: dict[str, Int64]) -> list[TrafficRow]:
    """Return the rows grouped by observed phase; their sum follows unless there is one row."""
    within: dict[str, list[TrafficRow]] = {}
    for row in rows:
        within.setdefault(observed_phase(row.phase, observed), []).append(row)
    seen = {phase: matrix.sum(axis=(1, 2)).tolist() for phase, matrix in observed.items()}
    within |= {phase: [] for phase, sent in seen.items() if any(sent) and phase not in within}
    joined = []
    for phase, parts in within.items():
        tally = Tally(None, *seen.get(phase, ()))
        if len(parts) == 1:
            joined.append(parts[0]._replace(observed=tally))
        else:
            predicted = reduce(Tally.plus, (row.predicted for row in parts), Tally())
            recorded = reduce(Tally.plus, (row.recorded for row in parts), Tally())
            name = ALL if parts else "?"
            joined += [*parts, TrafficRow(phase, name, predicted, recorded, tally)]
    return joined
