"""Schedules cost what their formulas and papers say: time, activations, messages and versions."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from parallel.pipeline import SCHEDULES, Times, make, simulate, validate, with_messages
from parallel.pipeline.actions import BackwardInput, BackwardWeight, Overlap, Send
from tests.parallel.pipeline.schedules_of_all_kinds import case, each_schedule, of_all_sizes

TIMES = [Times(f, i, w) for f, i, w in product((1, 2, 3), (1, 2, 3), (1, 2))]


@each_schedule
@pytest.mark.slow
def test_the_bubble_is_that_of_the_formula(name: str) -> None:
    formula, num_checked = SCHEDULES[name].bubble, 0
    for schedule in of_all_sizes(name, range(1, 7)):
        for times in TIMES if schedule.num_micro_batches < 16 else TIMES[:1]:
            if formula.holds(*case(schedule), times):
                wanted = formula.of(*case(schedule), times)
                assert simulate(schedule, times).bubble == wanted, (case(schedule), times)
                num_checked += 1
    assert num_checked >= 10


@pytest.mark.parametrize(
    ("name", "m", "times"),
    [
        ("interleaved", 2, Times(1, 1, 1)),
        ("zb-h1", 2, Times(1, 1, 1)),
        ("zb-h2", 4, Times(1, 1, 1)),
        ("zb-v", 4, Times(1, 1, 1)),
        ("zb-v", 16, Times(2, 1, 1)),
        ("v-half", 2, Times(1, 1, 1)),
        ("v-half", 16, Times(1, 2, 1)),
        ("v-min", 2, Times(1, 1, 1)),
        ("v-min", 16, Times(1, 2, 1)),
        ("dualpipe", 16, Times(1, 3, 1)),
        ("dualpipe-v", 16, Times(1, 2, 1)),
    ],
)
def test_where_the_formula_does_not_hold_it_says_so(name: str, m: int, times: Times) -> None:
    """The condition is needed: without it the bubble is another."""
    formula, schedule = SCHEDULES[name].bubble, make(name, 4, m)
    assert not formula.holds(*case(schedule), times)
    assert simulate(schedule, times).bubble != formula.of(*case(schedule), times)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_published_bubbles_without_bubbles_hold_if_w_fits_into_them(name: str) -> None:
    """They subtract a W for each rank; where it is longer than F, not all of it fits."""
    schedule, published = make(name, 4, 16), SCHEDULES[name].published
    assert published is not None
    for times in (Times(1, 1, 1), Times(3, 2, 1), Times(2, 3, 2)):
        assert simulate(schedule, times).bubble == published.of(*case(schedule), times)
    for times in (Times(1, 1, 2), Times(1, 3, 2)):
        assert simulate(schedule, times).bubble > published.of(*case(schedule), times)


@pytest.mark.parametrize("times", [(13, 10, 10), (10, 13, 10), (10, 10, 13), (10, 12, 8)])
def test_the_bubble_of_v_half_does_not_grow_with_micro_batches(times: tuple[int, ...]) -> None:
    """As published if W + 2B >= 2F and W + 2F >= B.  That of V-Min grows."""
    found = {
        name: [simulate(make(name, 4, m), Times(*times)).bubble for m in (8, 16, 32)]
        for name in ("v-half", "v-min")
    }
    assert len(set(found["v-half"])) == 1
    if times != (10, 10, 13):
        assert found["v-min"] == sorted(set(found["v-min"]))


@pytest.mark.parametrize("v", [1, 3, 4])
def test_interleaved_has_any_number_of_stages_on_a_rank(v: int) -> None:
    info = SCHEDULES["interleaved"]
    for p, m in product(range(1, 9), (1, 2, 3, 8, 16)):
        if m % max(1, m // p) == 0:
            schedule = make("interleaved", p, m, num_chunks=v)
            validate(schedule)
            validate(schedule, with_messages(schedule))
            simulation = simulate(schedule, Times(3, 2, 1))
            assert [simulation.live(r) for r in range(p)] == [
                info.kept.of(*case(schedule), r) for r in range(p)
            ]
            if m >= p:
                assert simulation.bubble == (p - 1) * 6  # v times less than that of whole ranks


def test_the_number_of_stages_on_a_rank_must_be_that_of_the_schedule() -> None:
    assert make("zb-v", 2, 4, num_chunks=2) == make("zb-v", 2, 4)
    with pytest.raises(ValueError, match="stages on a rank of 1f1b is 1, not 2"):
        make("1f1b", 2, 4, num_chunks=2)
    with pytest.raises(ValueError, match="of interleaved is at least 1, not 0"):
        make("interleaved", 2, 4, num_chunks=0)


PAIRS = [
    Times(f, i, w, overlapped=pair)
    for f, i, w in product((1, 2, 3), repeat=3)
    for pair in range(max(f, i + w), f + i + w)
    if w <= i <= f
]


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_pairs_that_save_time_leave_the_bubble_of_the_formula(name: str) -> None:
    for p in (2, 4, 6):
        schedule = make(name, p, 2 * p)
        for times in PAIRS:
            wanted = SCHEDULES[name].bubble.of(*case(schedule), times)
            assert simulate(schedule, times).bubble == wanted, (p, times)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_published_bubbles_of_pairs_are_those_of_pairs_that_save_nothing(name: str) -> None:
    """DeepSeek's formula is the exact one if F = I, and an F and a B that overlap take F + B.

    If they take less, the lists save more than it says: see `pair_bubble`.
    """
    schedule, info = make(name, 8, 16), SCHEDULES[name]
    assert info.published is not None
    for times in (Times(1, 1, 1), Times(3, 3, 2)):
        assert info.published.of(*case(schedule), times) == simulate(schedule, times).bubble
    for times in (Times(3, 2, 2), Times(3, 3, 2, overlapped=6)):
        assert info.published.of(*case(schedule), times) != simulate(schedule, times).bubble
    h, times = {"dualpipe": 3, "dualpipe-v": 7}[name], Times(3, 2, 2, overlapped=5)
    difference = h * (3 - 2) - (h - 1) * (3 + 4 - 5)
    published = info.published.of(*case(schedule), times)
    assert simulate(schedule, times).bubble == published + difference


@each_schedule
@pytest.mark.slow
def test_each_rank_keeps_as_much_as_the_formula_says(name: str) -> None:
    kept, num_checked = SCHEDULES[name].kept, 0
    for schedule in of_all_sizes(name):
        if kept.holds(*case(schedule), Times()):
            ranks, simulation = range(schedule.num_ranks), simulate(schedule)
            found = [simulation.live(rank) for rank in ranks]
            wanted = [kept.of(*case(schedule), rank) for rank in ranks]
            if name == "v-min":  # its formula is that of some ranks
                found, wanted = [max(found)], wanted[:1]
            assert found == wanted, case(schedule)
            num_checked += 1
    assert num_checked >= 8


@each_schedule
@pytest.mark.slow
def test_as_many_messages_are_sent_as_the_formula_says(name: str) -> None:
    for schedule in of_all_sizes(name):
        wanted = SCHEDULES[name].messages.of(*case(schedule), 0)
        assert sum(simulate(schedule).num_messages) == wanted
        sent = [isinstance(x, Send) for row in with_messages(schedule) for x in row]
        assert sum(sent) == wanted


def test_schedules_have_the_costs_that_papers_publish() -> None:
    """The tables of the papers, and of others who run these schedules."""
    p, m, unit = 8, 32, Times(1, 1, 1)
    fraction = {name: simulate(make(name, p, m), unit).fractions for name in SCHEDULES}
    flush = Fraction(p - 1, m)
    assert fraction["gpipe"] == fraction["1f1b"] == (Fraction(p - 1, m + p - 1), flush)
    assert fraction["interleaved"][1] == flush / 2
    assert fraction["zb-h1"][1] == flush / 3
    assert fraction["zb-h2"][1] == fraction["zb-v"][1] == 0
    assert fraction["v-half"][1] == Fraction(3 * p - 7, 6 * m) < flush / 2
    assert fraction["v-min"][1] == Fraction(4 * p - 5, 6 * m) < flush * 2 / 3
    assert fraction["naive"][0] == Fraction(p - 1, p)
    one_f_one_b = make("1f1b", p, m)
    assert [simulate(one_f_one_b).live(r) for r in range(p)] == [p - r for r in range(p)]
    for v in (2, 3):  # activations of the first rank: P (1 + (P-1) / (P v)) of P v-th parts
        most = simulate(make("interleaved", p, m, num_chunks=v)).live(0)
        assert Fraction(most, v) == Fraction(p * v + p - 1, v)
    messages = {name: sum(simulate(make(name, p, m)).num_messages) for name in SCHEDULES}
    assert messages["1f1b"] == messages["zb-h2"] == messages["dualpipe"] == 2 * m * (p - 1)
    assert messages["zb-v"] == messages["v-half"] == 2 * messages["1f1b"]
    assert messages["interleaved"] == 2 * m * (2 * p - 1)


def test_live_activations_are_those_counted_by_hand() -> None:
    one, all_first = simulate(make("1f1b", 4, 8)), simulate(make("gpipe", 4, 8))
    assert [one.live(r) for r in range(4)] == [4, 3, 2, 1]
    assert [all_first.live(r) for r in range(4)] == [8] * 4
    assert one.held(3) == [(3, 1), (27, 0)]  # the next F begins where a B ends
    assert one.held(2) == [(2, 1), (3, 2), (26, 1), (29, 0)]
    assert all_first.held(0)[-1] == (all_first.makespan, 0)


def test_activations_that_end_with_the_first_half_of_backward_are_fewer() -> None:
    """ZB-H1 keeps those of P micro-batches on all ranks, but of P - r only if I frees them."""
    simulation = simulate(make("zb-h1", 4, 8))
    assert [simulation.live(r) for r in range(4)] == [4, 4, 4, 4]
    assert [simulation.live(r, until=BackwardInput) for r in range(4)] == [4, 3, 2, 1]


@each_schedule
def test_what_is_kept_over_time_has_the_same_peak(name: str) -> None:
    simulation = simulate(make(name, 4, 8))
    for rank, until in product(range(4), (BackwardInput, BackwardWeight)):
        held = simulation.held(rank, until=until)
        assert max(number for _, number in held) == simulation.live(rank, until=until)
        assert held[-1][1] == 0 and held == sorted(held)


def test_results_are_exact() -> None:
    simulation = simulate(make("1f1b", 4, 8), Times(Fraction(1, 3), Fraction(1, 3), Fraction(1, 3)))
    assert simulation.bubble == 3 and simulation.makespan == 11
    assert simulation.fractions == (Fraction(3, 11), Fraction(3, 8))
    assert simulation.idle(3) == 0 and simulation.idle_in_step(3) == 3


def test_pipedream_keeps_the_versions_of_the_papers_figure() -> None:
    """Those of PipeDream's figure: rank r has P - r, and the last rank uses the newest."""
    simulation = simulate(make("pipedream", 4, 12))
    for rank in range(4):
        found, alive = simulation.versions(rank)
        assert found == {k: max(0, k - (3 - rank)) for k in range(12)}
        assert alive == 4 - rank


def test_a_message_takes_time_only_between_ranks() -> None:
    alone, apart = make("zb-v", 1, 3), make("1f1b", 2, 1)
    assert simulate(alone, Times(message=5)).makespan == simulate(alone).makespan
    assert simulate(apart, Times(message=5)).makespan == simulate(apart).makespan + 10


def test_overlapped_pairs_take_the_time_given() -> None:
    schedule = make("dualpipe", 4, 16)
    pairs = sum(isinstance(action, Overlap) for action in schedule.actions[0])
    plain, fast = simulate(schedule), simulate(schedule, Times(overlapped=2))
    assert plain.busy(0) - fast.busy(0) == pairs > 0
