"""Every algorithm is proved, and the verifier refuses every kind of wrong schedule."""

from __future__ import annotations

import pytest

from collectives import ScheduleError, algorithms
from collectives.schedule import Copy, Recv, RecvReduce, Round, Send
from collectives.spec import SPECS, Case
from collectives.verify import verify, verify_schedules

SIZES = [*range(1, 18), 24, 31, 32, 33]
EVERY = [(c, a) for c in algorithms.collectives() for a in algorithms.names(c)]


def roots(collective: str, size: int) -> list[int | None]:
    if not SPECS[collective].is_rooted:
        return [None]
    return list(range(size)) if size <= 9 else [0, 1, size // 2, size - 1]


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_algorithm_is_proved(collective: str, name: str) -> None:
    algorithm = algorithms.info(collective, name)
    segments = [{"segments": n} for n in (1, 2, 5)] if algorithm.options else [{}]
    sizes = [size for size in SIZES if algorithm.serves(size)]
    assert len(sizes) >= 5
    for size in sizes:
        for root in roots(collective, size):
            for options in segments:
                verify(collective, name, size, root, **options)


def refused(collective: str, *schedules: list[Round], num_pieces: int = 1, **keywords: bool) -> str:
    case = Case(len(schedules), 0, num_pieces)
    with pytest.raises(ScheduleError) as error:
        verify_schedules(collective, case, schedules, **keywords)
    return str(error.value)


PAIR = [
    [(Send(1, [0]), RecvReduce(1, [0], "right"))],
    [(Send(0, [0]), RecvReduce(0, [0], "left"))],
]


def test_the_right_schedule_of_two_ranks_passes() -> None:
    verify_schedules("all_reduce", Case(2), PAIR)


def test_a_contribution_counted_twice_is_refused() -> None:
    twice = [rounds * 2 for rounds in PAIR]
    assert "block 0 ends as" in refused("all_reduce", *twice, is_ordered=False)


def test_a_lost_contribution_is_refused() -> None:
    lossy = [[(Send(1, [0]), Recv(1, [0]))], [(Send(0, [0]), Recv(0, [0]))]]
    assert "block 0 ends as" in refused("all_reduce", *lossy, is_ordered=False)


def test_a_missing_block_is_refused() -> None:
    assert "ends as ()" in refused("broadcast", [()], [()])


def test_the_wrong_order_is_refused_only_where_order_is_promised() -> None:
    swapped = [
        [(Send(1, [0]), RecvReduce(1, [0], "left"))],
        [(Send(0, [0]), RecvReduce(0, [0], "right"))],
    ]
    assert "block 0 ends as" in refused("all_reduce", *swapped, is_ordered=True)
    verify_schedules("all_reduce", Case(2), swapped, is_ordered=False)


def test_an_algorithm_that_claims_an_order_it_has_not_is_refused() -> None:
    algorithm = algorithms.info("reduce", "binomial")
    schedules = [algorithm.schedule(rank, 4, 1) for rank in range(4)]
    with pytest.raises(ScheduleError, match="ends as"):
        verify_schedules("reduce", Case(4, 1), schedules, is_ordered=True)


def test_a_message_that_nobody_receives_is_refused() -> None:
    assert "nobody receives" in refused("broadcast", [(Send(1, [0]),)], [()])


def test_a_wait_for_a_message_that_is_not_sent_is_refused() -> None:
    assert "does not send" in refused("broadcast", [()], [(Recv(0, [0]),)])


def test_ends_that_name_different_blocks_are_refused() -> None:
    crossed = [[(Send(1, [0, 1]),)], [(Recv(0, [1, 0]),)]]
    assert "expects blocks" in refused("broadcast", *crossed, num_pieces=2)


def test_sending_a_block_that_is_not_held_is_refused() -> None:
    assert "does not hold" in refused("broadcast", [(Recv(1, [0]),)], [(Send(0, [0]),)])


def test_combining_with_a_block_that_is_not_held_is_refused() -> None:
    assert "does not hold" in refused("broadcast", [(Send(1, [0]),)], [(RecvReduce(0, [0]),)])


def test_receiving_a_block_twice_in_a_round_is_refused() -> None:
    schedules = [[(Send(1, [0]), Send(1, [0]))], [(Recv(0, [0]), Recv(0, [0]))]]
    assert "twice in one round" in refused("broadcast", *schedules)


def test_different_numbers_of_rounds_are_refused() -> None:
    assert "has 0 rounds" in refused("broadcast", [(Send(1, [0]),)], [])


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_is_no_other_rank_is_refused(peer: int) -> None:
    assert "as its peer" in refused("broadcast", [(Send(peer, [0]),)], [()])


def test_a_copy_of_unequal_length_is_refused() -> None:
    assert "copies 1 blocks to 2" in refused("broadcast", [(Copy([0], [1, 2]),)], [()])


def test_a_copy_gives_a_block_a_second_name() -> None:
    # The vector travels under another name and takes its own again: right, and seen to be.
    schedules = [
        [(Copy([0], [("x", 0)]),), (Send(1, [("x", 0)]),), ()],
        [(), (Recv(0, [("x", 0)]),), (Copy([("x", 0)], [0]),)],
    ]
    verify_schedules("broadcast", Case(2), schedules)
    assert "ends as ()" in refused("broadcast", *[rounds[:2] for rounds in schedules])


@pytest.mark.parametrize("name", ["x", ("x", 7), ("x", "y", 0)])
def test_a_name_that_stands_for_no_block_is_refused(name: object) -> None:
    assert "stands for no block" in refused("broadcast", [(Copy([0], [name]),)], [()])


def test_a_copy_to_a_name_of_another_size_is_refused() -> None:
    schedules = [[(Copy([0], [("x", 1)]),)], [()]]
    assert "a name of another size" in refused("broadcast", *schedules, num_pieces=2)


def test_sends_see_the_state_before_the_round() -> None:
    # Rank 1 passes on in the same round what it only then receives: it does not have it yet.
    schedules = [[(Send(1, [0]),)], [(Recv(0, [0]), Send(2, [0]))], [(Recv(1, [0]),)]]
    assert "rank 1, round 0: does not hold" in refused("broadcast", *schedules)


def test_the_error_ends_with_the_grid_and_the_cell_is_marked() -> None:
    message = refused("broadcast", [(Send(1, [0]),)], [()])
    assert message.splitlines()[1:] == ["rank  round 0", "0     [>1:0]", "1     ."]
