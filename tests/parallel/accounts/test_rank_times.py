"""Waiting, transfer and computation of a pipeline, told apart; and traffic between hosts."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import Topology
from parallel import Recipe
from parallel.accounts import Event, between_hosts, rank_times, renumbered
from parallel.pipeline import make, simulate, with_messages
from parallel.pipeline.actions import Action, Forward, Send
from tests.parallel.layouts import Setup


def events_in(name: str, p: int, m: int) -> list[list[Event]]:
    """What ranks would log that compute for a unit of time, and send in none."""
    schedule = make(name, p, m)
    spans, found = simulate(schedule).spans, []
    ends = {str(span.action): float(span.end) for row in spans for span in row}
    for rank, row in enumerate(spans):
        events, free = [], 0.0
        for span in row:
            begin, end = float(span.begin), float(span.end)
            action = span.action
            if begin > free:
                kind, source = ("F", -1) if isinstance(action, Forward) else ("B", 1)
                stage = action.stage + source
                wait = Event(f"SEND_{kind}", stage, action.micro_batch, free, begin, is_wait=True)
                events.append(wait)
            events.append(event_of(action, free, end))
            free = end
        for action in with_messages(schedule)[rank]:
            if isinstance(action, Send):
                of = f"{action.stage}{action.direction}{action.micro_batch}"
                events.append(event_of(action, ends[of], ends[of]))
        found.append(events)
    return found


def event_of(action: Action, begin: float, end: float) -> Event:
    return Event(action.code, action.stage, action.micro_batch, begin, end)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_a_log_is_that_of_the_simulator(name: str) -> None:
    """Both fractions, for equal times: all of it is waiting."""
    simulation = simulate(make(name, 4, 8))
    times = rank_times(events_in(name, 4, 8), [(0, 1, 2, 3)])
    assert times[0].fractions == pytest.approx([float(x) for x in simulation.fractions])
    for rank, each in enumerate(times):
        assert each.computing == float(simulation.busy(rank)) and each.transfer == 0


def test_a_late_message_is_waiting_and_a_slow_one_transfer() -> None:
    def of(sent: float) -> tuple[float, float]:
        sender = [Event("F", 0, 0, 0.0, sent), Event("SEND_F", 0, 0, sent, sent)]
        wait = Event("SEND_F", 0, 0, 1.0, 5.0, is_wait=True)
        times = rank_times([sender, [wait, Event("F", 1, 0, 1.0, 6.0)]], [(0, 1)])[1]
        return times.waiting, times.transfer

    assert of(sent=5.0) == (4.0, 0.0) and of(sent=0.5) == (0.0, 4.0) and of(sent=2.0) == (1.0, 3.0)


def test_a_run_logs_all_of_its_actions_and_waits() -> None:
    axes = (("pipe", 2), ("data", 2), ("tensor", 1))
    ends = Setup(axes, recipe=Recipe(num_micro_batches=3)).run()
    events = [list(end.trainer.micro_batches.events) for end in ends]
    times = rank_times(events, ends[0].trainer.mesh.ranks("pipe"))
    for each, of_rank in zip(times, events, strict=True):
        assert sum(event.is_wait for event in of_rank) == 3  # a message for each micro-batch
        assert each.computing > 0 and each.waiting >= 0 and each.transfer >= 0
        assert each.computing + each.waiting + each.transfer <= each.span + 1e-9


# Hosts


def test_the_good_order_of_axes_sends_least_between_hosts() -> None:
    axes = {"pipe": 2, "data": 2, "tensor": 2}
    table = Setup(tuple(axes.items())).run()[0].table
    assert table is not None
    good, bad = (
        between_hosts(renumbered(table.matrix, axes, order), Topology.consecutive(8, 2))
        for order in (("pipe", "data", "tensor"), ("tensor", "data", "pipe"))
    )
    assert table.matrix.sum() - good >= table.axes["tensor"][1].sum()  # all of it is within
    assert bad > good


def test_all_ranks_on_one_host_send_nothing_between_hosts() -> None:
    matrix = np.ones((4, 4), np.int64)
    assert between_hosts(matrix, Topology("aaaa")) == 0
    assert between_hosts(matrix, Topology("abcd")) == 12
    assert between_hosts(matrix, Topology("abaa")) == 6
    np.testing.assert_array_equal(
        renumbered(np.arange(16).reshape(4, 4), {"a": 2, "b": 2}, ("b", "a"))[1], [8, 10, 9, 11]
    )
