"""Every algorithm is proved, and the verifier refuses every kind of wrong schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from collectives import ScheduleError, algorithms
from collectives.schedule import Copy, CopyReduce, Recv, RecvReduce, Round, Send
from collectives.schedule.contracts import SPECS, Case
from collectives.schedule.verify import verify_schedules
from tests.algorithms.catalogue import EVERY, cases, cuts_pairs, each_algorithm, roots

MANY_RANKS = [64, 100, 127, 128, 129, 257]


def many_ranks(entry: algorithms.Algorithm) -> list[int]:
    """Fewer where a rank sends to every other rank, or to half of them: 257 ranks prove no more."""
    if cuts_pairs(entry):
        return MANY_RANKS[:2]
    return MANY_RANKS if entry.startups(p=257) < 128 else [64, 100, 129]


@each_algorithm
@pytest.mark.slow
def test_every_algorithm_is_proved(collective: str, name: str) -> None:
    num_proved = 0
    for size, options in cases(collective, name, up_to=40, large=[24, 31, 32, 33, 40]):
        for root in roots(collective, size, all_up_to=9 if options else 16):
            algorithms.verify(collective, name, size, root, **options)
            num_proved += 1
    assert num_proved >= 6


@each_algorithm
@pytest.mark.slow
def test_algorithms_without_a_root_are_proved_for_many_ranks(collective: str, name: str) -> None:
    entry = algorithms.info(collective, name)
    for size in filter(entry.serves, [] if SPECS[collective].is_rooted else many_ranks(entry)):
        entry.verify(size)


@pytest.mark.parametrize("size", [33, 65, 66, 129])
def test_circulant_broadcasts_are_proved_where_a_known_variant_fails(size: int) -> None:
    for segments in (1, 2, 3, 7, 12):
        algorithms.verify("broadcast", "circulant", size, size // 3, segments=segments)
        algorithms.verify("reduce", "circulant", size, 0, segments=segments)
    algorithms.verify("all_gather", "all_broadcast", size, segments=3)


def test_a_wrong_entry_of_a_circulant_schedule_is_refused() -> None:
    entry = algorithms.info("broadcast", "circulant")
    schedules = [entry.schedule(rank, 33, segments=12) for rank in range(33)]
    number, (recv, send) = next((k, ops) for k, ops in enumerate(schedules[31]) if len(ops) == 2)
    schedules[31][number] = recv, send._replace(blocks=(send.blocks[0] + 1,))
    with pytest.raises(ScheduleError, match=r"expects blocks|does not hold"):
        verify_schedules("broadcast", Case(33, 0, 12), schedules)


def refused(collective: str, *schedules: list[Round], num_pieces: int = 1, **keywords: bool) -> str:
    case = Case(len(schedules), 0, num_pieces)
    with pytest.raises(ScheduleError) as error:
        verify_schedules(collective, case, schedules, **keywords)
    return str(error.value)


PAIR = [[(Send(1, [0]), RecvReduce(1, [0], "right"))], [(Send(0, [0]), RecvReduce(0, [0], "left"))]]


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


@pytest.mark.parametrize("entry", [e for e in EVERY if not algorithms.info(*e).is_bitwise])
def test_an_algorithm_that_claims_bits_it_has_not_is_refused(entry: tuple[str, str]) -> None:
    claims = replace(algorithms.info(*entry), is_bitwise=True)
    with pytest.raises(ScheduleError, match="last bits may differ"):
        claims.verify(8)


def test_swapped_operands_give_the_same_bits() -> None:
    swapped = [
        [(Send(1, [0]), RecvReduce(1, [0], "left"))],
        [(Send(0, [0]), RecvReduce(0, [0], "left"))],
    ]
    verify_schedules("all_reduce", Case(2), swapped, is_ordered=False, is_bitwise=True)


def test_a_scan_takes_earlier_ranks_only() -> None:
    prefix = [[(Send(1, [0]),)], [(RecvReduce(0, [0], "left"),)]]
    verify_schedules("scan", Case(2), prefix)
    assert "ends as" in refused("scan", *PAIR)
    assert "ends as" in refused("exscan", *prefix)


def test_what_a_rank_holds_is_combined_after_the_messages() -> None:
    schedules = [
        [(Send(1, [0]), Recv(1, [0], into=[("x", 0)]), CopyReduce([("x", 0)], [0], "right"))],
        [(Send(0, [0]), Recv(0, [0], into=[("x", 0)]), CopyReduce([("x", 0)], [0], "left"))],
    ]
    verify_schedules("all_reduce", Case(2), schedules)
    without = [[ops[:2] for ops in rounds] for rounds in schedules]
    assert "ends as" in refused("all_reduce", *without)


def test_a_block_received_under_another_name_is_not_held_under_the_senders() -> None:
    schedules = [[(Send(1, [0]),)], [(Recv(0, [0], into=[("x", 0)]),)]]
    assert "ends as ()" in refused("broadcast", *schedules)


def test_a_message_that_nobody_receives_is_refused() -> None:
    assert "are not received at rank 1" in refused("broadcast", [(Send(1, [0]),)], [()])


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
    once = [[(Send(1, [0]),)], [(Recv(0, [0]),)], [()]]
    twice = [[(Send(2, [0]),)], [(Send(2, [0]),)], [(Recv(0, [0]), Recv(1, [0]))]]
    schedules = [[*a, *b] for a, b in zip(once, twice, strict=True)]
    assert "twice in one round" in refused("broadcast", *schedules)


def test_receiving_a_block_twice_in_one_message_is_refused() -> None:
    schedules = [[(Send(1, [0, 0]),)], [(Recv(0, [0, 0]),)]]
    assert "twice in one round" in refused("broadcast", *schedules)


@pytest.mark.parametrize("kinds", [(Recv, RecvReduce), (RecvReduce, Recv)])
def test_receiving_and_combining_a_block_in_one_round_is_refused(kinds: tuple) -> None:
    rounds = [
        [(Send(1, [0]),), (Recv(0, [0]),), ()],
        [(Send(2, [0]),), (), (Recv(0, [0]),)],
        [(Send(2, [0]),), (Send(2, [0]),), (kinds[0](0, [0]), kinds[1](1, [0]))],
    ]
    schedules = [list(mine) for mine in zip(*rounds, strict=True)]
    assert "twice in one round" in refused("broadcast", *schedules)


def test_messages_for_one_rank_in_a_round_are_received_in_their_order() -> None:
    sends = [(Send(1, [0]), Send(1, [1]))]
    first, second = Recv(0, [0]), Recv(0, [1])
    verify_schedules("broadcast", Case(2, 0, 2), [sends, [(first, second)]])
    assert "expects blocks" in refused("broadcast", sends, [(second, first)], num_pieces=2)


def test_a_local_combination_may_not_change_what_it_reads() -> None:
    both = CopyReduce([("x", 0), 0], [0, ("x", 0)])
    name = [(Copy([0], [("x", 0)]),), (both,)]
    assert "changes what it reads" in refused("all_reduce", name, name)


@pytest.mark.parametrize("make", [Copy, CopyReduce])
def test_a_copy_may_not_write_a_block_twice(make: type) -> None:
    twice = [(Copy([0], [("x", 0)]),), (make([("x", 0), ("x", 0)], [0, 0]),)]
    assert "twice" in refused("all_reduce", twice, twice)


@pytest.mark.parametrize(
    ("operation", "sentence"),
    [
        (RecvReduce(0, [0])._replace(side=None), "cannot have the side None"),
        (RecvReduce(0, [0])._replace(side="Left"), "cannot have the side 'Left'"),
        (Recv(0, [0])._replace(side="left"), "cannot have the side 'left'"),
        (Recv(0, [0])._replace(kind="receive"), "no operation 'receive'"),
        (Recv(0, [0])._replace(peer=0.0), "names 0.0 as its peer"),
        (Recv(0, [0])._replace(peer=False), "names False as its peer"),
        (Copy([0], [0])._replace(peer=0), "copy has no peer"),
    ],
)
def test_operations_that_cannot_be_are_refused(operation: Any, sentence: str) -> None:
    assert sentence in refused("broadcast", [(Send(1, [0]),)], [(operation,)])


def test_a_round_that_is_no_tuple_is_refused() -> None:
    assert "needs a comma behind it" in refused("broadcast", [Send(1, [0])], [(Recv(0, [0]),)])


def test_a_scan_that_ends_with_what_another_rank_holds_is_refused() -> None:
    same = [[(Send(1, [0]),)], [(Recv(0, [0]),)]]
    assert "rank 1, round 0: block 0 ends as" in refused("scan", *same)


def test_what_ends_wrong_is_marked_where_it_was_last_written() -> None:
    schedules = [
        [(Send(1, [0]), Recv(1, [0])), (), ()],
        [(Send(0, [0]), RecvReduce(0, [0])), (), ()],
    ]
    message = refused("all_reduce", *schedules)
    assert message.startswith("rank 0, round 0: block 0 ends as ((1, 0),)")
    assert "[>1:0 <1:0]" in message


def test_different_numbers_of_rounds_are_refused() -> None:
    assert "has 0 rounds" in refused("broadcast", [(Send(1, [0]),)], [])


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_is_no_other_rank_is_refused(peer: int) -> None:
    assert "as its peer" in refused("broadcast", [(Send(peer, [0]),)], [()])


def test_a_copy_of_unequal_length_is_refused() -> None:
    assert "gives 1 blocks 2 names" in refused("broadcast", [(Copy([0], [1, 2]),)], [()])


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
    assert "is not the name of a block" in refused("broadcast", [(Copy([0], [name]),)], [()])


def test_a_copy_to_a_name_of_another_size_is_refused() -> None:
    schedules = [[(Copy([0], [("x", 1)]),)], [()]]
    assert "of another size" in refused("broadcast", *schedules, num_pieces=2)


def test_sends_see_the_state_before_the_round() -> None:
    # Rank 1 passes on in the same round what it only then receives: it does not have it yet.
    schedules = [[(Send(1, [0]),)], [(Recv(0, [0]), Send(2, [0]))], [(Recv(1, [0]),)]]
    assert "rank 1, round 0: does not hold" in refused("broadcast", *schedules)


def test_the_error_ends_with_the_grid_and_the_cell_is_marked() -> None:
    message = refused("broadcast", [(Send(1, [0]),)], [()])
    assert message.splitlines()[1:] == ["rank  round 0", "0     [>1:0]", "1     ."]
