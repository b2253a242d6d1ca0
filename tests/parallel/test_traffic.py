"""The three columns: what makes them equal, and that nothing which differs goes unseen."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

import collectives
from collectives import Communicator, MonitorUnavailable, algorithms
from parallel.console import print_traffic
from parallel.traffic import (
    ALL,
    OUTSIDE,
    ObservedTraffic,
    PredictedCall,
    Tally,
    TrafficMismatch,
    TrafficMonitor,
    TrafficTable,
    observed_phase,
    sends_blocks_equally,
)

# Two ranks: a ring all-reduce of 10 bytes is 2(p-1) = 2 messages and 10 bytes from each.
CALLS = [PredictedCall("loss", "all_reduce", "ring", 10, num_calls=3)]
MATRIX = np.array([[0, 30], [30, 0]])
RECORDED = {("loss", "all_reduce"): Tally(3, 12, 60)}
SEEN = np.array([[[0, 6], [6, 0]], MATRIX])


def ledger(tallies: dict[tuple[str, str], Tally], matrix: Any = MATRIX) -> Any:
    """A gathered ledger with this summary."""
    return SimpleNamespace(summary=lambda by: tallies, matrix=lambda: matrix, rows=list)


def table(
    calls: list[PredictedCall] = CALLS,
    recorded: dict[tuple[str, str], Tally] = RECORDED,
    observed: dict[str, Any] | None = None,
    **options: Any,
) -> TrafficTable:
    seen = None if observed is None else ObservedTraffic(observed)
    return TrafficTable(calls, ledger(recorded), seen, size=2, **options)


def test_three_equal_columns() -> None:
    said = table(observed={"loss": SEEN}).check()
    assert said == "predicted = recorded = observed by MPI, to the byte"


def test_two_columns_are_called_two() -> None:
    assert "two columns compared: MPI was not observed" in table().check()


def test_nothing_is_sent_by_one_rank_alone() -> None:
    """What sends nothing leaves no record, and is not counted."""
    alone = TrafficTable(CALLS, ledger({}, np.zeros((1, 1))), None, size=1)
    assert alone.rows[0].predicted == Tally(0, 0, 0)
    alone.check()


@pytest.mark.parametrize("recorded", [
    {}, {("loss", "all_reduce"): Tally(3, 12, 61)}, {("loss", "all_reduce"): Tally(3, 13, 60)},
    {("loss", "all_reduce"): Tally(2, 12, 60)}, RECORDED | {("", "send"): Tally(1, 1, 0)},
    RECORDED | {("loss", "send"): Tally(1, 1, 8)},
])  # fmt: skip
def test_a_record_that_differs(recorded: dict[tuple[str, str], Tally]) -> None:
    with pytest.raises(TrafficMismatch, match="predicted"):
        table(recorded=recorded).check()


@pytest.mark.parametrize("phase", ["loss", "other", OUTSIDE])
def test_what_only_mpi_saw(phase: str) -> None:
    """One more empty message is enough, in a known phase, an unknown one or none."""
    more = {"loss": SEEN, phase: np.array([[[0, 1], [0, 0]], [[0, 0], [0, 0]]])}
    more[phase] = more[phase] + (SEEN if phase == "loss" else 0)
    with pytest.raises(TrafficMismatch, match=phase.strip("()")):
        table(observed=more).check()


def test_the_same_bytes_between_the_wrong_ranks() -> None:
    swapped = SEEN.copy()
    swapped[1] = [[0, 60], [0, 0]]
    with pytest.raises(TrafficMismatch, match="matrix"):
        table(observed={"loss": swapped}).check()


def test_calls_of_one_phase_add_up() -> None:
    calls = [PredictedCall("loss", "all_reduce", "ring", 4), *CALLS]
    assert table(calls).rows[0].predicted == Tally(4, 16, 68)


# Predicted calls


def test_calls_of_several_groups() -> None:
    """Two groups of three: a ring sends 2 (p-1) p messages and 2 (p-1) n bytes in each."""
    call = PredictedCall("p", "all_reduce", "ring", 12, num_calls=5, num_ranks=3, num_groups=2)
    assert call.sent(6) == Tally(2 * 5, 2 * 5 * 12, 2 * 5 * 48)


def test_groups_of_one_send_nothing() -> None:
    assert (
        PredictedCall("p", "all_reduce", "ring", 12, 5, num_ranks=1, num_groups=6).sent(6)
        == Tally()
    )


@pytest.mark.parametrize("collective", ["send", "send_recv"])
def test_messages_from_one_to_another(collective: str) -> None:
    """Their calls nobody counts, for the two ends number their own."""
    call = PredictedCall("p", collective, "point_to_point", 12, num_calls=5)
    assert call.sent(3) == Tally(None, 5, 60)
    assert PredictedCall("p", collective, "", 12, num_calls=5, num_groups=2).sent(4) == Tally(
        None, 10, 120
    )


def test_a_formula_for_even_blocks_only_is_refused() -> None:
    """Ten bytes on three ranks, by an algorithm whose formula is exact for multiples of three."""
    with pytest.raises(ValueError, match=r"the formula of PredictedCall\(.*\) gives no integer"):
        PredictedCall("p", "reduce_scatter", "recursive_halving", 10).sent(3)


LARGE = 1 << 22  # bytes: in more messages than the schedule has


def test_predictions_are_what_is_recorded() -> None:
    """Groups, messages, uneven parts and calls of one phase that overlap, on threads as ranks."""
    calls = [
        PredictedCall("step/a", "all_reduce", "ring", 40),
        PredictedCall("step/b", "all_gather", "ring", 8 * 5),
        PredictedCall(
            "groups", "all_reduce", "recursive_doubling", 24, 2, num_ranks=2, num_groups=2
        ),
        PredictedCall("alone", "all_reduce", "ring", 24, 2, num_ranks=1, num_groups=4),
        PredictedCall("line", "send", "", 16, 3),
        PredictedCall("circle", "send_recv", "", 8, 4),
        PredictedCall("in segments", "all_reduce", "ring", LARGE),
    ]

    def fn(comm: Communicator) -> TrafficTable | None:
        pairs, alone = comm.split(comm.rank % 2, 0), comm.split(comm.rank, 0)
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
}  # fmt: skip
BACKWARD_MATRIX = np.array([[0, 46], [30, 0]])
BACKWARD_SEEN = np.array([[[0, 8], [6, 0]], BACKWARD_MATRIX])


def backward(
    calls: list[PredictedCall] = BACKWARD,
    recorded: dict[tuple[str, str], Tally] = BACKWARD_RECORDED,
    observed: dict[str, Any] | None = None,
) -> TrafficTable:
    seen = ObservedTraffic({"backward": BACKWARD_SEEN} if observed is None else observed)
    return TrafficTable(calls, ledger(recorded, BACKWARD_MATRIX), seen, size=2)


def test_rows_of_one_phase_have_a_sum_that_was_observed() -> None:
    made = backward()
    assert [(row.phase, row.collective) for row in made.rows] == [
        ("backward/bucket0", "all_reduce"), ("backward", "broadcast"), ("backward", ALL),
    ]  # fmt: skip
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
    made = TrafficTable(BACKWARD, ledger(BACKWARD_RECORDED, BACKWARD_MATRIX), None, size=2)
    assert len(made.rows) == 2 and "two columns compared" in made.check()


@pytest.mark.parametrize("key", BACKWARD_RECORDED)
@pytest.mark.parametrize("more", [Tally(1, 0, 0), Tally(0, 1, 0), Tally(0, 0, 1)])
def test_a_part_that_differs(key: tuple[str, str], more: Tally) -> None:
    """Its own row says so, and where it is not only calls the sum does too."""
    made = backward(recorded=BACKWARD_RECORDED | {key: BACKWARD_RECORDED[key].plus(more)})
    assert made.rows[-1].recorded == made.rows[-1].predicted.plus(more)
    with pytest.raises(TrafficMismatch, match="/".join(key)):
        made.check()


def test_parts_that_differ_and_add_up_to_what_was_observed() -> None:
    swapped = dict(zip(BACKWARD_RECORDED, reversed(BACKWARD_RECORDED.values()), strict=True))
    made = backward(recorded=swapped)
    assert made.rows[-1].is_equal
    with pytest.raises(TrafficMismatch, match="bucket0/all_reduce"):
        made.check()


@pytest.mark.parametrize("what", [0, 1])
def test_a_sum_that_differs(what: int) -> None:
    """MPI saw a message or a byte more."""
    seen = BACKWARD_SEEN.copy()
    seen[what, 0, 1] += 1
    with pytest.raises(TrafficMismatch, match=r"backward/\(together\)"):
        backward(observed={"backward": seen}).check()


def test_a_label_belongs_to_the_longest_watched_phase_it_lies_in() -> None:
    labels = ["backward", "backward/bucket0", "backward/bucket0/x", "backwards", "back", OUTSIDE]
    observed = ObservedTraffic(dict.fromkeys(("backward", "backward/bucket0", "loss"), SEEN))
    assert [observed_phase(label, observed) for label in labels] == [
        "backward", "backward/bucket0", "backward/bucket0", OUTSIDE, OUTSIDE, OUTSIDE,
    ]  # fmt: skip


def test_what_no_watched_phase_holds_is_compared_with_what_left_outside() -> None:
    none = np.zeros_like(BACKWARD_SEEN)
    made = backward(observed={OUTSIDE: BACKWARD_SEEN, "loss": none})
    assert [(row.phase, row.collective) for row in made.rows][-1] == (OUTSIDE, ALL)
    made.check()
    with pytest.raises(TrafficMismatch, match="outside every phase"):
        backward(observed={OUTSIDE: none, "loss": BACKWARD_SEEN}).check()


def test_messages_beside_calls_in_one_phase() -> None:
    """Of the messages nobody knows the calls, and so of the sum."""
    calls = [*CALLS, PredictedCall("loss", "send", "", 5, 2)]
    made = table(calls, RECORDED | {("loss", "send"): Tally(1, 2, 10)}, {"loss": SEEN + SENT})
    assert [row.predicted.calls for row in made.rows] == [3, None, None]
    assert [row.recorded.calls for row in made.rows] == [3, None, None]
    assert all(row.is_equal for row in made.rows)
    calls[-1] = PredictedCall("loss", "send", "", 5, 1)
    with pytest.raises(TrafficMismatch, match=r"loss/send: .*\nloss/\(together\)"):
        table(calls, RECORDED | {("loss", "send"): Tally(1, 2, 10)}, {"loss": SEEN + SENT}).check()


SENT = np.array([[[0, 2], [0, 0]], [[0, 10], [0, 0]]])


def test_calls_without_messages_beside_others_in_one_phase() -> None:
    """In groups of one rank nothing is sent: neither the row nor the sum counts on it."""
    calls = [
        *CALLS,
        PredictedCall("loss", "broadcast", "binomial", 8, 4, num_ranks=1, num_groups=2),
    ]
    made = table(calls, observed={"loss": SEEN})
    assert [row.predicted for row in made.rows] == [Tally(3, 12, 60), Tally(), Tally(3, 12, 60)]
    made.check()


# What is shown


def printed(made: TrafficTable) -> str:
    """On a page too narrow for the table: no digit may be lost."""
    out = io.StringIO()
    print_traffic(made, Console(file=out, width=40))
    return out.getvalue()


def test_print_is_plain_where_there_is_no_terminal() -> None:
    text = printed(table(observed={"loss": SEEN}))
    assert text.isascii()
    assert cells(text, "all_reduce") == [
        "loss", "all_reduce", "3", "3", "12", "12", "12", "60", "60", "60",
    ]  # fmt: skip


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
    print_traffic(table(calls), Console(file=out, force_terminal=True, color_system="standard"))
    red = [line for line in out.getvalue().splitlines() if "\x1b[1;31m" in line]
    assert len(red) == 1 and "other" in red[0]


def test_print_has_no_calls_where_nobody_counts_them() -> None:
    calls = [PredictedCall("loss", "send", "", 5, 2)]
    made = table(calls, {("loss", "send"): Tally(1, 2, 10)}, {"loss": SENT})
    assert cells(printed(made), "send") == ["loss", "send", "", "", *["2"] * 3, *["10"] * 3]


def test_a_mismatch_says_the_numbers() -> None:
    calls = [PredictedCall("loss", "send", "", 5, 3), *CALLS]
    with pytest.raises(TrafficMismatch) as raised:
        table(calls, {("loss", "send"): Tally(1, 2, 10)}).check()
    assert str(raised.value).splitlines()[1:] == [
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
    sent = [("start/a", 0, 1, 3), ("start/b/c", 0, 1, 4), ("start", 1, 0, 5), ("", 1, 0, 6)]
    sent += [("starting", 0, 1, 7)]
    rows = [SimpleNamespace(phase=p, src=s, dst=d, bytes=n) for p, s, d, n in sent]
    known: Any = SimpleNamespace(**vars(ledger({})) | {"rows": lambda: rows, "size": 2})
    said = TrafficTable([], known, None, size=2).as_dict()["matrices"]
    assert json.loads(json.dumps(said)) == {
        "start": [[0, 7], [5, 0]], OUTSIDE: [[0, 0], [6, 0]], "starting": [[0, 7], [0, 0]],
    }  # fmt: skip


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
    comm: Any = SimpleNamespace(rank=0, size=2, counters=lambda: counted, reduce=lambda x, **_: x)
    return TrafficMonitor(comm), counted


def test_a_monitor_adds_up_the_visits_of_a_phase() -> None:
    monitor, mpi = watching()
    with monitor:
        for nbytes in (10, 20):
            with monitor.phase("loss"):
                mpi.send(nbytes)
    observed = monitor.gather()
    assert observed is not None
    assert observed.tally("loss") == Tally(None, 2, 30)
    assert observed.tally(OUTSIDE) == Tally(None, 0, 0)
    np.testing.assert_array_equal(observed.matrix(), [[0, 30], [0, 0]])


def test_a_monitor_sees_what_leaves_between_phases() -> None:
    monitor, mpi = watching()
    mpi.send(7)
    with monitor:
        with monitor.phase("loss"):
            mpi.send(10)
        mpi.send(1)
    mpi.send(7)
    observed = monitor.gather()
    assert observed is not None and observed.tally(OUTSIDE) == Tally(None, 1, 1)


def test_a_monitor_without_counters_says_why() -> None:
    def counters() -> None:
        raise MonitorUnavailable("MPICH has no monitoring")

    comm: Any = SimpleNamespace(rank=0, size=2, counters=counters)
    monitor = TrafficMonitor(comm)
    with monitor, monitor.phase("loss"):
        pass
    assert monitor.gather() is None and monitor.reason == "MPICH has no monitoring"


def test_a_monitor_may_be_unwanted() -> None:
    comm: Any = SimpleNamespace(rank=0, size=2)
    assert TrafficMonitor(comm, is_wanted=False).reason == "not monitored"


DIVIDED = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")


def recorded_bytes(collective: str, algorithm: str, size: int, num_bytes: int) -> int:
    """What so many ranks send of so many bytes, which they divide as evenly as possible."""
    counts = collectives.even_counts(num_bytes, size)

    def fn(comm: Communicator) -> int:
        x = np.zeros(num_bytes, np.uint8)
        calls = {
            "all_gather": lambda: comm.all_gather(
                x[: counts[comm.rank]], counts=counts, algorithm=algorithm
            ),
            "reduce_scatter": lambda: comm.reduce_scatter(x, counts=counts, algorithm=algorithm),
            "all_reduce": lambda: comm.all_reduce(x, algorithm=algorithm),
            "broadcast": lambda: comm.broadcast(x, out=x, algorithm=algorithm),
            "reduce": lambda: comm.reduce(x, algorithm=algorithm),
        }
        with comm.record() as ledger:
            calls[collective]()
        return sum(row.bytes for row in ledger.rows())

    return sum(collectives.run(fn, size=size))


def formula_holds(collective: str, algorithm: str, size: int, num_bytes: int) -> bool:
    call = PredictedCall("", collective, algorithm, num_bytes)
    try:
        predicted = call.sent(size).bytes
    except ValueError:  # not a whole number
        return False
    return predicted == recorded_bytes(collective, algorithm, size, num_bytes)


@pytest.mark.parametrize("size", [3, 4, 5, 6])
@pytest.mark.parametrize("collective", DIVIDED)
def test_who_sends_blocks_equally_has_a_formula_for_uneven_parts_and_nobody_else(
    collective: str, size: int
) -> None:
    """Of all algorithms; those that do not have one for even parts."""
    for name in algorithms.names(collective):
        if not algorithms.info(collective, name).serves(size):
            continue
        uneven = [formula_holds(collective, name, size, n) for n in range(size + 1, 2 * size)]
        assert all(uneven) is sends_blocks_equally(collective, name, size), name
        assert formula_holds(collective, name, size, 2 * size), name
