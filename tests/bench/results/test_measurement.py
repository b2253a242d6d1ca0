"""Bandwidths, spread, and the summary, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench.results.measurement import Row, bus_factor, measurement
from bench.results.summary import as_dict, average_busbw, noise, summaries
from bench.timing.quartiles import Quartiles, Samples
from bench.workloads.collective import Case

CASE = Case("all_reduce", 0, 4, 250_000_000, np.dtype("float32"))  # 1 GB


def row(name: str, seconds: float, wrong: int = 0, noise: float = 0.0) -> Row:
    """All ranks took so long, but the first a tenth of it; a quarter of samples a tenth less."""
    ranks = [Quartiles(s * 0.9, s, s * 1.2) for s in (seconds / 10, *[seconds] * 3)]
    algorithm = "ring" if name in ("plan", "call") else None if name in OTHERS else name
    return Row(CASE, name, algorithm, made(ranks, algorithm, wrong=wrong, noise=noise), None)


OTHERS = ("native", "memcpy", "bound")


def made(ranks, algorithm="ring", *, average=3, wrong=0, noise=0.0, name="plan"):
    samples = Samples(tuple(ranks), 20)
    return measurement(CASE, name, algorithm, samples, wrong, average=average, noise=noise)


@pytest.mark.parametrize(
    ("collective", "wanted"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("scatter", 0.75), ("broadcast", 1), ("reduce", 1)],
)
def test_the_bus_factor_is_that_of_nccl_tests(collective, wanted):
    assert bus_factor(collective, 4) == wanted


def rates(algorithm: str):
    rates = made([Quartiles(0.5, 0.5, 0.5)] * 4, algorithm)
    return rates.algbw, rates.busbw, rates.portbw


def test_the_port_of_a_wasteful_algorithm_is_busier_than_the_bus():
    assert rates("ring") == (2.0, 3.0, 3.0)
    assert rates("recursive_doubling") == (2.0, 3.0, 4.0)


def test_the_port_knows_the_options():
    assert rates("recursive_multiplying(radix=4)") == (2.0, 3.0, 6.0)
    assert rates("recursive_multiplying(radix=2)") == (2.0, 3.0, 4.0)


@pytest.mark.parametrize(("average", "seconds"), [(0, 1.0), (1, 2.0), (2, 1.0), (3, 3.0)])
def test_the_time_among_ranks_is_that_of_nccl_tests(average, seconds):
    ranks = [Quartiles(s, s, s) for s in (1.0, 2.0, 2.0, 3.0)]
    measured = made(ranks, average=average)
    assert measured.seconds == seconds
    assert (measured.fastest, measured.mean, measured.slowest) == (1.0, 2.0, 3.0)


def test_the_spread_is_half_the_distance_between_the_quartiles():
    assert row("ring", 0.5).first.spread == pytest.approx(0.15)


def test_a_line_to_compare_with_has_no_result_to_check():
    assert made([Quartiles(1, 1, 1)] * 4, None, name="memcpy").wrong is None
    assert made([Quartiles(1, 1, 1)] * 4, name="plan").wrong == 0


def test_ratios_say_how_many_times_faster_ours_is():
    times = {"ring": 0.5, "linear": 1.0, "call": 2.0, "native": 1.0, "memcpy": 0.1, "bound": 0.1}
    rows = [row(name, seconds) for name, seconds in times.items()]
    (summary,) = summaries(rows)
    assert (summary.best, summary.best_ratio, summary.call_ratio) == ("ring", 2.0, 0.5)
    assert as_dict(rows)["geometric_mean"] == {"best": 2.0, "call": 0.5}


def test_without_a_native_row_there_is_no_ratio():
    result = as_dict([row("ring", 0.5, wrong=3)])
    assert result["summary"][0]["best_ratio"] is None
    assert result["wrong"] == 3


def test_the_average_bus_bandwidth_is_of_ours():
    rows = [row("ring", 0.5), row("plan", 1.5), row("native", 0.1), row("memcpy", 0.1)]
    assert average_busbw(rows) == pytest.approx((3.0 + 1.0) / 2)


def test_the_noise_is_said_in_a_sentence():
    said = noise([row("plan", 0.5, noise=0.034)])
    assert said.startswith(
        "# Noise: plan:ring, measured twice in each case, differs from itself by"
    )
    assert "3.4% in the median and 3.4% at most (all_reduce, 1000000000 B)" in said
