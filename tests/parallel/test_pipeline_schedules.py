"""Every schedule computes all of a step, waits for nothing forever, and costs what papers say."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallel.actions import Action
from parallel.pipeline import (
    SCHEDULES,
    InvalidSchedule,
    Schedule,
    Times,
    make,
    parse,
    read_csv,
    simulate,
    validate,
    with_messages,
    write_csv,
)
from parallel.pipeline.__main__ import main
from parallel.pipeline.picture import in_time, short, svg
from parallel.pipeline.text import parse_row

each_schedule = pytest.mark.parametrize("name", SCHEDULES)
NUM_MICRO_BATCHES = (1, 2, 3, 5, 8, 12, 16)


def of_all_sizes(name: str, num_ranks: range = range(1, 9)) -> Iterator[Schedule]:
    """Those of a kind that exist."""
    found = 0
    for p, m in product(num_ranks, NUM_MICRO_BATCHES):
        try:
            schedule = make(name, p, m)
        except ValueError:
            continue
        found += 1
        yield schedule
    assert found >= 8


# Proofs


@each_schedule
def test_it_computes_all_and_waits_for_nothing_forever(name: str) -> None:
    """With messages, although each send waits for its receive."""
    for schedule in of_all_sizes(name):
        validate(schedule)
        validate(schedule, with_messages(schedule))


@each_schedule
def test_stages_are_where_they_should_be(name: str) -> None:
    for schedule in of_all_sizes(name):
        p, n = schedule.num_ranks, schedule.num_stages
        for stage in range(n):
            wanted = {stage % p}
            if name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
                wanted = {min(stage, 2 * p - 1 - stage)}
            if name == "dualpipe":
                wanted = {stage, p - 1 - stage}
            assert set(schedule.ranks_of(stage)) == wanted


def makespan(schedule: Schedule, *, waits_in_receives: bool) -> int:
    """That of lists with messages: one starts when its receive does, and none takes time."""
    lists = with_messages(schedule)
    at, free = [0] * len(lists), [0] * len(lists)
    posted: dict[Action, int] = {}
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, row in enumerate(lists):
            while at[rank] < len(row):
                action = row[at[rank]]
                waits = [action] if waits_in_receives and action.kind[:4] == "RECV" else []
                waits += [x for x in posted if x.kind[:4] == "RECV" and uses(action, x)]
                if any(sent_as(x) not in posted for x in waits):
                    break
                starts = [posted[x] for each in waits for x in (sent_as(each), each) if x in posted]
                free[rank] = max([free[rank], *starts]) + int(Times().of(action))
                if action.kind[:4] in ("SEND", "RECV"):
                    posted[action] = free[rank]
                at[rank] += 1
                has_moved = True
    assert at == [len(row) for row in lists]
    return max(free)


def uses(action: Action, receive: Action) -> bool:
    """Whether an action computes with what is received."""
    kinds = {"RECV_F": "F", "RECV_B": "BI"}[receive.kind]
    return any(x.kind in kinds and x[1:3] == receive[1:3] for x in action.parts or (action,))


def sent_as(receive: Action) -> Action:
    step = 1 if receive.kind == "RECV_B" else -1
    return Action(f"SEND_{receive.kind[-1]}", receive.stage + step, receive.micro_batch)


@each_schedule
def test_messages_that_start_in_their_place_delay_nothing(name: str) -> None:
    for p, m in ((2, 4), (4, 8), (6, 12)):
        schedule = make(name, p, m)
        assert makespan(schedule, waits_in_receives=False) == simulate(schedule).makespan


def test_a_rank_that_waits_in_its_receives_is_late() -> None:
    schedule = make("1f1b", 4, 8)
    assert makespan(schedule, waits_in_receives=True) == 45 > simulate(schedule).makespan == 33


WRONG = {
    "backward before forward": (["0B0 0F0"], "rank 0 waits forever in 0B0 for 0F0", ">0B0<"),
    "no backward": (["0F0"], "stage 0 computes F of micro-batch 0 on rank 0", "0F0 ><"),
    "no W": (["0F0 0I0"], "stage 0 computes FI of micro-batch 0 on rank 0", "0I0 ><"),
    "no forward": (["0F0 0B0 1B0"], "stage 1 computes B of micro-batch 0 on rank 0", "1B0 ><"),
    "two F": (["0F0 0F0 0B0"], "0F0 is there twice", ">0F0< >0F0<"),
    "two B": (["0F0 0B0 0B0"], "0B0 is there twice", ">0B0< >0B0<"),
    "two B on two ranks": (["0F0 0B0", "0B0"], "on rank 1 after rank 0", ">0B0<\nrank 1: >0B0<"),
    "B and its halves": (["0F0 0I0 0W0 0B0"], "stage 0 computes FBIW of micro-batch 0", ">0B0<"),
    "W before I": (["0F0 0W0 0I0"], "rank 0 waits forever in 0W0 for 0B0", ">0W0<"),
    "update of nothing": (["0F0 0B0 0UPDATE1"], "0UPDATE1 of rank 0 belongs to no", ">0UPDATE1<"),
    "update too early": (["0F0 0UPDATE0 0B0"], "in 0UPDATE0 for 0B0", ">0UPDATE0<"),
    "two updates": (["0F0 0B0 0UPDATE0 0UPDATE0"], "0UPDATE0 is there twice", ">0UPDATE0<"),
    "no micro-batch": (["0F0 0B0 0F2 0B2"], "stage 0 computes nothing of micro-batch 1", "0B2 ><"),
    "no stage": (["0F0 0B0 2F0 2B0"], "no rank has stage 1", "0F0"),
    "no list": (["0F0 0B0", ""], "rank 1 has no stage", "rank 1: ><"),
    "last stage first": (["0F0 1B0 1F0 0B0"], "in 1B0 for 1F0", ">1B0<"),
    "first backward first": (["0F0 1F0 0B0 1B0"], "in 0B0 for 1B0 on rank 0", ">0B0<"),
    "an overlapped pair of one micro-batch": (
        ["(0F0;0B0)OVERLAP_F_B"], "for 0F0 on rank 0", ">(0F0;0B0)OVERLAP_F_B<",
    ),
    "forward and backward apart": (
        ["0F0", "0B0"], "rank 1 computes 0B0, but rank 0 computes 0F0", ">0F0<\nrank 1: >0B0<",
    ),
    "W apart from I": (["0F0 0I0", "0W0"], "rank 1 computes 0W0, but rank 0", ">0W0<"),
    "copies of one stage only": (
        ["0F0 1F0 1B0 0B0", "0F1 0B1", "1F1 1B1"], "ranks 0 and 1 share stage 0", ">0F0< 1F0",
    ),
    "ranks that wait for each other": (
        ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
        "rank 0 waits forever in 0B0 for 1B0 on rank 1, and rank 1 waits forever in 1F1 for 0F1 on"
        " rank 0",
        "0F0   >0B0< 0F1 0B1\nrank 1: >1F1< 1B1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_run_is_refused_with_the_rank_and_the_cell(what: str) -> None:
    lists, why, faulty = WRONG[what]
    schedule = Schedule.of("wrong", [parse_row(row.split()) for row in lists])
    with pytest.raises(InvalidSchedule, match=why) as info:
        validate(schedule)
    assert faulty in str(info.value)


def test_a_wide_grid_is_cut_to_the_columns_around_the_faulty_cell() -> None:
    lists = [list(row) for row in make("1f1b", 2, 40).actions]
    lists[1].append(lists[1].pop(70))
    with pytest.raises(InvalidSchedule, match="waits forever in 1B35 for 1F35") as info:
        validate(Schedule.of("wrong", lists))
    _, *rows = str(info.value).splitlines()
    assert all(row.startswith(f"rank {rank}: ... ") for rank, row in enumerate(rows))
    assert ">1B35<" in rows[1] and max(map(len, rows)) < 140


TWO = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
WRONG_MESSAGES = {
    "not received": ((TWO[0], "1F0 1B0 1SEND_B0"), "rank 0 waits forever in 0SEND_F0 for 1RECV_F0"),
    "not sent": (("0F0 0RECV_B0 0B0", TWO[1]), "rank 0 waits forever in 0RECV_B0 for 1SEND_B0"),
    "sent before it exists": (("0SEND_F0 0F0 0RECV_B0 0B0", TWO[1]), "in 0SEND_F0 for 0F0"),
    "none at all for one": (("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"), "in 0B0 for 0RECV_B0"),
    "no list": ((TWO[0], ""), "rank 1 has no stage"),
    "sent by the last stage": ((TWO[0], f"{TWO[1]} 1SEND_F0"), "1SEND_F0 of rank 1 belongs to no"),
    "sent twice": ((f"{TWO[0]} 0SEND_F0", TWO[1]), "0SEND_F0 is there twice"),
    "received too late": ((TWO[0], "1F0 1RECV_F0 1B0 1SEND_B0"), "rank 1 waits forever in 1F0 for"),
}


@pytest.mark.parametrize("what", WRONG_MESSAGES)
def test_messages_that_do_not_match_are_refused(what: str) -> None:
    words, said = WRONG_MESSAGES[what]
    lists = [[parse(word) for word in row.split()] for row in words]
    with pytest.raises(InvalidSchedule, match=said):
        validate(make("1f1b", 2, 1), lists)


def test_two_sends_that_face_each_other_are_refused() -> None:
    """Buffered messages would hide it: each rank sends before it receives."""
    schedule = make("1f1b", 2, 2)
    lists = [list(row) for row in with_messages(schedule)]
    validate(schedule, lists)
    down, up = lists
    place, other = down.index(parse("0RECV_B0")), up.index(parse("1RECV_F1"))
    down.insert(down.index(parse("0SEND_F1")) + 1, down.pop(place))
    up.insert(up.index(parse("1SEND_B0")) + 1, up.pop(other))
    with pytest.raises(InvalidSchedule, match="rank 0 waits forever in 0SEND_F1") as info:
        validate(schedule, lists)
    assert ">0SEND_F1<" in str(info.value)


TOO_FEW = {
    ("dualpipe", 3, 8): "even number of ranks",
    ("dualpipe", 4, 6): "at least 8, not 6",
    ("dualpipe-v", 4, 7): "at least 8",
    ("interleaved", 3, 7): "no multiple of 2 rounds",
    ("dualpipe", 1, 8): "even number of ranks, not 1",
    ("dualpipe", 4, 9): "even number of micro-batches",
    ("gpipe", 0, 1): "at least 1",
    ("unknown", 1, 1): "choose from naive, gpipe",
}


@pytest.mark.parametrize("given", TOO_FEW)
def test_numbers_that_a_schedule_does_not_take_are_refused(given: tuple[str, int, int]) -> None:
    with pytest.raises(ValueError, match=TOO_FEW[given]):
        make(*given)


# Costs


TIMES = [Times(f, i, w) for f, i, w in product((1, 2, 3), (1, 2, 3), (1, 2))]


def case(schedule: Schedule) -> tuple[int, int, int]:
    """P, m and v."""
    p = schedule.num_ranks
    return p, schedule.num_micro_batches, schedule.num_stages // p


@each_schedule
def test_the_bubble_is_that_of_the_formula(name: str) -> None:
    formula, num_checked = SCHEDULES[name].bubble, 0
    for schedule in of_all_sizes(name, range(1, 7)):
        for times in TIMES if schedule.num_micro_batches < 16 else TIMES[:1]:
            if formula.holds(*case(schedule), times):
                wanted = formula.of(*case(schedule), times)
                assert simulate(schedule, times).bubble == wanted, (case(schedule), times)
                num_checked += 1
    assert num_checked >= 10


@pytest.mark.parametrize(("name", "m", "times"), [
    ("interleaved", 2, Times(1, 1, 1)), ("zb-h1", 2, Times(1, 1, 1)), ("zb-h2", 4, Times(1, 1, 1)),
    ("zb-v", 4, Times(1, 1, 1)), ("zb-v", 16, Times(2, 1, 1)), ("v-half", 2, Times(1, 1, 1)),
    ("v-half", 16, Times(1, 2, 1)), ("v-min", 2, Times(1, 1, 1)), ("v-min", 16, Times(1, 2, 1)),
    ("dualpipe", 16, Times(1, 3, 1)), ("dualpipe-v", 16, Times(1, 2, 1)),
])  # fmt: skip
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
    found = {name: [simulate(make(name, 4, m), Times(*times)).bubble for m in (8, 16, 32)]
             for name in ("v-half", "v-min")}  # fmt: skip
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


PAIRS = [Times(f, i, w, overlapped=pair) for f, i, w in product((1, 2, 3), repeat=3)
         for pair in range(max(f, i + w), f + i + w) if w <= i <= f]  # fmt: skip


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
def test_as_many_messages_are_sent_as_the_formula_says(name: str) -> None:
    for schedule in of_all_sizes(name):
        wanted = SCHEDULES[name].messages.of(*case(schedule), 0)
        assert sum(simulate(schedule).num_messages) == wanted
        sent = [x.kind.startswith("SEND") for row in with_messages(schedule) for x in row]
        assert sum(sent) == wanted


def test_published_vectors() -> None:
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


def test_live_activations_of_four_ranks_and_eight_micro_batches() -> None:
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
    assert [simulation.live(r, until="I") for r in range(4)] == [4, 3, 2, 1]


@each_schedule
def test_what_is_kept_over_time_has_the_same_peak(name: str) -> None:
    simulation = simulate(make(name, 4, 8))
    for rank, until in product(range(4), "IW"):
        held = simulation.held(rank, until=until)
        assert max(number for _, number in held) == simulation.live(rank, until=until)
        assert held[-1][1] == 0 and held == sorted(held)


def test_results_are_exact() -> None:
    simulation = simulate(make("1f1b", 4, 8), Times(Fraction(1, 3), Fraction(1, 3), Fraction(1, 3)))
    assert simulation.bubble == 3 and simulation.makespan == 11
    assert simulation.fractions == (Fraction(3, 11), Fraction(3, 8))
    assert simulation.idle(3) == 0 and simulation.idle_in_step(3) == 3


def test_versions_of_pipedream() -> None:
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
    pairs = sum(action.kind == "OVERLAP_F_B" for action in schedule.actions[0])
    plain, fast = simulate(schedule), simulate(schedule, Times(overlapped=2))
    assert plain.busy(0) - fast.busy(0) == pairs > 0


# Files and pictures


@each_schedule
def test_a_file_is_read_back(name: str, tmp_path: Path) -> None:
    schedule = make(name, 2, 4)
    write_csv(schedule.actions, tmp_path / f"{name}.csv")
    assert read_csv(tmp_path / f"{name}.csv") == schedule


def test_a_cell_that_is_no_action_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("0F0,,0B0\n0G0\n")
    with pytest.raises(ValueError, match=r"x.csv, row 2: '0G0' is not an action"):
        read_csv(tmp_path / "x.csv")


def test_actions_are_written_as_pytorch_writes_them() -> None:
    pair = Action("OVERLAP_F_B", parts=(Action("F", 0, 5), Action("B", 3, 2)))
    for action, word in (
        (Action("F", 2, 0), "2F0"), (Action("SEND_F", 3, 1), "3SEND_F1"),
        (Action("I", 1, 2), "1I2"), (pair, "(0F5;3B2)OVERLAP_F_B"),
    ):  # fmt: skip
        assert str(action) == word and parse(word) == action


def test_messages_in_a_file_are_left_out(tmp_path: Path) -> None:
    schedule = make("1f1b", 2, 3)
    write_csv(with_messages(schedule), tmp_path / "1f1b.csv")
    assert "0SEND_F0" in (tmp_path / "1f1b.csv").read_text()
    assert read_csv(tmp_path / "1f1b.csv") == schedule


def test_small_letters_are_of_the_second_stage_or_the_other_direction() -> None:
    for name, stages in (("zb-v", {0: "F", 3: "f"}), ("dualpipe", {0: "F", 1: "f"})):
        schedule = make(name, 2, 4)
        for action in schedule.actions[0]:
            if action.kind == "F":
                assert short(action, 0) == f"{stages[action.stage]}{action.micro_batch}"
    pair = next(x for x in make("dualpipe", 2, 4).actions[0] if x.parts)
    assert short(pair, 0) == "/".join(short(part, 0) for part in pair.parts)


def test_the_width_of_a_drawing_does_not_depend_on_the_unit_of_time() -> None:
    schedule = make("gpipe", 2, 2)
    assert svg(simulate(schedule, Times(500, 500, 500)), "") == svg(simulate(schedule), "")


def test_a_column_is_the_longest_time_of_which_all_are_multiples() -> None:
    schedule = make("1f1b", 2, 1)
    assert in_time(simulate(schedule, Times(100, 100, 100))) == in_time(simulate(schedule))
    half = in_time(simulate(schedule, Times(Fraction(1, 2), 1, 1)))
    assert half.splitlines()[1] == "rank 1:  . F0 B0  -  -  -  .  .  .  ."
    assert "W0 . ." not in in_time(simulate(make("zb-h1", 1, 1), Times(1, 1, 0)))


def test_a_drawing_has_every_action() -> None:
    schedule = make("dualpipe-v", 2, 4)
    root = ElementTree.fromstring(svg(simulate(schedule), "a title"))
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("F3") == words.count("f3") == 2 and "a title" in words


def test_the_command_draws_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--svg", str(tmp_path / "a.svg"), "--csv", str(tmp_path / "a.csv")]
    assert main(["show", "1f1b", "--stages", "2", "--micro-batches", "3", *files]) == 0
    said = capsys.readouterr().out
    assert "rank 0: F0 F1  .  . B0  - F2 B1  -  . B2  -" in said
    assert main(["show", str(tmp_path / "a.csv"), "--messages"]) == 0
    assert "0SEND_F0" in capsys.readouterr().out
    assert ElementTree.parse(tmp_path / "a.svg")


def test_the_command_compares_all_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--stages", "4", "--micro-batches", "8", "--times", "1:1:1"]) == 0
    said = capsys.readouterr().out
    assert all(f"| {name}" in said for name in SCHEDULES)


def test_the_command_says_all_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formulas"]) == 0
    said = capsys.readouterr().out
    for name, info in SCHEDULES.items():
        assert f"| {name} " in said and info.bubble.text in said and info.kept.text in said


REFUSED = {
    "dualpipe --micro-batches 4": "at least 8, not 4",
    "1f1b --times 1:1": "not F:I:W",
    "1f1b --times=1/0:1:1": "not F:I:W",
    "1f1b --times=-1:1:1": "must not be negative",
    "1f1b --times 0:1:1": "nor F be 0",
    "2f2b": "choose from naive",
    "missing.csv": "No such file",
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_command_refuses_in_a_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["show", *words.split()])
    assert stop.value.code == 2 and REFUSED[words] in capsys.readouterr().err
