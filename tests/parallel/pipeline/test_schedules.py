"""Every schedule computes all of a step, and waits for nothing forever; others are refused."""

from __future__ import annotations

import pytest

from parallel.pipeline import (
    InvalidSchedule,
    Schedule,
    Times,
    make,
    parse,
    simulate,
    validate,
    with_messages,
)
from parallel.pipeline.actions import Action, Message, Receive, Result
from parallel.pipeline.schedule import computations
from parallel.pipeline.text import parse_row
from tests.parallel.pipeline.schedules_of_all_kinds import each_schedule, of_all_sizes


@each_schedule
@pytest.mark.slow
def test_every_schedule_computes_all_and_waits_for_nothing_forever(name: str) -> None:
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
    posted: dict[Message, int] = {}
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, row in enumerate(lists):
            while at[rank] < len(row):
                action = row[at[rank]]
                waits = [action] if waits_in_receives and isinstance(action, Receive) else []
                waits += [x for x in posted if isinstance(x, Receive) and uses(action, x)]
                if any(x.other_end not in posted for x in waits):
                    break
                starts = [
                    posted[x] for each in waits for x in (each.other_end, each) if x in posted
                ]
                free[rank] = max([free[rank], *starts]) + int(action.time(Times()))
                if isinstance(action, Message):
                    posted[action] = free[rank]
                at[rank] += 1
                has_moved = True
    assert at == [len(row) for row in lists]
    return max(free)


def uses(action: Action, receive: Receive) -> bool:
    """Whether an action computes with what is received."""
    sent = receive.other_end
    received = Result(sent.direction, sent.stage, sent.micro_batch)
    own = receive.stage, receive.micro_batch
    return any(
        received in part.needs(sent.stage + 2) and (part.stage, part.micro_batch) == own
        for part in computations((action,))
    )


@each_schedule
@pytest.mark.slow
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
        ["(0F0;0B0)OVERLAP_F_B"],
        "for 0F0 on rank 0",
        ">(0F0;0B0)OVERLAP_F_B<",
    ),
    "forward and backward apart": (
        ["0F0", "0B0"],
        "rank 1 computes 0B0, but rank 0 computes 0F0",
        ">0F0<\nrank 1: >0B0<",
    ),
    "W apart from I": (["0F0 0I0", "0W0"], "rank 1 computes 0W0, but rank 0", ">0W0<"),
    "copies of one stage only": (
        ["0F0 1F0 1B0 0B0", "0F1 0B1", "1F1 1B1"],
        "ranks 0 and 1 share stage 0",
        ">0F0< 1F0",
    ),
    "ranks that wait for each other": (
        ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
        "rank 0 waits forever in 0B0 for 1B0 on rank 1, and rank 1 waits forever in 1F1 for 0F1 on"
        " rank 0",
        "0F0   >0B0< 0F1 0B1\nrank 1: >1F1< 1B1",
    ),
}


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
