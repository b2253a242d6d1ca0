"""The report of a benchmark: bandwidths, lines as in nccl-tests, a summary, and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

from rich.table import Table

from bench.case import CALL, JOINS, NATIVE, SPLITS, Case
from collectives.schedule.contracts import SPECS
from collectives.selection import select
from parallel.cli import table_with


class Measurement(NamedTuple):
    """One call: seconds, bandwidths in GB/s (`portbw` None where the algorithm is not known), and
    the number of wrong elements (None if it was not checked)."""

    seconds: float
    algbw: float
    busbw: float
    portbw: float | None
    wrong: int | None


class Row(NamedTuple):
    """A contender at one size; None for a form, out of place or in place, that it does not have."""

    case: Case
    name: str
    algorithm: str | None
    out_of_place: Measurement | None
    in_place: Measurement | None

    @property
    def seconds(self) -> float:
        """The time that goes into the summary: out of place, where there is such a form."""
        found = self.out_of_place or self.in_place
        assert found is not None, "a row has at least one form"
        return found.seconds

    @property
    def wrong(self) -> int:
        """The wrong elements of both forms."""
        return sum(m.wrong or 0 for m in (self.out_of_place, self.in_place) if m is not None)


def measurement(
    case: Case, algorithm: str | None, seconds: float, wrong: int | None
) -> Measurement:
    """The bandwidths that follow from a time."""
    algbw = case.num_bytes / seconds / 1e9
    busbw = algbw * bus_factor(case.collective, case.size)
    return Measurement(seconds, algbw, busbw, _port_bandwidth(case, algorithm, seconds), wrong)


def bus_factor(collective: str, p: int) -> float:
    """The factor from n / time to the bus bandwidth, for the least possible volume."""
    if collective == "all_reduce":
        return 2 * (p - 1) / p
    return (p - 1) / p if collective in SPLITS | JOINS else 1.0


def _port_bandwidth(case: Case, algorithm: str | None, seconds: float) -> float | None:
    """Bandwidth of the busiest port, at the volume that this algorithm really moves."""
    if algorithm is None:
        return None
    chosen = select.choose(
        case.collective, algorithm, case.size, case.num_bytes, topology=case.topology
    )
    busiest = chosen.algorithm.max_bytes_per_rank(p=case.size, n=case.num_bytes, **chosen.options)
    return float(busiest) / seconds / 1e9


# The lines, as nccl-tests has them.

_CASE = "{:>12} {:>12} {:>8} {:>6} {:>5} {:>30}"
_FORM = " {:>11} {:>7} {:>7} {:>7} {:>7}"
_FORM_WIDTH = len(_FORM.format(*" " * 5))

_FORMS = "out-of-place", "in-place"
HEADER = "\n".join(
    ("#" + line[1:]).rstrip()
    for line in (
        _CASE.format(*" " * 6) + "".join(form.center(_FORM_WIDTH) for form in _FORMS),
        _CASE.format("size", "count", "type", "redop", "root", "algorithm")
        + _FORM.format("time", "algbw", "busbw", "portbw", "#wrong") * 2,
        _CASE.format("(B)", "(elements)", "", "", "", "")
        + _FORM.format("(us)", "(GB/s)", "(GB/s)", "(GB/s)", "") * 2,
    )
)


def line(row: Row) -> str:
    """One row, under `HEADER`."""
    case, spec = row.case, SPECS[row.case.collective]
    op = case.op if spec.is_reduction else "none"
    root = case.root if spec.is_rooted else -1
    label = f"{CALL}:{row.algorithm}" if row.name == CALL else row.name
    head = _CASE.format(case.num_bytes, case.num_elements, case.dtype.name, op, root, label)
    return head + _form(row.out_of_place) + _form(row.in_place)


def _form(found: Measurement | None) -> str:
    if found is None:
        return _FORM.format(*"-" * 5)
    rates = [f"{rate:.2f}" for rate in (found.algbw, found.busbw)]
    port = "-" if found.portbw is None else f"{found.portbw:.2f}"
    wrong = "N/A" if found.wrong is None else found.wrong
    return _FORM.format(f"{found.seconds * 1e6:.2f}", *rates, port, wrong)


# The summary: ours against the MPI library's own.


class Summary(NamedTuple):
    """One size: seconds of MPI's own call, our best algorithm, and our call; None: not run."""

    size: int
    native: float | None
    best: str | None
    best_seconds: float | None
    call: float | None

    @property
    def best_ratio(self) -> float | None:
        """How many times faster than MPI's own our best algorithm is."""
        return _ratio(self.native, self.best_seconds)

    @property
    def call_ratio(self) -> float | None:
        """How many times faster than MPI's own our call is."""
        return _ratio(self.native, self.call)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "best_ratio": self.best_ratio, "call_ratio": self.call_ratio}


def _ratio(native: float | None, ours: float | None) -> float | None:
    return None if native is None or ours is None else native / ours


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """One for each size, in the order of the rows."""
    sizes: dict[int, list[Row]] = {}
    for row in rows:
        sizes.setdefault(row.case.num_bytes, []).append(row)
    return [_summary(size, group) for size, group in sizes.items()]


def _summary(size: int, rows: Sequence[Row]) -> Summary:
    others = {row.name: row.seconds for row in rows if row.name in (CALL, NATIVE)}
    ours = [row for row in rows if row.name not in others]
    best = min(ours, key=lambda row: row.seconds, default=None)
    name, seconds = (best.name, best.seconds) if best else (None, None)
    return Summary(size, others.get(NATIVE), name, seconds, others.get(CALL))


def mean(ratios: Iterable[float | None]) -> float | None:
    """The geometric mean of the ratios there are."""
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if known else None


def summary_table(found: Sequence[Summary]) -> Table:
    """Times in us, and how many times faster than MPI's own call ours are, size by size."""
    table = table_with(numbers=["size (B)", "native us", "best us", "native/best", "call us",
                                "native/call", "best algorithm"])  # fmt: skip
    for each in found:
        ours = [us(each.best_seconds), times_faster(each.best_ratio),
                us(each.call), times_faster(each.call_ratio)]  # fmt: skip
        table.add_row(str(each.size), us(each.native), *ours, each.best or "-")
    means = [mean(e.best_ratio for e in found), mean(e.call_ratio for e in found)]
    table.add_row("geom. mean", "", "", times_faster(means[0]), "", times_faster(means[1]), "")
    return table


def us(seconds: float | None) -> str:
    """Seconds as text, in microseconds."""
    return "-" if seconds is None else f"{seconds * 1e6:.2f}"


def times_faster(ratio: float | None) -> str:
    """A ratio as text."""
    return "-" if ratio is None else f"{ratio:.2f}"


def as_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows and summary for JSON."""
    found = summaries(rows)
    return {
        "rows": [_row_dict(row) for row in rows],
        "summary": [each.as_dict() for each in found],
        "geometric_mean": {
            "best": mean(each.best_ratio for each in found),
            "call": mean(each.call_ratio for each in found),
        },
        "wrong": sum(row.wrong for row in rows),
    }


def _row_dict(row: Row) -> dict[str, Any]:
    forms = {"out_of_place": row.out_of_place, "in_place": row.in_place}
    return {
        "size": row.case.num_bytes,
        "count": row.case.num_elements,
        "name": row.name,
        "algorithm": row.algorithm,
        **{name: found and found._asdict() for name, found in forms.items()},
    }
