"""Compare what a training run predicts to send, what the library recorded, and what MPI observed.

**Predicted** comes from the list of actions of a step and the schedules of the collectives,
**recorded** from the library's ledger, **observed** from the MPI library's own counters, which are
read at the beginning and the end of every phase.  All three count messages and payload bytes, from
each rank to each.  `TrafficTable.check` raises unless they are equal: in every row of the table, in
every phase, along every axis of the mesh, and in all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from collectives import Ledger
from parallel.accounts.calls import UNCOUNTED, Int64, PredictedCall, Tally
from parallel.accounts.monitor import NOT_OPENED, OUTSIDE, ObservedTraffic

RowKey: TypeAlias = tuple[str, str]  # (phase, collective)

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
    """What is sent by one collective in one phase along one axis.

    `calls` is None where calls cannot be counted.  `matrix` has the messages and bytes from each
    rank to each, int64 (2, p, p).
    """

    phase: str
    collective: str
    axis: str
    calls: int | None
    matrix: Int64

    @property
    def tally(self) -> Tally:
        """The sums over all ranks."""
        return Tally(self.calls, *map(int, self.matrix.sum(axis=(1, 2))))


def sent_by(calls: Iterable[PredictedCall], size: int) -> list[Sent]:
    """Return what predicted calls send among `size` ranks."""
    found = []
    for call in calls:
        matrix = call.matrices(size)
        tally = call.tally(matrix)
        found.append(Sent(call.phase, call.collective, call.axis, tally.calls, matrix))
    return found


def sent_in(ledger: Ledger) -> list[Sent]:
    """Return what a ledger of all ranks has recorded; no phase has the label `OUTSIDE`."""
    matrices: dict[tuple[str, str, str], Int64] = {}
    for row in ledger.rows():
        key = row.phase or OUTSIDE, row.collective, row.axis
        if key not in matrices:
            matrices[key] = np.zeros((2, ledger.size, ledger.size), np.int64)
        matrices[key][:, row.src, row.dst] += row.segments, row.bytes
    calls: Any = ledger.summary(by=("phase", "collective", "axis"))
    numbers = {(phase or OUTSIDE, *key): each.calls for (phase, *key), each in calls.items()}
    return [
        Sent(*key, None if key[1] in UNCOUNTED else numbers[key], matrix)
        for key, matrix in matrices.items()
    ]


class TrafficTable:
    """Predicted, recorded and observed traffic side by side; made on rank 0.

    Parameters
    ----------
    calls : iterable of PredictedCall
        As `Trainer.traffic` returns them.
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
        self.predicted, self.recorded = sent_by(calls, size), sent_in(ledger)
        self.axes = self._sums(self.recorded, "axis")
        self._phases = self._sums(self.recorded, "phase")
        self.matrices = {phase: matrix[1] for phase, matrix in self._phases.items()}
        self.matrix: Int64 = sum(self.matrices.values(), np.zeros((size, size), np.int64))
        self.rows = rows_of(tallies(self.predicted), tallies(self.recorded), observed)

    def _sums(self, sent: list[Sent], by: str) -> dict[str, Int64]:
        """Return the matrices added up by axis, or by outermost phase."""
        found: dict[str, Int64] = defaultdict(lambda: np.zeros((2, self.size, self.size), np.int64))
        for each in sent:
            found[getattr(each, by).partition("/")[0]] += each.matrix
        return {key: matrix for key, matrix in found.items() if matrix.any()}

    def _by_observed_phase(
        self, observed: ObservedTraffic
    ) -> tuple[dict[str, Int64], dict[str, Int64]]:
        """Return what was predicted of each observed phase, and what was observed of it."""
        found = {label: np.zeros_like(matrix) for label, matrix in observed.phases.items()}
        for each in self.predicted:
            label = observed_phase(each.phase, observed)
            found[label] = found.get(label, 0) + each.matrix
        return found, observed.phases

    def check(self) -> str:
        """Return a sentence on what was compared.  Raise TrafficMismatch if columns differ."""
        wrong = [str(row) for row in self.rows if not row.is_equal]
        for by, seen in (("axis", self.axes), ("phase", self._phases)):
            wrong += differences(by, "recorded", self._sums(self.predicted, by), seen)
        if self.observed is not None:
            wrong += differences("phase", "observed", *self._by_observed_phase(self.observed))
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
    found = []
    for key in predicted | seen:
        if np.any(predicted.get(key, 0) - seen.get(key, 0)):
            name = f"{by} {key}" if key else f"messages without {by}"
            found.append(f"{name}: the matrix predicted is not the one {column}")
    return found


def tallies(sent: list[Sent]) -> dict[RowKey, Tally]:
    """Return the sums by (phase, collective)."""
    found: dict[RowKey, Tally] = {}
    for each in sent:
        key = each.phase, each.collective
        found[key] = found.get(key, Tally()).plus(each.tally)
    return found


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
