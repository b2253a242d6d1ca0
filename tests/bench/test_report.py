"""Bandwidths, and the summary, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench.case import Case
from bench.report import Row, as_dict, bus_factor, line, measurement, summaries

CASE = Case("all_reduce", 0, 4, 250_000_000, np.dtype("float32"))  # 1 GB


def row(name: str, seconds: float, wrong: int = 0) -> Row:
    algorithm = None if name == "native" else "ring"
    return Row(CASE, name, algorithm, measurement(CASE, algorithm, seconds, wrong), None)


@pytest.mark.parametrize(
    ("collective", "wanted"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("scatter", 0.75), ("broadcast", 1), ("reduce", 1)],
)
def test_bus_factor(collective, wanted):
    assert bus_factor(collective, 4) == wanted


def test_the_port_of_a_wasteful_algorithm_is_busier_than_the_bus():
    assert measurement(CASE, "ring", 0.5, 0)[1:4] == (2.0, 3.0, 3.0)
    assert measurement(CASE, "recursive_doubling", 0.5, 0)[1:4] == (2.0, 3.0, 4.0)


def test_the_port_knows_the_options():
    wide = measurement(CASE, "recursive_multiplying(radix=4)", 0.5, 0)
    narrow = measurement(CASE, "recursive_multiplying(radix=2)", 0.5, 0)
    assert (wide.portbw, narrow.portbw) == (6.0, 4.0)


def test_ratios_say_how_many_times_faster_ours_is():
    rows = [row("ring", 0.5), row("linear", 1.0), row("call", 2.0), row("native", 1.0)]
    (found,) = summaries(rows)
    assert (found.best, found.best_ratio, found.call_ratio) == ("ring", 2.0, 0.5)
    assert as_dict(rows)["geometric_mean"] == {"best": 2.0, "call": 0.5}


def test_without_a_native_row_there_is_no_ratio():
    result = as_dict([row("ring", 0.5, wrong=3)])
    assert result["summary"][0]["best_ratio"] is None
    assert result["wrong"] == 3


def test_a_line_has_the_columns_of_nccl_tests():
    words = line(row("ring", 0.5)).split()
    assert words[:6] == ["1000000000", "250000000", "float32", "sum", "-1", "ring"]
    assert words[6:] == ["500000.00", "2.00", "3.00", "3.00", "0", *"-----"]
