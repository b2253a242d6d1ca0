"""The summary of a benchmark: ours against other libraries, and the noise of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from bench.contenders.contender import CALL, RIVALS
from bench.results.measurement import FORMS, REFERENCES, Measurement, Row, row_dict, us
from bench.workloads import sizes
from bench.workloads.collective import Case
from collectives.console import Number, Table


class Summary(NamedTuple):
    """One case: seconds of the fastest other library, our best algorithm, and our call, or None."""

    collective: str
    size: int
    other: str | None
    other_seconds: float | None
    best: str | None
    best_seconds: float | None
    call: float | None

    @property
    def best_ratio(self) -> float | None:
        """How many times faster than the other our best algorithm is."""
        return self._faster(self.best_seconds)

    @property
    def call_ratio(self) -> float | None:
        """How many times faster than the other our call is."""
        return self._faster(self.call)

    def _faster(self, ours: float | None) -> float | None:
        return None if self.other_seconds is None or ours is None else self.other_seconds / ours

    def as_dict(self) -> dict[str, Any]:
        """Return the case for JSON."""
        return {**self._asdict(), "best_ratio": self.best_ratio, "call_ratio": self.call_ratio}


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """Return a summary of each case, in the order of the rows."""
    cases: dict[Case, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return [_summary(case, group) for case, group in cases.items()]


def _summary(case: Case, rows: Sequence[Row]) -> Summary:
    others = [row for row in rows if row.name in RIVALS]
    ours = [row for row in rows if row.name not in (CALL, *RIVALS, *REFERENCES)]
    calls = [row.first.seconds for row in rows if row.name == CALL]
    fastest = *_fastest(others), *_fastest(ours)
    return Summary(case.collective, case.num_bytes, *fastest, next(iter(calls), None))


def _fastest(rows: Sequence[Row]) -> tuple[str | None, float | None]:
    """Return the label and the seconds of the fastest; None where there are none."""
    best = min(rows, key=lambda row: row.first.seconds, default=None)
    return (best.label, best.first.seconds) if best else (None, None)


def mean_ratio(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the ratios there are."""
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if known else None


def summary_table(cases: Sequence[Summary]) -> Table:
    """Return times in us, and how many times faster than the other's call ours are."""
    table = Table(
        "collective",
        Number("size (B)"),
        *(Number(f"{name} us", ".2f") for name in ("other", "best")),
        Number("other/best", ".2f"),
        Number("call us", ".2f"),
        Number("other/call", ".2f"),
        "best algorithm",
        "other",
    )
    for case in cases:
        times = (us(case.other_seconds), us(case.best_seconds))
        ratios = (case.best_ratio or "-", us(case.call), case.call_ratio or "-")
        table.add(case.collective, case.size, *times, *ratios, case.best or "-", case.other or "-")
    best, call = (
        mean_ratio(getattr(case, f"{name}_ratio") for case in cases) for name in ("best", "call")
    )
    table.add("geom. mean", None, None, None, best or "-", None, call or "-", "", "")
    return table


def noise(rows: Sequence[Row]) -> str:
    """Return the noise of the machine in a sentence: who was measured twice differs from itself."""
    measurements = {(row.case, form): m for row in rows for form, m in _forms(row)}
    case, form = max(measurements, key=lambda key: measurements[key].noise)
    worst, usual = measurements[case, form].noise, median(m.noise for m in measurements.values())
    where = f" ({case.collective}, {sizes.text(case.num_bytes)})" if case.num_bytes else ""
    return (
        f"# Noise: {rows[0].label}, measured twice in each case, differs from itself by "
        f"{usual:.1%} in the median and {worst:.1%} at most{where}"
    )


def _forms(row: Row) -> list[tuple[str, Measurement]]:
    forms = ((name, getattr(row, name)) for name in FORMS)
    return [(name, measurement) for name, measurement in forms if measurement is not None]


def average_busbw(rows: Iterable[Row]) -> float:
    """Return the mean bus bandwidth of all that is ours, in both forms."""
    ours = (row for row in rows if row.name not in (*RIVALS, *REFERENCES))
    rates = [m.busbw for row in ours for _, m in _forms(row)]
    return sum(rates) / len(rates) if rates else 0.0


def as_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows and summary for JSON."""
    cases = summaries(rows)
    return {
        "rows": [row_dict(row) for row in rows],
        "summary": [case.as_dict() for case in cases],
        "geometric_mean": {
            name: mean_ratio(getattr(case, f"{name}_ratio") for case in cases)
            for name in ("best", "call")
        },
        "wrong": sum(row.wrong for row in rows),
    }
