"""Totals are what a ledger would add up to, and the table adds up the ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np

import collectives
from collectives import Communicator
from collectives.diagnostics import Ledger, Totals
from collectives.diagnostics.unseen import ALWAYS
from collectives.mpi4py_compat.traffic_table import traffic_table
from tests.inside import session_of


def calls(comm: Communicator) -> None:
    """Blocking, asynchronous and planned calls, some of which send nothing on some ranks."""
    x = np.ones(100 * comm.size)
    with collectives.phase("outer"):
        comm.all_reduce(x)
        work = comm.all_gather(x[:5], async_op=True)
    work.wait()
    comm.broadcast(x if comm.rank == 0 else None)
    plan = comm.plan.all_reduce(x)
    for _ in range(3):
        plan.run()
    part = comm.split(comm.rank % 2)
    assert part is not None
    part.all_reduce(x)


def recorded(comm: Communicator) -> tuple[Ledger, Totals]:
    totals = Totals()
    with session_of(comm).recording(totals), comm.record() as ledger:
        calls(comm)
    return ledger, totals


def test_totals_are_the_sums_of_the_ledger() -> None:
    for ledger, totals in collectives.run(recorded, 4):
        num_calls = Counter(
            (entry.phase, entry.call.collective, entry.call.algorithm) for entry in ledger.entries
        )
        summary = totals.summary()
        assert {kind: sent.calls for kind, sent in summary.items()} == num_calls
        by_kind = ledger.summary(by=("phase", "collective", "algorithm"))
        sends = {kind: sent[1:] for kind, sent in summary.items() if sent.messages}
        assert sends == {kind: sent[1:] for kind, sent in by_kind.items()}
        assert len(sends) < len(summary) or ledger.rank < 3  # the last rank only receives


def test_a_call_belongs_to_the_phase_that_its_session_names() -> None:
    def named(comm: Communicator) -> list[str]:
        session_of(comm).phase_of_call = lambda: "a place"
        with comm.record() as ledger:
            calls(comm)
        return [row.phase for row in ledger.rows() if row.collective != "split"]

    assert {phase for phases in collectives.run(named, 4) for phase in phases} == {"a place"}


def test_only_totals_show_the_site_that_the_session_names() -> None:
    def named(comm: Communicator) -> tuple[Ledger, Totals]:
        session_of(comm).site_of_call = lambda: "a.py:1"
        return recorded(comm)

    for ledger, totals in collectives.run(named, 4):
        phases = {entry.phase for entry in ledger.entries}
        assert phases == {"", "outer"}
        assert {kind.site for kind in totals.summary()} == {"a.py:1", "outer/a.py:1"}


def test_the_table_adds_up_ranks_and_starts_with_the_site_that_sends_most() -> None:
    parts = {
        0: [("a.py:1", "broadcast", "linear", 1, 2, 20), ("b.py:2", "barrier", "linear", 1, 1, 0)],
        2: [("a.py:1", "broadcast", "linear", 1, 0, 0), ("c.py:3", "all_reduce", "ring", 2, 4, 64)],
        3: [("a.py:1", "counts", "linear", 1, 1, 8)],
    }
    assert list(traffic_table(parts, 5, ["Not seen: gloo."])) == [
        "What ranks 0, 2-3 sent by this library, by call site (sums over ranks):",
        "+--------------------------------------------------------------------+",
        "| site   | collective | algorithm | ranks | calls | messages | bytes |",
        "|--------+------------+-----------+-------+-------+----------+-------|",
        "| c.py:3 | all_reduce | ring      |     1 |     2 |        4 |    64 |",
        "| a.py:1 | broadcast  | linear    |     2 |     2 |        2 |    20 |",
        "| a.py:1 | counts     | linear    |     1 |     1 |        1 |     8 |",
        "| b.py:2 | barrier    | linear    |     1 |     1 |        1 |     0 |",
        "| total  |            |           |     3 |     6 |        8 |    92 |",
        "+--------------------------------------------------------------------+",
        "The table lacks ranks 1, 4: no answer in time.",
        "Not seen: gloo.",
        *ALWAYS,
    ]


def test_the_table_of_nothing_has_a_total() -> None:
    (total,) = (line for line in traffic_table({0: []}, 1) if line.startswith("| total"))
    assert total.split() == ["|", "total", "|", "|", "|", "1", "|", "0", "|", "0", "|", "0", "|"]
