"""The three columns: what makes them equal, and that nothing which differs goes unseen."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

import collectives
from collectives import Communicator, MonitorUnavailable
from collectives.diagnostics.ledger import Row
from parallel import Mesh, PredictedCall, TrafficMismatch, TrafficMonitor, TrafficTable
from parallel.accounts import Tally
from parallel.accounts.monitor import OUTSIDE
from parallel.accounts.table import ALL, observed_phase
from parallel.commands.tables import print_traffic
from tests.fakes.device import on_device
from tests.fakes.driver import gpu

# Two ranks: a ring all-reduce of 10 bytes is 2(p-1) = 2 messages and 10 bytes from each.
CALLS = [PredictedCall("loss", "all_reduce", "ring", 10, num_calls=3)]
MATRIX = np.array([[0, 30], [30, 0]])
RECORDED = {("loss", "all_reduce"): Tally(3, 12, 60)}
SEEN = np.array([[[0, 6], [6, 0]], MATRIX])


def ledger(tallies: dict[tuple[str, str], Tally], size: int = 2) -> Any:
    """A gathered ledger with these sums: of two ranks, which send equally much or one all."""

    def rows() -> Iterator[Row]:
        for (phase, collective), tally in tallies.items():
            both = (0, 0) if collective in ("send", "broadcast") else np.array(tally[1:]) // 2
            for src, volume in ((0, np.array(tally[1:]) - both), (1, np.array(both))):
                messages, nbytes = map(int, volume)
                if messages or nbytes:
                    yield Row(phase, collective, "", "", 0, src, 1 - src, nbytes, messages)

    def summary(by: Any) -> dict[tuple[str, ...], Tally]:
        return {(*key, ""): tally for key, tally in tallies.items()}

    return SimpleNamespace(summary=summary, rows=rows, size=size)


def table(
    calls: list[PredictedCall] = CALLS,
    recorded: dict[tuple[str, str], Tally] = RECORDED,
    observed: dict[str, Any] | None = None,
    **options: Any,
) -> TrafficTable:
    return TrafficTable(calls, ledger(recorded), observed, size=2, **options)


def test_three_equal_columns_pass() -> None:
    said = table(observed={"loss": SEEN}).check()
    assert said == "predicted = recorded = observed by MPI, to the byte"


def test_without_observation_two_columns_are_compared() -> None:
    assert "two columns compared: MPI was not observed" in table().check()


def test_nothing_is_sent_by_one_rank_alone() -> None:
    """What sends nothing leaves no record, and is not counted."""
    alone = TrafficTable(CALLS, ledger({}, 1), None, size=1)
    assert alone.rows[0].predicted == Tally(0, 0, 0)
    alone.check()


@pytest.mark.parametrize(
    "recorded",
    [
        {},
        {("loss", "all_reduce"): Tally(3, 12, 61)},
        {("loss", "all_reduce"): Tally(3, 13, 60)},
        {("loss", "all_reduce"): Tally(2, 12, 60)},
        RECORDED | {("", "send"): Tally(1, 1, 0)},
        RECORDED | {("loss", "send"): Tally(1, 1, 8)},
    ],
)
def test_a_record_that_differs_is_a_mismatch(recorded: dict[tuple[str, str], Tally]) -> None:
    with pytest.raises(TrafficMismatch, match="predicted"):
        table(recorded=recorded).check()


@pytest.mark.parametrize("phase", ["loss", "other", OUTSIDE])
def test_a_message_that_only_mpi_saw_is_a_mismatch(phase: str) -> None:
    """One more empty message is enough, in a known phase, an unknown one or none."""
    more = {"loss": SEEN, phase: np.array([[[0, 1], [0, 0]], [[0, 0], [0, 0]]])}
    more[phase] = more[phase] + (SEEN if phase == "loss" else 0)
    with pytest.raises(TrafficMismatch, match=phase.strip("()")):
        table(observed=more).check()


def test_the_same_bytes_between_the_wrong_ranks_are_a_mismatch() -> None:
    swapped = SEEN.copy()
    swapped[1] = [[0, 60], [0, 0]]
    with pytest.raises(TrafficMismatch, match="predicted is not the one observed"):
        table(observed={"loss": swapped}).check()


def test_calls_of_one_phase_add_up() -> None:
    calls = [PredictedCall("loss", "all_reduce", "ring", 4), *CALLS]
    assert table(calls).rows[0].predicted == Tally(4, 16, 68)


# Predicted calls


def test_calls_of_several_groups_are_counted_in_each() -> None:
    """Two groups of three: a ring sends 2 (p-1) p messages and 2 (p-1) n bytes in each."""
    call = PredictedCall("p", "all_reduce", "ring", 12, num_calls=5, groups=((0, 1, 2), (3, 4, 5)))
    assert call.sent(6) == Tally(2 * 5, 2 * 5 * 12, 2 * 5 * 48)


def test_groups_of_one_send_nothing() -> None:
    assert (
        PredictedCall("p", "all_reduce", "ring", 12, num_calls=5, groups=((0,), (1,))).sent(6)
        == Tally()
    )


@pytest.mark.parametrize("collective", ["send", "send_recv"])
def test_messages_from_one_rank_to_another_have_no_number_of_calls(collective: str) -> None:
    """Their calls nobody counts, for the two ends number their own."""
    call = PredictedCall("p", collective, "point_to_point", 12, num_calls=5)
    assert call.sent(3) == Tally(None, 5, 60)
    both = PredictedCall("p", collective, "", 12, num_calls=5, groups=((0, 1), (3, 2)))
    assert both.sent(4) == Tally(None, 10, 120)
    assert both.matrices(4)[1, 3, 2] == 60


def test_envelopes_of_messages_between_gpus_are_not_compared() -> None:
    def table(comm: Communicator) -> str:
        x = on_device(np.ones(3))
        comm.all_reduce(x)
        with comm.record() as mine, collectives.phase("p"):
            comm.send_recv(x, 1 - comm.rank, 1 - comm.rank)
        comm.synchronize()
        ledger = mine.gather()
        if ledger is None:
            return ""
        assert "envelope" in {row.collective for row in ledger.rows()}
        groups = ((0, 1), (1, 0))
        call = PredictedCall("p", "send_recv", "point_to_point", 3, 8, groups=groups)
        return TrafficTable([call], ledger, None, size=2).check()

    gpu().reset()
    found, _ = collectives.run(table, 2)
    assert found.startswith("predicted = recorded, to the byte")


LARGE = 1 << 22  # bytes: in more messages than the schedule has


def test_predictions_are_what_is_recorded() -> None:
    """Groups, messages, uneven parts and calls of one phase that overlap, on threads as ranks."""
    calls = [
        PredictedCall("step/a", "all_reduce", "ring", 5, 8),
        PredictedCall("step/b", "all_gather", "ring", (2, 1, 1, 1), 8),
        PredictedCall(
            "groups",
            "all_reduce",
            "recursive_doubling",
            3,
            8,
            2,
            groups=((0, 2), (1, 3)),
            axis="pairs",
        ),
        PredictedCall("alone", "all_reduce", "ring", 3, 8, 2, groups=((0,), (1,), (2,), (3,))),
        PredictedCall("line", "send", "", 2, 8, groups=((0, 1), (1, 2), (2, 3))),
        PredictedCall("circle", "send_recv", "", 1, 8, groups=((0, 1), (1, 2), (2, 3), (3, 0))),
        PredictedCall("in segments", "all_reduce", "ring", LARGE),
    ]

    def fn(comm: Communicator) -> TrafficTable | None:
        pairs, alone = comm.split(comm.rank % 2, name="pairs"), comm.split(comm.rank)
        with comm.record() as ledger:
            exchange(comm, pairs, alone)
        whole = ledger.gather()
        return None if whole is None else TrafficTable(calls, whole, None, size=comm.size)

    made = collectives.run(fn, size=4)[0]
    assert made is not None and "predicted = recorded" in made.check()
    assert len(made.rows) == len(calls)
    assert set(made.matrices) == {call.phase.partition("/")[0] for call in calls} - {"alone"}
    assert np.array_equal(sum(made.matrices.values()), made.matrix)


def exchange(comm: Communicator, pairs: Communicator, alone: Communicator) -> None:
    """The calls of the test above, on four ranks."""
    phase, rank = collectives.phase, comm.rank
    with phase("step"):
        with phase("a"):
            work = comm.all_reduce(np.ones(5), algorithm="ring", async_op=True)
        with phase("b"):
            comm.all_gather(np.ones(2 if rank == 0 else 1), counts=(2, 1, 1, 1), algorithm="ring")
        work.wait()
    for group, label, algorithm in (
        (pairs, "groups", "recursive_doubling"),
        (alone, "alone", "ring"),
    ):
        with phase(label):
            for _ in range(2):
                group.all_reduce(np.ones(3), algorithm=algorithm)
    with phase("line"):
        if rank > 0:
            comm.recv(np.ones(2), rank - 1)
        if rank < 3:
            comm.send(np.ones(2), rank + 1)
    with phase("circle"):
        comm.send_recv(np.ones(1), (rank + 1) % 4, (rank - 1) % 4)
    with phase("in segments"):
        comm.all_reduce(np.ones(LARGE, np.uint8), algorithm="ring")


# Several rows of one observed phase

# Two kinds of collective in one phase, of which the first is nested and may still go on.
BACKWARD = [
    PredictedCall("backward/bucket0", "all_reduce", "ring", 10, num_calls=3),
    PredictedCall("backward", "broadcast", "binomial", 8, num_calls=2),
]
BACKWARD_RECORDED = {
    ("backward/bucket0", "all_reduce"): Tally(3, 12, 60),
    ("backward", "broadcast"): Tally(2, 2, 16),
}
BACKWARD_MATRIX = np.array([[0, 46], [30, 0]])
BACKWARD_SEEN = np.array([[[0, 8], [6, 0]], BACKWARD_MATRIX])


def backward(
    calls: list[PredictedCall] = BACKWARD,
    recorded: dict[tuple[str, str], Tally] = BACKWARD_RECORDED,
    observed: dict[str, Any] | None = None,
) -> TrafficTable:
    seen = {"backward": BACKWARD_SEEN} if observed is None else observed
    return TrafficTable(calls, ledger(recorded), seen, size=2)


def test_rows_of_one_phase_have_a_sum_that_was_observed() -> None:
    made = backward()
    assert [(row.phase, row.collective) for row in made.rows] == [
        ("backward/bucket0", "all_reduce"),
        ("backward", "broadcast"),
        ("backward", ALL),
    ]
    *parts, whole = made.rows
    assert [row.observed for row in parts] == [None, None]
    assert whole.predicted == whole.recorded == Tally(5, 14, 76)
    assert whole.observed == Tally(None, 14, 76)
    assert made.check() == "predicted = recorded = observed by MPI, to the byte"


def test_a_single_row_needs_no_sum() -> None:
    """Nested or not."""
    for phase in ("loss", "loss/deep/er"):
        calls = [PredictedCall(phase, "all_reduce", "ring", 10, num_calls=3)]
        made = table(calls, {(phase, "all_reduce"): Tally(3, 12, 60)}, {"loss": SEEN})
        assert [row.observed for row in made.rows] == [Tally(None, 12, 60)]
        made.check()


def test_rows_without_observation_have_no_sum() -> None:
    made = TrafficTable(BACKWARD, ledger(BACKWARD_RECORDED), None, size=2)
    assert len(made.rows) == 2 and "two columns compared" in made.check()


@pytest.mark.parametrize("key", BACKWARD_RECORDED)
@pytest.mark.parametrize("more", [Tally(1, 0, 0), Tally(0, 1, 0), Tally(0, 0, 1)])
def test_a_part_that_differs_is_a_mismatch(key: tuple[str, str], more: Tally) -> None:
    """Its own row says so, and where it is not only calls the sum does too."""
    made = backward(recorded=BACKWARD_RECORDED | {key: BACKWARD_RECORDED[key].plus(more)})
    assert made.rows[-1].recorded == made.rows[-1].predicted.plus(more)
    with pytest.raises(TrafficMismatch, match="/".join(key)):
        made.check()


def test_parts_that_differ_are_a_mismatch_though_they_add_up_to_what_was_observed() -> None:
    swapped = dict(zip(BACKWARD_RECORDED, reversed(BACKWARD_RECORDED.values()), strict=True))
    made = backward(recorded=swapped)
    assert made.rows[-1].is_equal
    with pytest.raises(TrafficMismatch, match="bucket0/all_reduce"):
        made.check()


@pytest.mark.parametrize("what", [0, 1])
def test_a_sum_that_differs_is_a_mismatch(what: int) -> None:
    """MPI saw a message or a byte more."""
    seen = BACKWARD_SEEN.copy()
    seen[what, 0, 1] += 1
    with pytest.raises(TrafficMismatch, match=r"backward/\(together\)"):
        backward(observed={"backward": seen}).check()


def test_a_label_belongs_to_the_longest_watched_phase_it_lies_in() -> None:
    labels = ["backward", "backward/bucket0", "backward/bucket0/x", "backwards", "back", OUTSIDE]
    observed = "backward", "backward/bucket0", "loss"
    assert [observed_phase(label, observed) for label in labels] == [
        "backward",
        "backward/bucket0",
        "backward/bucket0",
        OUTSIDE,
        OUTSIDE,
        OUTSIDE,
    ]


def test_what_no_watched_phase_holds_is_compared_with_what_left_outside() -> None:
    none = np.zeros_like(BACKWARD_SEEN)
    made = backward(observed={OUTSIDE: BACKWARD_SEEN, "loss": none})
    assert [(row.phase, row.collective) for row in made.rows][-1] == (OUTSIDE, ALL)
    made.check()
    with pytest.raises(TrafficMismatch, match="outside every phase"):
        backward(observed={OUTSIDE: none, "loss": BACKWARD_SEEN}).check()


def test_a_phase_with_messages_beside_calls_has_no_number_of_calls() -> None:
    """Of the messages nobody knows the calls, and so of the sum."""
    calls = [*CALLS, PredictedCall("loss", "send", "", 5, num_calls=2)]
    made = table(calls, RECORDED | {("loss", "send"): Tally(1, 2, 10)}, {"loss": SEEN + SENT})
    assert [row.predicted.calls for row in made.rows] == [3, None, None]
    assert [row.recorded.calls for row in made.rows] == [3, None, None]
    assert all(row.is_equal for row in made.rows)
    calls[-1] = PredictedCall("loss", "send", "", 5, num_calls=1)
    with pytest.raises(TrafficMismatch, match=r"loss/send: .*\nloss/\(together\)"):
        table(calls, RECORDED | {("loss", "send"): Tally(1, 2, 10)}, {"loss": SEEN + SENT}).check()


SENT = np.array([[[0, 2], [0, 0]], [[0, 10], [0, 0]]])


def test_calls_without_messages_beside_others_count_in_no_sum() -> None:
    """In groups of one rank nothing is sent: neither the row nor the sum counts on it."""
    calls = [
        *CALLS,
        PredictedCall("loss", "broadcast", "binomial", 8, num_calls=4, groups=((0,), (1,))),
    ]
    made = table(calls, observed={"loss": SEEN})
    assert [row.predicted for row in made.rows] == [Tally(3, 12, 60), Tally(), Tally(3, 12, 60)]
    made.check()


# What is shown


def printed(made: TrafficTable, width: int = 200) -> str:
    out = io.StringIO()
    print_traffic(made, Console(file=out, width=width))
    return out.getvalue()


def test_print_is_plain_where_there_is_no_terminal() -> None:
    text = printed(table(observed={"loss": SEEN}))
    assert text.isascii()
    assert cells(text, "all_reduce") == [
        "loss",
        "all_reduce",
        "3",
        "3",
        "12",
        "12",
        "12",
        "60",
        "60",
        "60",
    ]


def test_numbers_that_are_equal_are_printed_once_where_the_console_is_narrow() -> None:
    text = printed(table(observed={"loss": SEEN}), 70)
    assert cells(text, "all_reduce") == ["loss", "all_reduce", "3", "12", "60", "p = r = o"]
    assert cells(printed(table(), 70), "all_reduce")[-1] == "p = r"


def test_numbers_that_differ_are_printed_as_predicted_and_recorded_anywhere() -> None:
    calls = [*CALLS, PredictedCall("other", "all_reduce", "ring", 10)]
    text = printed(table(calls), 40)
    assert all(f"{what} {column}" in text for what in ("messages", "bytes") for column in "pro")


def cells(text: str, word: str) -> list[str]:
    """Of the first row that holds this word."""
    line = next(line for line in text.splitlines() if word in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_print_says_why_nothing_was_observed() -> None:
    text = printed(table(reason="MPICH has no monitoring"))
    assert "observed: n/a (MPICH has no monitoring)" in text
    assert cells(text, "all_reduce")[4:] == ["12", "12", "n/a", "60", "60", "n/a"]


def test_print_leaves_to_the_sum_what_was_seen_of_it() -> None:
    text = printed(backward())
    assert "n/a" not in text
    assert cells(text, "bucket0")[2:] == ["3", "3", "12", "12", "", "60", "60", ""]
    assert cells(text, ALL)[2:] == ["5", "5", "14", "14", "14", "76", "76", "76"]


def test_rows_that_differ_are_red() -> None:
    out = io.StringIO()
    calls = [*CALLS, PredictedCall("other", "all_reduce", "ring", 10)]
    print_traffic(
        table(calls), Console(file=out, width=200, force_terminal=True, color_system="standard")
    )
    red = [line for line in out.getvalue().splitlines() if "\x1b[1;31m" in line]
    assert len(red) == 1 and "other" in red[0]


def test_print_has_no_calls_where_nobody_counts_them() -> None:
    calls = [PredictedCall("loss", "send", "", 5, num_calls=2)]
    made = table(calls, {("loss", "send"): Tally(1, 2, 10)}, {"loss": SENT})
    assert cells(printed(made), "send") == ["loss", "send", "", "", *["2"] * 3, *["10"] * 3]


def test_a_mismatch_says_the_numbers() -> None:
    calls = [PredictedCall("loss", "send", "", 5, num_calls=3), *CALLS]
    with pytest.raises(TrafficMismatch) as raised:
        table(calls, {("loss", "send"): Tally(1, 2, 10)}).check()
    assert str(raised.value).splitlines()[1:3] == [
        "loss/send: predicted 3 messages, 15 bytes; recorded 2 messages, 10 bytes",
        "loss/all_reduce: predicted 3 calls, 12 messages, 60 bytes;"
        " recorded 0 calls, 0 messages, 0 bytes",
    ]


def test_as_dict_holds_plain_numbers() -> None:
    said = table(observed={"loss": SEEN}).as_dict()
    assert said["matrix"] == [[0, 30], [30, 0]] and said["not_observed"] is None
    assert said["rows"][0]["observed"] == {"calls": None, "messages": 12, "bytes": 60}
    *parts, whole = json.loads(json.dumps(backward().as_dict()))["rows"]
    assert [part["observed"] for part in parts] == [None, None]
    assert whole["collective"] == ALL and whole["observed"]["bytes"] == 76


def test_matrices_are_of_outermost_phases() -> None:
    """Bytes of inner phases are in them; a label that only begins alike is another phase."""
    sent = {("start/a", "send"): 3, ("start/b/c", "send"): 4, ("", "send"): 6}
    sent |= {("starting", "broadcast"): 7}
    made = TrafficTable([], ledger({key: Tally(1, 1, n) for key, n in sent.items()}), None, size=2)
    assert json.loads(json.dumps(made.as_dict()["matrices"])) == {
        "start": [[0, 7], [0, 0]],
        OUTSIDE: [[0, 6], [0, 0]],
        "starting": [[0, 7], [0, 0]],
    }


# Every axis has a matrix


def along_axes(*, is_rogue: bool = False) -> TrafficTable:
    """Sums along both axes of a mesh; a rogue byte goes along the wrong one."""
    groups = {"data": ((0, 2), (1, 3)), "tensor": ((0, 1), (2, 3))}
    calls = [
        PredictedCall("sum", "all_reduce", "ring", n, 8, axis=axis, groups=groups[axis])
        for n, axis in ((6, "data"), (8, "tensor"))
    ]

    def fn(comm: Communicator) -> Any:
        mesh = Mesh(comm, data=2, tensor=2)
        axes = {axis: mesh[axis] for axis in mesh.axes}
        with comm.record() as ledger, collectives.phase("sum"):
            for n, axis in ((6, "data"), (8, "tensor")):
                axes[axis].all_reduce(np.zeros(n), algorithm="ring")
            if is_rogue and comm.rank in (0, 2):
                axes["data"].send_recv(
                    np.zeros(1, np.uint8), 1 - comm.rank // 2, 1 - comm.rank // 2
                )
        return ledger.gather()

    whole = collectives.run(fn, size=4)[0]
    return TrafficTable(calls, whole, None, size=4)


def test_every_axis_has_a_matrix_of_messages_and_bytes() -> None:
    made = along_axes()
    made.check()
    messages, nbytes = made.axes["data"]
    assert messages.tolist() == [[0, 0, 2, 0], [0, 0, 0, 2], [2, 0, 0, 0], [0, 2, 0, 0]]
    assert nbytes.sum() == 4 * 48 and made.axes["tensor"][1].sum() == 4 * 64


def test_a_rogue_byte_along_an_axis_is_noticed() -> None:
    with pytest.raises(TrafficMismatch, match="axis data: the matrix predicted is not the one rec"):
        along_axes(is_rogue=True).check()


# The monitor


class Counted(NamedTuple):
    """Stands for MPI's counters: cumulative, and moved by hand."""

    messages: list[int]
    bytes: list[int]

    def read(self) -> tuple[list[int], list[int]]:
        return self.messages, self.bytes

    def close(self) -> None:
        """Nothing to give back."""

    def send(self, nbytes: int) -> None:
        self.messages[1] += 1
        self.bytes[1] += nbytes


def watching() -> tuple[TrafficMonitor, Counted]:
    """A monitor on rank 0 of 2, whose counters do not begin at zero."""
    counted = Counted([5, 5], [500, 500])
    comm: Any = SimpleNamespace(rank=0, size=2, counters=lambda: counted)
    nothing = np.frombuffer(b"{}", np.uint8)  # what the other rank has sent
    comm.all_gather = lambda x: np.array([x[0], nothing.size])
    comm.gather = lambda x, **_: np.concatenate([x, nothing])
    return TrafficMonitor(comm), counted


def test_a_monitor_adds_up_the_visits_of_a_phase() -> None:
    monitor, mpi = watching()
    with monitor:
        for nbytes in (10, 20):
            with monitor.phase("loss"):
                mpi.send(nbytes)
    observed = monitor.gather()
    assert observed is not None
    np.testing.assert_array_equal(observed["loss"], [[[0, 2], [0, 0]], [[0, 30], [0, 0]]])
    assert not observed[OUTSIDE].any()


def test_a_monitor_sees_what_leaves_between_phases() -> None:
    monitor, mpi = watching()
    mpi.send(7)
    with monitor:
        with monitor.phase("loss"):
            mpi.send(10)
        mpi.send(1)
    mpi.send(7)
    observed = monitor.gather()
    assert observed is not None and observed[OUTSIDE].sum(axis=(1, 2)).tolist() == [1, 1]


def test_a_monitor_without_counters_says_why() -> None:
    def counters() -> None:
        raise MonitorUnavailable("MPICH has no monitoring")

    comm: Any = SimpleNamespace(rank=0, size=2, counters=counters)
    monitor = TrafficMonitor(comm)
    with monitor, monitor.phase("loss"):
        pass
    assert monitor.gather() is None and monitor.reason == "MPICH has no monitoring"


def test_a_monitor_that_is_not_wanted_says_so() -> None:
    comm: Any = SimpleNamespace(rank=0, size=2)
    assert TrafficMonitor(comm, is_wanted=False).reason == "not monitored"
