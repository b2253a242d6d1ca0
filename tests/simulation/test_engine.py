"""The engine against closed forms of the LogGOPS model, and against what must not matter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType

import numpy as np
import pytest

from collectives import simulation
from collectives.programs import Kind, Program
from collectives.simulation import Link, Machine, simulate
from tests.inside import without_numba
from tests.simulation.rows import copy, program, programs, receive, send, wait

o, O_BYTE, L, G_MESSAGE, G = 3.0, 0.25, 5.0, 4.0, 0.5  # seconds: easy to add up
COPY, COMBINE = 0.125, 1.0
EAGER = Link(
    overhead_seconds=o,
    overhead_seconds_per_byte=O_BYTE,
    latency_seconds=L,
    gap_seconds=G_MESSAGE,
    seconds_per_byte=G,
)
RENDEZVOUS = EAGER._replace(is_rendezvous=True)
FAR = EAGER._replace(latency_seconds=100.0)


def machine(link: Link = EAGER) -> Machine:
    return Machine(
        {"same_host": (link,), "other_host": (FAR,)},
        copy_seconds_per_byte=COPY,
        combine_seconds_per_byte=COMBINE,
    )


def seconds(*tables: Program, link: Link = EAGER, **options: object) -> list[float]:
    return simulate(tables, machine(link), **options).rank_seconds.tolist()  # type: ignore[arg-type]


def test_a_message_costs_an_overhead_at_both_ends_the_latency_and_its_bytes() -> None:
    sender, receiver = program(send(1, 9), wait()), program(receive(0, 9), wait())
    assert seconds(sender, receiver) == [o + 8 * O_BYTE, o + L + o + 8 * G]


def test_overheads_per_byte_count_where_the_link_is_faster_than_the_receiver() -> None:
    slow = EAGER._replace(overhead_seconds_per_byte=2.0)
    sender, receiver = program(send(1, 9), wait()), program(receive(0, 9), wait())
    assert seconds(sender, receiver, link=slow) == [o + 16, o + L + o + 16]


def test_the_next_message_on_a_port_waits_for_the_gap() -> None:
    sender = program(send(1, 9, 0), send(1, 9, 1), wait(2))
    receiver = program(receive(0, 9, 0), receive(0, 9, 1), wait(2))
    first = o + L + o + 8 * G
    assert seconds(sender, receiver) == [G_MESSAGE + 8 * G + o + 8 * O_BYTE, first + 1 + o + 8 * G]


def test_a_rendezvous_send_ends_when_the_receiver_takes_the_message() -> None:
    sender = program(send(1, 9), wait())
    late = program(copy(800), receive(0, 9), wait())
    # The message came while the receiver copied, and is received after that.
    assert seconds(sender, late) == [o + 8 * O_BYTE, 100 + o + 8 * G]
    assert seconds(sender, late, link=RENDEZVOUS) == [100.0, 100 + o + 8 * G]


def test_an_empty_message_costs_no_bytes() -> None:
    assert seconds(program(send(1, 0), wait()), program(receive(0, 0), wait()))[1] == o + L + o


def exchange(num_bytes: int, latency: float = L) -> float:
    """A send and a receive at the same time; a rank receives when it has issued its send."""
    further = num_bytes - 1
    return o + max(latency, further * O_BYTE) + o + further * G


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_ring_takes_its_closed_form(size: int) -> None:
    block = 64
    times = simulate(programs("ring", size, block * size), machine())
    a_round = exchange(block)
    expected = 2 * (size - 1) * a_round + (size - 1) * block * COMBINE
    assert times.rank_seconds.tolist() == pytest.approx([expected] * size)


def test_recursive_doubling_takes_its_closed_form() -> None:
    times = simulate(programs("recursive_doubling", 16, 64), machine())
    assert times.seconds == pytest.approx(4 * (exchange(64) + 64 * COMBINE))


def test_the_cost_of_a_call_and_links_of_other_hosts_are_added() -> None:
    times = simulate(
        programs("recursive_doubling", 4, 64),
        machine()._replace(call_seconds=7.0),
        hosts=[0, 0, 1, 1],
    )
    assert times.seconds == pytest.approx(7 + exchange(64) + exchange(64, 100.0) + 2 * 64 * COMBINE)


def test_a_straggler_is_slow_itself_and_delays_those_that_wait_for_it() -> None:
    link = EAGER._replace(overhead_seconds_per_byte=0.0)
    tables = programs("recursive_doubling", 2, 64)
    fast, slow = simulate(tables, machine(link), stragglers={1: 3.0}).rank_seconds
    assert fast == 3 * o + L + o + 63 * G + 64 * COMBINE
    assert slow == max(3 * o, o + L) + 3 * o + 63 * G + 3 * 64 * COMBINE


@pytest.mark.parametrize("name", ["ring", "rabenseifner", "swing", "double_binary_tree"])
def test_names_of_ranks_do_not_matter(name: str) -> None:
    """Unless two things happen at the same time: then the one that is known for longer is first."""
    uneven = machine(EAGER._replace(overhead_seconds=3.0103, latency_seconds=4.7712))
    size, order = 8, [3, 1, 4, 0, 5, 7, 2, 6]
    plain = programs(name, size, 512)
    moved: list[Program] = [plain[0]] * size
    for rank, original in enumerate(plain):
        rows = original.rows.copy()
        posts = rows[:, 0] <= Kind.SEND
        rows[posts, 2] = np.array(order)[rows[posts, 2]]
        moved[order[rank]] = replace(original, rows=rows)
    times = simulate(moved, uneven).rank_seconds
    assert times[order].tolist() == simulate(plain, uneven).rank_seconds.tolist()


def test_programs_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="do not receive what they send"):
        seconds(program(send(1, 9), wait()), program(receive(0, 8), wait()))
    with pytest.raises(ValueError, match="do not receive what they send"):
        seconds(program(send(1, 9), wait()), program())


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    tables: Sequence[Program] = [
        program(receive(1 - rank, 1), wait(), send(1 - rank, 1), wait()) for rank in range(2)
    ]
    with pytest.raises(ValueError, match="wait for each other forever: rank 0"):
        seconds(*tables)


def test_the_interpreted_loop_gives_the_same_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = simulate(programs("swing", 6, 999), machine(RENDEZVOUS)).rank_seconds.tolist()
    without_numba(monkeypatch, "because of this test")
    monkeypatch.delitem(sys.modules, "collectives.simulation.event_loop")
    monkeypatch.delattr(simulation, "event_loop")
    again = simulate(programs("swing", 6, 999), machine(RENDEZVOUS)).rank_seconds.tolist()
    assert again == seconds
    assert isinstance(simulation.event_loop.run, FunctionType)  # type: ignore[attr-defined]
