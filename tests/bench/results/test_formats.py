"""Lines that programs can read which were written for nccl-tests, OSU benchmarks, or CSV."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest

from bench.results.formats import FORMATS, fitted, header
from bench.results.measurement import FORMS, Row, measurement
from bench.timing.quartiles import Quartiles, Samples
from bench.workloads.collective import Case

FLOAT = np.dtype("float32")
CASES = {
    "all_reduce": Case("all_reduce", 0, 4, 250_000, FLOAT),
    "all_gather": Case("all_gather", 0, 4, 250_000, FLOAT),
    "broadcast": Case("broadcast", 0, 4, 250_000, FLOAT, root=2),
    "barrier": Case("barrier", 0, 4, 0, FLOAT),
}
# As scripts for nccl-tests read a line: size, count, type, redop, root; time, algbw, busbw, wrong.
TIMES = r"\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\d+|N/A)"
NCCL = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)" + TIMES + TIMES)


def row(collective: str, name: str = "plan", wrong: int = 0) -> Row:
    ranks = [Quartiles(s * 0.9, s, s * 1.1) for s in (1e-3, 2e-3, 2e-3, 3e-3)]
    samples, case = Samples(tuple(ranks), 20), CASES[collective]
    selected = {"all_gather": "ring", "barrier": "dissemination"}.get(collective, "linear")
    algorithm = selected if name == "plan" else None
    form = measurement(case, name, algorithm, samples, wrong, average=3, noise=0.05)
    apart = None if collective == "broadcast" else form
    return Row(case, name, algorithm, apart, None if collective == "barrier" else form)


def test_a_line_has_the_columns_of_nccl_tests():
    (line,) = FORMATS["nccl"].lines([row("all_reduce")])
    columns = NCCL.match(line)
    assert columns is not None
    assert columns.groups()[:5] == ("1000000", "250000", "float32", "sum", "-1")
    assert columns.groups()[5:] == ("3000.00", "0.33", "0.50", "0") * 2
    assert line.split()[-1] == "plan:linear" and line.split()[-5:-1] == ["10.0", "1.00"] * 2


def test_heads_stand_above_their_columns():
    (line,) = FORMATS["nccl"].lines([row("all_reduce")])
    names, units = header(is_host=True).splitlines()[1:]
    for head, value in [("size", "1000000"), ("redop", "sum"), ("#wrong", "0"), ("portbw", "1.00")]:
        assert line[: names.index(head) + len(head)].endswith(f" {value}")
    times, more = ["time", "algbw", "busbw", "#wrong"], ["+-", "portbw"]
    case = ["#", "size", "count", "type", "redop", "root"]
    assert names.split() == [*case, *times * 2, *more * 2, "algorithm"]
    assert units.split().count("(us)") == 2


def test_a_form_that_there_is_not_is_a_dash():
    (line,) = FORMATS["nccl"].lines([row("broadcast")])
    assert line.split()[3:10] == ["none", "2", "-", "-", "-", "-", "3000.00"]


def test_the_end_says_what_nccl_tests_says():
    said = FORMATS["nccl"].tail([row("all_reduce")])
    assert said[:2] == ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 0.5"]
    assert FORMATS["nccl"].tail([row("all_reduce", wrong=3)])[0].endswith(" : 6 FAILED")


@pytest.mark.parametrize(("collective", "size"), [("all_reduce", 1000000), ("all_gather", 250000)])
def test_osu_lines_have_a_size_and_the_mean_of_the_ranks(collective, size):
    assert FORMATS["osu"].lines([row(collective)]) == []
    lines = FORMATS["osu"].tail([row(collective)])
    assert "# Size       Avg Latency(us)" in lines
    numbers = [line.split() for line in lines if line and not line.startswith("#")]
    assert numbers == [[str(size), "2000.00"]]


def test_full_osu_lines_have_the_fastest_and_the_slowest_rank():
    *_, head, line = FORMATS["osu --full"].tail([row("all_reduce")])
    names = "# Size Avg Latency(us) Min Latency(us) Max Latency(us) Iterations"
    assert head.split() == names.split()
    assert line.split() == ["1000000", "2000.00", "1000.00", "3000.00", "20"]


def test_osu_has_a_table_for_each_contender_and_no_size_for_a_barrier():
    rows = [row("all_reduce"), row("all_reduce", "native"), row("barrier")]
    lines = FORMATS["osu"].tail(rows)
    assert lines.count("# Size       Avg Latency(us)") == 2
    assert lines[-2].split() == ["#", "Avg", "Latency(us)"] and lines[-1].split() == ["2000.00"]


def test_csv_has_a_line_for_each_form():
    csv_format, rows = FORMATS["csv"], [row("all_reduce"), row("broadcast", "native")]
    assert csv_format.comment("scan") == csv_format.tail(rows) == []
    lines = list(csv.DictReader([*csv_format.head({}), *csv_format.lines(rows)]))
    assert [line["form"] for line in lines] == [*FORMS, "in_place"]
    assert float(lines[0]["seconds"]) == 3e-3 and lines[0]["algorithm"] == "linear"
    assert lines[2]["portbw"] == "" and lines[2]["root"] == "2" and lines[2]["noise"] == "0.05"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.234, "1.23"), (12345.67, "12345.7"), (1234567, "1234567"), (12345678, "1.2e+07")],
)
def test_numbers_fit_in_their_columns(value, text):
    assert fitted(value, 7) == text
