"""The three columns: what makes them equal, and that nothing which differs goes unseen."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from collectives import MonitorUnavailable
from parallel.show import print_traffic
from parallel.traffic import (
    OUTSIDE,
    Observed,
    PredictedCall,
    Tally,
    TrafficMismatch,
    TrafficTable,
    Witness,
)

# Two ranks: a ring all-reduce of 10 bytes is 2(p-1) = 2 messages and 10 bytes from each.
CALLS = [PredictedCall("loss", "all_reduce", "ring", 10, count=3)]
MATRIX = np.array([[0, 30], [30, 0]])
RECORDED = {("loss", "all_reduce"): Tally(3, 12, 60)}
SEEN = np.array([[[0, 6], [6, 0]], MATRIX])


def ledger(tallies: dict[tuple[str, str], Tally], matrix: Any = MATRIX) -> Any:
    """A gathered ledger with this summary."""
    return SimpleNamespace(summary=lambda by: tallies, matrix=lambda: matrix)


def table(
    calls: list[PredictedCall] = CALLS,
    recorded: dict[tuple[str, str], Tally] = RECORDED,
    observed: dict[str, Any] | None = None,
    **options: Any,
) -> TrafficTable:
    seen = None if observed is None else Observed(observed)
    return TrafficTable(calls, ledger(recorded), seen, size=2, **options)


def test_three_equal_columns() -> None:
    said = table(observed={"loss": SEEN}).check()
    assert said == "predicted = recorded = observed by MPI, to the byte"


def test_two_columns_are_called_two() -> None:
    assert "two columns compared, for MPI was not observed" in table().check()


def test_nothing_is_sent_by_one_rank_alone() -> None:
    alone = TrafficTable(CALLS, ledger({}, np.zeros((1, 1))), None, size=1)
    assert alone.rows[0].predicted == Tally(3, 0, 0)
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


def test_a_phase_holds_one_kind_of_collective() -> None:
    with pytest.raises(ValueError, match="phase 'loss' holds two kinds of collective"):
        table([*CALLS, PredictedCall("loss", "broadcast", "binomial", 8)])


def printed(made: TrafficTable) -> str:
    """On a page too narrow for the table: no digit may be lost."""
    out = io.StringIO()
    print_traffic(made, Console(file=out, width=40))
    return out.getvalue()


def test_print_is_plain_where_there_is_no_terminal() -> None:
    text = printed(table(observed={"loss": SEEN}))
    assert text.isascii()
    line = next(line for line in text.splitlines() if "all_reduce" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["loss", "all_reduce", "3", "3", "12", "12", "12", "60", "60", "60"]


def test_print_says_why_nothing_was_observed() -> None:
    text = printed(table(reason="MPICH has no monitoring"))
    assert "observed: n/a (MPICH has no monitoring)" in text


def test_as_dict_holds_plain_numbers() -> None:
    said = table(observed={"loss": SEEN}).as_dict()
    assert said["matrix"] == [[0, 30], [30, 0]] and said["not_observed"] is None
    assert said["rows"][0]["observed"] == {"calls": None, "messages": 12, "bytes": 60}


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


def watched() -> tuple[Witness, Counted]:
    """A witness on rank 0 of 2, whose counters do not begin at zero."""
    counted = Counted([5, 5], [500, 500])
    comm: Any = SimpleNamespace(rank=0, size=2, counters=lambda: counted, reduce=lambda x, **_: x)
    return Witness(comm), counted


def test_a_witness_adds_up_the_visits_of_a_phase() -> None:
    witness, mpi = watched()
    with witness:
        for nbytes in (10, 20):
            with witness.phase("loss"):
                mpi.send(nbytes)
    observed = witness.gather()
    assert observed is not None
    assert observed.tally("loss") == Tally(None, 2, 30)
    assert observed.tally(OUTSIDE) == Tally(None, 0, 0)
    np.testing.assert_array_equal(observed.matrix(), [[0, 30], [0, 0]])


def test_a_witness_sees_what_leaves_between_phases() -> None:
    witness, mpi = watched()
    mpi.send(7)
    with witness:
        with witness.phase("loss"):
            mpi.send(10)
        mpi.send(1)
    mpi.send(7)
    observed = witness.gather()
    assert observed is not None and observed.tally(OUTSIDE) == Tally(None, 1, 1)


def test_a_witness_without_counters_says_why() -> None:
    def counters() -> None:
        raise MonitorUnavailable("MPICH has no monitoring")

    comm: Any = SimpleNamespace(rank=0, size=2, counters=counters)
    witness = Witness(comm)
    with witness, witness.phase("loss"):
        pass
    assert witness.gather() is None and witness.reason == "MPICH has no monitoring"


def test_a_witness_may_be_unwanted() -> None:
    comm: Any = SimpleNamespace(rank=0, size=2)
    assert Witness(comm, is_wanted=False).reason == "not monitored"
