"""A machine is found again from its own times, bad times are refused, and goals are judged."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.choosing.fitting import divided, fitted_links, line, link_errors, rate, undisturbed
from bench.choosing.machine import groups_of
from bench.choosing.patterns import PATTERNS, Sample, predicted
from bench.choosing.predictions import Held, Verdict, regrets, verdict
from bench.choosing.sampling import Taken, Time
from bench.choosing.sampling import least as least_of
from collectives.launch import launch
from collectives.selection.decisions import Decisions, Ranks
from collectives.simulation import OTHER_HOST, SAME_HOST, Link, Machine

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.on_open_mpi, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 4096
EAGER = Link(LIMIT, 2e-7, 2e-11, 5e-7, 3e-7, 4e-10)
REST = Link(math.inf, 3e-7, 2e-11, 3e-6, 4e-7, 6e-11, is_rendezvous=True)
MACHINE = Machine({SAME_HOST: (EAGER, REST)}, 4e-7, 2e-11, 3e-11)
BASE = MACHINE._replace(links={})
SIZES = [8, 128, 512, 2048, 4096, 4160, 8192, 32768, 131072, 1 << 20]


@cache
def true_samples() -> list[Sample]:
    """What would be measured if the model were true."""
    blank = [Sample(pattern, SAME_HOST, size, 1.0) for pattern in PATTERNS for size in SIZES]
    seconds = predicted(blank, MACHINE)
    return [
        sample._replace(seconds=time) for sample, time in zip(blank, seconds.tolist(), strict=True)
    ]


def samples(noise: float = 0.0) -> list[Sample]:
    """The same with noise that only takes longer."""
    draw = Random(1).random
    return [slower(sample, 1 + noise * draw()) for sample in true_samples()]


def slower(sample: Sample, factor: float) -> Sample:
    return sample._replace(seconds=sample.seconds * factor)


def test_a_machine_is_found_again_from_its_own_times() -> None:
    links = fitted_links(samples(), LIMIT, BASE)
    assert [link.up_to_bytes for link in links] == [LIMIT, math.inf]
    assert [link.is_rendezvous for link in links] == [False, True]
    for fitted, true in zip(links, (EAGER, REST), strict=True):
        of_link = [sample for sample in samples() if (sample.num_bytes <= LIMIT) == (true is EAGER)]
        assert np.abs(link_errors(of_link, fitted, BASE)).max() < 0.02
        assert fitted.seconds_per_byte == pytest.approx(true.seconds_per_byte, rel=0.05)
        start_up, truth = (
            2 * link.overhead_seconds + link.latency_seconds for link in (fitted, true)
        )
        assert start_up == pytest.approx(truth, rel=0.05)
        assert fitted.gap_seconds == pytest.approx(true.gap_seconds, rel=0.2)


def test_noise_moves_a_machine_by_no_more_than_the_noise() -> None:
    links = fitted_links(samples(noise=0.1), LIMIT, BASE)
    for fitted, true in zip(links, (EAGER, REST), strict=True):
        for size in (8, 4096, 1 << 20):
            assert 0.98 < fitted.seconds(size) / true.seconds(size) < 1.12


def test_one_time_that_was_disturbed_decides_little() -> None:
    disturbed = samples()
    at = disturbed.index(next(sample for sample in disturbed if sample.num_bytes == 8192))
    disturbed[at] = slower(disturbed[at], 5)
    rest = fitted_links(disturbed, LIMIT, BASE)[-1]
    assert rest.seconds(1 << 20) == pytest.approx(REST.seconds(1 << 20), rel=0.05)
    assert rest.seconds(32768) == pytest.approx(REST.seconds(32768), rel=0.2)


def sizes_divided(*patterns: dict[int, float]) -> list[list[int]]:
    """The groups of sizes, from the times of some patterns."""
    return divided(
        [
            Sample(str(number), SAME_HOST, size, seconds)
            for number, times in enumerate(patterns)
            for size, seconds in times.items()
        ]
    )


def test_sizes_are_divided_where_times_bend() -> None:
    straight = {size: 1e-6 + 1e-9 * size for size in SIZES}
    assert sizes_divided(straight) == [SIZES]
    bent = {size: time if size < 5000 else 10 * time for size, time in straight.items()}
    twice = {size: time if size < 1000 else 10 * time for size, time in bent.items()}
    assert sizes_divided(twice) == [SIZES[:3], SIZES[3:6], SIZES[6:]]
    assert all(max(group) < 5000 or min(group) > 5000 for group in sizes_divided(bent))
    assert sizes_divided(straight, twice) == sizes_divided(twice)
    few = SIZES[:7]  # too few for three groups
    assert sizes_divided({size: twice[size] for size in few}) == [SIZES[:3], SIZES[3:7]]
    assert divided([]) == []


def test_a_line_is_fitted_by_relative_errors_and_has_no_negative_costs() -> None:
    assert line([8, 800], [1.0, 100.0]) == pytest.approx((0, 1 / 8))
    assert line([10, 20], [5.0, 6.0]) == pytest.approx((4, 0.1))
    assert line([10, 20], [6.0, 5.0])[1] == 0.0, "it does not fall"
    assert line([10, 20], [1.0, 9.0])[0] == 0.0


def test_the_rate_of_work_is_the_median_over_sizes() -> None:
    assert rate([10, 20, 40], [10.0, 20.0, 4000.0]) == 1.0


@pytest.mark.parametrize(
    ("at", "seconds", "sentence"),
    [
        (0, 0.0, "ping-pong of 8 bytes took 0.0 seconds, which is no time"),
        (0, math.nan, "ping-pong of 8 bytes took nan seconds"),
        (9, 1e-9, "ping-pong of 1048576 bytes took no longer than of 8 bytes on same_host"),
    ],
)
def test_times_of_no_machine_are_refused(at: int, seconds: float, sentence: str) -> None:
    wrong = samples()
    wrong[at] = wrong[at]._replace(seconds=seconds)
    with pytest.raises(ValueError, match=sentence):
        fitted_links(wrong, LIMIT, BASE)


def test_times_without_any_order_are_refused() -> None:
    random = Random(2)
    wrong = [slower(sample, 10 ** random.uniform(-3, 3)) for sample in samples()]
    with pytest.raises(ValueError, match=r"no link has the times measured .* repeat|disturbed"):
        fitted_links(wrong, LIMIT, BASE)


def test_samples_in_which_ranks_lost_their_cores_do_not_count() -> None:
    """They take a hundred microseconds more, whatever their size; the others are fitted alone."""
    slow = samples()
    slow[1::3] = [
        sample._replace(seconds=sample.seconds + 1e-4, is_quiet=False) for sample in slow[1::3]
    ]
    by_pattern = [[sample for sample in slow if sample.pattern == pattern] for pattern in PATTERNS]
    quiet = [sample for one in by_pattern for sample in undisturbed(one)]
    assert len(quiet) < 0.7 * len(slow) and all(sample.is_quiet for sample in quiet)
    for fitted, true in zip(fitted_links(quiet, LIMIT, BASE), (EAGER, REST), strict=True):
        for size in (8, 4096, 1 << 20):
            assert fitted.seconds(size) == pytest.approx(true.seconds(size), rel=0.05)
    spoilt = fitted_links([sample._replace(is_quiet=True) for sample in slow], LIMIT, BASE)
    assert spoilt[0].seconds(8) > 1.05 * EAGER.seconds(8), "the negative control"


def test_where_ranks_lose_their_cores_again_and_again_nothing_is_fitted() -> None:
    pings = [ping for ping in samples() if ping.pattern == "ping-pong"]
    busy = [ping._replace(is_quiet=ping.num_bytes < 2000) for ping in pings]
    with pytest.raises(ValueError, match=r"nearly every ping-pong on same_host \(7 of 10 sizes\)"):
        undisturbed(busy)
    few = [sample for sample in samples() if sample.num_bytes not in (8, 128, 512)]
    with pytest.raises(ValueError, match="too few messages up to 4096 bytes on same_host"):
        fitted_links(few, LIMIT, BASE)


def test_a_time_is_of_the_samples_in_which_no_rank_lost_its_core() -> None:
    slow, quiet = Taken(1e-4, 1), Taken(1e-6, 0)
    assert least([slow] * 20 + [quiet] * 4) == (pytest.approx(1e-6), True)
    assert least([slow] * 20 + [quiet] * 3) == (pytest.approx(1e-4, rel=1), False)


def least(taken: list[Taken]) -> Time:
    class Alone:
        def Allreduce(self, *_: object) -> None:  # noqa: N802 - as in mpi4py
            """One rank: nothing changes."""

    return least_of(taken, Alone())  # type: ignore[arg-type]


def test_a_link_of_each_class_is_measured_between_the_first_ranks_that_have_it() -> None:
    def groups(*host_of: int, at_once: bool = False) -> list[tuple[object, ...]]:
        return [tuple(group) for group in groups_of(host_of, at_once=at_once)]

    first = ((0, 1),)
    assert groups(0, 0, 1, 1) == [(SAME_HOST, first, first), (OTHER_HOST, ((0, 2),), ((0, 2),))]
    assert groups(0, 1, 1) == [(OTHER_HOST, first, first), (SAME_HOST, ((1, 2),), ((1, 2),))]
    assert groups(0, 1, 2) == [(OTHER_HOST, first, ((0, 1, 2),))], "a ring of one rank of each host"
    assert groups(0) == []
    same, other = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    at_once = [(SAME_HOST, same, same), (OTHER_HOST, other, ((0, 2),))]
    assert groups(0, 0, 1, 1, at_once=True) == at_once
    assert groups(0, 0, 0, at_once=True) == [(SAME_HOST, first, first)], "one is left over"


def test_a_ring_of_ranks_exchanges_as_two_do_where_nothing_is_shared() -> None:
    pair = Sample("exchange", SAME_HOST, 4096, 1.0)
    of_two, of_five = predicted([pair, pair._replace(num_ranks=5)], MACHINE)
    assert of_two == pytest.approx(of_five)


def held(label: str, seconds: float, predicted_seconds: float, num_bytes: int = 8) -> Held:
    return Held("all_reduce", label, 2, num_bytes, seconds, predicted_seconds)


def test_goals_are_judged_by_errors_and_by_what_would_be_picked() -> None:
    right = [held("ring", 1.0, 1.05), held("linear", 2.0, 1.9)]
    assert verdict(right) == Verdict(2, pytest.approx(0.05), pytest.approx(0.05), 1.0, 1.0)
    assert verdict(right).is_met
    inexact = [held("ring", 1.0, 1.2), held("linear", 2.0, 2.4)]
    assert verdict(inexact).regret == 1.0 and not verdict(inexact).is_met
    misled = [held("ring", 1.0, 1.06), held("linear", 1.15, 1.05)]
    assert verdict(misled).regret == pytest.approx(1.15) and not verdict(misled).is_met
    outlier = [held("ring", 1.0, 1.0)] * 5 + [held("linear", 2.0, 4.0)]
    assert verdict(outlier).tail > 0.25 and not verdict(outlier).is_met


def test_picks_are_compared_size_by_size() -> None:
    calls = [held("ring", 1.0, 1.0), held("linear", 2.0, 2.0)]
    calls += [held("ring", 4.0, 3.0, 64), held("linear", 2.0, 5.0, 64)]
    assert regrets(calls) == [1.0, 2.0]
    assert verdict(calls).regret == pytest.approx(math.sqrt(2)) and verdict(calls).worst == 2.0


# On real ranks

# Real ranks measure, but the fit gets times without noise: a busy machine must not decide.
PROGRAM = """
import sys
from bench.__main__ import main
from bench.choosing.machine import MachineMeasurement
from tests.bench.choosing.test_machine import MACHINE, predicted

real = MachineMeasurement.pattern

def pattern(self, group, name, num_bytes, seconds):
    samples = real(self, group, name, num_bytes, seconds)
    assert [sample.num_bytes for sample in samples] == list(num_bytes)
    assert all(1e-9 < sample.seconds < 10 for sample in samples)
    times = predicted(samples, MACHINE).tolist()
    return [each._replace(seconds=time, is_quiet=True) for each, time in zip(samples, times)]

MachineMeasurement.pattern = pattern
sys.exit(main(["tune", *sys.argv[1:]]))
"""


def run(*command: str, num_ranks: int = 2) -> tuple[int, str, str]:
    done = launch(num_ranks, command, env={"PYTHONPATH": str(ROOT)}, timeout=100, capture=True)
    return done.returncode, done.stdout, done.stderr


def test_everything_is_measured_written_checked_and_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    tables = {"3": {"facts": {}, "tables": {"barrier": [{"up_to": None, "best": ["tree"]}]}}}
    path.write_text(json.dumps({"machine": None, "measured": tables}))
    quick = ["--check", "--collective", "scan", "--samples", "5", "--seconds", "3", "-e", "8"]
    status, said, errors = run("-c", PROGRAM, *quick, "--output", str(path))
    last = {0: "All goals are met.", 1: "Not all goals are met."}
    assert status in last and last[status] in said, said + errors
    decisions = Decisions.from_json(path.read_text())
    assert decisions.fitted is not None and list(decisions.fitted.machine.links) == [SAME_HOST]
    links = decisions.fitted.machine.links[SAME_HOST]
    assert links[-1].is_rendezvous and not links[0].is_rendezvous
    assert links[-1].seconds(1 << 20) == pytest.approx(REST.seconds(1 << 20), rel=0.1)
    assert decisions.fitted.facts["ranks"] == "2"
    assert set(decisions.measured[Ranks(2)].tables) == {"scan"}, "algorithms are measured as well"
    measured = json.loads(path.read_text())["measured"]
    assert measured["3"] == tables["3"], "what was measured on other numbers of ranks is kept"


def test_one_part_leaves_the_other_as_it_is_and_prints_what_it_writes(tmp_path: Path) -> None:
    path, numbers = tmp_path / "decisions.json", tmp_path / "numbers.json"
    tables = {"2": {"facts": {}, "tables": {"barrier": [{"up_to": None, "best": ["tree"]}]}}}
    path.write_text(json.dumps({"machine": None, "measured": tables}))
    files = ["--output", str(path), "--json", str(numbers)]
    quick = ["--samples", "5", "--seconds", "1"]
    status, said, errors = run("-c", PROGRAM, "--only", "machine", *quick, *files)
    assert status == 0, said + errors
    written = json.loads(path.read_text())
    assert written["measured"] == tables, "what was measured is kept"
    links = json.loads(numbers.read_text())["tables"]["links"]
    costs = written["machine"]["links"][SAME_HOST]
    assert [link["G ns/B"] for link in links] == [
        pytest.approx(1e9 * cost["seconds_per_byte"]) for cost in costs
    ]
    assert all(f"{link['G ns/B']:.4f}" in said for link in links)
    assert links[-1]["up to bytes"] is None and costs[-1]["up_to_bytes"] is None
    status, said, errors = run(
        "-m", "bench", "tune", "--only", "check", "--collective", "scan", *quick, *files
    )
    assert status in (0, 1) and "Written" not in said, said + errors
    assert json.loads(path.read_text()) == written, "a check alone writes nothing"
    checked = json.loads(numbers.read_text())["tables"]
    assert list(checked) == ["check by collective", "check by bytes", "check by ranks"]
    assert [row["ranks"] for row in checked["check by ranks"]] == [2]


def test_what_cannot_be_fitted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    busy = PROGRAM.replace("is_quiet=True", "is_quiet=False")
    status, said, errors = run("-c", busy, "--samples", "5", "--output", str(path))
    sentence = "ranks lost their cores in nearly every ping-pong on same_host"
    assert status == 2 and errors.count(sentence) == 1, said + errors
    assert "MPI_ABORT" not in said + errors and not path.exists()
