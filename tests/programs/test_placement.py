"""Where blocks lie: nothing is copied or rotated that can be sent as it lies."""

from __future__ import annotations

import pytest

from collectives.algorithms import info
from collectives.programs.lifetimes import outline
from collectives.programs.placement import _Compiler, compile_lane
from collectives.programs.steps import Combine, Lane, Message, Move, Step
from collectives.schedule import Copy, Recv, Schedule, Send
from collectives.schedule.layout import Region, consecutive


def moves(program: Lane) -> list[Move]:
    """Every copy within the rank."""
    every = [*program.staying, *program.closing]
    for step in program.steps:
        every += [*step.packing, *(a for a in step.finishing if isinstance(a, Move))]
    return every


def sizes_sent(program: Lane) -> list[int]:
    """The elements of every message that the rank sends."""
    return [message.region.num_elements for step in program.steps for message in step.sends]


@pytest.mark.parametrize("rank", range(5))
def test_ring_all_reduce_copies_nothing_and_needs_no_scratch(rank: int) -> None:
    program = compile_lane(info("all_reduce", "ring"), rank, 5, 0, 1003)
    assert moves(program) == []
    assert program.num_scratch == 0


def test_the_first_combination_reads_the_input_and_writes_the_output() -> None:
    program = compile_lane(info("all_reduce", "recursive_doubling"), 0, 2, 0, 10)
    x, y = Region("input", 0, 10), Region("output", 0, 10)
    exchange = Step((), (Message(1, x),), (Message(1, y),), (Combine(x, y, y),))
    assert program == Lane((exchange,))


def test_ring_in_place_needs_scratch_for_two_blocks_at_most() -> None:
    program = compile_lane(info("all_reduce", "ring"), 1, 8, 0, 800, (), 0)
    assert program.num_scratch <= 100
    assert moves(program) == []


def test_ring_reduce_scatter_keeps_two_blocks_of_scratch_at_most() -> None:
    program = compile_lane(info("reduce_scatter", "ring"), 1, 8, 0, (100,) * 8)
    assert program.num_scratch <= 200


@pytest.mark.parametrize("collective", ["all_gather", "gather"])
def test_gathering_in_place_leaves_the_own_block_where_it_is(collective: str) -> None:
    name = "ring" if collective == "all_gather" else "linear"
    program = compile_lane(info(collective, name), 0, 4, 0, (3, 3, 3, 3), (), 0)
    assert moves(program) == []


def test_adjacent_blocks_travel_as_they_lie() -> None:
    program = compile_lane(info("scatter", "binomial"), 0, 8, 0, (5,) * 8)
    assert all(not step.packing for step in program.steps)
    assert program.steps[0].sends == (Message(4, Region("input", 20, 40)),)


def test_blocks_that_wrap_round_the_end_are_packed_into_one_message() -> None:
    program = compile_lane(info("scatter", "binomial"), 2, 4, 2, (5, 5, 5, 5))
    (send,) = program.steps[0].sends
    assert send.region.num_elements == 10
    assert program.steps[0].packing == ()  # ranks 0 and 1 lie together
    program = compile_lane(info("scatter", "binomial"), 1, 4, 1, (5, 5, 5, 5))
    assert program.steps[0].packing == (
        Move(Region("input", 15, 20), Region("scratch", 0, 5)),
        Move(Region("input", 0, 5), Region("scratch", 5, 10)),
    )


def test_an_output_that_would_overwrite_unread_input_makes_a_copy_first() -> None:
    assert compile_lane(info("all_reduce", "ring"), 0, 2, 0, 10, (), 1).copies_input
    swapped = compile_lane(info("all_to_all", "pairwise"), 0, 2, 0, ((5, 5), (5, 5)), (), 0)
    assert swapped.copies_input


def test_an_output_at_an_odd_address_makes_a_copy_first() -> None:
    assert compile_lane(info("all_reduce", "ring"), 0, 2, 0, 10, (), "odd").copies_input


def test_memory_that_is_merely_near_makes_no_copy() -> None:
    assert not compile_lane(info("all_reduce", "ring"), 0, 2, 0, 10, (), 10).copies_input


def test_one_rank_copies_its_input_or_does_nothing_in_place() -> None:
    alone = compile_lane(info("all_reduce", "ring"), 0, 1, 0, 10)
    assert alone.staying == (Move(Region("input", 0, 10), Region("output", 0, 10)),)
    assert compile_lane(info("all_reduce", "ring"), 0, 1, 0, 10, (), 0) == Lane(())


def test_every_message_of_the_schedule_is_sent_even_if_empty() -> None:
    program = compile_lane(info("all_reduce", "ring"), 0, 4, 0, 2)
    sent = sizes_sent(program)
    assert sent.count(0) > 0
    assert len(sent) == 6


def compiled(schedule: Schedule, before: list[int], after: list[int]) -> Lane:
    """A schedule of our own, on blocks of 1, 2, 3 elements."""
    sizes = {0: 1, 1: 2, 2: 3}
    initial, final = consecutive("input", before, sizes), consecutive("output", after, sizes)
    return _Compiler(sizes, initial, final, "none").lane(outline(schedule))


def result(program: Lane, memory: list[str], num_output: int) -> list[str]:
    """What the output holds after the moves of a program that sends nothing."""
    buffers = {"input": memory, "output": ["?"] * num_output}
    buffers["scratch"] = ["?"] * program.num_scratch
    for src, dst in moves_in_order(program):
        values = buffers[src.buffer][src.start : src.stop]
        buffers[dst.buffer][dst.start : dst.stop] = values
    return buffers["output"]


def moves_in_order(program: Lane) -> list[Move]:
    finishing = [action for step in program.steps for action in step.finishing]
    return [*program.staying, *finishing, *program.closing]


def test_copies_made_at_once_read_before_they_write() -> None:
    swap = Copy([("a", 1), ("b", 1)], [("b", 1), ("a", 1)])
    name = Copy([1, 1], [("a", 1), ("b", 1)])
    back = Copy([("b", 1)], [1])
    program = compiled([(name,), (swap,), (back,)], [0, 1], [1])
    assert result(program, ["x", "y", "z"], 2) == ["y", "z"]


def test_a_copied_result_outlives_later_scratch() -> None:
    rounds = [(Copy([0], [("n", 0)]),), (Copy([2], [("m", 2)]),), (Copy([("n", 0)], [0]),), ()]
    program = compiled([*rounds, (Copy([("m", 2)], [2]),)], [0, 2], [0, 2])
    assert result(program, ["x", "p", "q", "r"], 4) == ["x", "p", "q", "r"]


def test_a_name_made_by_another_rank_has_the_size_of_its_block() -> None:
    program = compiled([(Recv(1, [("n", 2)]),), (Send(1, [("n", 2)]),)], [], [])
    assert sizes_sent(program) == [3]
