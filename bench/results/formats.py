"""The lines of a benchmark: as nccl-tests prints them, as the OSU benchmarks do, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from bench.results import summary
from bench.results.measurement import FORMS, Measurement, Row, op_and_root, percent, row_dict
from bench.workloads.collective import JOINS, SPLITS, Case
from collectives.arrays.backends import HOST


class Format(NamedTuple):
    """What is printed: before anything is measured, as a comment, after each case, in the end."""

    head: Callable[[dict[str, Any]], list[str]]
    comment: Callable[[str], list[str]]
    lines: Callable[[Sequence[Row]], list[str]]
    tail: Callable[[Sequence[Row]], list[str]]


def nothing(_: object) -> list[str]:
    """Return no lines."""
    return []


# As nccl-tests: its columns first, in its widths, so that programs that read it can read ours.

_CASE = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
_TIMES = "  {:>7}  {:>6}  {:>6}  {:>6}"
# Of each form, after both.
_MORE_ON_HOST = "  {:>5}  {:>6}"
_MORE_ON_DEVICE = _MORE_ON_HOST + "  {:>7}"
_FORM_WIDTH = len(_TIMES.format(*" " * 4))


def header(*, is_host: bool) -> str:
    """Return the lines above the columns."""
    more, forms = _more_format(is_host), [form.replace("_", "-") for form in FORMS]
    width = len(more.format(*" " * 3))
    lines = (
        _CASE.format(*" " * 5)
        + "".join(form.center(_FORM_WIDTH) for form in forms)
        + "".join(form.rjust(width) for form in forms),
        _CASE.format("size", "count", "type", "redop", "root")
        + _TIMES.format("time", "algbw", "busbw", "#wrong") * 2
        + more.format("+-", "portbw", "of copy") * 2
        + "  algorithm",
        _CASE.format("(B)", "(elements)", "", "", "")
        + _TIMES.format("(us)", "(GB/s)", "(GB/s)", "") * 2
        + more.format("(%)", "(GB/s)", "(%)") * 2,
    )
    return "\n".join(("#" + line[1:]).rstrip() for line in lines)


def _more_format(is_host: bool) -> str:
    return _MORE_ON_HOST if is_host else _MORE_ON_DEVICE


def line(row: Row) -> str:
    """Return one row, under `header`."""
    case, more = row.case, _more_format(row.case.backend.is_host)
    head = _CASE.format(case.num_bytes, case.num_elements, case.dtype.name, *op_and_root(case))
    forms = [row.out_of_place, row.in_place]
    numbers = "".join([*map(_times, forms), *(more.format(*_more(form)) for form in forms)])
    return f"{head}{numbers}  {row.label}"


def _times(measurement: Measurement | None) -> str:
    if measurement is None:
        return _TIMES.format(*"-" * 4)
    wrong = "N/A" if measurement.wrong is None else measurement.wrong
    rates = fitted(measurement.algbw, 6), fitted(measurement.busbw, 6)
    return _TIMES.format(fitted(measurement.seconds * 1e6, 7), *rates, wrong)


def _more(measurement: Measurement | None) -> list[str]:
    if measurement is None:
        return ["-"] * 3
    port = "-" if measurement.portbw is None else fitted(measurement.portbw, 6)
    share = "-" if measurement.of_copy is None else percent(measurement.of_copy)
    return [percent(measurement.spread), port, share]


def fitted(value: float, width: int) -> str:
    """Return a number with two digits after the point, or with fewer if it is too wide."""
    shown = (f"{value:.{count}f}" for count in (2, 1, 0))
    return next((text for text in shown if len(text) <= width), f"{value:.1e}")


def _nccl_head(facts: dict[str, Any]) -> list[str]:
    said = "# " + ", ".join(f"{key} {value}" for key, value in facts.items())
    return [said, header(is_host=facts["arrays"] == HOST.kind)]


def _nccl_lines(rows: Sequence[Row]) -> list[str]:
    return [line(row) for row in rows]


def _nccl_tail(rows: Sequence[Row]) -> list[str]:
    wrong = sum(row.wrong for row in rows)
    return [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {summary.average_busbw(rows):g}",
        summary.noise(rows),
    ]


# As the OSU benchmarks: a table for each contender, whose time is the mean of the ranks.

_BLOCK_SIZED = (SPLITS | JOINS) - {"reduce_scatter"}  # where a size is that of one block


def _osu(rows: Sequence[Row], *, is_full: bool) -> list[str]:
    ordered = sorted(rows, key=_osu_table)  # stable: sizes stay in their order
    return [
        text
        for _, table in groupby(ordered, _osu_table)
        for text in _osu_lines(list(table), is_full)
    ]


def _osu_table(row: Row) -> tuple[str, ...]:
    op, root = op_and_root(row.case)
    return row.case.collective, row.name, row.case.dtype.name, op, str(root)


def _osu_lines(rows: Sequence[Row], is_full: bool) -> Iterator[str]:
    case, columns = rows[0].case, ["Avg Latency(us)"]
    columns += ["Min Latency(us)", "Max Latency(us)"] * is_full
    has_sizes = case.collective != "barrier"
    yield ""
    yield f"# {case.collective} Latency Test, {rows[0].name}, in the format of OSU"
    yield "# Datatype: {}, redop {}, root {}".format(case.dtype.name, *op_and_root(case))
    heads = "".join(f"{column:>18}" for column in columns) + f"{'Iterations':>12}" * is_full
    yield (f"{'# Size':<10}{heads}" if has_sizes else f"#{heads[1:]}")
    for row in rows:
        size = f"{_osu_size(row.case):<10}" if has_sizes else ""
        yield size + _osu_cells(row.first, is_full)


def _osu_size(case: Case) -> int:
    is_block = case.collective in _BLOCK_SIZED
    return case.num_bytes // case.size if is_block else case.num_bytes


def _osu_cells(measurement: Measurement, is_full: bool) -> str:
    seconds = [measurement.mean, *([measurement.fastest, measurement.slowest] if is_full else [])]
    cells = "".join(f"{taken * 1e6:>18.2f}" for taken in seconds)
    return cells + (f"{measurement.samples:>12}" if is_full else "")


# CSV: a line for each contender and form.

_KEYS = ("collective", "size", "count", "dtype", "op", "root", "name", "algorithm")
_FIELDS = (*_KEYS, "form", *Measurement._fields)


def _csv_line(values: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


def _csv(rows: Sequence[Row]) -> list[str]:
    return [
        _csv_line([*(given[key] for key in _KEYS), form, *given[form].values()])
        for given in map(row_dict, rows)
        for form in FORMS
        if given[form] is not None
    ]


FORMATS = {
    "nccl": Format(_nccl_head, lambda text: [f"# {text}"], _nccl_lines, _nccl_tail),
    "osu": Format(nothing, nothing, nothing, lambda rows: _osu(rows, is_full=False)),
    "osu --full": Format(nothing, nothing, nothing, lambda rows: _osu(rows, is_full=True)),
    "csv": Format(lambda _: [_csv_line(_FIELDS)], nothing, _csv, nothing),
}
