"""What is recorded is what was sent."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, select
from tests.scenarios import ALGORITHMS, Job, perform

P = 4


def recorded(body: Any, size: int = P) -> Any:
    """The whole ledger of `body(comm)`, as rank 0 gathers it."""

    def rank(comm: Communicator) -> Any:
        with comm.record() as ledger:
            body(comm)
        return ledger.gather()

    return collectives.run(rank, size)[0]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_bytes_and_messages_are_those_of_the_formula(
    collective: str, algorithm: str, size: int
) -> None:
    rows: Any = 24 * size  # every number of pieces divides it
    n = 4 * rows * (size if collective in ("gather", "all_gather") else 1)
    if collective in ("gather", "all_gather"):
        rows = (rows,) * size
    with_out = {"broadcast", "scatter"}  # without a header

    def body(comm: Communicator) -> None:
        if collective in with_out:
            x = np.zeros(rows, np.float32)
            out = x if collective == "broadcast" else np.empty(rows // size, np.float32)
            getattr(comm, collective)(x, out=out, algorithm=algorithm)
        else:
            perform(comm, Job(collective, algorithm, size, rows))

    ledger = recorded(body, size)
    info = collectives.algorithms.info(collective, algorithm)
    options = select.options(info, size, n)
    messages, total = info.messages(p=size, n=n, **options), info.total(p=size, n=n, **options)
    assert ledger.summary(by=("collective", "algorithm")) == {
        (collective, algorithm): (1, messages, total)
    }
    assert ledger.matrix().sum() == total


@pytest.mark.parametrize(
    ("given", "wanted", "messages"),
    [
        ("chain", "chain", P - 1),
        ("chain()", "chain", P - 1),
        (" chain( segments=3,chains = 1 ) ", "chain(chains=1, segments=3)", 3 * (P - 1)),
        ("chain(segments=3)", "chain(segments=3)", 3 * (P - 1)),
    ],
)
def test_options_are_shown_where_they_were_given(given: str, wanted: str, messages: int) -> None:
    ledger = recorded(lambda comm: comm.reduce(np.zeros(9), algorithm=given))
    assert ledger.summary(by=("algorithm",)) == {(wanted,): (1, messages, (P - 1) * 72)}


def test_uneven_blocks_are_counted_exactly() -> None:
    ledger = recorded(lambda comm: comm.all_reduce(np.zeros(1003, np.uint8), algorithm="ring"))
    assert ledger.summary(by=())[()].bytes == 2 * (P - 1) * 1003
    sizes = [251, 251, 251, 250]
    for rank in range(P):  # to the right all blocks but the own one, to the left all but another
        assert ledger.matrix()[rank, (rank + 1) % P] == 1003 - sizes[rank]
        assert ledger.matrix()[rank, rank - 1] == 1003 - sizes[rank - 1]


def test_phases_nest_and_belong_to_their_thread() -> None:
    def body(comm: Communicator) -> None:
        with collectives.phase("backward"), collectives.phase(f"layer{comm.rank % 2}"):
            comm.all_reduce(np.zeros(4), algorithm="ring")
        comm.barrier()

    by_phase = recorded(body).summary(by=("phase",))
    assert {phase for (phase,) in by_phase} == {"backward/layer0", "backward/layer1", ""}


def test_nothing_is_recorded_outside_the_block() -> None:
    def body(comm: Communicator) -> Any:
        comm.all_reduce(np.zeros(4))
        with comm.record() as ledger:
            pass
        comm.all_reduce(np.zeros(4))
        return ledger.rows()

    assert collectives.run(body, P) == [[]] * P


def test_ledgers_nest() -> None:
    def body(comm: Communicator) -> Any:
        with comm.record() as outer:
            comm.barrier()
            with comm.record() as inner:
                comm.barrier()
        return len(outer.rows()), len(inner.rows())

    assert collectives.run(body, P) == [(4, 2)] * P


def test_subgroups_are_recorded_in_the_ranks_of_the_recorder() -> None:
    def body(comm: Communicator) -> None:
        group = comm.split(comm.rank % 2)
        assert group is not None
        group.all_reduce(np.zeros(10, np.uint8), algorithm="recursive_doubling")

    ledger = recorded(body)
    edges = {(row.src, row.dst) for row in ledger.rows() if row.collective == "all_reduce"}
    assert edges == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert ledger.summary(by=("collective",))[("all_reduce",)] == (2, 4, 40)
    assert ("split",) in ledger.summary(by=("collective",))


def test_a_subgroups_own_ledger_sees_only_itself() -> None:
    def body(comm: Communicator) -> Any:
        group = comm.split(comm.rank % 2)
        assert group is not None
        with group.record() as ledger:
            comm.barrier()
            group.all_reduce(np.zeros(10, np.uint8))
        return {(row.src, row.dst) for row in ledger.rows()}

    assert collectives.run(body, P) == [{(0, 1)}, {(0, 1)}, {(1, 0)}, {(1, 0)}]


def test_each_run_of_a_plan_is_a_call() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(8)
        plan = comm.plan.all_reduce(x, out=x)
        for _ in range(3):
            plan.run()
        plan.free()

    assert recorded(body).summary(by=("collective",))[("all_reduce",)].calls == 3


def test_every_message_of_a_user_is_a_call() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(5):
            comm.send_recv(np.zeros(1), (comm.rank + 1) % P, (comm.rank - 1) % P)

    assert recorded(body).summary(by=("collective",))[("send_recv",)].calls == 5


def test_calls_of_groups_with_the_same_members_are_told_apart() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(2):
            comm.subgroup(range(P)).all_reduce(np.zeros(1))

    assert recorded(body).summary(by=("collective",))[("all_reduce",)].calls == 2


def test_what_gather_sends_for_itself_is_labelled() -> None:
    def body(comm: Communicator) -> Any:
        with comm.record() as outer:
            with comm.record() as inner:
                comm.barrier()
            inner.gather()
        return outer.gather()

    kinds = collectives.run(body, P)[0].summary(by=("collective",))
    assert {kind for (kind,) in kinds} == {"barrier", "ledger"}


def test_point_to_point_is_recorded() -> None:
    def body(comm: Communicator) -> None:
        right, left = (comm.rank + 1) % P, (comm.rank - 1) % P
        comm.send_recv(np.zeros(3), right, left)

    matrix = recorded(body).matrix()
    assert np.array_equal(matrix, 24 * np.roll(np.eye(P, dtype=int), 1, axis=1))


def test_exports_hold_every_row(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        with comm.record() as ledger, collectives.phase("step"):
            comm.all_reduce(np.zeros(8), algorithm="ring")
        if comm.rank == 0:
            ledger.to_csv(tmp_path / "rows.csv")
            ledger.to_json(tmp_path / "rows.json")
            ledger.to_chrome_trace(tmp_path / "trace.json")

    collectives.run(body, P)
    with open(tmp_path / "rows.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (P - 1) == len(json.loads((tmp_path / "rows.json").read_text()))
    assert rows[0]["phase"] == "step" and rows[0]["bytes"] == "16"
    (event,) = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert event["dur"] > 0 and event["args"]["bytes"] == 6 * 16


def test_recording_changes_no_result() -> None:
    def body(comm: Communicator) -> Any:
        x = np.random.default_rng(comm.rank).random(100)
        plain = comm.all_reduce(x)
        with comm.record():
            return np.array_equal(plain, comm.all_reduce(x))

    assert all(collectives.run(body, P))
